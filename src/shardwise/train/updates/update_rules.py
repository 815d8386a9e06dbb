"""Update rules that torch does not have, or has only for whole tensors: Lion, LAMB, Muon, Adafactor.

Each is a `torch.optim.Optimizer` over plain parameters or DTensors, and gives the same update under every
layout: what is element-wise works on the local shard; what needs the whole tensor either reduces sums over the
mesh axes that shard it (LAMB), or gathers one full tensor at a time and keeps its own part (Adafactor); matrices of
Muon are shared out among the ranks, each made orthogonal on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwise.plan.updating import newton_schulz_flops
from shardwise.train.updates.sharing import Sharing, bring_together, from_team, give_back, lie_of, sharing_of

Groups = Iterable[Tensor] | Iterable[dict[str, Any]]


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its storage: `(local shape)`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank of its mesh: `(global shape)`. Costs an all-gather of its bytes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part_of(full: Tensor, like: Tensor) -> Tensor:
    """The part of a full tensor, the same on every rank, that this rank keeps of `like`. No communication."""
    if not isinstance(like, DTensor):
        return full
    whole = DTensor.from_local(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local().to(like.to_local().device)


def sum_over_shards(values: Tensor, like: Sequence[Tensor]) -> Tensor:
    """Row i of `values`, `(len(like), k)`, summed over the ranks that hold different parts of `like[i]`.

    One all-reduce per mesh axis and distinct layout, for all tensors together. In place.
    """
    layouts: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for row, tensor in enumerate(like):
        if isinstance(tensor, DTensor):
            split = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
            layouts.setdefault((tensor.device_mesh, split), []).append(row)
    for (mesh, split), rows in layouts.items():
        part = values[rows]
        for dim in split:
            if mesh.size(dim) > 1:
                dist.all_reduce(part, group=mesh.get_group(dim))
        values[rows] = part
    return values


class _Rule(torch.optim.Optimizer):
    """The loop that the rules share: count the step, then update one parameter group."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update_group(group)
        return loss

    def update_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of one group that have a gradient."""
        for parameter in self.with_grad(group):
            self.update(parameter, self.state[parameter], group)

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter from its gradient."""
        raise AssertionError(f"{type(self).__name__} defines neither update nor update_group")

    def with_grad(self, group: dict[str, Any]) -> Iterator[Tensor]:
        """Those parameters of a group that have a gradient, with their step counted."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                yield parameter


def _average(state: dict[str, Any], key: str, parameter: Tensor) -> Tensor:
    """The local part of a running average with the shape and layout of its parameter, made at first use."""
    if key not in state:
        state[key] = torch.zeros_like(parameter)
    return local_shard(state[key])


def _adam_direction(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Adam's bias-corrected direction `m / (sqrt(v) + eps)`, local part (Kingma and Ba, arXiv 1412.6980)."""
    assert parameter.grad is not None
    grad = local_shard(parameter.grad)
    beta1, beta2 = group["betas"]
    mean = _average(state, "exp_avg", parameter).lerp_(grad, 1 - beta1)
    square = _average(state, "exp_avg_sq", parameter).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    count = state["step"].item()
    root = square.sqrt().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
    return mean.div(1 - beta1**count).div_(root)


