"""The rows of the table of constraints, a file per area. See `plan/constraints.py`."""
