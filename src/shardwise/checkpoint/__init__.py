"""Stores: a run saved so that any mesh can go on from it."""
