"""Is a run right, and what is wrong with it: `lint` before it starts, `verify` against one process."""
