"""`Ema`: an exponential moving average of the weights, over the local shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError, UsageError
from shardwise.parallel.placed import Placed
from shardwise.train.torch_private import average_into, shard_like
from shardwise.train.updates.update_rules import local_shard

PREFIX = "ema."


class Ema:
    """`average = decay * average + (1 - decay) * weight` after each update, for every trainable parameter.

    Element-wise, so it is the same under every plan, and no rank holds more than its shard. Kept in fp32 for parameters
    in half types. Give it to `TrainState(ema=...)`: the step updates it, checkpoints hold it.

    Args:
        placed: from `apply`.
        decay: above 0 and below 1; 0.999 averages over about the last 1,000 updates.
        warmup: use `min(decay, (1 + n) / (10 + n))` after n updates: an average of few updates forgets its start.

    Raises:
        UsageError: `decay` out of range.

    Cost: one number per local element, one pass over the parameters per update.

    >>> state = TrainState(placed, optimizer, data, ema=Ema(placed, 0.999))  # doctest: +SKIP
    >>> with state.ema.applied():  # doctest: +SKIP
    ...     evaluate(placed, loss_fn, windows)
    """

    def __init__(self, placed: Placed, decay: float = 0.999, *, warmup: bool = False) -> None:
        """See the class."""
        if not 0 < decay < 1:
            raise UsageError(f"Ema: decay={decay}; needed a number above 0 and below 1, as 0.999")
        self.decay, self.warmup = decay, warmup
        self.updates = 0
        self._placed, self._is_applied = placed, False
        placed.reshard()
        self._live = {name: p for name, p in placed.named_parameters().items() if p.requires_grad}
        self._local = {name: local_shard(p) for name, p in self._live.items()}
        self._average = {name: _wide(p.detach()).clone() for name, p in self._local.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are into the average."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        average_into(list(self._average.values()), list(self._local.values()), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside, and its own again afterwards. Every rank enters it.

        Raises:
            UsageError: inside of it, from what saves, loads or steps the state, and from a second one.

        Cost: a second copy of the local parameters while it lasts.
        """
        self.check_own("applied again")
        kept = {name: p.detach().clone() for name, p in self._local.items()}
        self._write(self._average)
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            self._write(kept)

    def check_own(self, what: str) -> None:
        """Refuse what must find the model's own weights while it has the averaged ones."""
        if self._is_applied:
            raise UsageError(
                f"the state is {what} within `ema.applied()`, where the model has its averages: its own are back "
                "behind the block: do it there"
            )

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._local.items():
            parameter.copy_(values[name])
        if self._placed.copies is not None:
            self._placed.copies.refresh()

    def tensors(self) -> dict[str, Tensor]:
        """`ema.<parameter>` -> the average, laid out as the parameter is."""
        named: dict[str, Tensor] = {}
        for name, average in self._average.items():
            live = self._live[name]
            named[PREFIX + name] = shard_like(average, live) if isinstance(live, DTensor) else average
        return named

    def local_tensors(self) -> dict[str, Tensor]:
        """`tensors`, each as the plain tensor that is here: `(local shape)`."""
        return {PREFIX + name: average for name, average in self._average.items()}

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Continue from what `tensors` gave.

        Raises:
            CheckpointError: a parameter has no average there.
        """
        missing = [name for name in self._average if PREFIX + name not in tensors]
        if missing:
            raise CheckpointError(
                f"the checkpoint holds no moving average of {missing[0]} ({len(missing)} in all lack one); it was "
                "saved without ema=, or with other trainable parameters: load it without ema=, and then start one"
            )
        for name, average in self._average.items():
            average.copy_(local_shard(tensors[PREFIX + name]))
        self.updates = updates


def _wide(tensor: Tensor) -> Tensor:
    """Half types in fp32: an average in bf16 would not move by a thousandth."""
    return tensor.float() if tensor.element_size() < 4 else tensor
