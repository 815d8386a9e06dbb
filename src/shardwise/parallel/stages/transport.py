"""How tensors move between pipeline stages: their shapes are learnt once, then torch's schedules carry them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from shardwise.errors import ModelError, PlanError
from shardwise.model.tracer import tensors_in, without_values
from shardwise.parallel.looks.reach import unseen
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.module_torch_private import global_hooks
from shardwise.parallel.reruns import buffers_in, copies_of, put_in_place
from shardwise.parallel.stages.pipeline_torch_private import CARRIES_INTEGERS, SCHEDULE_CLASSES, Stage, run_schedule
from shardwise.parallel.stages.stage import StageModule, signature_of
from shardwise.plan.schedule import stages_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Shapes = tuple[tuple[int, ...], ...]
Shape = tuple[tuple[int, ...], torch.dtype]
Boundary = tuple[Shape, ...]
"""Shapes and types of the tensors between two stages, as they are on this rank (shards under tensor parallelism)."""
KEPT_SIGNATURES = 4
"""Schedules kept, one per number and shapes of micro-batches; the oldest goes first."""


class Transport:
    """Runs this rank's stages: `train` by torch's schedule, `evaluate` breadth first."""

    def __init__(
        self, stages: Sequence[StageModule], kind: str, mesh: Mesh, trace: Callable[[Inputs], Mapping[int, Shapes]]
    ) -> None:
        self.stages, self.kind, self.mesh, self.trace = tuple(stages), kind, mesh, trace
        self.group = mesh.group("pp")
        num_ranks = mesh.size("pp")
        self.rank_of = {
            stage: rank for rank in range(num_ranks) for stage in stages_of(kind, rank, num_ranks, len(self.stages))
        }
        self._boundaries: dict[tuple[Any, ...], dict[int, Boundary]] = {}
        self._first: dict[tuple[Any, ...], tuple[Inputs, dict[int, Boundary]]] = {}
        self._schedules: dict[tuple[Any, ...], tuple[Any, list[Stage]]] = {}

    def train(self, inputs: list[Inputs]) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches; their losses on the rank of the last stage."""
        key = (len(inputs), *self._key(inputs[0]))
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(len(inputs), self._boundary(inputs[0]))
            _forget_oldest(self._schedules)
        schedule, stages = self._schedules[key]
        # torch hands the first argument of stage 0 on to it, and wants one: an empty tensor, not looked at
        token = (torch.empty(0, device=self.mesh.device),)
        keywords: list[dict[str, object]] = [{"index": i, "inputs": x} for i, x in enumerate(inputs)]
        losses = run_schedule(schedule, stages, [token] * len(inputs), keywords)
        return [loss.detach() for loss in losses]

    def evaluate(self, inputs: list[Inputs]) -> list[torch.Tensor]:
        """Forward of all micro-batches, stage by stage; their losses on the rank of the last stage."""
        boundary = self._boundary(inputs[0])
        device, losses = self.mesh.device, []
        works: list[dist.Work] = []
        sent: list[torch.Tensor] = []  # kept until they have gone
        local: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        with torch.no_grad():
            for module in self.stages:
                stage = module.cut.stage
                for index, arguments in enumerate(inputs):
                    received = local.pop((stage, index), ())
                    if stage and not received:
                        received = tuple(torch.empty(s, dtype=t, device=device) for s, t in boundary[stage])
                        for tensor in received:
                            dist.recv(tensor, group=self.group, group_src=self.rank_of[stage - 1])
                    output = module(*received, index=index, inputs=arguments)
                    if module.cut.is_last:
                        losses.append(output)
                    elif self._is_here(stage + 1):
                        local[stage + 1, index] = output
                    else:
                        peer = self.rank_of[stage + 1]
                        sends = [dist.isend(tensor, group=self.group, group_dst=peer) for tensor in output]
                        works += [work for work in sends if work is not None]
                        sent += output
            for work in works:
                work.wait()
        return losses

    def know(self, inputs: Inputs, boundary: dict[int, Boundary]) -> None:
        """Take what passes between stages for inputs of these shapes as given, in place of a run that learns it.

        Args:
            inputs: a micro-batch's.
            boundary: what each local stage receives (key: stage) and sends (key: stage + 1).
        """
        self._boundaries[self._key(inputs)] = boundary
        self._first.setdefault(self._kind(inputs), (without_values(inputs), boundary))

    def _is_here(self, stage: int) -> bool:
        return self.rank_of[stage] == self.mesh.index("pp")

    def _key(self, inputs: Inputs) -> tuple[Any, ...]:
        return (*signature_of([inputs]), *self._mode())

    def _kind(self, inputs: Inputs) -> tuple[Any, ...]:
        """The key of inputs but for their sizes."""
        return (*((path, t.dim(), t.dtype) for path, t in tensors_in(inputs)), *self._mode())

    def _mode(self) -> tuple[bool, bool]:
        return torch.is_autocast_enabled(self.mesh.device.type), self.stages[0].training

    def _boundary(self, inputs: Inputs) -> dict[int, Boundary]:
        """What each local stage receives (key: stage) and sends (key: stage + 1); learnt by one forward on zeros.

        Only a run knows: tensor and sequence parallelism and mixed precision change shapes and types. Of other sizes it
        is told by what the first ones gave, without a run, in which shards of data ranks would be gathered: the sizes
        may be new to some of these ranks alone, and the others do not take part.
        """
        key = self._key(inputs)
        if key not in self._boundaries:
            first = self._first.get(self._kind(inputs))
            self._boundaries[key] = (first and self._of_other_sizes(*first, inputs)) or self._learn(inputs)
            self._first.setdefault(self._kind(inputs), (without_values(inputs), self._boundaries[key]))
            _forget_oldest(self._boundaries)
        return self._boundaries[key]

    def _of_other_sizes(
        self, first: Inputs, boundary: dict[int, Boundary], inputs: Inputs
    ) -> dict[int, Boundary] | None:
        """What passes for other inputs: each dim as many times larger as in the traced forward; None: by no share."""
        before, now = self.trace(first), self.trace(inputs)
        found: dict[int, Boundary] = {}
        for stage, known in boundary.items():
            shapes = [
                _scaled(*each) for each in zip((shape for shape, _ in known), before[stage], now[stage], strict=False)
            ]
            if not len(known) == len(before[stage]) == len(now[stage]) or None in shapes:
                return None
            found[stage] = tuple(
                (shape, dtype) for shape, (_, dtype) in zip(shapes, known, strict=True) if shape is not None
            )
        return found

    def _learn(self, inputs: Inputs) -> dict[int, Boundary]:
        known: dict[int, Boundary] = {}
        device = self.mesh.device
        for module in self.stages:
            stage = module.cut.stage
            if stage and stage not in known:
                objects: list[Any] = [None]
                dist.recv_object_list(objects, group=self.group, group_src=self.rank_of[stage - 1], device=device)
                known[stage] = objects[0]
            if module.cut.is_last:
                continue
            received = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in known.get(stage, ())]
            with torch.no_grad(), _no_side_effects(module, device):
                output = module(*received, index=0, inputs=inputs)
            known[stage + 1] = tuple((tuple(t.shape), t.dtype) for t in output)
            if not self._is_here(stage + 1):
                peer = self.rank_of[stage + 1]
                dist.send_object_list([known[stage + 1]], group=self.group, group_dst=peer, device=device)
        return known

    def _make_schedule(
        self, num_micro_batches: int, boundary: dict[int, Boundary]
    ) -> tuple[PipelineScheduleSingle | PipelineScheduleMulti, list[Stage]]:
        _refuse_integers(boundary)
        stages = []
        for module in self.stages:
            cut = module.cut
            stages.append(
                Stage(
                    module,
                    cut.stage,
                    cut.num_stages,
                    self.mesh.device,
                    input_args=_examples(boundary[cut.stage]) if cut.stage else (torch.empty(0, device="meta"),),
                    output_args=(torch.empty((), device="meta", requires_grad=True),)
                    if cut.is_last
                    else _examples(boundary[cut.stage + 1]),
                    group=self.group,
                )
            )
        schedule_class: Any = SCHEDULE_CLASSES[self.kind]
        single = issubclass(schedule_class, PipelineScheduleSingle)
        try:
            # the last stage returns the loss itself
            schedule = schedule_class(
                stages[0] if single else stages, num_micro_batches, loss_fn=_same, scale_grads=False
            )
        except (ValueError, AssertionError) as error:
            raise PlanError(
                f"pipeline.run: schedule {self.kind} over {self.mesh.size('pp')} ranks x {len(stages)} stages does not "
                f"take {num_micro_batches} micro-batches: {str(error).splitlines()[0]} Change mb or the schedule"
            ) from error
        return schedule, stages


