"""What `plan/search.py` walks: the space, its families, and the bounds that pass families by. No torch."""
