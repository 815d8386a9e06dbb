"""`TrainState`: everything that changes while a run goes on, and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.optim import Optimizer

from shardwise.errors import CheckpointError, UsageError
from shardwise.parallel.layers.batchnorm import BatchNorm
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.parallel.randomness.generators import Drawn
from shardwise.parallel.torch_private import empty_as
from shardwise.train.batches import Batches
from shardwise.train.ema import Ema
from shardwise.train.kept.conversion import Conversion, find_conversion
from shardwise.train.kept.extra_state import ExtraState
from shardwise.train.kept.given import check_given
from shardwise.train.kept.mirror import Mirror
from shardwise.train.kept.passing import Passing
from shardwise.train.kept.stateful import StatefulObjects, own_place, told
from shardwise.train.loss_scale import LossScale
from shardwise.train.protect import Guard
from shardwise.train.torch_private import local_of
from shardwise.train.updates.group_values import GroupValues
from shardwise.train.updates.optim import PREFIX, NamedOptimizer, name_optimizer
from shardwise.train.updates.state_values import Kind
from shardwise.train.values import from_json, like

Tensors = dict[str, torch.Tensor]
_BESIDE = ("stateful", "groups", "optimizer_state")
"""Of a state's scalars: what the body of a training loop may change."""


class DataPosition(Protocol):
    """What a state needs of its batches: where they are, as plain numbers."""

    def state_dict(self) -> dict[str, Any]:
        """The position as JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        ...


class TrainState:
    """A placed module, its optimizer, learning-rate schedule, position in the data, step and tokens.

    Args:
        placed: from `apply`.
        optimizer: from `shardwise.adamw` and its like, or a torch optimizer over `placed.parameters()`.
        batches: from `shardwise.loader`; None: the user feeds `make_step` by hand.
        schedule: step (from 0) -> factor of the base learning rate; None: constant.
        ema: a moving average of the weights, updated by each step.
        seed: kept in checkpoints, so that a resumed run goes on with the same randomness; None: that of `apply`.

    Raises:
        UsageError: batches of another number of micro-batches than the plan's, a `schedule` or an `ema` that is none.

    >>> state = TrainState(placed, adamw(placed, lr=3e-4), batches)  # doctest: +SKIP
    """

    def __init__(
        self,
        placed: Placed,
        optimizer: NamedOptimizer | Optimizer,
        batches: DataPosition | None = None,
        *,
        schedule: Callable[[int], float] | None = None,
        ema: Ema | None = None,
        seed: int | None = None,
    ) -> None:
        """See the class."""
        check_given(placed, optimizer, batches, schedule, ema)
        self._passing = Passing(placed)
        self.placed = self._passing.watching(placed)
        self.optimizer = optimizer if isinstance(optimizer, NamedOptimizer) else name_optimizer(optimizer, placed)
        self.batches = batches
        self.schedule = schedule
        self.ema = ema
        self.seed = placed.seed if seed is None else seed
        self.step = 0
        self.skipped = self.unmade = 0
        """Steps without an update, of the run and in a row, for what is not finite."""
        self.weight = 0.0
        """Loss weight seen so far: tokens, for a token loss."""
        self.loss_scale = LossScale() if placed.plan.precision == "fp16" else None
        self.run_id = uuid.uuid4().hex
        """Of which run it is, by which its stores know it: one for the last steps and one for the best, say."""
        self._has_batch_norm = any(isinstance(m, BatchNorm) for part in placed.parts for m in part.root.modules())
        self._extra = ExtraState(placed)
        self._stateful = StatefulObjects()
        self._taken_back: Mapping[str, Any] | None = None
        self._group_values = GroupValues(self.optimizer, scheduled=schedule is not None)
        self.mirror: Mirror | None = None
        """Keeps copies of this state in memory, under `--recover`; see `shardwise.train.kept.mirror`."""
        self.is_joined = False
        """Whether this process has taken over what the run had reached; see `rejoin`."""
        self.guard = Guard()
        """The last good steps, where a run is protected; see `train/protect.py`."""
        self.halvings = 0
        """How often the rows of micro-batches were halved, for ranks ran out of memory; see `guards/halving.py`."""
        self.stepped_with: Mapping[str, Any] | None = None
        """What its steps do to gradients, as `StepOptions.of_the_maths` says it; None: none was made."""
        self.saved_with: Mapping[str, Any] | None = None
        """The same of the checkpoint that was loaded, until a first step has been compared with it."""
        self.generators = Drawn(placed.mesh.device)
        """Those of Python, NumPy and torch: checkpoints hold where they are if the script draws from them."""
        self._factor = 1.0
        self._ema_updates = 0

    def __getstate__(self) -> NoReturn:
        """`copy.deepcopy` and `pickle` ask for it: process groups cannot be copied, and shards are no whole model."""
        raise UsageError(
            "TrainState: it cannot be copied or pickled, as its parts belong to this process and its mesh; to come "
            "back to it, save it: store = shardwise.Store(directory); path = store.save(state).path; "
            "store.load(state, path)"
        )

    @property
    def mesh(self) -> Mesh:
        """The mesh that the state lives on."""
        return self.placed.mesh

    def set_lr(self) -> float:
        """Give the optimizer this step's learning rate; returns that of its first group.

        Raises:
            UsageError: something else has set rates, which this would undo.
        """
        if self.schedule is None:
            return float(self.optimizer.param_groups[0]["lr"])
        if (found := len(self.optimizer.param_groups)) != (needed := len(self.optimizer.base_lrs)):
            raise UsageError(
                f"TrainState: schedule: found {found} groups of the optimizer, needed the {needed} that it began with: "
                "of one that came later the schedule knows no base learning rate; make all groups before TrainState, "
                "or leave schedule= out and set rates in the loop"
            )
        factor = self.schedule(self.step)
        if factor != self._factor:
            for group, base in zip(self.optimizer.param_groups, self.optimizer.base_lrs, strict=True):
                if not isinstance(group["lr"], torch.Tensor) and group["lr"] != base * self._factor:
                    raise UsageError(
                        f"TrainState: schedule: found the learning rate {group['lr']:g}, which the script or a "
                        f"scheduler of torch has set, needed {base * self._factor:g}, which the schedule had set and "
                        "goes on from; keep one of them: leave schedule= out, or what sets rates beside it"
                    )
            self.optimizer.scale_lr(factor)
            self._factor = factor
        return float(self.optimizer.param_groups[0]["lr"])

    def tensors(self) -> Tensors:
        """Every tensor by its logical name: `model.<parameter or buffer>`, `optim.<parameter>.<key>`."""
        if self.ema is not None:
            self.ema.check_own("saved")
        return self._model_tensors() | self.optimizer.state_tensors() | (self.ema.tensors() if self.ema else {})

    def local_tensors(self) -> Tensors:
        """The same as plain tensors: what is here of each, `(local shape)`, sharing its storage.

        Cost: a fifth of that of `tensors`, which makes a DTensor of each; for what is done after every step.
        """
        model = {name: local_of(tensor) for name, tensor in self._live_model().items()}
        return model | self.optimizer.local_state() | (self.ema.local_tensors() if self.ema else {})

    def template(
        self, names: Collection[str], *, late: Mapping[str, Kind] | None = None, forms: Mapping[str, str] | None = None
    ) -> Tensors:
        """Fresh tensors, of the names and layouts that a checkpoint holding `names` would load here.

        `late`, `forms`: see `NamedOptimizer.state_template`.
        """
        model = {name: empty_as(tensor) for name, tensor in self._model_tensors().items()}
        if self.ema is not None:
            self.ema.check_own("loaded")
            model |= {name: empty_as(tensor) for name, tensor in self.ema.tensors().items()}
        own = [name for name in names if name.startswith(PREFIX)]
        return model | self.optimizer.state_template(own, late=late, forms=forms)

    def conversion(self, stored: Mapping[str, Kind], template: Tensors) -> Conversion | None:
        """How what is `stored` in another type becomes what a `template` has; None: nothing is.

        Args:
            stored: shape and type of every tensor of a checkpoint.
            template: what `template` gave for it.
        """
        return find_conversion(self.optimizer, stored, template)

    def _model_tensors(self) -> Tensors:
        return {name: tensor.detach() for name, tensor in self._live_model().items()}

    def _live_model(self) -> Tensors:
        """By logical name, the parameters and persistent buffers themselves."""
        self.placed.reshard()
        model: Tensors = {f"model.{name}": p for name, p in self.placed.named_parameters().items()}
        for part in self.placed.parts:
            buffers = dict(part.root.named_buffers())
            persistent = part.root.state_dict(keep_vars=True) if buffers else {}
            model |= {f"model.{name}": buffer for name, buffer in buffers.items() if name in persistent}
        return model

    def scalars(self) -> dict[str, Any]:
        """Everything that is not a tensor, as JSON."""
        scale = self.loss_scale
        rare: dict[str, Any] = {"halvings": self.halvings} if self.halvings else {}
        if self.guard.losses or self.guard.hits:
            rare["guard"] = self.guard.to_json()
        if self.unmade:
            rare["unmade"] = self.unmade
        if extra := self._extra.to_json():
            rare["extra_state"] = extra
        if (options := self.stepped_with or self.saved_with) is not None:  # of a load that no step has followed
            rare["stepped_with"] = dict(options)
        if made := self._stateful.made:
            rare["stateful_made"] = made
        if factors := self._stateful.factors():
            rare["stateful_factors"] = factors
        if found := self.optimizer.forms():
            rare["optimizer_forms"] = found
        if self._has_batch_norm:
            rare["batch_norm"] = {"micro_batches": self.placed.plan.batch.micro_batches}  # whose statistics it takes
        if self.placed.ties:  # for exports: other programs want all names
            rare["ties"] = dict(self.placed.ties)
        return (
            rare
            | self._beside()
            | {
                "step": self.step,
                "skipped": self.skipped,
                "weight": self.weight,
                "seed": self.seed,
                "base_lr": self.optimizer.base_lrs,
                "optimizer": {"name": self.optimizer.kind, "groups": self._group_values.settings()},
                "data": told("batches", self.batches) if self.batches is not None else None,
                "ema_updates": self.ema.updates if self.ema is not None else None,
                "ema_decay": self.ema.decay if self.ema is not None else None,
                "ema_warmup": self.ema.warmup if self.ema is not None else None,
                "schedule": self._factors(),
                "loss_scale": [scale.scale, scale.good_steps] if scale is not None else None,
                "plan": str(self.placed.plan),
            }
        )

    def members(self) -> list[dict[str, Any]]:
        """Of each group of the optimizer on this rank its settings, and the names of the parameters that it steps."""
        return self._group_values.members()

    def factors(self, at: Mapping[str, Sequence[int]]) -> dict[str, list[tuple[int, list[float]]]]:
        """What the functions of schedulers of torch that are kept give at some steps, by name."""
        return self._stateful.factors(at)

    def _factors(self) -> list[tuple[int, float]]:
        """What the schedule gave at first, half-way and last: by this a later start tells another one.

        Of no later step, for which a table of factors may have no row.
        """
        steps = sorted({0, self.step // 2, max(0, self.step - 1)})
        return [(step, 1.0 if self.schedule is None else float(self.schedule(step))) for step in steps]

    def load_tensors(self, tensors: Tensors) -> None:
        """Take over a filled `template`.

        Raises:
            CheckpointError: it lacks tensors of the model.
        """
        own = self._model_tensors()
        missing = sorted(own.keys() - tensors.keys())
        if missing:
            raise CheckpointError(
                f"load_tensors: {', '.join(missing[:5])} of the model are not there ({len(missing)} in all); "
                "was the checkpoint written with another model?"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                local_of(tensor).copy_(local_of(tensors[name]))
        if self.placed.copies is not None:
            self.placed.copies.refresh()
        if self.ema is not None:
            self.ema.load_tensors(tensors, self._ema_updates)
            self._ema_updates = 0  # of those scalars alone: weights that are loaded by themselves begin an average
        self.optimizer.load_state_tensors({k: v for k, v in tensors.items() if k.startswith(PREFIX)})

    def keep(self, **objects: Any) -> None:
        """Make other objects of the script part of the state, before it is loaded or trained.

        Args:
            **objects: by name, what has `state_dict` and `load_state_dict`, with the same state on every rank: torch's
                schedulers, meters, curricula. Numbers, texts, lists, dicts, arrays and small tensors, at most 256 KiB.

        Raises:
            UsageError: an object without these two, one whose tensors ranks divide, or a name that is taken.
            ModelError: its state is something else, or too large.

        >>> state.keep(scheduler=scheduler)  # doctest: +SKIP
        """
        self._stateful.add(objects)

    def forgets(self) -> str:
        """What a checkpoint of this state will not have, and what to do; empty: nothing that is known."""
        schedule = "" if self.schedule is not None else self._stateful.forgets(self.optimizer.param_groups)
        return "; ".join(filter(None, (schedule, self._passing.forgets())))

    def _beside(self) -> dict[str, Any]:
        """What the body of a training loop may change: values of groups, other objects."""
        if self._taken_back is not None:  # what it does after such a step is of no step
            return {key: self._taken_back[key] for key in _BESIDE if key in self._taken_back}
        kept, values = self._stateful.to_json(), self._group_values
        found = {"stateful": kept, "groups": values.moved(), "optimizer_state": values.apart()}
        return {key: held for key, held in found.items() if any(held)}

    def _load_beside(self, scalars: Mapping[str, Any]) -> None:
        self._taken_back = None
        self._stateful.load(scalars.get("stateful") or {})
        self._group_values.load(scalars.get("groups") or (), scalars.get("optimizer_state") or ())

    def take_back(self, scalars: Mapping[str, Any]) -> None:
        """Be what `scalars()` gave, whatever the loop's body does for the step that is taken back."""
        self.load_scalars(scalars)
        self._taken_back = scalars

    def trains(self, batch: object) -> None:
        """A step trains on this batch: the position in the data is behind it, whatever the loop has read ahead."""
        if isinstance(self.batches, Batches):
            self.batches.ahead.trains(batch)

    def begin_step(self) -> None:
        """Undo what the body of the loop did after a step that was taken back."""
        if self._taken_back is not None:
            self._load_beside(self._taken_back)

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Continue where `scalars()` was taken; what is refused leaves everything as it was.

        Raises:
            CheckpointError: modules keep more, or less, beside their parameters than those that were saved; the data
                is other data; it is not of a `TrainState`.
        """
        if lacking := [key for key in _SAVED if key not in scalars]:
            raise CheckpointError(
                f"found no {', '.join(lacking)}, so that it is of a state of another class; needed that of a "
                "TrainState; load the weights only and begin with them (weights_only=True)"
            )
        before, updates = self.scalars(), self._ema_updates
        try:
            self._load_scalars(scalars)
        except Exception:  # whatever a script's object raised: half a load is none
            self._load_scalars(before)
            self._ema_updates = updates
            raise

    def _load_scalars(self, scalars: Mapping[str, Any]) -> None:
        self._extra.load(scalars.get("extra_state", {}))
        self._load_beside(scalars)
        self.step = int(scalars["step"])
        self.skipped, self.unmade = int(scalars["skipped"]), int(scalars.get("unmade", 0))
        self.weight = float(scalars["weight"])
        self.seed = int(scalars["seed"])
        self._ema_updates = int(scalars.get("ema_updates") or 0)
        if self.batches is not None and scalars["data"] is not None:
            place = own_place(scalars["data"], scalars.get("data_by_rank"), self.mesh)
            self.batches.load_state_dict(like(self.batches.state_dict(), from_json(place)))
        self.saved_with = scalars.get("stepped_with")
        self.guard.load(scalars.get("guard") or Guard().to_json())
        self.halvings = max(self.halvings, int(scalars.get("halvings", 0)))  # a state that is rewound needs no less
        if self.loss_scale is not None and scalars["loss_scale"] is not None:
            self.loss_scale.scale, self.loss_scale.good_steps = scalars["loss_scale"]


_SAVED = ("step", "skipped", "weight", "seed", "data", "loss_scale")
"""Scalars that every save of a `TrainState` has."""


def placed_of(state: object) -> Placed:
    """What a state trains; UsageError: it is none, as what `apply` gave."""
    if isinstance(state, TrainState):
        return state.placed
    raise UsageError(f"a step: found {type(state).__name__}; needed state = TrainState(placed, optimizer)")
