"""`Trained`: the parameters that a step trains, as they were when it was made."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.parallel.limits import refuse_gradient_hook
from shardwise.parallel.torch_private import wrapper_of
from shardwise.train.state import TrainState


class Trained:
    """Trainable parameters by name, and a look at each step whether they still are the ones."""

    def __init__(self, state: TrainState) -> None:
        """Raises ModelError: parameters are not as `apply` saw them, see `Placed.check_trainable`."""
        state.placed.reshard()
        state.placed.check_trainable()
        self._state, self._placed, named = state, state.placed, state.placed.named_parameters()
        self.parameters = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        for optimizer in (state.optimizer, *getattr(state.optimizer, "parts", {}).values()):
            optimizer.is_of_stage = state.placed.pipeline is not None

    def check(self) -> None:
        """Refuse averages in their place, hooks on them, and those that were unfrozen since then (under DDP: frozen).

        And those to whose `.data` somebody assigned, where that does nothing.

        A torch optimizer that was built over all parameters would step what has a gradient, though it is in no sum over
        ranks, no norm and no checkpoint.

        Raises:
            ModelError: names the first.
            UsageError: within `Ema.applied`.

        Cost: a look at flags of each parameter, and a microsecond per sharded one.
        """
        if self._state.ema is not None:
            self._state.ema.check_own("stepped")
        if self._placed.reduced is not None and not all(p.requires_grad for p in self.parameters.values()):
            self._placed.check_trainable()
        for name, parameter in self.parameters.items():
            refuse_gradient_hook(name, parameter)
        for name, before in self._placed.wrappers.items():
            sharded: Any = self.parameters.get(name)
            if isinstance(sharded, DTensor) and wrapper_of(sharded) != before:
                raise ModelError(
                    f"parameter {name} is sharded, and its `.data` was assigned, which changed nothing: torch puts it "
                    "into the DTensor, and neither into the shard nor into what computes with it; write "
                    "parameter.copy_(value) under torch.no_grad(), or change what is there (parameter.data.clamp_(...))"
                )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ModelError(
                    f"parameter {name} was unfrozen after make_step: no norm of gradients and no checkpoint holds it; "
                    "unfreeze it in the model's constructor. To train more from some step on, save, and start again "
                    "with a constructor that freezes less"
                )