def _scaled(shape: tuple[int, ...], before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...] | None:
    """A shape of this rank's, of which the whole was `before` and is `now`; None where the division leaves a rest."""
    if not len(shape) == len(before) == len(now):
        return None
    dims = list(zip(shape, before, now, strict=True))
    return None if any(a * c % max(b, 1) for a, b, c in dims) else tuple(a * c // b if b else a for a, b, c in dims)


def _same(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output


def _refuse_integers(boundary: dict[int, Boundary]) -> None:
    for stage, shapes in boundary.items():
        whole = [dtype for _, dtype in shapes if not (dtype.is_floating_point or dtype.is_complex)]
        if whole and not CARRIES_INTEGERS:
            raise ModelError(
                f"pipeline.run: a block hands {whole[0]} on to stage {stage}, and torch {torch.__version__} carries "
                "floating-point numbers only; take them as an input of the model, which every stage is given, or use "
                "torch 2.13 or newer"
            )


def _examples(boundary: Boundary) -> tuple[torch.Tensor, ...]:
    # every float may carry a gradient: where there is none, zeros are sent, which costs time and is right
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
        for shape, dtype in boundary
    )


def _forget_oldest(kept: dict[tuple[Any, ...], Any]) -> None:
    while len(kept) > KEPT_SIGNATURES:
        del kept[next(iter(kept))]


@contextmanager
def _no_side_effects(module: StageModule, device: torch.device) -> Iterator[None]:
    """Random state, buffers, what modules count and collect, and gathered parameters as they were."""
    buffers = copies_of(buffers_in(module.root))
    devices = [] if device.type == "cpu" else [device]
    random = torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda")
    with unseen(module.root, global_hooks()), put_in_place(buffers), random:
        yield
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
