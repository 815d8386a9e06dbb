"""Initial weights: a constructor recorded on the meta device, and any one of its tensors made again."""
