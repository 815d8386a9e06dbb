"""Several losses in one step, each a mean with a weight of its own.

    total = sum over names of  factor * (sum over the window) / (weight of the window)

The quotients differ, so that sums of different losses cannot share the one division at the end of a step. The weights
are therefore known before the first forward: each is a function of the micro-batch alone, summed over the window and
all ranks in one small all-reduce. See docs/decisions/0008-several-losses.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.errors import UsageError
from shardwise.findings import nearest
from shardwise.parallel.mesh import GRADIENT_AXES, Mesh
from shardwise.train.loss import Loss, as_loss
from shardwise.train.scaled import refuse_scaler

Weight = Callable[[Any], torch.Tensor | float]
"""micro-batch -> its weight: a number or a 0-dim tensor, zero or more."""


class Losses:
    """A loss function that gives several losses by name.

    Args:
        function: (model output, micro-batch) -> name -> `Loss(sum, weight)`.
        weights: name -> the weight of a micro-batch, a function of the micro-batch alone; what `function` returns as
            weight must be the same number. The first name is the main loss: a step reports its weight.
        factors: name -> what its mean is multiplied with; 1 where none is given.

    Raises:
        UsageError: no weights, or a factor for a name without one.

    Cost: one all-reduce of as many numbers as there are losses at the beginning of each step, and one at its end.

    Example:
        >>> losses = Losses(
        ...     lambda output, batch: {"tokens": Loss(output[0].sum(), 2), "balance": Loss(output[1].sum(), 4)},
        ...     weights={"tokens": lambda batch: 2, "balance": lambda batch: 4},
        ...     factors={"balance": 0.5},
        ... )
        >>> step = losses.begin(["a batch"], [False])
        >>> step.loss((torch.ones(2), torch.ones(4)), "a batch")
        Loss(sum=tensor(3.), weight=2)
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Mapping[str, Any]],
        *,
        weights: Mapping[str, Weight],
        factors: Mapping[str, float] | None = None,
    ) -> None:
        """See the class."""
        self.function, self.weights = function, dict(weights)
        unknown = sorted((factors or {}).keys() - self.weights.keys())
        if not self.weights or unknown:
            raise UsageError(
                f"Losses: found weights for {', '.join(self.weights) or 'no name'}"
                + (f" and a factor for {unknown[0]!r}; {nearest(unknown[0], list(self.weights))}" if unknown else "")
                + "; give every loss a weight: weights={'tokens': lambda batch: (batch['labels'] != -100).sum(), ...}"
            )
        if fixed := [name for name, weight in self.weights.items() if not callable(weight)]:
            raise UsageError(
                f"Losses: weights of {fixed[0]!r}: found {self.weights[fixed[0]]!r}; needed a function of the micro-"
                "batch that gives what the loss is divided by; what its mean is multiplied with stands in factors="
            )
        self.factors = {name: float((factors or {}).get(name, 1.0)) for name in self.weights}

    def __call__(self, output: Any, micro: Any) -> dict[str, Loss]:
        """Each loss of a micro-batch, in the order of `weights`.

        Raises:
            UsageError: the function returns other names, or (on the CPU) another weight than was declared.
        """
        result = self.function(output, micro)
        if not isinstance(result, Mapping) or result.keys() != self.weights.keys():
            found = ", ".join(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
            raise UsageError(
                f"Losses: the loss function returned {found}, needed a dict of Loss with the names of weights=: "
                f"{', '.join(self.weights)}"
            )
        terms = {name: as_loss(result[name], 1) for name in self.weights}
        for name, term in terms.items():
            declared = self.weights[name](micro)
            if _is_known(term.weight) and _is_known(declared) and not _close(float(term.weight), float(declared)):
                raise UsageError(
                    f"Losses: {name}: the loss function returned the weight {float(term.weight):g} for a micro-batch, "
                    f"and weights[{name!r}] gave {float(declared):g}; needed the same number; count the same things"
                )
        return terms

    def begin(self, micro_batches: list[Any], zero: list[bool] | tuple[bool, ...], mesh: Mesh | None = None) -> Window:
        """Weigh a window before its first forward. A collective of the ranks that see different tokens.

        Args:
            micro_batches: this rank's.
            zero: which of them are padding, and weigh nothing.
            mesh: None: this process is the only one.
        """
        own = [
            sum(float(weigh(micro)) for micro, is_zero in zip(micro_batches, zero, strict=True) if not is_zero)
            for weigh in self.weights.values()
        ]
        totals = torch.tensor(own, dtype=torch.float64)
        if mesh is not None:
            totals = mesh.all_reduce_sum(totals.to(mesh.device), *GRADIENT_AXES)
        return Window(self, totals.tolist())

    def total(self, terms: Mapping[str, Loss]) -> Loss:
        """The sum of the means, as a `Loss` with the weight of the main one; a loss without weight adds nothing."""
        main = next(iter(terms.values())).weight
        mean = torch.zeros((), dtype=torch.float64)
        for name, loss in terms.items():
            if float(loss.weight):
                mean = mean + self.factors[name] * loss.sum / loss.weight
        return Loss(mean * main, main)


def with_function(losses: Losses, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Losses:
    """The same losses, with what `wrap` makes of their function.

    Raises:
        UsageError: it names a scaler.
    """
    refuse_scaler(losses.function)
    return Losses(wrap(losses.function), weights=losses.weights, factors=losses.factors)


class Window:
    """The losses of one step: what each counts for, and what it came to."""

    def __init__(self, losses: Losses, weights: list[float]) -> None:
        """`weights`: of the whole window, in the order of `losses.weights`."""
        self.losses, self.weights = losses, dict(zip(losses.weights, weights, strict=True))
        main = weights[0]
        self._shares = {
            name: losses.factors[name] * (main / weight if weight else 0.0) for name, weight in self.weights.items()
        }
        self._seen: dict[int, torch.Tensor] = {}

    def loss(self, output: Any, micro: Any, is_padding: bool = False) -> Loss:
        """What to back-propagate: a sum that the division by the main weight makes the sum of means."""
        terms = self.losses(output, micro)
        if not is_padding:  # a dict by micro-batch: a pipeline's stage may run once more to learn shapes
            self._seen[id(micro)] = torch.stack([loss.sum.detach().double() for loss in terms.values()])
        first, *rest = self._shares
        total = self._shares[first] * terms[first].sum
        for name in rest:
            total = total + self._shares[name] * terms[name].sum
        return Loss(total, terms[first].weight)

    def means(self, mesh: Mesh) -> dict[str, float]:
        """The mean of each loss over the window, without its factor; a collective of all ranks."""
        sums = torch.zeros(len(self.weights), dtype=torch.float64, device=mesh.device)
        for seen in self._seen.values() if mesh.index("tp") == 0 else ():
            sums += seen
        totals = mesh.all_reduce_sum(sums).tolist()
        return {
            name: total / weight if weight else math.nan
            for (name, weight), total in zip(self.weights.items(), totals, strict=True)
        }


def losses_in(result: Any, rows: int) -> list[Loss]:
    """What a loss function of either kind returned: one loss, or several in order."""
    return list(result.values()) if isinstance(result, dict) else [as_loss(result, rows)]


def _is_known(weight: torch.Tensor | float) -> bool:
    """Values on an accelerator are not looked at: that would make the host wait for the device."""
    return not isinstance(weight, torch.Tensor) or weight.device.type == "cpu"


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12)
