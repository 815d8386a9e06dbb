"""Parameters that not every data rank uses in a step.

DDP waits for the gradient of each, and sums none until it has come: refused, and `find-unused` told.

Where `fully_shard` carries the data axes, torch reduces of a group of parameters those that have a gradient on this
rank. Where ranks use different ones (heads of tasks, experts in a loop), the gradient of one parameter is added to that
of another, or sizes do not fit. Here one without a gradient takes part with zeros, as under DDP's
`find_unused_parameters`; and one that no rank used ends without a gradient, as in one process: its optimizer state
stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import ModelError
from shardwise.parallel.engines.unused_torch_private import Sharded, Watched, not_reduced, watch_groups
from shardwise.parallel.mesh import GRADIENT_AXES
from shardwise.parallel.placed import Placed


class Unused:
    """Of one state: `begin` before a step's passes, `here` after them, `drop` where any rank has some."""

    def __init__(self, placed: Placed, *, by_hand: bool = False) -> None:
        """Make every `fully_shard` group reduce all that it trains; nothing where there is one data rank.

        Args:
            placed: whose parameters.
            by_hand: the step itself sums what DDP wraps.
        """
        self._mesh, self._shared = placed.mesh, placed.shared_stages
        self.lacks = False
        """What `here` said last."""
        self._groups: list[Watched] = []
        self._waits: list[DistributedDataParallel] = []
        self._advice = "add find-unused to the plan"
        if placed.plan.communication.static_graph:
            self._advice += " in place of static-graph"
        if not by_hand:
            self._waits = [part.run for part in placed.parts if isinstance(part.run, DistributedDataParallel)]
        if placed.mesh.num_gradient_ranks > 1:
            self._groups = [group for part in placed.parts for group in watch_groups(part.run)]

    def begin(self) -> None:
        """Forget what the step before used.

        Raises:
            ModelError: DDP waits for gradients of a backward pass that was none of a step.
        """
        if any(not_reduced(wrapped) is not None for wrapped in self._waits):
            raise ModelError(
                "DDP still waits for gradients of a forward pass before this step: found a call of "
                "`placed.parts[0].run` by the script itself (in the loss of another model, say), or a "
                "step before that ended in an error; "
                "needed: `placed.module(...)`, whose gradients no step takes"
            )
        for group in self._groups:
            group.calls = 0
            group.used.clear()

    def here(self) -> bool:
        """Whether this rank gave some parameter no gradient."""
        self.lacks = any(not used and each.sharded_param.requires_grad for each, used in self._parameters())
        return self.lacks

    def check_reduced(self) -> None:
        """After the backward that DDP reduces: it has reduced.

        Raises:
            ModelError: a parameter has got no gradient in it.
        """
        for wrapped in self._waits:
            if (names := not_reduced(wrapped)) is not None:
                what = ", ".join(name.removeprefix("root.") for name in names[:3]) or "some parameters"
                raise ModelError(
                    f"{what} ({len(names)} parameters) got no gradient from the backward pass that ends a step, and "
                    "DDP, which waits for all of them, has not summed those of the others over the ranks; "
                    f"{self._advice}, use fsdp in place of dp, or freeze what nobody trains "
                    "(requires_grad_(False) in the model's constructor)",
                    row="module.unused",
                )

    def drop(self, grads: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The gradients without those of parameters that no data rank used.

        Every rank calls it in the same step.

        Raises:
            ModelError: a group was called by some ranks more often than by others: what they gathered is not theirs.

        Cost: one all-reduce of four bytes per parameter and eight per group.
        """
        calls = [group.calls for group in self._groups]
        found = [int(used) for _, used in self._parameters()]
        values, end = self.most([*found, *calls, *(-n for n in calls)]), len(found) + len(calls)
        by_any, most, least = values[: len(found)], values[len(found) : end], values[end:]
        self._check_calls(most, [-n for n in least])
        nobody = {id(e.sharded_param) for (e, _), used in zip(self._parameters(), by_any, strict=True) if not used}
        kept = dict(grads)
        for name, parameter in parameters.items():
            if id(parameter) in nobody and name not in self._shared:  # else another stage used it
                parameter.grad = None
                kept.pop(name, None)
        return kept

    def most(self, numbers: list[int]) -> list[int]:
        """The largest of each over the data ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int32, device=self._mesh.device)
        if self._groups:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._mesh.group(*GRADIENT_AXES))
        found: list[int] = tensor.tolist()
        return found

    def _parameters(self) -> Iterator[tuple[Sharded, bool]]:
        for group in self._groups:
            yield from ((each, place in group.used) for place, each in enumerate(group.parameters))

    def _check_calls(self, most: list[int], least: list[int]) -> None:
        for group, high, low in zip(self._groups, most, least, strict=True):
            if high != low:
                raise ModelError(
                    f"fully_shard: {group.name or 'the model'} was called {low} times in this step by one data rank "
                    f"and {high} times by another, so they gathered each other's parameters; every rank must call what "
                    "is gathered by itself: gather it with what holds it, by blocks=PATTERN of modules that every rank "
                    "calls, or wrap=NUMBER of more parameters than it has, or use dp and find-unused in place of fsdp"
                )
