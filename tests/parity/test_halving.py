"""Out of memory on one rank: all abandon the window, halve the micro-batches, and reach the undisturbed result."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import OutOfMemoryError, UsageError
from shardwise.parallel import compose
from shardwise.parallel.memory import is_out_of_memory
from shardwise.testing import World, fail_at
from shardwise.train.guards.halving import cut_rows
from shardwise.train.kept.mirror import Mirror
from shardwise.train.kept.outliving import Memory, Place, Slot
from tests.parity import grid, points
from tests.parity.points import Case

CASE = Case(rows=40, global_batch=8, steps=4, clip=0.5)
HALVE = sw.StepOptions(clip_norm=0.5, on_oom="halve")


def run(text: str, fault: tuple[Any, ...] | None, times: int = 1, loss: str = "weighted") -> tuple[grid.Trace, Any]:
    """What `points.run` gives, of a run in which a fault is planted; and what happened."""
    trace, events, rows = grid.Trace(), [], []
    with points.placed_state(text, CASE) as state:
        grid.spy_on_gradients(state, trace)

        def loss_fn(output: torch.Tensor, batch: list[torch.Tensor]) -> Any:
            rows.append(len(output))
            return points.LOSSES[loss](output, batch)

        rank, step, where, error = fault or (0, 99, "forward", None)
        with fail_at(rank, step, where, error, state=state, times=times):
            for m in sw.steps(state, loss_fn, until=CASE.steps, options=HALVE):
                trace.losses.append(m.loss)
                trace.norms.append(m.grad_norm)
                events += m.events
        trace.params = {n: grid.whole(p) for n, p in state.placed.named_parameters().items()}
    return trace, (events, rows)


FAULTS = [
    (1, 2, "forward", MemoryError("planted")),
    (0, 2, "backward", torch.OutOfMemoryError("planted")),
    (1, 3, "backward", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
]


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_what_is_memory_that_ran_out(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


@pytest.mark.share(2)
@pytest.mark.parametrize(("plan", "loss"), [("dp2", "weighted"), ("dp2 / mb2", "a_scalar_mean"), ("dp1", "weighted")])
def test_the_result_is_that_of_an_undisturbed_run(world: World, plan: str, loss: str) -> None:
    size = sw.Plan.parse(plan).world
    [truth] = world(1, points.reference, Case(**{**vars(CASE), "loss": loss}))
    for fault in [None, *FAULTS[: 3 if plan == "dp2" else 1]]:
        planted = fault if fault is None else (fault[0] % size, *fault[1:])
        results = world(size, run, f"{plan} / fp64", planted, 1, loss)
        worst = grid.differences([trace for trace, _ in results], truth)
        assert max(worst.values()) <= 1e-11, (planted, worst)
        for _, (events, rows) in results:
            expected = [] if planted is None else [(planted[1], planted[0], 1)]
            assert [(e["step"], e["rank"], e["halvings"]) for e in events] == expected
            if planted is not None and plan == "dp2":
                assert max(rows[:1]) == 4 and rows[-1] == 2  # the new size stays


def test_it_halves_again_and_gives_up_at_one_row(world: World) -> None:
    [(_, (events, rows))] = world(1, run, "dp1 / fp64", (0, 2, "backward", MemoryError("planted")), 3)
    assert [event["halvings"] for event in events] == [1, 2, 3] and rows[-1] == 1
    for text in world(2, hopeless, "dp2 / fp64"):
        assert "rank 1 is out of memory with micro-batches of one row" in text and "recompute blocks" in text


def hopeless(text: str) -> str:
    with pytest.raises(OutOfMemoryError) as error:
        run(text, (1, 2, "backward", MemoryError("planted")), 10)
    return str(error.value)


def met(text: str) -> str:
    """Rank 1 runs out of memory where the ranks meet to weigh several losses: what ends it."""
    with points.placed_state(text, CASE) as state:

        def weigh(batch: list[torch.Tensor]) -> torch.Tensor:
            if state.mesh.rank == 1 and state.step == 1:
                raise MemoryError("planted")
            return batch[2].sum()

        losses = sw.Losses(lambda output, batch: {"a": points.weighted(output, batch)}, weights={"a": weigh})
        try:
            for _ in sw.steps(state, losses, until=3, options=HALVE):
                pass
        except (MemoryError, RuntimeError) as error:
            return f"{state.step}: {type(error).__name__}"
        return ""


def test_a_rank_is_not_called_back_from_where_others_wait_for_it(world: World) -> None:
    """Its vote was summed with their weights, and they trained on with another loss."""
    assert world(2, met, "dp2 / fp64") == ["1: RuntimeError", "1: MemoryError"]


def test_where_no_smaller_micro_batch_helps_it_says_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with points.placed_state("dp1 / fp64", CASE) as state:
        with (
            fail_at(0, 1, "optimizer", RuntimeError("DefaultCPUAllocator: can't allocate"), state=state),
            pytest.raises(
                OutOfMemoryError, match=r"step of AdamW: out of memory \(RuntimeError: Def.*room for its state"
            ),
        ):
            next(sw.steps(state, points.weighted, until=2, options=HALVE))

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("planted\nwith details")

        monkeypatch.setattr(compose, "materialize", full)
        with pytest.raises(
            OutOfMemoryError, match=r"apply, rank 0, plan .* \(OutOfMemoryError: planted\); .*needed: 0.0 MiB"
        ):
            sw.apply(points.Net, state.placed.plan, state.mesh)


def test_copies_in_memory_that_do_not_fit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    memory = Memory.create(range(1))
    monkeypatch.setattr(Slot, "data", full)
    with points.placed_state("dp1 / fp64", CASE) as state:
        mirror = Mirror(Place(job="ab" * 16, rank=0, world=1, order=0, memory=memory))
        with pytest.raises(OutOfMemoryError, match=r"rank 0 keeps two copies .* 0\.\d MiB each: found Cannot allocate"):
            mirror.keep(state)
    memory.close()


def without(text: str) -> str:
    """The negative control: without the option the error is the rank's own."""
    with points.placed_state(text, CASE) as state, fail_at(0, 1, "forward", MemoryError("planted"), state=state):
        try:
            next(sw.steps(state, points.weighted, until=2))
        except MemoryError as error:
            return str(error)
    return ""


