"""`trace_step`: one rank's training step without its machines or memory, and what it would hold and send.

The step is the real one: the passes of `apply`, `make_step`, the optimizer. Only the tensors have no memory and the
process group no other members. `measure_step` runs the same on real processes, counted by the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.diagnose.tracing.boundaries import links_of, tell
from shardwise.diagnose.tracing.ledger import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Collective,
    Ledger,
    axis_names,
    tensors_in,
    whole,
)
from shardwise.diagnose.tracing.without_values import Pretending, Training, without_values
from shardwise.parallel.blocks import own_blocks
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.parallel.placed import Batch, Placed
from shardwise.parallel.torch_private import in_backward
from shardwise.plan.plan import Plan
from shardwise.testing.fake import fake_world
from shardwise.train.state import TrainState
from shardwise.train.step import LossFn, make_step


@dataclass(frozen=True, kw_only=True)
class StepPeaks:
    """Live bytes of one step at their largest, as a whole and by phase."""

    parts: Mapping[str, Mapping[str, int]]
    """Phase, or part of a phase (`backward: last block`) -> bytes by kind at its largest moment; see
    `shardwise.diagnose.tracing.ledger.KINDS`."""
    collectives: Mapping[Collective, int] = field(default_factory=dict)
    """Each with how often it was issued."""

    @property
    def by_phase(self) -> dict[str, int]:
        """`forward`, `backward`, `update`: the largest sum of live bytes in each."""
        sums: dict[str, int] = {}
        for part, held in self.parts.items():
            sums[whole(part)] = max(sums.get(whole(part), 0), sum(held.values()))
        return sums

    @property
    def num_bytes(self) -> int:
        """The peak."""
        return max(self.by_phase.values())

    @property
    def phase(self) -> str:
        """In which phase, or part of one, the peak is."""
        return max(self.parts, key=lambda part: sum(self.parts[part].values()))

    @property
    def held(self) -> Mapping[str, int]:
        """At the peak, by kind."""
        return self.parts[self.phase]


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What the steps of one rank hold and send."""

    rank: int
    layers: int
    """Blocks on this rank."""
    resting: int
    """Bytes between two steps."""
    first: StepPeaks
    """The first step, in which optimizer state and buffers are made."""
    later: StepPeaks
    """Every later one."""

    @property
    def peak(self) -> int:
        """Bytes at the largest moment of any step."""
        return max(self.first.num_bytes, self.later.num_bytes)


def trace_step(training: Training, plan: Plan, *, rank: int = 0, is_cpu: bool = True) -> StepTrace:
    """The step of one rank of a plan's world, on this process alone, without memory and without arithmetic.

    Args:
        training: what is trained.
        plan: any that `apply` takes.
        rank: which rank of `plan.world`.
        is_cpu: gradients are reduced by gloo, which sums in a copy; False: by NCCL, which has none. Kernels are those
            of CPUs either way.

    Returns:
        Bytes of live tensors and collectives. Host and device are not told apart: what a plan offloads is counted.

    Raises:
        PlanError: the constraints refuse the plan.
        ModelError: the model, or a part of it, needs values that only a real run has.

    Cost: two or three steps of about a second for a small model; grows with the number of layers, and not with their
    width.

    >>> trace_step(training, Plan.parse("fsdp64 tp8"), rank=3).peak  # doctest: +SKIP
    """
    links = links_of(training, plan, rank) if plan.axes.pp > 1 else []
    with fake_world(plan.world, rank), open_mesh(plan, device="cpu") as mesh:
        ledger = Pretending(axis_names(mesh))
        ledger.is_cpu = is_cpu
        with without_values(training, plan, mesh, ledger) as placed:
            if links:
                tell(training, placed, links)
            return _count_steps(training, placed, ledger)


def measure_step(training: Training, plan: Plan, mesh: Mesh) -> StepTrace:
    """The same of a real rank, which trains: what `trace_step` is proven against. Every rank of the mesh calls it."""
    ledger = Ledger(axis_names(mesh))
    ledger.patience_s = 1e-3 if mesh.world > 1 else 0.0
    with ledger:
        placed = apply(training.model, plan, mesh, sample=training.sample, rules=training.rules)
        return _count_steps(training, placed, ledger)


