"""Memory where torch's eager kernels run, moment by moment of a step. No torch."""
