"""The samples of a step are the same under every division over ranks and micro-batches, for ever and at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwise.errors import ConfigError, DataError, ModelError, PlanError, UsageError
from shardwise.parallel.inputs import Signature, model_inputs, num_rows, split_rows
from shardwise.plan.plan import Batch
from shardwise.train.batches import Batches, LoaderOptions, Window, eval_batches, loader
from shardwise.train.data.loader_options import LoaderKeywords
from shardwise.train.data.order import SampleOrder


@dataclass
class Share:
    rank: int
    size: int


class FakeMesh:
    """One of D data ranks; `meet` sums over those that run as threads."""

    device = torch.device("cpu")

    def __init__(self, rank: int = 0, ranks: int = 1, pp: int = 1, meet: Meeting | None = None) -> None:
        self.batch = Share(rank, ranks)
        self.pp = pp
        self.meet = meet

    def size(self, axis: str) -> int:
        return self.pp if axis == "pp" else 1

    def all_reduce_sum(self, tensor: torch.Tensor, *axes: str) -> torch.Tensor:
        assert self.meet is not None and axes == ("dp_replicate", "dp_shard")
        return self.meet.sum(self.batch.rank, tensor)


class Meeting:
    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.values: list[torch.Tensor] = [torch.empty(0)] * ranks

    def sum(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.values[rank] = tensor.clone()
        self.barrier.wait()
        total = torch.stack(self.values).sum(0)
        self.barrier.wait()
        return total


def on_ranks(
    ranks: int, make: Callable[[FakeMesh], Batches], count: int | None = None, pp: int = 1
) -> list[list[Window]]:
    """Windows per rank, each rank a thread: one that waits alone breaks the barrier."""
    meet = Meeting(ranks)
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            batches = make(FakeMesh(rank, ranks, pp, meet))
            results[rank] = list(batches) if count is None else [next(batches) for _ in range(count)]
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def one_by_one(
    ranks: int, make: Callable[[FakeMesh], Batches], count: int | None = None, pp: int = 1
) -> list[list[Window]]:
    """The same without threads: a map-style data set needs no communication, and this mesh would refuse it."""
    every = []
    for rank in range(ranks):
        batches = make(FakeMesh(rank, ranks, pp))
        every.append(list(batches) if count is None else [next(batches) for _ in range(count)])
    return every


def rows_of(windows: list[Window]) -> list[int]:
    """The samples that weigh something, over all ranks of one window."""
    return [
        int(value)
        for window in windows
        for batch, zero in zip(window.micro_batches, window.weights_zero, strict=True)
        if not zero
        for value in batch
    ]


def check_step(windows: list[Window], expected: list[int]) -> None:
    """One window of all ranks: exactly these samples, the same number of micro-batches, honest metadata."""
    assert rows_of(windows) == expected
    assert len({len(window.micro_batches) for window in windows}) == 1
    assert {window.num_rows for window in windows} == {len(expected)}
    for window in windows:
        assert [len(b) if n else 0 for b, n in zip(window.micro_batches, window.rows, strict=True)] == list(window.rows)
        assert window.weights_zero == tuple(n == 0 for n in window.rows)
        assert all(len(batch) > 0 for batch in window.micro_batches)
        assert [index for _, index in window.sample_ids] == rows_of([window])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 7])
def test_the_samples_of_a_step_are_the_same_under_every_division(ranks: int, micro_batches: int) -> None:
    order = SampleOrder(50, seed=5)
    batch = Batch(global_size=24, micro_batches=micro_batches)
    every = one_by_one(ranks, lambda mesh: loader(list(range(50)), batch, mesh, seed=5), count=6)
    for step in range(6):
        windows = [of_rank[step] for of_rank in every]
        check_step(windows, order.slice(step * 24, step * 24 + 24).tolist())
        assert all(len(window.micro_batches) == micro_batches and window.step == step for window in windows)


def test_the_check_sees_a_rank_that_reads_anothers_rows() -> None:
    every = one_by_one(2, lambda mesh: loader(list(range(50)), 24, FakeMesh(0, mesh.batch.size)), count=1)
    with pytest.raises(AssertionError):
        check_step([of_rank[0] for of_rank in every], SampleOrder(50).slice(0, 24).tolist())


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 40),
    global_size=st.integers(1, 30),
    micro_batches=st.integers(1, 6),
    ranks=st.integers(1, 6),
    pp=st.sampled_from([1, 2]),
    epochs=st.integers(1, 3),
)
def test_all_epochs_to_the_last_sample(
    size: int, global_size: int, micro_batches: int, ranks: int, pp: int, epochs: int
) -> None:
    batch = Batch(global_size=global_size, micro_batches=micro_batches)
    every = one_by_one(ranks, lambda mesh: loader(list(range(size)), batch, mesh, epochs=epochs), pp=pp)
    order, total = SampleOrder(size), size * epochs
    assert {len(of_rank) for of_rank in every} == {-(-total // global_size)}
    for step, windows in enumerate(zip(*every, strict=True)):
        expected = order.slice(step * global_size, min(total, (step + 1) * global_size)).tolist()
        if pp == 1:
            check_step(list(windows), expected)
            assert all(len(window.micro_batches) == micro_batches for window in windows)
        else:
            check_step(list(windows), expected)
            check_pipeline(windows, micro_batches)


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 60),
    global_size=st.integers(1, 30),
    micro_batches=st.integers(1, 6),
    ranks=st.integers(1, 6),
    pp=st.sampled_from([1, 2]),
)
def test_evaluation_is_exact(size: int, global_size: int, micro_batches: int, ranks: int, pp: int) -> None:
    batch = Batch(global_size=global_size, micro_batches=micro_batches)
    every = one_by_one(ranks, lambda mesh: eval_batches(list(range(size)), batch, mesh), pp=pp)
    seen = [value for windows in zip(*every, strict=True) for value in rows_of(list(windows))]
    assert sorted(seen) == list(range(size))
    make = eval_batches(list(range(size)), batch, FakeMesh(0, ranks, pp))
    assert len(every[0]) == make.num_steps
    if pp > 1:
        for windows in zip(*every, strict=True):
            assert all(len(window.micro_batches) == micro_batches for window in windows)
            check_pipeline(windows, micro_batches)
            assert sum(sum(window.rows) for window in windows) == windows[0].num_rows
    else:
        assert seen == list(range(size))


def check_pipeline(windows: tuple[Window, ...], micro_batches: int) -> None:
    """What a schedule takes: a multiple of the plan's number, all of one shape on a rank, none larger than planned."""
    for window in windows:
        assert len(window.micro_batches) % micro_batches == 0
        assert len({len(batch) for batch in window.micro_batches}) == 1


