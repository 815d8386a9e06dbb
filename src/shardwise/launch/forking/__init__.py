"""Processes forked from one that imported torch already, and what is said to it."""
