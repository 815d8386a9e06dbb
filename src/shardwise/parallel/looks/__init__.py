"""Calls of a script's functions for a look: nothing of such a call stays, and none is made of what cannot be undone."""