def test_a_pipelines_parts_are_as_large_as_can_be() -> None:
    def sizes(size: int, make: Callable[..., Batches] = loader) -> list[list[int]]:
        batches = make(list(range(size)), Batch(global_size=32, micro_batches=4), FakeMesh(pp=2), epochs=1)
        return [[len(b) * (not zero) for b, zero in zip(w.micro_batches, w.weights_zero, strict=True)] for w in batches]

    assert sizes(32) == [[8, 8, 8, 8]]
    assert sizes(6) == [[2, 2, 2, 0]]
    assert sizes(26) == [[2] * 13 + [0] * 3]  # 13 rows at once are more than memory was planned for
    assert sizes(26, eval_batches) == [[6, 6, 6, 6], [1, 1, 0, 0]]


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 8), (2, 3)])
def test_resume_under_another_number_of_ranks(before: int, after: int) -> None:
    batch = Batch(global_size=12, micro_batches=2)

    def make(mesh: FakeMesh) -> Batches:
        return loader(list(range(31)), batch, mesh, seed=2)

    saved = make(FakeMesh(0, before))
    for _ in range(5):
        next(saved)
    assert saved.state_dict()["epoch"] == 60 // 31

    def resumed(mesh: FakeMesh) -> Batches:
        batches = make(mesh)
        batches.load_state_dict(saved.state_dict())
        return batches

    for step, windows in enumerate(zip(*one_by_one(after, resumed, count=4), strict=True), start=5):
        assert {window.step for window in windows} == {step}
        check_step(list(windows), SampleOrder(31, 2).slice(step * 12, step * 12 + 12).tolist())
        assert sorted(saved.ids_at(step).tolist()) == sorted(rows_of(list(windows)))


