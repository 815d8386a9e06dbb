"""Model x plan x another plan x options, drawn at random: saved under one, loaded and trained on under the other.

What arrives is compared bit by bit with the bytes in the files (read by safetensors, put together here) and with what
one process loads; the steps after it with those of one process in fp64, and bit by bit where the same mesh goes on.
Samples come in the order of the run, each once. `SHARDWISE_SOAK=150` draws so many, others on every run; the seed is in
the name of the test. A failure names its case; `failures(world, [case], tmp_path)` repeats it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import shardwise as sw
from shardwise.testing import World
from shardwise.train.data.order import SampleOrder
from tests.parity import grid
from tests.parity.drawn_models import ROWS, SEED
from tests.parity.drawn_reshard import MODELS, OPTIMIZERS, Case, Half, Told, draw, run_all

SOAK = int(os.environ.get("SHARDWISE_SOAK", "0"))
PER_JOB = 5 if SOAK else 2
FIRST_SEED = Random().randrange(10**6)
"""Of a soak."""
TOLERANCE = 1e-11
NEAR = {"fp32": 1e-5, "bf16": 0.02, "bf16-pure": 0.02, "fp16": 0.005}
"""Relative, of the first loss after the load, where rounding is not small enough for a comparison of all steps."""

NOISE = re.compile(r"attn\.w?k\.bias")
"""The bias of keys has no gradient but rounding, as softmax takes it away, and most optimizers give that a step."""
KNOWN = re.compile(r"^no save|\[module\.|every stage needs one")
"""Why a plan may be refused when the model is there, though no constraint on sizes says so."""


def stored(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, put together by the names of their parts; every element is there once."""
    entries = json.loads((path / "manifest.json").read_text())["tensors"]
    dtypes = {name: getattr(torch, entry["dtype"]) for name, entry in entries.items()}
    found = {name: torch.zeros(entry["shape"], dtype=dtypes[name]) for name, entry in entries.items()}
    times = {name: torch.zeros(entry["shape"]) for name, entry in entries.items()}
    for file in sorted(path.glob("rank-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in set(opened.keys()) - {"shardwise.digests"}:
                name, bracket, place = key.partition("[")
                spans = re.findall(r"(\d+):(\d+)", place) if bracket else [(0, size) for size in found[name].shape]
                slices = tuple(slice(int(start), int(stop)) for start, stop in spans)
                found[name][slices] = opened.get_tensor(key)
                times[name][slices] += 1
    assert all(bool((counted == 1).all()) for counted in times.values())
    return found


def union(ranks: list[Told], attribute: str) -> dict[str, Tensor]:
    """The tensors of all ranks; those that several ranks hold are equal."""
    merged: dict[str, Tensor] = {}
    for told in ranks:
        for name, tensor in getattr(told, attribute).items():
            assert same(merged.setdefault(name, tensor), tensor), f"ranks disagree about {name}"
    return merged


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), f"{what}: names differ: {sorted(found.keys() ^ wanted.keys())[:5]}"
    wrong = [name for name, tensor in wanted.items() if not same(found[name], tensor)]
    assert not wrong, f"{what}: {len(wrong)} of {len(wanted)} differ: {wrong[:5]}"


def check_samples(case: Case, before: list[Told], after: list[Told]) -> None:
    """The order is the run's, from its first step over the save to its end; each position once."""
    steps = _steps(before, range(case.before.steps))
    steps += _steps(after, range(case.before.steps, case.before.steps + case.after.steps))
    sizes = [case.before.global_batch] * case.before.steps + [case.after.global_batch] * case.after.steps
    assert [len(step) for step in steps] == sizes, [len(step) for step in steps]
    order = SampleOrder(ROWS, SEED).slice(0, sum(sizes))
    assert [row for step in steps for row in step] == list(enumerate(order.tolist()))


def _steps(ranks: list[Told], steps: range) -> list[list[tuple[int, int]]]:
    """Of each step the positions and samples of all ranks: those that share a replica's rows have the same."""
    return [sorted({row for told in ranks for row in told.rows[step]}) for step in steps]


def check_numbers(case: Case, after: list[Told], truth: Told) -> None:
    """The steps after the load against those of one process."""
    kinds = [sw.Plan.parse(half.plan).precision for half in (case.before, case.after)]
    if kinds[1] == "fp64":  # what was loaded is the same, whatever it was saved in
        for told in (*after, truth):
            told.trace.params = {n: t for n, t in told.end.items() if not NOISE.search(n)}
        worst = grid.differences([told.trace for told in after], truth.trace)
        assert max(worst.values()) <= TOLERANCE, f"against one process: {worst}"
    elif not MODELS[case.model].has_experts:  # a choice of experts is no small rounding
        a, b = after[0].trace.losses[0], truth.trace.losses[0]
        near = a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= NEAR[kinds[1]] * abs(b)
        assert near, f"first loss {a}, in one process {b}"


def check_resumed(case: Case, before: list[Told], after: list[Told]) -> None:
    """Rank by rank: the run that was stopped is the one that nothing disturbed."""
    for undisturbed, resumed in zip(before, after, strict=True):
        assert repr(resumed.trace.losses) == repr(undisturbed.trace.losses), "losses"  # one that is NaN is the same one
        assert repr(resumed.trace.norms) == repr(undisturbed.trace.norms), "norms"
        assert resumed.rows == {s: r for s, r in undisturbed.rows.items() if s >= case.before.steps}, "samples"
        assert resumed.last == undisturbed.last, (resumed.last, undisturbed.last)
        check_equal(resumed.end, undisturbed.end, "the resumed run's end")


def failures(world: World, cases: list[Case], path: Path) -> dict[Case, str]:
    """What is wrong with each case of a job: its worlds are those of the first."""
    sizes = [sw.Plan.parse(half.plan).world for half in (cases[0].before, cases[0].after)]
    before = world(sizes[0], run_all, cases, "save", str(path), timeout_s=300)
    after = world(sizes[1], run_all, cases, "load", str(path), timeout_s=300)
    truth = world(1, run_all, cases, "truth", str(path), timeout_s=300)[0]
    wrong = {}
    for i, case in enumerate(cases):
        runs = [ranks[i] for ranks in before], [ranks[i] for ranks in after]
        refused = {told.refused for ranks in runs for told in ranks} - {""}
        if refused:
            wrong |= {case: "; ".join(refused)} if not all(map(KNOWN.search, refused)) else {}
            continue
        try:
            check(case, *runs, truth[i], path / str(i))
        except AssertionError as error:
            wrong[case] = str(error)
    return wrong


def check(case: Case, before: list[Told], after: list[Told], truth: Told, path: Path) -> None:
    kept = stored(path / f"step-{case.before.steps:08d}")
    check_equal(union(before, "tensors"), kept, "what was saved, in the files")
    check_equal(union(after, "tensors"), truth.tensors, "what was loaded, and what one process loads")
    if not case.converts:
        check_equal(union(after, "tensors"), kept, "what was loaded, and the files")
    if case.same:
        check_resumed(case, before, after)
    check_samples(case, before, after)
    check_numbers(case, after, truth)


def jobs() -> Iterator[tuple[int, tuple[int, int], bool]]:
    """Seed, worlds, and whether the same mesh goes on."""
    if not SOAK:
        yield from ((4, (2, 4), False), (6, (2, 2), True))
        return
    random = Random(FIRST_SEED)
    for i in range(math.ceil(SOAK / PER_JOB)):
        is_same = i % 4 == 3
        sizes = random.choices((1, 2, 3, 4, 6, 8), (1, 4, 1, 4, 1, 2), k=2)
        yield FIRST_SEED + i, (sizes[0], sizes[0] if is_same else sizes[1]), is_same


@pytest.mark.share(2)
@pytest.mark.parametrize(("seed", "worlds", "is_same"), list(jobs()))
def test_what_one_plan_saves_goes_on_under_another(
    world: World, tmp_path: Path, seed: int, worlds: tuple[int, int], is_same: bool
) -> None:
    random = Random(seed)
    cases = [draw(random, worlds, same=is_same, light=not SOAK) for _ in range(PER_JOB)]
    wrong = failures(world, cases, tmp_path)
    assert not wrong, "\n".join(f"{case}: {said}" for case, said in wrong.items())


def found(model: str, plan: str, **changes: Any) -> Case:
    """A run that goes on under its own plan."""
    half = Half(plan, "adamw fp32", global_batch=8, steps=1, workers=0)
    case = Case(model, half, half, 0.5, frozen=False, ema=False, layers=2, beside=False, own=False, probed=False)
    return replace(case, **changes)


def test_what_the_draws_found(world: World, tmp_path: Path) -> None:
    cases = [
        found("decoder", "dp3 / fp32", own=True),  # DDP's first sums in another order, in a loop of one's own
        found("counted", "dp3 / fp32 / find-unused"),  # a rehearsed step was counted by a module's extra state
        found("counted", "fsdp3 / fp32", probed=True),  # and so was what a probe measured
    ]
    assert not failures(world, cases, tmp_path)


def test_the_draws_reach_every_model_optimizer_and_axis() -> None:
    random = Random(0)
    cases = [draw(random, (4, 8)) for _ in range(300)]
    assert {case.model for case in cases} == set(MODELS)
    assert {case.after.optimizer for case in cases} == set(OPTIMIZERS)
    words = {re.sub(r"\d+$", "", word) for case in cases for word in (case.before.plan + case.after.plan).split()}
    assert words >= {"pp", "dp", "fsdp", "cp", "tp", "ep", "mb", "seq", "zero", "offload=state", "recompute=blocks"}
    assert {case.same for case in (draw(random, (4, 4), same=True) for _ in range(20))} == {True}
