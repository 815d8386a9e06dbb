"""AdamW on bf16 parameters without an fp32 copy of them: the update is rounded stochastically.

bf16 has 8 digits: an update smaller than 1/256 of its parameter is lost when it is rounded to nearest. Rounded up with
the probability of what is cut off, it is right on average (Gupta et al., arXiv:1502.02551, section 3).

The random bits are keyed by (seed, update, parameter's name, element), so that a sharded parameter is rounded as the
whole one is, and a resumed run goes on as the one that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import UsageError
from shardwise.parallel.init import local_slice
from shardwise.parallel.placed import Placed
from shardwise.parallel.randomness.counter import Elements, Numbers, Stream
from shardwise.train.updates.groups import check_dials, decay_groups
from shardwise.train.updates.optim import NamedOptimizer, stepped_parameters

CUT = 16
"""Bits of fp32 that bf16 does not have."""


def stochastic_adamw(
    placed: Placed,
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    no_decay: Sequence[str] = (),
) -> NamedOptimizer:
    """AdamW whose bf16 parameters have no fp32 copy: they are rounded stochastically. For plans with `bf16-pure`.

    Arguments are those of `adamw`. Parameters of other types are stepped as AdamW steps them.

    Cost: per local element 2 bytes of parameter and 8 of fp32 averages, where `adamw` has 14 in all; in a step about
    three times the time of the fused kernel, without communication.

    Raises:
        UsageError: a dial out of range, or no parameter in bf16.
        ModelError: nothing to train, or a pattern that matches nothing.

    >>> optimizer = stochastic_adamw(placed, 3e-4)  # a plan with bf16-pure  # doctest: +SKIP
    """
    check_dials("stochastic_adamw", lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
    params, live = stepped_parameters(placed, local=True, masters=False)
    if not any(p.dtype == torch.bfloat16 for p in params.values()):
        found = ", ".join(sorted({str(p.dtype) for p in params.values()}))
        raise UsageError(
            f"stochastic_adamw: rank {placed.mesh.rank}: found parameters of {found}, needed bf16 ones; use a plan "
            f"with `bf16-pure` in place of `{placed.plan.precision}`, or adamw"
        )
    groups = decay_groups(placed, params, weight_decay, no_decay)
    names = {id(p): (name, live[name]) for name, p in params.items()}
    dials = {"lr": lr, "betas": betas, "eps": eps}
    optimizer = StochasticAdamW(groups, dials, names, placed.seed)
    return NamedOptimizer(optimizer, params, live)


class StochasticAdamW(torch.optim.Optimizer):
    """See `stochastic_adamw`. The seed is part of the state, so that it comes back with a checkpoint."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        dials: dict[str, Any],
        names: Mapping[int, tuple[str, Tensor]],
        seed: int,
    ) -> None:
        """`names`: `id` of a stepped local tensor -> the parameter's name, and the parameter with its layout."""
        super().__init__(groups, dials)
        self._names, self._seed = names, seed
        self._elements: dict[int, Elements] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2)."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self.state[parameter], group)
        return loss

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        if not state:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            state["step"], state["seed"] = 0, self._seed
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        state["step"] += 1
        count, (beta1, beta2), lr = state["step"], group["betas"], float(group["lr"])
        grad = parameter.grad.to(state["exp_avg"].dtype)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = state["exp_avg_sq"].sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
        new = parameter.to(grad.dtype, copy=True).mul_(1 - lr * group["weight_decay"])
        new.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**count))
        if parameter.dtype == torch.bfloat16:
            name, live = self._names[id(parameter)]
            if id(parameter) not in self._elements:
                self._elements[id(parameter)] = elements_in(live, name)
            stream = Stream.of(state["seed"], "rounding", count, name)
            new = rounded(new, Numbers(stream, self._elements[id(parameter)], parameter.device))
        parameter.copy_(new)


def rounded(values: Tensor, numbers: Numbers) -> Tensor:
    """fp32 values to bf16, up or down with the probability that is right on average; what is not finite stays so.

    A number below one unit in the last place is added to the digits that are cut off, and they are cut off.
    """
    bits = values.view(torch.int32) + numbers.integers(CUT)
    cut = bits.bitwise_and_(-(1 << CUT)).view(torch.float32)
    return torch.where(values.isfinite(), cut, values).to(torch.bfloat16)


def elements_in(parameter: nn.Parameter | Tensor, name: str) -> Elements:
    """The places that this rank's part of a parameter has in the whole, row-major."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    shape, device = tuple(parameter.shape), local.device
    along, stride = [], parameter.numel()
    for dim, size in enumerate(shape):
        stride //= max(size, 1)
        places = torch.arange(size, device=device).view(-1, *([1] * (len(shape) - dim - 1))).expand(shape)
        mine = local_slice(places, parameter, name)  # views all along: no memory of the parameter's size
        line = mine[(0,) * dim + (slice(None),) + (0,) * (len(shape) - dim - 1)] if mine.numel() else mine.flatten()
        along.append(line * stride)
    return Elements(tuple(local.shape), tuple(along))
