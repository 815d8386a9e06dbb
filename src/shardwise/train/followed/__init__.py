"""What a script's own hooks and writes do with parts of a tensor: followed at first, refused where it is wrong."""
