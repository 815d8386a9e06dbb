"""A sequence divided over ranks: attention that is exact, and what else mixes tokens."""
