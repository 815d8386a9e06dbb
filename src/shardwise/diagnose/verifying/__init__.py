"""What two runs are compared by, and what a difference between them means."""
