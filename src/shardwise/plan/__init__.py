"""Plans: what they are, which are legal, what they cost. Nothing here imports torch."""
