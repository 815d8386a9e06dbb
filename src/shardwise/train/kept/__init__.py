"""What outlives a step, a process or a run: states, directories, copies in memory."""
