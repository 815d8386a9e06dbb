"""What verbs are given, by options, files and surroundings, and what becomes of it."""
