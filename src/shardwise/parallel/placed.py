"""`Placed`: a module with a plan applied to it, as this rank sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError, UsageError
from shardwise.parallel.gathered_torch_private import Gathered
from shardwise.parallel.mesh import Mesh
from shardwise.plan.plan import Plan

Batch = Any
"""One micro-batch as the collate function gives it: a dict of tensors, a tuple, or a tensor; rows first."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one parameter went: the pass that placed it, in which way, and its shape before."""

    pass_name: str
    text: str
    global_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """One stage of the model on this rank (the whole model without a pipeline)."""

    root: nn.Module
    """The user's module, pruned to this stage; parameters keep their original names."""
    run: nn.Module
    """What is called: the root, a data-parallel wrapper around it, or the pipeline's stage around it."""
    stage: int = 0


class PipelineRunner(Protocol):
    """What `cut_pipeline` leaves for the step."""

    def run(
        self,
        micro_batches: list[Batch],
        loss_fn: Callable[[Any, Batch], torch.Tensor],
        *,
        backward: bool,
        flushes: int = 1,
    ) -> list[torch.Tensor]:
        """Run the schedule over this rank's micro-batches; losses on the rank of the last stage, else empty."""
        ...


class ContextShare(Protocol):
    """What `shard_context` leaves for the step."""

    def share(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch along the sequence, with the positions of its tokens."""
        ...


class SharedParameters(Protocol):
    """Parameters of which ranks hold copies that no engine sums; see `ties.py` and `engines/scalars.py`."""

    def counts_here(self, name: str) -> bool:
        """Whether this rank's copy is the one that sums over the world count."""
        ...

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients; all ranks call it."""
        ...

    def refresh(self) -> None:
        """Let this rank's further copies follow its first one."""
        ...


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When randomness is drawn, and for which rows."""

    seed: int
    step: int
    rows: range | None = None
    """Numbers of this rank's rows, the same under every plan; None: those of the data ranks follow one another."""
    samples: tuple[int, ...] = ()
    """How many of these each micro-batch is made of, as the loader counts: a sample may be several rows."""


class RandomKeys(Protocol):
    """What `key_randomness` leaves for the step and for recompute."""

    def begin(self, roots: Sequence[nn.Module], moment: Moment, micro: Sequence[Batch], zero: Sequence[bool]) -> None:
        """Start a step: this rank's micro-batches, and which of them are padding."""
        ...

    def at(self, index: int) -> AbstractContextManager[None]:
        """Within it, the forward of a micro-batch draws keyed numbers."""
        ...

    def renumber(self, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        """The step's micro-batches were divided again: do the same with the numbers of their rows."""
        ...

    def inside(self, name: str, module: nn.Module) -> None:
        """Key a module's own forward, and not what is put around it later."""
        ...

    def replayed(self, forward: Callable[..., Any]) -> Callable[..., Any] | None:
        """A forward that draws the same numbers when it is called again; None: nothing is keyed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A module with a plan applied: its parts on this rank and where each parameter went.

    Made by `shardwise.apply`. Names are those of the user's module under every plan.
    """

    parts: tuple[Part, ...]
    """One; in a pipeline one for each stage of this rank."""
    plan: Plan
    mesh: Mesh
    blocks: tuple[str, ...] = ()
    """Names of the repeated blocks."""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Name of every parameter of this rank -> how it is sharded, and which pass did it."""
    sample: Batch | None = None
    blueprint: Any = None
    rules: Mapping[str, str] | None = None
    pipeline: PipelineRunner | None = None
    """None where `pp` is 1."""
    context: ContextShare | None = None
    """None where `cp` is 1."""
    experts: tuple[str, ...] = ()
    """Names of the modules whose parameters are split over the `ep` axis."""
    float8: tuple[str, ...] = ()
    """Names of the linear layers that multiply in float8."""
    plain: nn.Module | None = None
    """The model on meta as it was before the passes; until its first forward is looked at, under tensor parallelism."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """Names of the modules that a tensor-parallel rule speaks of -> its style."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Names of the modules to which a precision rule gives a type of their own -> that type."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Further names of a tied parameter -> its first name, which is the parameter's name everywhere."""
    shared_stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """First name of each parameter that several pipeline stages use -> those stages."""
    copies: SharedParameters | None = None
    """Parameters that several pipeline stages hold, or that `fully_shard` leaves whole."""
    reduced: frozenset[str] | None = None
    """Names of the parameters whose gradients DDP sums, which it was told once; None: other engines look each time."""
    wrappers: Mapping[str, int] = field(default_factory=dict)
    """Names of the parameters that are DTensors -> what changes when somebody assigns to their `.data`, which they
    ignore: of `parallel/torch_private.py`."""
    gathered: Gathered | None = None
    """Of sharded parameters without a pipeline: how long what a forward gathers stays."""
    trains: frozenset[str] | None = None
    """Names that an optimizer made from this steps; None: all that are trainable. See `train/updates/several.py`."""
    after_step: tuple[Callable[[bool], None], ...] = ()
    """Called at the end of each training step, on all ranks, with whether the update was made."""
    seed: int = 0
    """The job's, as `apply` was given it."""
    randomness: RandomKeys | None = None
    original_names: tuple[str, ...] = ()
    """Names of all modules of the original model, whatever was pruned from this rank."""

    @property
    def module(self) -> nn.Module:
        """The user's module on this rank, pruned to its stage under a pipeline.

        Raises:
            ModelError: several stages live on this rank; use `parts`.
        """
        if len(self.parts) != 1:
            raise ModelError(
                f"placed.module: rank {self.mesh.rank} holds {len(self.parts)} pipeline stages "
                f"({self.plan.schedule.kind}), so there is no single module; iterate over placed.parts"
            )
        return self.parts[0].root

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Original name -> parameter of this rank (a DTensor where it is sharded); a tied one by its first name.

        Of what the forward of a step has gathered the copies, as long as they are there: in a loss function.
        """
        found: dict[str, nn.Parameter] = {}
        for part in self.parts:
            for name, parameter in part.root.named_parameters():
                found.setdefault(self.ties.get(name, name), parameter)
        return found

    def reshard(self) -> None:
        """Free parameters that a forward without backward left gathered.

        An optimizer over copies would train nothing, and what is written into them is lost.
        """
        for part in self.parts:
            for module in part.run.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within it what a forward gathers stays as the plan says; a forward of a script's own gives it back at once.

        A script writes into parameters between its forwards: into copies, or into shards of which copies were there.
        """
        if self.gathered is None or self.gathered.is_kept:
            yield
            return
        self.gathered.keep(True)
        try:
            yield
        finally:
            self.gathered.keep(False)

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Original name -> buffer of this rank."""
        return {name: b for part in self.parts for name, b in part.root.named_buffers()}

    def check_trainable(self) -> None:
        """Refuse parameters that `apply` has not seen as they are now, where it set up how gradients are summed.

        Raises:
            ModelError: made, or put in place of a sharded one, after `apply`; or frozen or not frozen since then, where
                DDP sums.
        """
        found = self.named_parameters()
        added = [name for name in found if name not in self.placements and self.plan.world > 1]
        trains = {name for name, parameter in found.items() if parameter.requires_grad}
        changed = sorted(trains ^ self.reduced) if self.reduced is not None else []
        replaced = [name for name in self.wrappers if not isinstance(found.get(name), DTensor)]
        if added or replaced or changed:
            name = (added or replaced or changed)[0]
            what = "made" if added else "replaced" if replaced else "unfrozen" if name in trains else "frozen"
            what = what if name in found else "removed"
            raise ModelError(
                f"parameter {name} was {what} after apply, which had set up how gradients are summed over ranks; do it "
                "in the model's constructor"
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank, in order of their names in the module, sharded where they are between steps.

        In a function of `several` those that its optimizer steps.
        """
        self.reshard()
        return (p for name, p in self.named_parameters().items() if self.trains is None or name in self.trains)

    def local_parameters(self) -> dict[str, nn.Parameter]:
        """Original name -> parameter over this rank's shard, sharing its storage.

        Element-wise optimizers (SGD, AdamW, Lion) step these: the update is the same and free of the
        cost of dispatching through DTensor.
        """
        local: dict[str, nn.Parameter] = {}
        self.reshard()
        for name, parameter in self.named_parameters().items():
            if isinstance(parameter, DTensor):
                shard = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
                local[name] = shard
            else:
                local[name] = parameter
        return local

    def share(self, batch: Batch) -> Batch:
        """What this rank computes of a micro-batch: all of it, or its part of each sequence under `cp`."""
        return batch if self.context is None else self.context.share(batch)

    def train(self, mode: bool = True) -> None:
        """Switch all parts between training and evaluation behaviour."""
        for part in self.parts:
            part.run.train(mode)

    @contextmanager
    def in_mode(self, training: bool) -> Iterator[None]:
        """All modules in training, or in evaluation, for a while; a script may train with parts in evaluation."""
        modes = [(module, module.training) for part in self.parts for module in part.run.modules()]
        self.train(training)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def with_(self, **changes: Any) -> Placed:
        """A copy with some fields replaced: what a pass returns."""
        return replace(self, **changes)


def named_in(placed: Placed) -> dict[str, nn.Parameter]:
    """The parameters of what an optimizer is given, by their original names.

    Raises:
        UsageError: a module or its parameters, as torch's optimizers take them.
    """
    if not isinstance(placed, Placed):
        raise UsageError(
            f"an optimizer of Shardwise takes what apply() gave: found {type(placed).__name__}, needed "
            "`adamw(placed, lr=...)`; one of torch takes `placed.parameters()`"
        )
    placed.reshard()
    return placed.named_parameters()


def check_placed(placed: object, call: str) -> None:
    """Refuse a module, or a state, in place of what `apply` gave.

    Args:
        placed: what is looked at.
        call: what was given it, for the message.

    Raises:
        UsageError: naming what was found, and what is needed.
    """
    if not isinstance(placed, Placed):
        known = "; state.placed is it" if hasattr(placed, "placed") else ""
        raise UsageError(
            f"{call}: found {type(placed).__name__}; needed placed = shardwise.apply(model, plan, mesh){known}"
        )
