"""What a plan makes of a model on each rank: stages, shards, groups, activations. No torch."""