def _steps_to_settle(placed: Placed) -> int:
    """Steps until one is like every later one: DDP puts its buckets in order in the second one, or in the third.

    The fourth is none: buffers are compared after it.
    """
    replicas = any(isinstance(part.run, DistributedDataParallel) for part in placed.parts)
    return 2 + replicas + 2 * (replicas and placed.plan.communication.static_graph)


def _count_steps(training: Training, placed: Placed, ledger: Ledger) -> StepTrace:
    ledger.mark("parameters", tensors_in(list(placed.parameters())))
    optimizer = training.optimizer(placed)
    masters = [p for name, p in optimizer.params.items() if p.dtype != optimizer.live[name].dtype]
    ledger.mark("optimizer", tensors_in(masters))

    def note_gradients(*args: object) -> None:
        ledger.mark("gradients", (p.grad for p in placed.parameters() if p.grad is not None))

    hook = optimizer.torch.register_step_pre_hook(note_gradients)
    batch = training.batch(placed.mesh)
    state = TrainState(placed, optimizer)
    peaks: list[StepPeaks] = []
    with _phases(placed, training.loss) as (phase, loss):
        ledger.phase = phase
        step = make_step(state, loss, clip=training.clip)
        for _ in range(_steps_to_settle(placed)):
            ledger.begin()
            step(batch)
            ledger.mark("optimizer", tensors_in(list(optimizer.torch.state.values())))
            peaks.append(_peaks_of(ledger))
    hook.remove()
    time.sleep(100 * ledger.patience_s)
    ledger.begin()
    layers = len(list(own_blocks(placed)))
    return StepTrace(rank=placed.mesh.rank, layers=layers, resting=ledger.total, first=peaks[0], later=peaks[-1])


def _peaks_of(ledger: Ledger) -> StepPeaks:
    parts = {part: peak.by_kind() for part, peak in ledger.peaks.items()}
    return StepPeaks(parts=parts, collectives=dict(ledger.collectives))


LOSS, LAST, MIDDLE, FIRST = (f"{BACKWARD}: {part}" for part in ("loss", "last block", "middle blocks", "first block"))
"""Parts of a backward pass, each with one largest moment whatever the number of blocks. The first block's is with what
is before the blocks."""


def _set(part: list[str], name: str, gradient: object) -> None:
    part[0] = name


@contextmanager
def _phases(placed: Placed, loss_fn: LossFn) -> Iterator[tuple[Callable[[], str], LossFn]]:
    """Which phase it is now, and the loss function, which is a part of the forward."""
    inside = [0]
    part = [LOSS]

    def enter(*args: object) -> None:
        inside[0] += 1
        part[0] = LOSS

    def leave(*args: object) -> None:
        inside[0] -= 1

    def loss(output: Any, batch: Batch) -> Any:
        enter()
        try:
            return loss_fn(output, batch)
        finally:
            leave()

    now = [UPDATE]

    def phase() -> str:
        if in_backward():
            now[0] = part[0]
        elif inside[0]:
            now[0] = FORWARD
        elif whole(now[0]) == BACKWARD:
            now[0] = UPDATE
        return now[0]

    def turn(name: str, block: nn.Module, args: object, output: object) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(_set, part, name))  # type: ignore[no-untyped-call]  # torch has no types here

    hooks = []
    for stage in placed.parts:
        hooks.append(stage.run.register_forward_pre_hook(enter, prepend=True))
        hooks.append(stage.run.register_forward_hook(leave, always_call=True))
    blocks = [block for _, block in own_blocks(placed)]
    for i, block in enumerate(blocks):
        name = FIRST if i == 0 else LAST if i == len(blocks) - 1 else MIDDLE
        hooks.append(block.register_forward_hook(partial(turn, name)))
    try:
        yield phase, loss
    finally:
        for hook in hooks:
            hook.remove()
