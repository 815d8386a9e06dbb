"""What a model is, without torch: its size, its parts, its naming rules."""
