"""A step on shapes alone: what it would hold and send, without its machines or memory."""
