"""Starting processes: this machine through torch elastic, and the environment that launchers leave."""
