"""A few numbers of a step that ride with DDP's gradients: their sum over the ranks costs no collective of its own.

They are the gradient of a parameter that nothing is multiplied with. DDP puts it into a bucket like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.parallel.torch_private import run_backward

MAX_RANKS = 512
"""Up to here a whole number below 4,096 comes back exactly, though DDP divides it by the ranks in fp32 and adds."""


COUNT = 21
"""How many there are: a loss, and five numbers of four parts; see `train/sums.py`."""


class Carrier(nn.Module):
    """What DDP wraps: the user's module, and the numbers."""

    def __init__(self, root: nn.Module, like: torch.Tensor) -> None:
        super().__init__()
        self.root = root
        # beside half types they have a bucket of their own: 8 bits would not hold them
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.numbers = nn.Parameter(torch.zeros(COUNT, dtype=dtype, device=like.device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's forward."""
        return self.root(*args, **kwargs)

    def backward(self, loss: torch.Tensor, values: list[float]) -> None:
        """The backward of a loss, which also gives `values` to DDP. Once per step, in the backward that is reduced.

        Args:
            loss: shape ().
            values: as many as `numbers`.
        """
        numbers = self.numbers
        load = torch.tensor(values, dtype=numbers.dtype, device=numbers.device)
        # the numbers are a second root, whose gradient is given: DDP's hook on the parameter takes it from there
        run_backward((loss, numbers), (torch.ones_like(loss), load))

    def unload(self, num_ranks: int) -> list[float]:
        """The sums of what the ranks loaded, after the backward. DDP averages; this undoes it."""
        numbers = self.numbers
        mean = numbers.grad
        assert mean is not None
        numbers.grad = None
        return [value * num_ranks for value in mean.tolist()]
