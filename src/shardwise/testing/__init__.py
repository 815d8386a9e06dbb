"""Tools for testing distributed code on one machine."""
