"""A job whose number of processes changes: who is there, and under which plan it goes on."""
