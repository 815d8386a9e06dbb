"""Checkpoints of other libraries, in and out: read without running anything of theirs, written for them to read."""
