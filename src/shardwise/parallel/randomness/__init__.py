"""Randomness keyed by location: where a forward draws, and what it draws there."""
