from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import pipeline as bench
from shardwise.cli.schedule import schedule
from shardwise.errors import ExitCode, PlanError
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec
from shardwise.model.tracer import trace_chain
from shardwise.models.presets import build
from shardwise.parallel.pipeline import first_blocks
from shardwise.parallel.stages.pipeline_torch_private import SCHEDULE_CLASSES
from shardwise.parallel.stages.schedules import picture, save_png
from shardwise.plan.plan import LOOPED, SCHEDULES, V_SHAPED, ZERO_BUBBLE, Axes, Plan, Schedule
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.imbalance import busiest
from shardwise.plan.ranks.stages import counted_flops, split_evenly
from shardwise.plan.rows.pipeline import micro_batches_fit
from shardwise.plan.schedule import Action, actions, stages_of, table_of
from shardwise.plan.time_terms.simulate import LOCAL, NOTHING, Costs, _order, simulate
from shardwise.plan.workload import Workload
from tests.fake.torch_orders import StandIn, schedule_order

app = typer.Typer()
app.command()(schedule)


def stages_per_rank(kind: str) -> int:
    return 2 if kind in LOOPED else 1


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_action_is_there_once_on_the_rank_of_its_stage(kind: str, pp: int) -> None:
    micro_batches, stages = 2 * pp, stages_per_rank(kind)
    table = actions(kind, pp, stages, micro_batches)
    for rank, row in enumerate(table):
        assert {action.stage for action in row} == set(stages_of(kind, rank, pp, stages))
    done = [action for row in table for action in row]
    assert len(done) == len(set(done))
    pairs = {(s, m) for s in range(pp * stages) for m in range(micro_batches)}
    assert {(a.stage, a.micro_batch) for a in done if a.work == "F"} == pairs
    assert {(a.stage, a.micro_batch) for a in done if a.work in "BI"} == pairs
    split = {(a.stage, a.micro_batch) for a in done if a.work == "I"}
    assert split == {(a.stage, a.micro_batch) for a in done if a.work == "W"}
    assert bool(split) == (kind in ZERO_BUBBLE)


GRID = [
    (kind, ranks, stages, micro)
    for kind, ranks, stages in product(SCHEDULES, (1, 2, 3, 4, 5, 8), (1, 2, 3, 4))
    for micro in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 17, 24)
    if (stages == 2 if kind in V_SHAPED else stages == 1 or kind in LOOPED)
]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_planners_tables_are_torchs(kind: str) -> None:
    compared = 0
    for case in (case for case in GRID if case[0] == kind):
        try:
            theirs = schedule_order(*case)
        except (ValueError, AssertionError):
            with pytest.raises(PlanError, match="torch refuses"):
                actions(*case)
            continue
        assert [[tuple(action[:3]) for action in row] for row in actions(*case)] == [renumbered(row) for row in theirs]
        compared += 1
    assert compared > 30