def test_resume_with_another_number_of_rows_per_step_goes_on_at_the_position() -> None:
    first = loader(list(range(40)), 6, FakeMesh(), epochs=1)
    seen = rows_of([next(first), next(first)])
    second = loader(list(range(40)), 10, FakeMesh(), epochs=1)
    second.load_state_dict(first.state_dict())
    assert second.num_steps == 5
    assert second.ids_at(2).tolist() == SampleOrder(40).slice(12, 22).tolist()
    assert sorted(seen + rows_of(list(second))) == list(range(40))
    with pytest.raises(ConfigError, match="before step 2"):
        second.ids_at(1)


def test_resume_in_the_last_and_after_the_last_window() -> None:
    batches = loader(list(range(10)), 4, FakeMesh(), epochs=1)
    list(batches)
    again = loader(list(range(10)), 4, FakeMesh(), epochs=1)
    again.load_state_dict(batches.state_dict())
    assert batches.state_dict()["position"] == 10 and again.step == 3
    assert list(again) == []


@pytest.mark.parametrize(
    ("size", "changes", "error", "reason"),
    [
        (11, {}, DataError, "another number of samples is another order: saved size=10, now 11"),
        (10, {"seed": 4}, ConfigError, "saved seed=0, now 4"),
        (10, {"shuffle": False}, ConfigError, "shuffled and plain order differ"),
    ],
)
def test_resume_with_other_data_is_refused(size: int, changes: Any, error: type[Exception], reason: str) -> None:
    state = loader(list(range(10)), 4, FakeMesh()).state_dict()
    with pytest.raises(error, match=reason):
        loader(list(range(size)), 4, FakeMesh(), **changes).load_state_dict(state)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(DataError, match="lacks kind, position"):
        loader([1, 2], 1, FakeMesh()).load_state_dict({"step": 1, "size": 2, "seed": 0, "shuffle": True})


def test_drop_last_and_lengths() -> None:
    assert [len(w.indices) for w in loader(list(range(10)), 4, FakeMesh(), epochs=1, drop_last=True)] == [4, 4]
    assert loader(list(range(10)), 4, FakeMesh(), epochs=1, drop_last=True).num_steps == 2
    assert loader(list(range(10)), 4, FakeMesh(), epochs=1).num_steps == 3
    assert loader(list(range(10)), 4, FakeMesh()).num_steps is None
    with pytest.raises(DataError, match="3 samples in 1 epochs never fill"):
        loader([1, 2, 3], 4, FakeMesh(), epochs=1, drop_last=True)


# ---------------------------------------------------------------- reading


class Squares(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(float(index)), "labels": torch.tensor(index * index)}


def equal(ours: Window, theirs: Window) -> bool:
    same = all(
        torch.equal(a[key], b[key])
        for a, b in zip(ours.micro_batches, theirs.micro_batches, strict=True)
        for key in ("x", "labels")
    )
    return same and (ours.step, ours.indices, ours.rows) == (theirs.step, theirs.indices, theirs.rows)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing_but_who_reads(persistent: bool) -> None:
    batch = Batch(global_size=7, micro_batches=3)
    here = list(loader(Squares(), batch, FakeMesh(1, 2), epochs=2))
    before = torch.get_rng_state()
    far = loader(Squares(), batch, FakeMesh(1, 2), epochs=2, workers=2, prefetch=3, persistent_workers=persistent)
    assert all(equal(a, b) for a, b in zip(here, far, strict=True))
    far.load_state_dict({**far.state_dict(), "step": 2, "position": 14})
    assert equal(here[2], next(far)) and equal(here[3], next(far))  # and left with windows that were read ahead
    far.load_state_dict({**far.state_dict(), "step": 1, "position": 7})
    assert all(equal(a, b) for a, b in zip(here[1:], far, strict=True))
    assert torch.equal(before, torch.get_rng_state())


class Broken(Squares):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise ValueError(f"sample {index} is broken")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_arrives_as_it_is(workers: int) -> None:
    with pytest.raises(ValueError, match="sample .* is broken"):
        next(loader(Broken(), 2, FakeMesh(), workers=workers))


