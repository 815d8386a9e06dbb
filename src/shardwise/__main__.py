"""`python -m shardwise` is `shardwise`."""

from shardwise.cli.main import main

main()
