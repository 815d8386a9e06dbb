"""`NamedOptimizer`: the table from the names of a placed model's parameters to what an optimizer steps.

The step function hands gradients over by name (`take_grads`), the store reads and writes state by name
(`state_tensors`), so both work the same for every optimizer and under every plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.findings import nearest, shown
from shardwise.parallel.memory import STATE_ROOM, fitting
from shardwise.parallel.placed import Placed, named_in
from shardwise.parallel.refused.own_steps import hand_over, stepping
from shardwise.parallel.torch_private import empty_as
from shardwise.train.torch_private import local_of, shard_like
from shardwise.train.updates.clipped import watched
from shardwise.train.updates.state_values import (
    NUMBER,
    NUMBERS,
    Kind,
    empty_beside,
    filled,
    forms,
    frame,
    leaves,
    same_forms,
)
from shardwise.train.updates.update_rules import local_shard
from shardwise.train.updates.whole_steps import state_after_step
from shardwise.train.updates.wrapped import check_inner_state

PREFIX = "optim."
MASTER = "master"
"""State key of the fp32 copy that is stepped in place of a parameter in half precision."""
_HALF = (torch.bfloat16, torch.float16)
_META = torch.device("meta")


class NamedOptimizer:
    """A `torch.optim.Optimizer` with names: which parameter of the model each stepped tensor belongs to.

    Attributes:
        torch: the optimizer itself.
        params: original name -> the tensor that is stepped: the parameter, its local shard, or its fp32 master.
        live: original name -> the placed model's parameter.
        base_lrs: learning rate of each group before the schedule's factor.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], live: Mapping[str, nn.Parameter]
    ) -> None:
        """Use the constructors of this module, or `name_optimizer`."""
        self.torch = optimizer
        self.params = dict(params)
        self.live = dict(live)
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._masters = {name: p for name, p in self.params.items() if p.dtype != self.live[name].dtype}
        self._group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._holders = list({id(p): p for p in (*self.params.values(), *self.live.values())}.values())
        """Every tensor that may hold a gradient, once."""
        self._numbers: dict[str, dict[str, type]] = {}
        self._frames: dict[str, Any] = {}
        """Lists, tuples and dicts in the state of each parameter; and of all what a checkpoint said of later ones."""
        self._forms: dict[str, str] = {}
        self._has_stepped = self.is_of_stage = self.is_told = False
        self.num_followed = 0
        self._is_own = type(optimizer).__module__.startswith("shardwise.")
        """It makes all of its state in the first step; what a checkpoint has more is of another `state_dtype`."""

    @property
    def masters(self) -> frozenset[str]:
        """Names of the parameters that are stepped as fp32 copies."""
        return frozenset(name for name, p in self.params.items() if p.dtype != self.live[name].dtype)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups."""
        return self.torch.param_groups

    @property
    def kind(self) -> str:
        """Name of the optimizer's class; of several, joined by `+`."""
        return type(self.torch).__name__

    def owner(self, name: str) -> torch.optim.Optimizer:
        """The torch optimizer that steps a parameter."""
        return self.torch

    def scale_lr(self, factor: float) -> None:
        """Set every group's learning rate to its base times `factor` (a schedule's value)."""
        for group, base in zip(self.param_groups, self.base_lrs, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    def take_grads(self, grads: Mapping[str, Tensor | None]) -> None:
        """Hand over this step's gradients, `(global shape)` as DTensors or `(local shape)` as plain tensors.

        A parameter that is not named, or whose gradient is None, is not stepped.

        Raises:
            ModelError: a name is not one of this optimizer's.
        """
        if grads.keys() != self.params.keys() and not grads.keys() <= self.params.keys():
            unknown = sorted(grads.keys() - self.params.keys())
            raise ModelError(
                f"take_grads: {_some(unknown)} not stepped by this {type(self.torch).__name__}; "
                f"{nearest(unknown[0], list(self.params))}; hand over gradients of its parameters only"
            )
        hand_over(self.torch)
        new = [n for n, p in self.params.items() if grads.get(n) is not p.grad]  # a plain one has its gradient already
        with torch.no_grad():
            for name in new:
                parameter, grad = self.params[name], grads.get(name)
                parameter.grad = None if grad is None else _grad_for(parameter, grad, self.live[name])

    def step(self) -> None:
        """Update from what was handed over; UsageError: nothing was; OutOfMemoryError: its state does not fit."""
        with fitting(f"step of {self.kind}", STATE_ROOM), stepping(self.torch), watched(self):
            self.torch.step()
        if not self._has_stepped:
            self._has_stepped = True
            self._tell_unstorable()
        if self._masters:
            with torch.no_grad():
                for name, master in self._masters.items():
                    local_shard(self.live[name]).copy_(local_shard(master))

    def _tell_unstorable(self) -> None:
        """At the first step, and not at a save hours later."""
        try:
            self.local_state()
        except ModelError as error:
            warnings.warn(f"no checkpoint will hold this run: {error}", stacklevel=5)

    def zero_grad(self) -> None:
        """Forget the gradients, here and on the model's parameters."""
        for parameter in self._holders:
            parameter.grad = None

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """`optim.<parameter>.<key>` -> state, with the layout and global shape of the parameter where it is sharded.

        Plain numbers (a step count) come as 0-dim tensors. A parameter that was never stepped has no entries.
        """
        check_inner_state(self.torch)
        states = self.torch.state
        return {k: t for n, p in self.params.items() for k, t in self._named_state(n, states.get(p, {})).items()}

    def forms(self) -> dict[str, str]:
        """What of the state is a number of Python's, a list, a tuple or a dict, by key, where all parameters agree."""
        return same_forms(forms(self.torch.state.get(parameter, {})) for parameter in self.params.values())

    @torch.no_grad()
    def state_template(
        self, names: Collection[str], *, late: Mapping[str, Kind] | None = None, forms: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """Fresh tensors for the state that a checkpoint holding `names` would load; values unspecified.

        The optimizer is left as it is. Every rank calls it: a rule that gathers does so here.
        Cost: a step of one parameter of each kind without a state (of each one, where the optimizer is the user's).

        Args:
            names: of tensors of a checkpoint.
            late: shape and type of those of them that come though a first step does not make them (slow weights, a
                mean that begins later): each cut as its parameter is, as far as it has the same dims.
            forms: what of the state was no tensor, as `forms` gives it.
        """
        self._forms = dict(forms or {})
        wanted: dict[str, set[str]] = {}
        for param, key in (_split(name, self.params) for name in names):
            if key != MASTER or param not in self._masters:
                wanted.setdefault(param, set()).add(key)
        tensors: dict[str, dict[str, Tensor]] = {}
        alike: dict[Any, dict[str, Any]] = {}
        # the largest first, whose step takes most: what is made for a look is gone before there is much of the rest
        for name in sorted(self.params, key=lambda name: -self.params[name].numel()):
            state = self._state_like(name, wanted[name], alike) if name in wanted else {}
            self._frames[name], values = frame(state), leaves(state)
            made = {key for key, value in values.items() if value is not None}
            if late and made and made <= wanted[name] and not self._is_own:
                came = {key: late.get(f"{PREFIX}{name}.{key}") for key in sorted(wanted[name] - made)}
                values |= {key: self._late(name, key, kind) for key, kind in came.items() if kind is not None}
            self._numbers[name] = {key: type(value) for key, value in values.items() if isinstance(value, int | float)}
            tensors[name] = {key: empty_as(tensor) for key, tensor in self._named_state(name, values).items()}
        return {key: tensor for name in self.params for key, tensor in tensors[name].items()}

    def _state_like(self, name: str, wanted: set[str], alike: dict[Any, dict[str, Any]]) -> dict[str, Any]:
        """State of a parameter that has none but the wanted: what is here, or what a first step leaves."""
        state: dict[str, Any] = self.torch.state.get(self.params[name]) or {}
        is_more = any(value is not None and key not in wanted for key, value in leaves(state).items())
        return self._state_made(name, alike) if is_more or not state else state

    def _late(self, name: str, key: str, kind: Kind) -> Any:
        """What stands for state that is made after the first step; None: nothing can."""
        parameter, live, (shape, dtype) = self.params[name].detach(), self.live[name], kind
        try:
            filled(self._frames[name], {key: None}, self._forms)
        except KeyError:  # it lies in what nobody knows
            return None
        if self._forms.get(key) == NUMBER and not shape and dtype in NUMBERS:
            return NUMBERS[dtype]()
        if shape == tuple(live.shape):
            same = str(parameter.dtype) == f"torch.{dtype}"
            return parameter if same else torch.empty_like(parameter, dtype=getattr(torch, dtype))
        if isinstance(live, DTensor) and not isinstance(parameter, DTensor):
            return None  # of rules over shards nobody knows what it is a part of
        return empty_beside(parameter, shape, getattr(torch, dtype))

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all state by `tensors`: what `state_template` gave, filled. They are kept, not copied.

        Raises:
            ModelError: an entry of a parameter that this optimizer does not step.
        """
        states: dict[str, dict[str, Tensor]] = {name: {} for name in self.params}
        for full_name, tensor in tensors.items():
            name, key = _split(full_name, self.params)
            if name not in states:
                raise ModelError(
                    f"load_state_tensors: {full_name!r} is of no parameter that this {type(self.torch).__name__} "
                    f"steps; {nearest(name, list(self.params))}"
                )
            states[name][key] = tensor
        for name, parameter in self.params.items():
            if name in self._masters:
                local_shard(parameter).copy_(local_shard(states[name].pop(MASTER)))
            self.torch.state.pop(parameter, None)
            if states[name]:
                found = {key: self._stepped_state(name, key, t) for key, t in states[name].items()}
                self.torch.state[parameter] = filled(self._frames.get(name, {}), found, self._forms)

    def local_state(self) -> dict[str, Tensor]:
        """`state_tensors`, each as the plain tensor that is here: `(local shape)`."""
        return {key: tensor for state in self.states_by_parameter().values() for key, tensor in state.items()}

    def states_by_parameter(self) -> dict[str, dict[str, Tensor]]:
        """The same, parameter by parameter."""
        check_inner_state(self.torch)
        states = {name: self._plain_state(name, self.torch.state.get(p, {})) for name, p in self.params.items()}
        return {name: {key: local_of(value) for key, value in state.items()} for name, state in states.items()}

    def _named_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
        parameter, live = self.params[name], self.live[name]
        named = self._plain_state(name, state)
        if not isinstance(live, DTensor) or isinstance(parameter, DTensor):
            return named
        # a plain state as large as a stepped shard is a shard too; a step count or a row of means is whole
        return {
            key: shard_like(value, live) if value.dim() > 0 and value.shape == parameter.shape else value
            for key, value in named.items()
        }

    def _plain_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Of one parameter, as its optimizer holds it; numbers as tensors."""
        values = {MASTER: self.params[name].detach(), **state} if name in self._masters else state
        named: dict[str, Tensor] = {}
        for key, value in leaves(values).items():
            if isinstance(value, Tensor):
                named[f"{PREFIX}{name}.{key}"] = value
            elif isinstance(value, int | float):
                kind = torch.float64 if isinstance(value, float) else torch.int64
                named[f"{PREFIX}{name}.{key}"] = torch.tensor(value, dtype=kind)
            elif value is not None:
                raise ModelError(
                    f"{type(self.torch).__name__}: state {key!r} of {name!r} is a {type(value).__name__}; only tensors "
                    "and numbers, and lists, tuples and dicts of them, can be saved by name; use another optimizer"
                )
        return named

    def _stepped_state(self, name: str, key: str, tensor: Tensor) -> Any:
        if key in self._numbers.get(name, ()):
            return self._numbers[name][key](tensor.item())
        return tensor if isinstance(self.params[name], DTensor) else local_shard(tensor)

    def _state_made(self, name: str, alike: dict[Any, dict[str, Any]]) -> dict[str, Any]:
        """The state that the first step of a parameter makes: keys, shapes and types are wanted, nothing else.

        Torch's rules and those of this library make the same of all parameters of one kind: one of them is stepped.
        """
        parameter, live = self.params[name], self.live[name]
        if not type(self.torch).__module__.startswith(("torch.", "shardwise.")):
            return state_after_step(self.torch, parameter)
        kind: tuple[Any, ...] = (self._group_of.get(id(parameter)), parameter.dtype, live.shape)  # alike on all ranks
        kind += (live.device_mesh, live.placements) if isinstance(live, DTensor) else ()
        if kind not in alike:  # kept on meta, where it takes no memory
            made = state_after_step(self.torch, parameter).items()
            alike[kind] = {k: (empty_as(it, _META), it.device) if isinstance(it, Tensor) else it for k, it in made}
        return {key: empty_as(*it) if isinstance(it, tuple) else it for key, it in alike[kind].items()}


def name_optimizer(optimizer: torch.optim.Optimizer | NamedOptimizer, placed: Placed) -> NamedOptimizer:
    """Give names to an optimizer that the user built over `placed.parameters()`.

    Parameters are recognised by identity, so build the optimizer after `apply`. A group that mixes sharded and
    plain parameters has its `foreach` and `fused` switched off: torch cannot run those over a mixture.

    Raises:
        ModelError: a parameter is not the model's, a trainable one is missing, or the optimizer cannot work by
            steps of given gradients (LBFGS, SparseAdam), or on shards (Rprop, torch's Adafactor).

    >>> name_optimizer(torch.optim.AdamW(placed.parameters(), lr=3e-4), placed)  # doctest: +SKIP
    """
    if isinstance(optimizer, NamedOptimizer):
        return optimizer
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ModelError(
            f"name_optimizer: {kind} cannot be used: a step here has one dense gradient and no closure; "
            "use adamw, sgd, lion, lamb, muon, adafactor or another first-order torch optimizer"
        )
    live = _trainable(placed)
    unsharded = torch.optim.Rprop | torch.optim.Adafactor  # in-place indexing, and norms, that a DTensor refuses
    if isinstance(optimizer, unsharded) and any(isinstance(p, DTensor) for p in live.values()):
        other = "shardwise.adafactor, the same rule" if kind == "Adafactor" else "adamw, sgd or another optimizer"
        raise ModelError(
            f"name_optimizer: torch's {kind} cannot step sharded parameters; use {other}, or a plan without zero and tp"
        )
    frozen = {id(p) for p in placed.parameters() if not p.requires_grad}
    stepped = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    known = {id(p) for p in live.values()} | frozen
    unknown = [f"a {tuple(p.shape)} {p.dtype}" for key, p in stepped.items() if key not in known]
    missing = [name for name, p in live.items() if id(p) not in stepped]
    if unknown or missing:
        problem = f"steps {_some(unknown)}, no parameter of the placed model" if unknown else f"lacks {_some(missing)}"
        raise ModelError(
            f"name_optimizer: {kind} {problem} (rank {placed.mesh.rank}); build it over placed.parameters() after "
            "apply(), and set requires_grad=False on what shall not be trained"
        )
    for group in optimizer.param_groups:
        if len({isinstance(p, DTensor) for p in group["params"]}) > 1:
            group.update({key: False for key in ("foreach", "fused") if group.get(key)})
    return NamedOptimizer(optimizer, live, live)


def _trainable(placed: Placed) -> dict[str, nn.Parameter]:
    """Trainable parameters of this rank, each object once (tied ones under their first name)."""
    first: dict[int, str] = {}
    parameters = named_in(placed)
    for name, parameter in parameters.items():
        if parameter.requires_grad and (placed.trains is None or name in placed.trains):
            first.setdefault(id(parameter), name)
    return {name: parameters[name] for name in first.values()}


def stepped_parameters(
    placed: Placed, *, local: bool, masters: bool = True
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """What an optimizer steps, and the model's parameters, by name; with `masters` fp32 copies of those in half types.

    Raises:
        ModelError: nothing is trainable on this rank.
    """
    live = _trainable(placed)
    if not live:
        raise ModelError(
            f"optimizer: rank {placed.mesh.rank} has no trainable parameter (of {len(placed.named_parameters())}); "
            "set requires_grad=True on some in every pipeline stage"
        )
    shards = placed.local_parameters() if local else live
    stepped = {name: shards[name] for name in live}
    for name, parameter in stepped.items():
        if masters and parameter.dtype in _HALF:
            stepped[name] = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
    return stepped, live


def _split(full_name: str, known: Collection[str]) -> tuple[str, str]:
    """`optim.layers.0.wq.exp_avg` -> (`layers.0.wq`, `exp_avg`); a key of state may hold dots where names are known."""
    whole = full_name.removeprefix(PREFIX)
    places = [place for place, letter in enumerate(whole) if letter == "."][::-1]
    place = next((place for place in places if whole[:place] in known), places[0] if places else 0)
    return whole[:place], whole[place + 1 :]


def _grad_for(parameter: Tensor, grad: Tensor, live: Tensor) -> Tensor:
    if isinstance(grad, DTensor) and isinstance(live, DTensor) and grad.placements != live.placements:
        grad = grad.redistribute(placements=live.placements)
    if grad.dtype != parameter.dtype:
        grad = grad.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return local_shard(grad)
    return grad if isinstance(grad, DTensor) else shard_like(grad, parameter)


def _some(names: Sequence[str]) -> str:
    return shown([repr(name) for name in names], 5)
