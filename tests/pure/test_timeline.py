"""The picture of a step holds the estimate's own seconds, each where it runs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardwise.hardware.cluster import load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.memory import estimate_memory
from shardwise.plan.pictures import step_picture
from shardwise.plan.plan import Plan
from shardwise.plan.search import Candidate, Search
from shardwise.plan.searching.space import Space
from shardwise.plan.spelled import seconds
from shardwise.plan.stack import load_stack
from shardwise.plan.timeline import Timeline, timeline_of
from shardwise.plan.timing import estimate_time
from shardwise.plan.workload import Workload

STACK = load_stack("shardwise")


def drawn(text: str, model: str = "llama-8b", where: str = "h100:8x4") -> tuple[Timeline, Candidate, Space]:
    sizes, cluster, plan = preset(model), load_cluster(where), Plan.parse(text)
    work = Workload(seq_len=4096, global_batch=64)
    space = Space(profile_of(sizes), sizes, cluster, work, STACK)
    memory = estimate_memory(space.profile, plan, work, stack=STACK, device=cluster.device)
    time = estimate_time(space.profile, cluster, plan, work, stack=STACK)
    chosen = Candidate(plan=plan, memory=memory, time=time)
    return timeline_of(space, chosen), chosen, space


PLANS = [
    ("fsdp32 / mb2 / bf16 / recompute=blocks", "llama-8b"),
    ("dp4 tp8 / mb16 / bf16 / seq", "llama-8b"),
    ("fsdp4 cp2 tp4 zero1 / mb4 / bf16", "llama-8b"),
    ("fsdp32 ep8 / mb2 / bf16", "mixtral-8x7b"),
    ("dp8 tp4 / mb2 / bf16 / offload=activations", "llama-8b"),
]
PIPES = [
    ("pp4 fsdp2 tp4 zero1 / 1f1b mb16 / bf16 / recompute=blocks", "llama-8b"),
    ("pp8 tp4 / interleaved vs2 mb16 / bf16", "llama-8b"),
    ("pp4 fsdp8 ep8 zero1 / zero-bubble-v mb8 / bf16", "mixtral-8x7b"),
]


@pytest.mark.parametrize(("text", "model"), PLANS + PIPES)
def test_the_seconds_of_the_legend_are_the_step(text: str, model: str) -> None:
    step, chosen, _ = drawn(text, model)
    time = chosen.time
    assert sum(value for kind, value in step.seconds.values() if kind != "hidden") == pytest.approx(time.total)
    hidden = sum(value for kind, value in step.seconds.values() if kind == "hidden")
    assert hidden == pytest.approx(sum(time.hidden.values()))
    assert ("recompute" in step.seconds) is ("recompute" in time.terms)


@pytest.mark.parametrize(("text", "model"), PLANS)
def test_a_step_without_a_pipeline_is_drawn_whole(text: str, model: str) -> None:
    step, chosen, _ = drawn(text, model)
    (lane,) = step.lanes
    assert step.end == pytest.approx(chosen.time.total)
    shown: dict[str, float] = {}
    for piece in (*lane.compute, *lane.sent):
        shown[piece.kind] = shown.get(piece.kind, 0.0) + piece.end - piece.start
    for kind in ("forward", "recompute", "backward", "exposed", "optimizer", "other"):
        said = sum(value for of, value in step.seconds.values() if of == kind)
        assert shown.get(kind, 0.0) == pytest.approx(said, abs=1e-9), kind
    for row in (lane.compute, sorted(lane.sent)):
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(row))
    computes = [piece for piece in lane.compute if piece.kind in ("forward", "recompute", "backward")]
    for piece in lane.sent:  # hidden: below compute; exposed: nothing computes
        behind = sum(max(0.0, min(piece.end, c.end) - max(piece.start, c.start)) for c in computes)
        assert behind == pytest.approx(piece.end - piece.start if piece.kind == "hidden" else 0.0, abs=1e-9), piece


@pytest.mark.parametrize(("text", "model"), PIPES)
def test_a_pipeline_shows_every_rank_with_its_idle_time(text: str, model: str) -> None:
    step, chosen, _ = drawn(text, model)
    time, plan = chosen.time, chosen.plan
    assert [lane.rank for lane in step.lanes] == list(range(plan.axes.pp))
    assert step.end == pytest.approx(time.total, rel=0.01)
    for lane, busy in zip(step.lanes, time.stages, strict=True):
        pieces = [piece for piece in (*lane.compute, *lane.sent) if piece.what not in time.terms]
        own = [piece for piece in pieces if piece.kind != "hidden" and "gathers" not in piece.what]
        assert sum(piece.end - piece.start for piece in own) == pytest.approx(busy, rel=0.001)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(sorted(own)))
    kinds = {piece.kind for lane in step.lanes for piece in lane.compute}
    assert ("weights" in kinds) is (plan.schedule.kind == "zero-bubble-v")
    assert ("recompute" in kinds) is (plan.recompute.mode == "blocks")


def test_many_micro_batches_of_a_deep_pipeline_are_drawn_in_part() -> None:
    step, chosen, space = drawn("pp32 / 1f1b mb64 / bf16")
    assert (len(step.lanes), step.drawn) == (32, 64)
    step, chosen, space = drawn("pp4 tp8 / 1f1b mb64 / bf16 / seq")
    assert (len(step.lanes), step.drawn) == (4, 16)
    text = step_picture(Search(goal="time", space=space, ranked=(chosen,)), chosen)
    assert "drawn with 16 of the 64 micro-batches" in text
    assert "rank 3" in text
    assert "published runs laid out as this plan is (tp + pp)" in text
    assert f"idle: bubble and sends {seconds(chosen.time.terms['pipeline'])}" in text


def test_of_what_grows_with_micro_batches_as_many_parts_are_drawn() -> None:
    """A step drawn with 16 of 64 ended in the waiting of all 64: as if a third of it were lost."""
    step, chosen, _ = drawn("pp4 tp8 / 1f1b mb64 / bf16 / seq")
    whole = chosen.time.terms["stragglers"]
    for lane in step.lanes:
        [waiting] = [piece.end - piece.start for piece in lane.compute if piece.what == "stragglers"]
        assert waiting == pytest.approx(whole * 16 / 64)
    assert step.seconds["stragglers"] == ("other", pytest.approx(whole))


def test_the_colours_tell_recompute_from_backward_and_hidden_from_exposed() -> None:
    _, chosen, space = drawn("fsdp32 / mb2 / bf16 / recompute=blocks")
    text = step_picture(Search(goal="time", space=space, ranked=(chosen,)), chosen)
    shown = {what: f'fill="{colour}"><title>{what}' for what, colour in (
        ("recompute, micro-batch 1", "#b34fa0"), ("backward, micro-batch 1", "#2aa198"), ("forward", "#3b7dd8"),
        ("gathers and reductions, micro-batch 1 (", "#e8c39e"), ("gathers, micro-batch 0:", "#d9633b"),
        ("optimizer", "#e0a526"),
    )}  # fmt: skip
    for what, found in shown.items():
        assert found in text, what
