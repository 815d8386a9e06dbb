"""What stands in place of a layer, or around it, where ranks have parts of it."""