def other_errors(text: str) -> str:
    with pytest.raises(RuntimeError, match="shapes differ") as error:
        run(text, (0, 2, "forward", RuntimeError("shapes differ")))
    return str(error.value)


def test_only_with_the_option_and_only_for_memory(world: World) -> None:
    assert world(1, without, "dp1 / fp64") == ["planted"]
    assert world(1, other_errors, "dp1 / fp64") == ["shapes differ"]


def resumed(text: str) -> list[tuple[list[Any], int]]:
    """The first events, and the rows of the last micro-batch, of a state that had halved twice, under both options."""
    found = []
    for options in (HALVE, sw.StepOptions()):
        with points.placed_state(text, CASE) as state:
            state.load_scalars(state.scalars() | {"halvings": 2})
            rows: list[int] = []

            def loss_fn(output: torch.Tensor, batch: list[torch.Tensor], rows: list[int] = rows) -> Any:
                rows.append(len(output))
                return points.weighted(output, batch)

            events = [m.events for m in sw.steps(state, loss_fn, until=2, options=options)]
            assert events[1] == () and ("halvings" in state.scalars()) == (options is HALVE)
            found.append((list(events[0]), rows[-1]))
    return found


def test_a_resume_goes_on_halved_or_says_that_it_does_not(world: World) -> None:
    [(kept, whole)] = world(1, resumed, "dp1 / fp64")
    assert kept == ([{"event": "micro-batches are halved as before", "step": 1, "halvings": 2}], 2)
    assert whole == ([{"event": "micro-batches are no longer halved", "step": 1, "halvings": 2}], 8)


def cut(rows: list[int], zero: list[bool], parts: int, equally: bool) -> list[tuple[int, bool]]:
    """Rows of the pieces of micro-batches of so many rows, and which are padding; nothing is lost or doubled."""
    micro = [torch.arange(number) + 10 * i for i, number in enumerate(rows)]
    pieces, flags = cut_rows(list(micro), tuple(zero), parts, equally=equally)
    real = [piece for piece, is_zero in zip(pieces, flags, strict=True) if not is_zero]
    whole = [batch for batch, is_zero in zip(micro, zero, strict=True) if not is_zero]
    assert torch.equal(torch.cat(real), torch.cat(whole))
    return [(len(piece), is_zero) for piece, is_zero in zip(pieces, flags, strict=True)]


def test_pieces_are_as_many_on_every_rank_where_ranks_wait_for_one_another() -> None:
    assert cut([5, 4], [False, False], 2, equally=True) == [(3, False), (2, False), (2, False), (2, False)]
    assert cut([2, 2], [False, True], 4, equally=False) == [(1, False), (1, False), (1, True), (1, True)]
    assert cut([2, 1], [False, True], 4, equally=True) == [(1, False)] * 2 + [(1, True)] * 6
    assert cut([3], [False], 1, equally=True) == [(3, False)]


def refused(text: str, normed: bool = False) -> str:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        model = (lambda: torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))) if normed else points.Net
        placed = sw.apply(model, plan, mesh, rules=points.RULES if plan.axes.tp > 1 else None)
        with pytest.raises(UsageError) as error:
            sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), points.weighted, options=HALVE)
        return str(error.value)


def test_where_layers_communicate_it_is_refused(world: World) -> None:
    for plan, found in (("tp2 / fp64", "the axes tp"), ("fsdp2 / fp64", "fully_shard")):
        (text, _) = world(2, refused, plan)
        assert found in text and "start with --recover" in text
    assert "batch norm" in world(1, refused, "dp1 / fp64", True)[0]


class Sometimes(torch.nn.Module):
    """In every second step, by the rows, it uses a layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.some = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.some(x) if x[0, 0] > 0 else y


def steps_of(text: str, options: sw.StepOptions) -> tuple[list[float], dict[str, torch.Tensor]]:
    rows = [torch.randn(4, generator=torch.Generator().manual_seed(i)).abs() * (-1) ** (i // 4) for i in range(24)]
    with sw.open_mesh(sw.Plan.parse(text)) as mesh:
        placed = sw.apply(Sometimes, sw.Plan.parse(text), mesh, seed=1)
        optimizer = torch.optim.AdamW(placed.parameters(), lr=0.1, weight_decay=0.1)
        state = sw.TrainState(placed, optimizer, sw.loader(rows, 4, mesh, shuffle=False))
        losses = [
            m.loss for m in sw.steps(state, lambda y, _: sw.mean_over((y - 1).square()), until=6, options=options)
        ]
        return losses, {name: tensor.clone() for name, tensor in state.local_tensors().items()}


def test_a_layer_that_no_rank_used_is_not_stepped(world: World) -> None:
    [(losses, truth)] = world(1, steps_of, "dp1 / fp64", sw.StepOptions())
    for found, tensors in world(2, steps_of, "dp2 / fp64 find-unused", sw.StepOptions(on_oom="halve")):
        assert found == pytest.approx(losses, rel=1e-12)
        assert tensors.keys() == truth.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, truth[name], rtol=1e-11, atol=1e-12, msg=name)
