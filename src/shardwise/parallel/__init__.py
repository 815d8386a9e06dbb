"""Passes that put a plan onto a module, and the mesh they run on."""
