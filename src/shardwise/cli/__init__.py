"""The `shardwise` command: each verb parses, calls one function and prints."""
