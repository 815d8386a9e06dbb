"""What a script or a module does that parts would do wrong without a word: found, and said."""