class Lion(_Rule):
    """Sign of an interpolated momentum (Chen et al., arXiv 2302.06675, algorithm 2). Element-wise.

    Cost: one running average per parameter; no communication.
    """

    def __init__(
        self, params: Groups, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        """`betas`: interpolation of the update, decay of the momentum."""
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """`p -= lr (sign(lerp(m, g, 1 - beta1)) + decay p)`; then `m = lerp(m, g, 1 - beta2)`."""
        assert parameter.grad is not None
        grad, shard = local_shard(parameter.grad), local_shard(parameter)
        momentum = _average(state, "exp_avg", parameter)
        beta1, beta2 = group["betas"]
        direction = momentum.lerp(grad, 1 - beta1).sign_()
        shard.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        momentum.lerp_(grad, 1 - beta2)


class Lamb(_Rule):
    """Adam with each tensor's step scaled to its norm (You et al., arXiv 1904.00962, algorithm 2).

    Cost: two running averages per parameter, one more copy of the local shards during a step, and one small
    all-reduce per mesh axis for the norms of all tensors together.
    """

    def __init__(
        self,
        params: Groups,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        """As in the paper, with the identity for its function phi."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update_group(self, group: dict[str, Any]) -> None:
        """`p -= lr |p| / |r| r` with `r = m / (sqrt(v) + eps) + decay p`; a ratio with a zero norm is 1."""
        parameters = list(self.with_grad(group))
        if not parameters:
            return
        directions = [
            _adam_direction(p, self.state[p], group).add_(local_shard(p), alpha=group["weight_decay"])
            for p in parameters
        ]
        shards = [local_shard(p) for p in parameters]
        squares = [torch.stack([s.square().sum(), r.square().sum()]) for s, r in zip(shards, directions, strict=True)]
        norms = sum_over_shards(torch.stack(squares), parameters).sqrt_()
        ratios = torch.where((norms > 0).all(dim=1), norms[:, 0] / norms[:, 1], 1.0)
        for shard, direction, ratio in zip(shards, directions, ratios, strict=True):
            shard.sub_(direction * (group["lr"] * ratio))


class Muon(_Rule):
    """Momentum made orthogonal by Newton-Schulz (Jordan, kellerjordan.github.io/posts/muon), for matrices.

    Groups with `orthogonal=False` are stepped by AdamW. The length of a step is that of AdamW, `0.2 sqrt(max(rows,
    columns))` (arXiv 2502.16982), so one learning rate serves both. The iteration runs in the parameter's own type,
    not in bf16: rounding there would make two layouts differ in the third digit.
    Cost: one running average per matrix. In a step the matrices are shared out (`train/updates/sharing.py`): each takes
    `5 x (4 r^2 c + 2 r^3)` flops (r the shorter side) on one of the ranks that share it; it is sent there and back
    along each axis that splits it, and its update is gathered over those whose ranks hold the same.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(
        self,
        params: Groups,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        """`betas`: AdamW's, of groups with `orthogonal=False`; `replicas`: who holds plain parameters alike."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": 1e-8}
        super().__init__(params, {**defaults, "orthogonal": True})
        self._replicas = replicas

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Decoupled weight decay, then the step along Adam's direction."""
        _take_step(parameter, _adam_direction(parameter, state, group), group)

    def update_group(self, group: dict[str, Any]) -> None:
        """Matrices in batches of as many as ranks share them, those with most work first: a batch is of near equals."""
        if not group["orthogonal"]:
            super().update_group(group)
            return
        shared: dict[Sharing, list[Tensor]] = {}
        for parameter in self.with_grad(group):
            shared.setdefault(sharing_of(parameter, self._replicas), []).append(parameter)
        for sharing, parameters in shared.items():
            # Largest first; equals stay in their order, so all ranks make the same batches.
            parameters.sort(key=lambda p: -newton_schulz_flops(*p.shape))
            size = sharing.team * sharing.num_teams
            for start in range(0, len(parameters), size):
                self._update_batch(parameters[start : start + size], sharing, group)

    def _update_batch(self, parameters: list[Tensor], sharing: Sharing, group: dict[str, Any]) -> None:
        """One matrix for each rank, at most."""
        batches = [parameters[i : i + sharing.team] for i in range(0, len(parameters), sharing.team)]
        lies = [[lie_of(parameter) for parameter in batch] for batch in batches]
        like = local_shard(parameters[0]).new_empty(0, device=_device_of(parameters[0]))
        for parameter in parameters:
            self._follow(parameter, group["momentum"])
        directions: list[Tensor] = []
        if sharing.here < len(batches):
            own = lies[sharing.here]
            parts = [self._nesterov(parameter, group["momentum"]) for parameter in batches[sharing.here]]
            wholes = bring_together(sharing, parts, own)
            if wholes:
                wholes.append(orthogonalize(wholes.pop(), self.COEFFICIENTS))
                wholes[0].mul_(0.2 * math.sqrt(max(wholes[0].shape)))
            directions = give_back(sharing, wholes, own, like)
        for team, batch in enumerate(batches):
            theirs = from_team(sharing, team, directions if team == sharing.here else [], lies[team], like)
            for parameter, direction in zip(batch, theirs, strict=True):
                _take_step(parameter, direction, group)

    def _follow(self, parameter: Tensor, momentum: float) -> None:
        """Let the running average follow the gradient."""
        assert parameter.grad is not None
        _average(self.state[parameter], "momentum_buffer", parameter).lerp_(local_shard(parameter.grad), 1 - momentum)

    def _nesterov(self, parameter: Tensor, momentum: float) -> Tensor:
        """The local part of what is made orthogonal, on the device that iterates."""
        assert parameter.grad is not None
        average = _average(self.state[parameter], "momentum_buffer", parameter)
        return local_shard(parameter.grad).lerp(average, momentum).to(_device_of(parameter))


def _take_step(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    shard = local_shard(parameter)
    shard.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction.to(shard.device), alpha=-group["lr"])


def _device_of(parameter: Tensor) -> torch.device:
    """That of its mesh, which its shard has left where states are offloaded."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int = 5) -> Tensor:
    """Singular values of `(rows, columns)` pulled towards 1 by a quintic Newton-Schulz iteration."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x: Tensor = matrix.mT if tall else matrix
    del matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Adafactor(_Rule):
    """Second moments kept as one row and one column (Shazeer and Stern, arXiv 1804.04235).

    Dials and numbers are those of `torch.optim.Adafactor`, which itself refuses sharded tensors.
    Cost: rows + columns numbers of state per matrix, on every rank; per step an all-gather of each gradient, one at
    a time, and one scalar all-reduce.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        clip: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        """`clip` is the paper's d: the largest root mean square of an update before scaling."""
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "clip": clip, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Decoupled weight decay, then the clipped, relatively scaled step."""
        assert parameter.grad is not None
        shard, grad = local_shard(parameter), gather_full(parameter.grad)
        count = state["step"].item()
        square = sum_over_shards(shard.square().sum().reshape(1, 1), [parameter])
        scale = max(group["eps"][1], math.sqrt(square.item() / max(parameter.numel(), 1)))
        relative = scale * min(group["lr"], 1 / math.sqrt(count))
        floor = group["eps"][0] if group["eps"][0] is not None else torch.finfo(parameter.dtype).eps
        variance = self._variance(grad, state, count ** group["beta2_decay"], floor)
        direction = variance.clamp_(min=floor * floor).rsqrt_().mul_(grad)
        rms = direction.norm().item() / math.sqrt(max(direction.numel(), 1))
        shard.mul_(1 - group["lr"] * group["weight_decay"])
        shard.sub_(local_part_of(direction, parameter), alpha=relative / max(1.0, rms / group["clip"]))

    def _variance(self, grad: Tensor, state: dict[str, Any], weight: float, floor: float) -> Tensor:
        if grad.dim() < 2:
            return _mean_of(state, "variance", grad.square(), weight).clone()
        rows = _mean_of(state, "row_var", grad.square().mean(dim=-1, keepdim=True), weight)
        columns = _mean_of(state, "col_var", grad.square().mean(dim=-2, keepdim=True), weight)
        return (rows @ columns).div_(rows.mean(dim=-2, keepdim=True).clamp_(min=floor))


def _mean_of(state: dict[str, Any], key: str, value: Tensor, weight: float) -> Tensor:
    """A running mean over steps, made at first use."""
    mean: Tensor = state.setdefault(key, torch.zeros_like(value))
    return mean.lerp_(value, weight)
