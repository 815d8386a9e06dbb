"""The user-owned loop: loss, step, norm, data order, optimizers, metrics."""
