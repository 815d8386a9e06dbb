"""One rank of `shardwise train`, from its start to its summary."""
