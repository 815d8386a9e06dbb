"""The optimizers by name: `adamw`, `sgd`, `lion`, `lamb`, `muon`, `adafactor`, each over a placed model.

All give the same update under every plan. Parameters in half precision get an fp32 master copy, which is what
is stepped; it is part of the saved state. `weight_decay` is decoupled (AdamW's) everywhere but in `sgd`.
Patterns are shell-style over original parameter names, and `*` crosses dots: `*.bias`, `*norm*`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.errors import UsageError
from shardwise.findings import nearest
from shardwise.parallel.mesh import GRADIENT_AXES
from shardwise.parallel.placed import Placed
from shardwise.plan.updating import NOT_MUON
from shardwise.train.updates.groups import check_dials, decay_groups, split_by_pattern
from shardwise.train.updates.low_bits import STATE_KINDS, LowBitAdamW
from shardwise.train.updates.optim import NamedOptimizer, stepped_parameters
from shardwise.train.updates.update_rules import Adafactor, Lamb, Lion, Muon

_FUSED = ("cpu", "cuda", "xpu")


def adamw(
    placed: Placed,
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    no_decay: Sequence[str] = (),
    state_dtype: str = "fp32",
) -> NamedOptimizer:
    """AdamW: `torch.optim.AdamW`, fused, over the local shards.

    Args:
        placed: from `apply`.
        lr: base learning rate; a schedule's factor multiplies it.
        betas: decays of the two running averages.
        eps: added to the root of the second one.
        weight_decay: decoupled, scaled by the learning rate.
        no_decay: patterns of parameters without decay, e.g. `("*.bias", "*norm*")`.
        state_dtype: how the averages are kept between steps: `fp32` (at least the parameters' own type), `bf16`,
            `bf16-stochastic`, `8bit` or `4bit` (these two need torchao); see `train/updates/low_bits.py`.

    Cost: two numbers of state per local element; no communication, but for `8bit` and `4bit` where `tp` splits rows.

    Raises:
        UsageError: a dial out of range; torchao is not installed.
        ModelError: nothing to train, or a pattern that matches nothing.

    >>> optimizer = adamw(placed, 3e-4, weight_decay=0.1, no_decay=("*norm*",))  # doctest: +SKIP
    """
    check_dials("adamw", lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
    if state_dtype != "fp32":
        if state_dtype not in STATE_KINDS:
            known = ("fp32", *STATE_KINDS)
            raise UsageError(
                f"adamw: state_dtype={state_dtype!r}; needed one of {known}; {nearest(state_dtype, known)}"
            )
        params, live = stepped_parameters(placed, local=False)
        groups = decay_groups(placed, params, weight_decay, no_decay)
        names = {id(parameter): name for name, parameter in params.items()}
        dials = {"lr": lr, "betas": betas, "eps": eps}
        return NamedOptimizer(LowBitAdamW(groups, dials, state_dtype, names, placed.seed), params, live)
    params, live = stepped_parameters(placed, local=True)
    groups = decay_groups(placed, params, weight_decay, no_decay)
    return NamedOptimizer(torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, **_fast(placed)), params, live)


def sgd(
    placed: Placed,
    lr: float,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    no_decay: Sequence[str] = (),
) -> NamedOptimizer:
    """SGD: `torch.optim.SGD`, fused, over the local shards.

    Args:
        placed: from `apply`.
        lr: base learning rate; a schedule's factor multiplies it.
        momentum: decay of the running sum of gradients; 0: none is kept.
        nesterov: step along the gradient plus `momentum` times the running sum.
        weight_decay: an L2 penalty in the gradient, not decoupled.
        no_decay: patterns of parameters without it, as those of `adamw`.

    Cost: with momentum one number of state per local element; no communication.

    Raises:
        UsageError: a dial out of range, or `nesterov` without momentum.
        ModelError: nothing to train, or a pattern that matches nothing.

    >>> optimizer = sgd(placed, 0.1, momentum=0.9)  # doctest: +SKIP
    """
    check_dials("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and momentum == 0:
        raise UsageError("sgd: nesterov=True with momentum=0; it needs a momentum, give momentum=0.9 or so")
    params, live = stepped_parameters(placed, local=True)
    groups = decay_groups(placed, params, weight_decay, no_decay)
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, **_fast(placed))
    if momentum:
        optimizer.register_step_pre_hook(_late_momentum)
    return NamedOptimizer(optimizer, params, live)


def lion(
    placed: Placed,
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    no_decay: Sequence[str] = (),
) -> NamedOptimizer:
    """Lion (Chen et al., arXiv 2302.06675): the sign of an interpolated momentum, over the local shards.

    The paper takes a learning rate 3 to 10 times smaller, and a decay as much larger, than AdamW's.

    Args:
        placed: from `apply`.
        lr: length of every element's step; a schedule's factor multiplies it.
        betas: weight of the momentum in the step, and its decay.
        weight_decay: decoupled, scaled by the learning rate.
        no_decay: patterns of parameters without it, as those of `adamw`.

    Cost: one number of state per local element; no communication.

    Raises:
        UsageError: a dial out of range.
        ModelError: nothing to train, or a pattern that matches nothing.

    >>> optimizer = lion(placed, 1e-4, weight_decay=0.3)  # doctest: +SKIP
    """
    check_dials("lion", lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)
    params, live = stepped_parameters(placed, local=True)
    groups = decay_groups(placed, params, weight_decay, no_decay)
    return NamedOptimizer(Lion(groups, lr=lr, betas=betas), params, live)


def lamb(
    placed: Placed,
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    no_decay: Sequence[str] = (),
) -> NamedOptimizer:
    """LAMB (You et al., arXiv 1904.00962): Adam, each tensor's step scaled to the tensor's norm.

    Arguments are those of `adamw`; `lr` is the length of a tensor's step, as a share of the tensor's own length.

    Cost: two numbers of state per local element, one more copy of the local shards during a step, and one small
    all-reduce per mesh axis that shards parameters.

    Raises:
        UsageError: a dial out of range.
        ModelError: nothing to train, or a pattern that matches nothing.

    >>> optimizer = lamb(placed, 2e-3)  # doctest: +SKIP
    """
    check_dials("lamb", lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
    params, live = stepped_parameters(placed, local=False)
    groups = decay_groups(placed, params, weight_decay, no_decay)
    return NamedOptimizer(Lamb(groups, lr=lr, betas=betas, eps=eps), params, live)


def muon(
    placed: Placed,
    lr: float,
    *,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    not_muon: Sequence[str] | None = None,
) -> NamedOptimizer:
    """Muon for matrices (Jordan 2024; step length of arXiv 2502.16982), AdamW for everything else.

    Args:
        placed: from `apply`.
        lr: base learning rate of both; take AdamW's.
        momentum: decay of the matrices' running average.
        weight_decay: decoupled; of matrices only.
        betas: AdamW's, for parameters that are not matrices.
        not_muon: patterns of matrices for AdamW; None: embeddings and heads (`NOT_MUON`).

    Cost: a matrix's Newton-Schulz iteration on one of the ranks that share it, which take as many each, one full
    matrix in memory at a time; every matrix is sent there and back once in a step.

    Raises:
        UsageError: a dial out of range.
        ModelError: nothing to train, or a pattern (given by the caller) that matches nothing.

    >>> optimizer = muon(placed, 3e-4)  # doctest: +SKIP
    """
    check_dials("muon", lr=lr, momentum=momentum, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
    params, live = stepped_parameters(placed, local=False)
    strict = not_muon is not None
    excluded = split_by_pattern(placed, list(params), NOT_MUON if not_muon is None else not_muon, "muon", strict=strict)
    matrices = [p for name, p in params.items() if p.dim() == 2 and name not in excluded]
    others = [p for name, p in params.items() if p.dim() != 2 or name in excluded]
    groups = [
        {"params": matrices, "orthogonal": True},
        {"params": others, "orthogonal": False, "weight_decay": 0.0},
    ]
    # parameters are plain under DDP alone, which gives its ranks one gradient
    replicas = placed.mesh.group(*GRADIENT_AXES) if placed.mesh.num_gradient_ranks > 1 else None
    optimizer = Muon([g for g in groups if g["params"]], lr, momentum, weight_decay, betas, replicas)
    return NamedOptimizer(optimizer, params, live)


def adafactor(
    placed: Placed,
    lr: float = 1e-2,
    *,
    beta2_decay: float = -0.8,
    clip: float = 1.0,
    weight_decay: float = 0.0,
    no_decay: Sequence[str] = (),
) -> NamedOptimizer:
    """Adafactor (Shazeer and Stern, arXiv 1804.04235), with the dials and numbers of `torch.optim.Adafactor`.

    Args:
        placed: from `apply`.
        lr: how long a step is at most, as a share of the tensor's root mean square; a schedule's factor multiplies it.
        beta2_decay: the average of squares decays by `1 - step ** beta2_decay`.
        clip: the most that an update's root mean square is before `lr`.
        weight_decay: decoupled, scaled by the learning rate.
        no_decay: patterns of parameters without it, as those of `adamw`.

    Cost: state of rows + columns numbers per matrix, on every rank; per step an all-gather of every gradient,
    one full tensor in memory at a time, and one scalar all-reduce per parameter.

    Raises:
        UsageError: a dial out of range.
        ModelError: nothing to train, or a pattern that matches nothing.

    >>> optimizer = adafactor(placed, 1e-2)  # doctest: +SKIP
    """
    check_dials("adafactor", lr=lr, clip=clip, weight_decay=weight_decay, minus_beta2_decay=-beta2_decay)
    params, live = stepped_parameters(placed, local=False)
    groups = decay_groups(placed, params, weight_decay, no_decay)
    return NamedOptimizer(Adafactor(groups, lr, beta2_decay, clip=clip), params, live)


OPTIMIZERS: dict[str, Callable[..., NamedOptimizer]] = {
    "adamw": adamw,
    "sgd": sgd,
    "lion": lion,
    "lamb": lamb,
    "muon": muon,
    "adafactor": adafactor,
}
"""By the name that a configuration uses. All take `(placed, lr)` and dials by keyword."""


def _late_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Of a parameter that no step before had a gradient of: torch's kernel takes momenta of all, or of none."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if 0 < len(optimizer.state) < len(params):
        for parameter in params:
            if parameter.grad is not None and parameter not in optimizer.state:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _fast(placed: Placed) -> dict[str, bool]:
    """One kernel for all parameters: 3 to 5 times less time than a loop or foreach on CPU (measured, 40 tensors)."""
    return {"fused": True} if placed.mesh.device.type in _FUSED else {"foreach": True}
