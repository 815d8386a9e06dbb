"""The other hosts of a job, and the ranks on each."""
