"""One stage of a pipeline, and how tensors come and go between stages."""
