"""Reference models and the presets of public ones."""