def renumbered(row: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Forwards of a stage numbered in their order, as they run: torch 2.13's table counts 1F1B's last rank from 1."""
    seen: Counter[int] = Counter()
    numbered = []
    for work, stage, micro_batch in row:
        numbered.append((work, stage, seen[stage] if work == "F" else micro_batch))
        seen[stage] += work == "F"
    return numbered


@pytest.mark.parametrize("kind", LOOPED)
@pytest.mark.parametrize(("ranks", "stages", "micro"), [(2, 2, 4), (4, 2, 8), (3, 3, 12), (4, 2, 17)])
def test_receives_are_posted_where_torch_posts_them(kind: str, ranks: int, stages: int, micro: int) -> None:
    if kind in V_SHAPED:
        stages = 2
    if not micro_batches_fit(kind, ranks, micro):
        micro = 16
    stand_ins: Any = [StandIn(ranks * stages, ranks) for _ in range(stages)]
    schedule: Any = SCHEDULE_CLASSES[kind](stand_ins, micro, scale_grads=False)
    theirs, pairs = {}, []
    for rank, lowered in schedule.pipeline_order_with_comms.items():
        count = 0
        for action in lowered:
            parts = action.sub_actions or (action,)
            if action.sub_actions:
                pairs.append([(p.computation_type.value, p.stage_index, p.microbatch_index) for p in parts])
            word = action.computation_type.value
            if word in ("RECV_F", "RECV_B"):
                theirs[rank, word[-1], action.stage_index, action.microbatch_index] = count
            count += sum(part.computation_type.value in ("F", "B", "I", "W") for part in parts)
    table = actions(kind, ranks, stages, micro)
    flat = [(rank, action) for rank, row in enumerate(table) for action in row]
    first = [sum(len(row) for row in table[:rank]) for rank in range(ranks)]
    ours = {}
    for number, rank, _, _, posted in _order(table):
        action = flat[number][1]
        if posted != LOCAL:
            key = (rank, "F" if action.work == "F" else "B", action.stage, action.micro_batch)
            ours[key] = 0 if posted == NOTHING else posted - first[rank] + 1
    assert ours == theirs and ours
    after = [(a[:3], b[:3]) for row in table for a, b in pairwise(row) if a.overlapped]
    assert sorted(after) == sorted((tuple(a), tuple(b)) for a, b in pairs)


def test_stages_of_a_v() -> None:
    assert [stages_of("dualpipe-v", rank, 3, 2) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert stages_of("interleaved", 1, 2, 3) == (1, 3, 5)


@pytest.mark.parametrize(("kind", "turns"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_bubble_equals_the_formula(kind: str, turns: int, pp: int, micro_batches: int) -> None:
    # (p - 1) / (v m + p - 1): Narayanan et al., arXiv:2104.04473, section 2.2
    expected = (pp - 1) / (turns * micro_batches + pp - 1)
    assert simulate(actions(kind, pp, turns, micro_batches)).bubble == pytest.approx(expected)


def test_zero_bubbles_are_smaller() -> None:
    bubbles = {kind: simulate(actions(kind, 4, stages_per_rank(kind), 16)).bubble for kind in SCHEDULES}
    assert max(bubbles[kind] for kind in ZERO_BUBBLE) < bubbles["interleaved"] < bubbles["1f1b"]


def test_costs_change_times() -> None:
    table = actions("1f1b", 2, 1, 2)
    assert simulate(table).total == 2 * 3 + 3
    assert simulate(table, Costs(forward=2, backward=4)).total == 18


def test_an_action_starts_after_what_it_needs() -> None:
    timeline = simulate(actions("zero-bubble-v", 4, 2, 8))
    ends = {span.action: span.end for rank in timeline.ranks for span in rank}
    for rank in timeline.ranks:
        for (work, stage, micro_batch, _), start, _ in rank:
            if work == "F" and stage:
                assert start >= ends[Action("F", stage - 1, micro_batch)]
            if work == "I" and stage < 7:
                assert start >= ends[Action("I", stage + 1, micro_batch)]


def test_a_table_that_cannot_finish_is_refused() -> None:
    first, second = actions("gpipe", 2, 1, 2)
    table = [first[::-1], second]
    with pytest.raises(PlanError, match="cannot finish, 0B1, 1F0 wait for each other"):
        simulate(table)


def test_what_torch_refuses() -> None:
    with pytest.raises(PlanError, match="schedule dualpipe-v: torch refuses 4 ranks x 2 stages with 3 micro-batches"):
        actions("dualpipe-v", 4, 2, 3)
    with pytest.raises(PlanError, match="has no pipeline"):
        table_of(Plan())


def test_picture_shows_work_and_waiting() -> None:
    lines = [line.plain for line in picture(simulate(actions("1f1b", 2, 1, 2)), width=3)]
    assert lines == ["rank 0  F0 F1 ......B0    ...B1", "rank 1  ...F0 B0    F1 B1    ......"]


def test_png(tmp_path: Path) -> None:
    timeline = simulate(actions("interleaved", 4, 2, 8))
    save_png(timeline, tmp_path / "a.png", title="pp4 / interleaved mb8")
    image = Image.open(tmp_path / "a.png").convert("RGB")
    assert image.width > 1000
    colours = {colour for _, colour in image.getcolors(maxcolors=1 << 20) or []}
    assert {(0x4C, 0x78, 0xA8), (0x54, 0xA2, 0x4B), (0xEE, 0xEE, 0xEE)} <= colours  # forward, backward, bubble


def test_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pp4 1f1b mb8", "--png", str(tmp_path / "a.png")], env={"COLUMNS": "200"})
    assert result.exit_code == ExitCode.OK
    assert "bubble 27.3 %" in result.stdout and result.stdout.count("rank ") == 4
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_command_as_json() -> None:
    result = CliRunner().invoke(app, ["pp2 zero-bubble mb4", "--json"])
    answer = json.loads(result.stdout)
    assert answer["plan"] == "pp2 / zero-bubble mb4 / fp32"
    assert answer["ranks"][0][0] == {"work": "F", "stage": 0, "micro_batch": 0, "start": 0.0, "end": 1.0}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["pp4 dualpipe-v mb2"], ExitCode.REFUSED),
        (["dp4"], ExitCode.REFUSED),
        (["pp4 interleavd"], ExitCode.REFUSED),
        (["pp2 mb2", "--png", "/no/such/folder/a.png"], ExitCode.USAGE),
        (["pp2 mb2", "--png", "a.picture"], ExitCode.USAGE),
        (["pp2 mb2", "--png", "a.gif"], ExitCode.USAGE),
    ],
)
def test_command_refuses(words: list[str], code: ExitCode) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code
    assert result.stderr and not isinstance(result.exception, ValueError | OSError)


def test_the_measured_page_is_of_this_simulation() -> None:
    page = bench.PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \| ([0-9.]+ \| [0-9.]+) \| [+-]", page, re.M))
    assert tuple(rows) == SCHEDULES
    for kind, row in rows.items():
        simulated, measured = map(float, row.split(" | "))
        stages = 2 if kind in LOOPED else 1
        table = actions(kind, bench.RANKS, stages, bench.MICRO_BATCHES)
        assert simulate(table, bench.costs_of(kind)).total == pytest.approx(simulated, abs=1e-3)
        assert abs(simulated / measured - 1) < bench.TARGET
    assert bench.paste(page, "NEW").count("NEW") == 1
    with pytest.raises(SystemExit, match="markers"):
        bench.paste("no markers", "NEW")


# ---------------------------------------------------------------- the split of blocks


@pytest.mark.parametrize("costs", [[1] * 7, [1, 2, 3, 4, 5, 6], [9, 1, 1, 1, 1, 5], [0, 0, 1, 0, 0, 1]])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_split_is_the_best_there_is(costs: list[int], parts: int) -> None:
    def largest(starts: tuple[int, ...]) -> int:
        ends = (*starts[1:], len(costs))
        return max(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True))

    found = split_evenly(tuple(costs), parts)
    assert len(found) == parts and list(found) == sorted(set(found)) and found[0] == 0
    assert largest(found) == min(largest((0, *cut)) for cut in combinations(range(1, len(costs)), parts - 1))


def test_even_blocks_are_split_evenly() -> None:
    starts = split_evenly((1,) * 10, 4)
    assert sorted(b - a for a, b in zip(starts, (*starts[1:], 10), strict=True)) == [2, 2, 3, 3]


class Lopsided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10_000, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.head = nn.Linear(4, 20)


def test_a_head_counts_and_an_embedding_does_not() -> None:
    blocks = tuple(f"layers.{i}" for i in range(6))
    plan = Plan(axes=Axes(pp=2))
    assert first_blocks(Lopsided(), blocks, plan) == (0, 5)
    given = plan.with_(schedule=Schedule(boundaries=("layers.2",)))
    assert first_blocks(Lopsided(), blocks, given) == (0, 2)
    with pytest.raises(PlanError, match="every stage needs one"):
        first_blocks(Lopsided(), blocks, Plan(axes=Axes(pp=8)))


def test_a_head_that_is_tied_to_the_embedding_counts_too() -> None:
    module = Lopsided()
    module.embed = nn.Embedding(20, 4)
    module.head.weight = module.embed.weight
    assert first_blocks(module, tuple(f"layers.{i}" for i in range(6)), Plan(axes=Axes(pp=2))) == (0, 5)


SIZES: dict[str, Any] = {"vocab_size": 1024, "dim": 32, "num_heads": 4, "ffn_dim": 64, "max_seq_len": 512}


def cut_with_a_sample(spec: ModelSpec, plan: Plan, seq_len: int) -> tuple[int, ...]:
    with torch.device("meta"):
        root = build(spec)()
    ids = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
    return first_blocks(root, spec.block_names, plan, trace_chain(root, (ids,), {}, spec.block_names))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_experts_count_by_those_that_a_token_meets(stages: int) -> None:
    spec = ModelSpec(**SIZES, kind="moe", num_layers=8, num_experts=8, experts_per_token=2)
    plan = Plan(axes=Axes(pp=stages))
    with torch.device("meta"):
        root = build(spec)()
    found = first_blocks(root, spec.block_names, plan)
    assert found == cut_with_a_sample(spec, plan, 16)
    if stages == 2:  # the head is as much as two blocks; beside all of their experts it would be half of one
        assert found == (0, 5)


@pytest.mark.share(6)
@pytest.mark.parametrize("seq_len", [16, 512])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    "kind", [{"kind": "gpt"}, {"kind": "llama"}, {"kind": "moe", "num_experts": 8, "experts_per_token": 2}], ids=str
)
@pytest.mark.parametrize("tied", [True, False])
def test_stages_are_planned_where_apply_cuts_them(kind: dict[str, Any], stages: int, seq_len: int, tied: bool) -> None:
    spec = ModelSpec(**SIZES, **kind, num_layers=10, tie_embeddings=tied)
    plan, work = Plan(axes=Axes(pp=stages)), Workload(seq_len=seq_len, global_batch=8)
    assert Division(profile_of(spec), plan, work).firsts == cut_with_a_sample(spec, plan, seq_len)


def test_an_uneven_load_of_experts_moves_no_stage() -> None:
    spec = ModelSpec(
        **SIZES, kind="moe", num_layers=9, num_dense_layers=4, dense_ffn_dim=128, num_experts=8, experts_per_token=2
    )
    plan, work = Plan.parse("pp2 fsdp4 ep4 / 1f1b mb2"), Workload(seq_len=16, global_batch=8, imbalance=4.0)
    profile = profile_of(spec)
    uneven = busiest(profile, plan, work)
    assert counted_flops(uneven.blocks[-1], 16) > 1.5 * counted_flops(profile.blocks[-1], 16)
    assert Division(uneven, plan, work).firsts == Division(profile, plan, work).firsts
    apart = Division(replace(uneven, even=None), plan, work).firsts
    assert apart != Division(profile, plan, work).firsts  # negative control


def test_long_sequences_make_a_head_a_smaller_share() -> None:
    spec = ModelSpec(**SIZES, kind="llama", num_layers=10)
    cuts = [Division(profile_of(spec), Plan(axes=Axes(pp=2)), Workload(seq_len=n, global_batch=2)) for n in (16, 4096)]
    assert cuts[0].firsts[1] > cuts[1].firsts[1]


def test_v_shaped_schedules_are_looped() -> None:
    assert set(V_SHAPED) <= set(LOOPED)