class Many(Squares):
    """Counts how it is read."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        self.calls.append("items")
        return [super(Many, self).__getitem__(index) for index in indices]


class Whole(Many):
    def get_batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        self.calls.append("batch")
        return {"x": torch.tensor(indices).float(), "labels": torch.tensor(indices) ** 2}


def test_the_fast_paths_are_taken_and_equal() -> None:
    plain, many, whole, chosen = Squares(), Many(), Whole(), Whole()
    windows = [next(loader(data, 5, FakeMesh())) for data in (plain, many, whole)]
    assert equal(windows[0], windows[1]) and equal(windows[0], windows[2])
    assert (many.calls, whole.calls) == (["items"], ["batch"])
    assert len(next(loader(chosen, 5, FakeMesh(), collate=lambda rows: rows)).micro_batches[0]) == 5
    assert chosen.calls == ["items"]


def test_collate_must_give_a_batch() -> None:
    with pytest.raises(ConfigError, match="collate function gave int"):
        next(loader([1, 2], 2, FakeMesh(), collate=lambda rows: 3))
    with pytest.raises(ConfigError, match="keys that are not strings"):
        next(loader([1, 2], 2, FakeMesh(), collate=lambda rows: {0: torch.tensor(rows)}))


def test_pinning_without_an_accelerator_is_quiet() -> None:
    assert rows_of([next(loader([1, 2], 2, FakeMesh(), pin_memory=True, shuffle=False))]) == [1, 2]


# ---------------------------------------------------------------- streams


class Counting(IterableDataset[int]):
    def __init__(self, size: int, start: int = 0) -> None:
        self.range = range(start, start + size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.range)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("size", [1, 10, 12, 23])
def test_a_stream_is_read_once_and_ends_on_all_ranks(ranks: int, micro_batches: int, pp: int, size: int) -> None:
    batch = Batch(global_size=6, micro_batches=micro_batches)
    every = on_ranks(ranks, lambda mesh: loader(Counting(size), batch, mesh, epochs=1), pp=pp)
    assert {len(of_rank) for of_rank in every} == {-(-size // 6)}
    for step, windows in enumerate(zip(*every, strict=True)):
        assert sorted(rows_of(list(windows))) == list(range(step * 6, min(size, step * 6 + 6)))
        assert sorted(p for window in windows for p in window.positions) == sorted(rows_of(list(windows)))
        assert len({len(window.micro_batches) for window in windows}) == 1
        if pp > 1:
            check_pipeline(windows, micro_batches)
    exact = on_ranks(ranks, lambda mesh: eval_batches(Counting(size), batch, mesh), pp=pp)
    assert sorted(v for ws in zip(*exact, strict=True) for v in rows_of(list(ws))) == list(range(size))


def test_a_stream_goes_on_over_epochs_and_resumes_under_other_ranks() -> None:
    before = on_ranks(2, lambda mesh: loader(Counting(10), 4, mesh), count=6)
    straight = [sorted(rows_of(list(windows))) for windows in zip(*before, strict=True)]
    assert straight[2] == [0, 1, 8, 9]
    state = loader(Counting(10), 4, FakeMesh()).state_dict() | {"step": 3, "position": 12}

    def resumed(mesh: FakeMesh) -> Batches:
        batches = loader(Counting(10), 4, mesh)
        batches.load_state_dict(state)
        return batches

    after = on_ranks(3, resumed, count=3)
    assert [sorted(rows_of(list(windows))) for windows in zip(*after, strict=True)] == straight[3:]


def test_a_stream_is_read_ahead_by_one_worker() -> None:
    windows = list(loader(Counting(11), 4, FakeMesh(), epochs=1, workers=1))
    assert [rows_of([window]) for window in windows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_streams_of_uneven_shares_end_together() -> None:
    def make(mesh: FakeMesh) -> Batches:
        return loader(Counting(3 + 4 * mesh.batch.rank, start=100 * mesh.batch.rank), 6, mesh, epochs=1, sharded=True)

    every = on_ranks(3, make)
    assert {len(of_rank) for of_rank in every} == {6}
    assert sorted(v for ws in zip(*every, strict=True) for v in rows_of(list(ws))) == [
        *range(3), *range(100, 107), *range(200, 211)
    ]  # fmt: skip
    assert every[0][5].weights_zero == (True,) and every[2][5].weights_zero == (False,)


def test_streams_that_differ_or_are_empty_are_refused_on_every_rank() -> None:
    def differ(mesh: FakeMesh) -> Batches:
        return loader(Counting(8 + mesh.batch.rank), 4, mesh, epochs=1)

    with pytest.raises(DataError, match=r"streams differ: the data ranks read \[0, 1, 2\]"):
        on_ranks(3, differ)
    with pytest.raises(DataError, match="gave no sample"):
        on_ranks(2, lambda mesh: loader(Counting(0), 4, mesh))
    with pytest.raises(DataError, match="1 of 2 data ranks have no sample at all"):
        on_ranks(2, lambda mesh: loader(Counting(5 * mesh.batch.rank), 4, mesh, sharded=True, epochs=1))


def test_a_second_loop_finds_the_evaluation_again_and_an_end_of_training_is_said() -> None:
    held_out = eval_batches(list(range(9)), Batch(global_size=4, micro_batches=2), FakeMesh())
    for _ in range(2):
        assert rows_of([next(iter(held_out))]) == list(range(4))  # a look at a batch takes none from a pass
        assert rows_of(list(held_out)) == list(range(9))
    streamed = eval_batches(Counting(5), 4, FakeMesh())
    assert rows_of(list(streamed)) == rows_of(list(streamed)) == list(range(5))
    batches = loader(list(range(10)), 4, FakeMesh(), epochs=1)
    assert len([next(iter(batches)) for _ in range(2)]) == 2  # a loop that is entered again goes on
    list(batches)
    with pytest.raises(UsageError, match=r"its 1 epoch\(s\) are over.*epochs=3"):
        list(batches)
    batches.load_state_dict(batches.state_dict() | {"step": 2, "position": 8})
    assert len(list(batches)) == 1


def test_a_generator_is_one_pass() -> None:
    assert len(list(loader((i for i in range(9)), 4, FakeMesh()))) == 3
    with pytest.raises(ConfigError, match="can be read once only"):
        list(loader((i for i in range(9)), 4, FakeMesh(), epochs=2))
    short = loader(Counting(3), 4, FakeMesh(), epochs=1)
    short.load_state_dict(short.state_dict() | {"step": 1, "position": 4})
    with pytest.raises(DataError, match="skip 4 samples of the stream, it ended after 3"):
        next(short)
    once = loader((torch.tensor(i) for i in range(20)), 4, FakeMesh())
    beginning = once.state_dict()
    next(once)
    once.quarantine(0, 8)  # goes on where it is
    assert next(once).micro_batches[0].tolist() == [8, 9, 10, 11]
    once.load_state_dict(beginning)  # whoever rewinds, or rehearses a step, would get what comes now for the first ones
    with pytest.raises(DataError, match="going to step 0 reads the stream again.*a generator, which can be read once"):
        next(once)
    with pytest.raises(UsageError, match="--recover reads samples again: found a generator"):
        once.check_reads_again("--recover")
    for fine in (Counting(20), [1, 2], Restarted()):
        loader(fine, 4, FakeMesh()).check_reads_again("--recover")
    loader((i for i in range(20)), 4, FakeMesh(), workers=1).check_reads_again("--recover")


class Restarted(Counting):
    """An iterator of itself, which begins anew."""

    def __init__(self) -> None:
        super().__init__(3)

    def __iter__(self) -> Any:
        self.at = iter(range(3))
        return self

    def __next__(self) -> int:
        return next(self.at)


# ---------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        ([], {}, DataError, "holds 0 samples"),
        ({"train": [1]}, {}, DataError, "with the keys train"),
        (DataLoader([1, 2]), {}, DataError, "found a torch DataLoader"),
        (3, {}, DataError, "int is no data set"),
        ([1], {"sharded": True}, ConfigError, "sharded=True with a list"),
        ([1], {"sead": 1}, ConfigError, "did you mean 'seed'"),
        ([1], {"workers": -1}, ConfigError, "workers=-1; needed: 0 or more"),
        ([1], {"epochs": 0}, ConfigError, "epochs=0"),
        ([1], {"prefetch": 2}, ConfigError, "prefetch without worker processes"),
        ([1], {"global_size": 5}, ConfigError, "4 in the batch and 5 as the option"),
        (Counting(3), {"shuffle": True}, ConfigError, "shuffle=True with an iterable"),
        (Counting(3), {"workers": 2}, ConfigError, "each would read the whole stream"),
    ],
)
def test_misuse_is_refused(dataset: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loader(dataset, 4, FakeMesh(), **options)


def test_a_batch_without_a_size_is_refused_and_can_be_given_one() -> None:
    with pytest.raises(ConfigError, match="found none; needed: one number"):
        loader([1, 2], Batch(micro_batches=2), FakeMesh())
    assert len(next(loader([1, 2], Batch(micro_batches=2), FakeMesh(), global_size=4)).micro_batches) == 2
    with pytest.raises(PlanError, match="found 0, needed an integer of at least 1"):
        loader([1, 2], 0, FakeMesh())


def test_keywords_are_the_options() -> None:
    assert set(LoaderKeywords.__annotations__) == {field.name for field in fields(LoaderOptions)}


def test_evaluation_keeps_batch_and_collate() -> None:
    batches = loader(list(range(9)), Batch(global_size=4, micro_batches=2), FakeMesh(), collate=torch.tensor)
    windows = list(batches.evaluation(list(range(5))))
    assert [rows_of([window]) for window in windows] == [[0, 1, 2, 3], [4]]
    assert windows[1].weights_zero == (False, True)


def test_rows_of_nested_batches() -> None:
    ids = torch.zeros(4, 3)
    for batch in (ids, {"a": ids}, [{"n": 3, "a": ids}], ([ids, ids],), {"t": torch.tensor(1.0), "a": {"b": ids}}):
        assert num_rows(batch) == 4
    assert [part[0]["a"].shape[0] for part in split_rows(({"a": ids},), 2)] == [2, 2]
    labels, parts = torch.zeros(4), [torch.zeros(4, 2), torch.zeros(5, 2)]
    for lengths in ((6, 6, 6, 6), (1, 2, 3, 1), (2, 3, 4, 2)):  # a sample each: they are the rows, not their tokens
        texts = [torch.zeros(length, 2) for length in lengths]
        for batch in ({"texts": texts, "labels": labels}, (texts, labels), (texts, [{"boxes": ids}] * 4)):
            assert num_rows(batch) == 4
            first, last = split_rows(batch, 2)
            kept = [list(part.values())[0] if isinstance(part, dict) else part[0] for part in (first, last)]
            assert [len(text) for part in kept for text in part] == list(lengths)
        assert model_inputs({"texts": texts, "labels": labels}, Signature(("texts",), "Model"))[1] == {"texts": texts}
    assert num_rows((parts, labels)) == 4 and num_rows(({"a": parts[1]}, labels)) == 5  # parts of each sample
    with pytest.raises(ModelError, match="a batch of type dict holds no tensor with rows; needed"):
        num_rows({"a": "text"})


def test_what_a_batch_has_for_each_row_is_cut_with_it() -> None:
    boxes = [torch.ones(count, 4) for count in (3, 1, 5)]
    batch = {"x": torch.zeros(3, 2), "boxes": boxes, "texts": ("a", "b", "c"), "table": torch.ones(5), "sizes": [1, 2]}
    first, second = split_rows(batch, 2)
    assert list(map(len, first["boxes"])) == [3, 1] and second["texts"] == ("c",) and second["boxes"][0] is boxes[2]
    assert len(first["table"]) == 5 and first["sizes"] == [1, 2]
    pair = split_rows([torch.zeros(2, 4), torch.ones(2)], 2)  # as a loader gives (x, y): no list of rows
    assert [part[1].shape for part in pair] == [(1,), (1,)]
    with pytest.raises(ModelError, match="a list of 3 tensors with 3 rows each"):
        split_rows({"x": torch.zeros(3, 2), "marks": [torch.ones(3)] * 3}, 2)


def test_rows_are_those_of_what_the_model_gets() -> None:
    takes = Signature(("x",), "Model")
    batch = {"x": torch.zeros(8, 2), "table": torch.ones(3), "weight": torch.ones(5)}
    assert model_inputs(batch, takes)[1].keys() == {"x"}
    with pytest.raises(ModelError, match=r"found 3, and 8 in what the model gets \(x\); put that first"):
        model_inputs({"table": torch.ones(3), **{"x": torch.zeros(8, 2)}}, takes)
