"""`find_plan` against an exhaustive search, its bounds against the estimates, and what no estimate may do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from time import process_time
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, ModelError, PlanError, UsageError
from shardwise.hardware.cluster import GIB, Cluster, load_cluster
from shardwise.model.profile import Profile, profile_of
from shardwise.model.spec import ModelSpec, preset
from shardwise.plan.constraints import check
from shardwise.plan.hosting import on_host
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan, Schedule
from shardwise.plan.reasons import binds, decisions, why_lost
from shardwise.plan.search import ALIKE, HEADROOM, Candidate, Search, Walk, every_plan, find_plan
from shardwise.plan.searching import walk
from shardwise.plan.searching.choice import Choice, bucket_of
from shardwise.plan.searching.families import Core, Flow, Leaf, Pipe, Spread, least_simplicity, simplicity
from shardwise.plan.searching.front import APART, FrontWalk, front_of
from shardwise.plan.searching.space import FEATURES, OPT_IN, Space, features_of
from shardwise.plan.stack import Stack, load_stack, stacks
from shardwise.plan.timing import estimate_time
from shardwise.plan.workload import Adapters, Workload

SMALL = replace(preset("llama-1b"), num_layers=4)
MOE = replace(preset("mixtral-8x7b"), num_layers=2, ffn_dim=2048)
PICTURES = replace(preset("vit-b-16"), num_layers=4)  # its steps wait for data
MIXED = replace(MOE, num_layers=4, num_dense_layers=2, dense_ffn_dim=1024, shared_ffn_dim=512)


def cluster(name: str, memory_gib: float | None = None) -> Cluster:
    found = load_cluster(name)
    return found.with_(device=replace(found.device, memory=memory_gib * GIB)) if memory_gib else found


def find(spec: ModelSpec, where: Cluster, workload: Workload, **options: object) -> Search:
    return find_plan(profile_of(spec), spec, where, workload, **{"headroom": 0.0, **options})  # type: ignore[arg-type]


def space_of(spec: ModelSpec, where: Cluster, workload: Workload) -> Space:
    return Space(profile_of(spec), spec, where, workload, load_stack("shardwise"))


def estimated(space: Space, plan: Plan) -> Candidate:
    workload = space.workload
    memory = estimate_memory(space.profile, plan, workload, stack=space.stack, device=space.cluster.device)
    return Candidate(
        plan=plan,
        memory=memory,
        time=estimate_time(space.profile, space.cluster, plan, workload, stack=space.stack),
    )


def ranked_by_hand(fits: Iterable[Candidate], top: int = 99) -> list[Plan]:
    """Of those as good as the fastest of the layouts that are left, the simplest; then of other layouts."""
    left, found = list(fits), list[Plan]()
    while left and len(found) < top:
        most = min(each.time.total for each in left) * (1 + ALIKE)
        best = min((each for each in left if each.time.total <= most), key=lambda each: simplicity(each.plan))
        found.append(best.plan)
        left = [each for each in left if each.layout != best.layout]
    return found


TINY = Workload(seq_len=128, global_batch=1)

# ---------------------------------------------------------------- against all plans

CASES = [
    (SMALL, "h100:4", 80, 2048, 4),
    (SMALL, "h100:4", 6, 2048, 4),
    (SMALL, "a100-80g:2x2", 9, 4096, 4),
    (SMALL, "h100:3x2", 12, 1024, 3),
    (MOE, "h100:4", 14, 1024, 4),
    (SMALL, "l4:2", 22, 256, 2),  # two plans that differ by a ten-thousandth, of which the simpler is wanted
]


SLOW = (1, 2)  # of the cases: seconds to list all their plans


@pytest.mark.share(5)
@pytest.mark.parametrize(
    ("spec", "where", "gib", "seq_len", "batch"),
    [pytest.param(*case, marks=pytest.mark.soak if i in SLOW else ()) for i, case in enumerate(CASES)],
)
def test_the_best_plan_is_that_of_an_exhaustive_search(
    spec: ModelSpec, where: str, gib: float, seq_len: int, batch: int
) -> None:
    there, workload = cluster(where, gib), Workload(seq_len=seq_len, global_batch=batch)
    space = space_of(spec, there, workload)
    all_plans = [estimated(space, plan) for plan in every_plan(space)]
    found = find(spec, there, workload, top=4)
    expected = ranked_by_hand((each for each in all_plans if each.memory.fits), top=4)
    assert [each.plan for each in found.ranked] == expected
    assert len(all_plans) > 10 * found.estimated or len(all_plans) < 3000


def test_of_plans_as_good_the_simplest_is_taken_wherever_their_times_lie() -> None:
    """Classes of times had borders: plans that differed by a ten-thousandth fell on both sides of one."""
    found = find(SMALL, cluster("h100:4"), Workload(seq_len=2048, global_batch=4), forbid=("pp", "cp", "tp"))
    one = found.met[0]
    for n in range(40):
        choice, least = Choice("time"), 1.0 + n * ALIKE / 40
        for text, more in (("fsdp4 zero3", 0.0), ("fsdp4 zero2", 1e-4), ("fsdp2 dp2 zero1", 5e-4), ("dp4", 3e-3)):
            step = replace(one.time, terms={"compute": least * (1 + more)})
            choice.add(replace(one, plan=Plan.parse(text), time=step))
        assert choice.best is not None and str(choice.best.plan) == "fsdp4 zero2 / fp32"
        after = (bucket_of(least), (), 0, least * (1 + 1.1 * ALIKE), None)
        assert not choice.may_change(after) and choice.may_change((*after[:3], least, None))


def test_packed_weights_too() -> None:
    """Adapters on a base in 4 bits, on devices that it fits into in few ways."""
    adapters = Adapters(on=("q", "v"), base="gptq")
    work = Workload(seq_len=1024, global_batch=3, trained=0.01, adapters=adapters)
    space = space_of(SMALL, there := cluster("h100:3x2", 3), work)
    fits = [each for each in (estimated(space, plan) for plan in every_plan(space)) if each.memory.fits]
    expected = ranked_by_hand(fits)
    found = find(SMALL, there, work, top=len(expected))
    assert [each.plan for each in found.ranked] == expected


@pytest.mark.parametrize(("gib", "batch"), [(9.76, 2), (11.76, 6)])
def test_offloaded_activations_too(gib: float, batch: int) -> None:
    fast = cluster("l4:2", gib).with_(host_bandwidth=2e12)  # nothing computes while they move
    there, workload = fast, Workload(seq_len=4096, global_batch=batch)
    words = {"allow": ("offload-activations",), "forbid": ("cp", "tp")}
    space = replace(space_of(SMALL, there, workload), **words)
    fits = [each for each in (estimated(space, plan) for plan in every_plan(space)) if each.memory.fits]
    expected = ranked_by_hand(fits)
    found = find(SMALL, there, workload, **words)
    assert [each.plan for each in found.ranked] == expected
    assert any(each.plan.offload.activations for each in found.ranked)


def test_with_fewer_choices_no_layout_is_faster() -> None:
    """Recomputed operators are moved to the host neither: what costs more compute takes less time here."""
    work, allow = Workload(seq_len=8192, global_batch=1009), ("offload-activations",)
    whole, part = (
        {
            each.layout: each.time.total
            for each in find(preset("qwen3-32b"), cluster("a100-40g:8"), work, **words).ranked
        }
        for words in (
            {"allow": allow},
            {"allow": allow, "forbid": ("recompute=blocks", "recompute=every", "recompute=ratio")},
        )
    )
    assert len(whole.keys() & part.keys()) > 1
    assert all(whole[layout] <= part[layout] * (1 + ALIKE) for layout in whole.keys() & part.keys())


@pytest.mark.share(2)
@pytest.mark.parametrize("goal", ["memory", "cost"])
def test_other_goals_too(goal: str) -> None:
    there, workload = cluster("h100:4", 12), Workload(seq_len=1024, global_batch=4)
    found = find(SMALL, there, workload, goal=goal, top=1).best
    assert found is not None
    smaller = [there.with_(per_node=n) for n in (1, 2, 4)] if goal == "cost" else [there]
    best = inf
    for part in smaller:
        part = part if part.per_node == there.per_node else part.with_(domain=part.per_node)
        space = space_of(SMALL, part, workload)
        fits = [each for each in (estimated(space, plan) for plan in every_plan(space)) if each.memory.fits]
        best = min([best, *(each.score(goal) for each in fits)])  # type: ignore[arg-type]
    assert found.score(goal) == pytest.approx(best, rel=2 * ALIKE)  # type: ignore[arg-type]


def test_a_stack_that_leaves_ranks_without_blocks() -> None:
    where, workload, stack = cluster("h100:4", 13), Workload(seq_len=2048, global_batch=4), load_stack("nanotron")
    space = Space(profile_of(SMALL), SMALL, where, workload, stack, forbid=("cp", "tp"))
    every = [found for plan in every_plan(space) if (found := estimated(space, plan)).memory.fits]
    best = find(SMALL, where, workload, stack=stack, forbid=("cp", "tp")).best
    assert best and best.time.total <= min(found.time.total for found in every) * (1 + ALIKE)


@pytest.mark.parametrize("stack", stacks())
def test_every_stack_plans(stack: str) -> None:
    assert find(SMALL, cluster("h100:8", 24), Workload(seq_len=2048, global_batch=8), stack=load_stack(stack)).best


@pytest.mark.parametrize("stack", [load_stack("deepspeed"), replace(load_stack("eager"), fused_optimizer=False)])
def test_no_bound_is_above_an_estimate_where_hooks_and_updates_are_other_engines(stack: Stack) -> None:
    """Below zero 3 DeepSpeed's hooks take nothing of the host."""
    work, there = Workload(seq_len=128, global_batch=4), cluster("h100:4", 80)
    space = Space(profile_of(SMALL), SMALL, there, work, stack, forbid=("cp", "tp", "pp"))
    bounds = Walk(space, "time", inf).bounds
    for core in list(space.cores(4, {}))[::2]:
        for pipe in space.pipes(core):
            flows = [Flow(pipe, schedule, 0, offload) for schedule, offload in space.flows(pipe)]
            for flow, spread in product(flows, space.spreads(pipe)):
                plan = space.plan(flow, spread)
                total = estimated(space, plan).time.total * (1 + 1e-9)
                assert bounds.core_time(core) <= total, plan
                assert bounds.least_time(flow) <= total and bounds.plan_time(flow, spread) <= total, plan


def test_no_bound_is_above_an_estimate() -> None:
    """And they are tight enough to be of use: some are within 5 % of the estimate."""
    tightest = 0.0
    pictures: dict[str, Any] = {"sample_bytes": 6e7}
    cases = [
        *((*case, {}) for case in CASES),
        (MIXED, "h100:4", 80, 1024, 4, {}),
        (PICTURES, "b200:4", 80, 196, 30, pictures),
    ]
    cases += [
        (MOE, "h100:2x2", 14, 1024, 4, {"optimizer": "muon", "imbalance": 1.5}),
        (MOE, "l4:4", 14, 1024, 4, {"optimizer": "lamb"}),
        (SMALL, "h100:3x2", 4, 1024, 3, {"trained": 0.01, "adapters": Adapters(on=("q",), base="nf4")}),
        (MOE, "l4:4", 8, 1024, 4, {"trained": 0.01, "adapters": Adapters(on=("q",), base="gptq")}),
    ]
    for spec, where, gib, seq_len, batch, more in cases:
        work = Workload(seq_len=seq_len, global_batch=batch, **more)
        space = space_of(spec, cluster(where, gib), work)
        space = replace(space, allow=("offload-activations",) if spec is MOE else ())
        walk = Walk(space, "time", inf)
        bounds = walk.bounds
        for core in list(space.cores(space.cluster.world, {}))[::17]:
            for pipe in space.pipes(core):
                for (schedule, offload), policy in product(space.flows(pipe), range(len(space.recomputes))):
                    flow = Flow(pipe, schedule, policy, offload)
                    for spread in list(space.spreads(pipe))[::4]:
                        plan = space.plan(flow, spread)
                        if space.broken(plan):
                            continue
                        each = estimated(space, plan)
                        time = bounds.plan_time(flow, spread)
                        size = bounds.plan_size(flow, spread, bounds.flow_size(flow, every_rank=True))
                        assert bounds.least_size(bounds.flow_size(flow)) <= size * (1 + 1e-9), plan
                        assert bounds.core_size(core) <= each.memory.device, plan
                        assert bounds.core_time(core) <= time * (1 + 1e-9), plan
                        assert bounds.least_time(flow) <= each.time.total * (1 + 1e-9), plan
                        data = bounds.least_data(Flow(pipe, Schedule(), policy, False))
                        assert bounds.pipe_time(pipe, policy, data) <= each.time.total * (1 + 1e-9), plan
                        assert bounds.fitting_time(core, each.memory.device) <= each.time.total * (1 + 1e-9), plan
                        assert walk.least.of_pipe(pipe, policy) <= each.memory.device, plan
                        if pipe.offloaded:
                            host = on_host(each.memory, plan, space.cluster.per_node)
                            assert bounds.hosted(flow, spread) <= host * (1 + 1e-9), plan
                        for family in (core, pipe, flow, Leaf(flow, spread)):
                            assert least_simplicity(family) <= simplicity(plan), plan
                        by_table = bounds.plan_time(flow, spread, bounds.flow_time(flow, simulates=True))
                        assert time <= by_table <= each.time.total * (1 + 1e-9), plan
                        assert size <= each.memory.device * (1 + 1e-9), plan
                        tightest = max(tightest, time / each.time.total, size / each.memory.device)
    assert tightest > 0.95


@pytest.mark.parametrize(
    ("spec", "where", "optimizer", "forbid"),
    [
        (SMALL, "l4:4", "adamw", ("pp", "cp")),
        (replace(SMALL, num_layers=12, vocab_size=512), "h100:2x2", "adafactor", ("pp", "cp")),
    ],
)
def test_no_bound_in_either_of_two_types_is_above_what_a_plan_needs(
    spec: ModelSpec, where: str, optimizer: str, forbid: tuple[str, ...]
) -> None:
    """What an allocator holds, it gives back. Hosts behind devices hide as much of a step in either type."""
    space = space_of(spec, cluster(where), Workload(seq_len=512, global_batch=4, optimizer=optimizer))
    space = replace(space, allow=("bf16-pure",), forbid=forbid)
    bounds = Walk(space, "time", inf).bounds
    for core in space.cores(4, {}):
        for pipe in space.pipes(core):
            for flow, spread in product([Flow(pipe, Schedule(), 0, False)], space.spreads(pipe)):
                each = estimated(space, plan := space.plan(flow, spread))
                size = bounds.plan_size(flow, spread, bounds.flow_size(flow, every_rank=True))
                assert size <= each.needs * (1 + 1e-9), plan
                for least in (bounds.least_time(flow), bounds.plan_time(flow, spread), bounds.pipe_time(pipe, 0)):
                    assert least <= each.time.total * (1 + 1e-9), plan


@pytest.mark.parametrize("layers", [1, 4])
def test_a_bound_of_what_is_sent_has_a_tied_table_once(layers: int) -> None:
    spec = replace(SMALL, num_layers=layers, vocab_size=512, ffn_dim=5632, num_kv_heads=8)
    space = space_of(spec, cluster("b200:8"), Workload(seq_len=512, global_batch=8))
    space = replace(space, forbid=("tp", "pp"))
    bounds = Walk(space, "time", inf).bounds
    for core in (core for core in space.cores(8, {}) if core.cp == 8):
        for pipe in space.pipes(core):
            for policy, spread in product(range(len(space.recomputes)), space.spreads(pipe)):
                plan = space.plan(flow := Flow(pipe, Schedule(), policy, False), spread)
                assert bounds.plan_time(flow, spread) <= estimated(space, plan).time.total * (1 + 1e-9), plan


@pytest.mark.parametrize(
    ("name", "spec"), [("nanotron", SMALL), ("megatron-core", SMALL), ("megatron-2021", MOE), ("shardwise-cpu", SMALL)]
)
def test_no_bound_is_above_what_a_plan_of_another_stack_needs(name: str, spec: ModelSpec) -> None:
    """States of plans that have the same; gradients that data axes do not divide; inputs in fp8; one memory of all."""
    work, there = Workload(seq_len=2048, global_batch=8), cluster("h100:4")
    space = Space(profile_of(spec), spec, there, work, load_stack(name), allow=("fp8",), forbid=("pp",))
    bounds = Walk(space, "time", inf).bounds
    for core in list(space.cores(4, {}))[::3]:
        for pipe in space.pipes(core):
            policies = (0, bounds.leanest(core))
            for policy, spread in product(policies, space.spreads(pipe)):
                plan = space.plan(flow := Flow(pipe, Schedule(), policy, False), spread)
                if space.broken(plan):
                    continue
                each = estimated(space, plan)
                size = bounds.plan_size(flow, spread, bounds.flow_size(flow, every_rank=True))
                assert size <= each.needs * (1 + 1e-9), plan
                if pipe.offloaded:
                    assert bounds.hosted(flow, spread) <= on_host(each.memory, plan, there.per_node) * (1 + 1e-9), plan
                assert bounds.fitting_time(core, each.memory.device) <= each.time.total * (1 + 1e-9), plan


WIDE = replace(SMALL, num_layers=8, vocab_size=512, tie_embeddings=False)
GPT = replace(preset("gpt2-small"), num_layers=8, vocab_size=50304)
INT8: dict[str, Any] = {"trained": 0.01, "adapters": Adapters(on=("up", "down"), base="int8")}
ON_CPUS = {
    "a stage that is done has given its weights back": ("pp2 cp3 zero2 / zero-bubble-v mb2 / bf16", GPT, 128, 4, {}),
    "and the shards of its gradients alone": (
        "pp2 cp2 zero1 / interleaved vs4 mb3 / fp32 / context=ulysses recompute=every3", WIDE, 16, 12, {},
    ),
    "a single micro-batch gives weights back while gradients come": (
        "tp2 zero1 / fp32 / seq loss-parallel recompute=blocks", PICTURES, 16, 6, {},
    ),
    "and its first block has no gradients yet": ("pp2 / gpipe / fp32 / recompute=blocks", WIDE, 512, 8, {}),
    "a loss over shards has one copy less": (
        "pp2 tp2 zero3 / interleaved / fp32 / loss-parallel recompute=blocks", GPT, 1024, 6, {},
    ),
    "with adapters too": (
        "pp2 tp2 zero1 / looped-bfs vs4 / fp32 / seq loss-parallel recompute=every2", GPT, 512, 32, INT8,
    ),
    "logits wait as shards": ("pp2 tp2 zero2 / zero-bubble mb2 / fp32 / seq recompute=every2", GPT, 128, 32, {}),
    "a block that is computed again has what it kept": ("tp2 / fp32 / loss-parallel recompute=ops", WIDE, 512, 8, {}),
    "no block's weights are gathered at the loss": (
        "tp4 ep4 zero3 / fp32 / loss-parallel recompute=every4", MIXED, 2048, 4, {},
    ),
    "a head of few tokens keeps little": ("pp4 zero3 / gpipe mb4 / bf16 / recompute=ops", PICTURES, 196, 32, {}),
}  # fmt: skip


def families_of(space: Space, plan: Plan) -> tuple[Flow, Spread]:
    """The families of a search that have this plan."""
    axes, policies = plan.axes, range(len(space.recomputes))
    for core in space.cores(plan.world, {}):
        if (core.tp, core.cp, core.ep, core.precision) != (axes.tp, axes.cp, axes.ep, plan.precision):
            continue
        for pipe in space.pipes(core):
            if (pipe.pp, pipe.micro_batches) == (axes.pp, plan.batch.micro_batches):
                flows = ((schedule, n, offload) for (schedule, offload), n in product(space.flows(pipe), policies))
                alike = [Flow(pipe, *each) for each in flows if each[0].kind == plan.schedule.kind or axes.pp == 1]
                for flow, spread in product(alike, space.spreads(pipe)):
                    if str(space.plan(flow, spread)) == str(plan):
                        return flow, spread
    raise AssertionError(f"no family has {plan}")


@pytest.mark.parametrize("why", ON_CPUS)
def test_no_bound_is_above_what_a_plan_needs_on_processors(why: str) -> None:
    text, spec, seq_len, batch, more = ON_CPUS[why]
    plan, work = Plan.parse(text), Workload(seq_len=seq_len, global_batch=batch, optimizer="sgd", **more)
    where = load_cluster(f"{'cpu' if plan.precision == 'fp32' else 'l4'}:{plan.world}")
    space = Space(profile_of(spec), spec, where, work, load_stack("shardwise-cpu"))
    walk, (flow, spread) = Walk(space, "time", inf), families_of(space, plan)
    needs = estimated(space, plan).needs * (1 + 1e-9)
    assert walk.bounds.plan_size(flow, spread, walk.bounds.flow_size(flow, every_rank=True)) <= needs
    assert walk.bounds.family_size(flow, walk._spreads_of, (), walk.bounds.flow_size(flow)) <= needs
    assert walk.least.of_pipe(flow.pipe, flow.policy) <= needs
    assert walk.least.bare(flow.pipe) <= needs


def test_a_bound_does_not_go_by_what_was_asked_before() -> None:
    space = space_of(SMALL, cluster("h100:4"), Workload(seq_len=512, global_batch=4))
    space = replace(space, stack=load_stack("torchtitan"), allow=("bf16-pure",), forbid=("pp", "cp", "tp"))
    pipes = [pipe for core in space.cores(4, {}) for pipe in space.pipes(core)]
    for order in (pipes, pipes[::-1]):
        bounds = Walk(space, "time", inf).bounds
        for pipe in order:
            assert bounds.pipe_time(pipe, 0) == Walk(space, "time", inf).bounds.pipe_time(pipe, 0), pipe


@pytest.mark.parametrize(("name", "where"), [("mixtral-8x7b", "h100:8"), ("llama-8b", "h100:1x4")])
def test_queues_of_cores_end_where_all_cores_do(monkeypatch: pytest.MonkeyPatch, name: str, where: str) -> None:
    """Beyond `EXACT` devices smaller micro-batches wait for larger ones; of those cut alike one is followed."""
    times = []
    for exact in (walk.EXACT, 1):
        monkeypatch.setattr(walk, "EXACT", exact)
        best = find(preset(name), cluster(where), Workload(seq_len=4096, global_batch=64)).best
        assert best is not None
        times.append(best.time.total)
    assert times[1] == pytest.approx(times[0], rel=ALIKE)


@pytest.mark.parametrize("name", ["shardwise", "shardwise-cpu"])
def test_no_bound_of_a_pipe_is_above_what_its_plans_need(name: str) -> None:
    where = cluster("h100:4", 14) if name == "shardwise" else load_cluster("cpu:4")
    space = replace(space_of(MOE, where, Workload(seq_len=1024, global_batch=4)), stack=load_stack(name))
    walk, tightest = Walk(space, "time", inf), 0.0
    for core in list(space.cores(4, {}))[::19]:
        for pipe in space.pipes(core):
            least = walk.least.of_pipe(pipe)
            for (schedule, offload), policy in product(space.flows(pipe), (0, walk.bounds.leanest(core))):
                flow = Flow(pipe, schedule, policy, offload)
                for plan in (space.plan(flow, spread) for spread in space.spreads(pipe)):
                    if not space.broken(plan):
                        needs = estimated(space, plan).memory.device
                        assert least <= needs, plan
                        tightest = max(tightest, least / needs)
            assert walk.least.fits(core, least) or least == inf
    assert tightest > 0.5


def test_a_bound_of_a_pipeline_takes_its_first_stages_as_they_are() -> None:
    """Those of DeepSeek-V3 are shorter than others: its first three blocks have no experts."""
    space = space_of(preset("deepseek-v3"), load_cluster("h100:8x256"), Workload(seq_len=4096, global_batch=2048))
    core = Core(2048, tp=1, cp=4, ep=64, samples=1, context="ulysses")
    pipe = Pipe(core, pp=8, data=64, micro_batches=32)
    flow, spread = Flow(pipe, Schedule(kind="interleaved", stages_per_rank=4), 0, False), Spread(pipe, 1, 64, 1)
    least = Walk(space, "time", inf).bounds.plan_time(flow, spread)
    total = estimated(space, space.plan(flow, spread)).time.total
    assert 0.95 * total < least <= total


def test_a_bound_runs_the_table_of_a_split_schedule() -> None:
    """With as many micro-batches as ranks it waits most: without, 333 plans were estimated in full.

    And of memory bounds know gradients that wait for the weights' part, logits that wait behind the loss, and what is
    kept where blocks cannot be compiled: without, 189 were.
    """
    sizes = preset("llama-8b")
    found = find_plan(profile_of(sizes), sizes, load_cluster("h100:1x8"), Workload(seq_len=8192, global_batch=8))
    assert found.estimated < 130


def test_passes_shorter_than_their_launches_need_few_full_estimates() -> None:
    """Bounds know which gradients a zero-bubble schedule can move: of such passes hardly any."""
    sizes = preset("bert-large")
    found = find_plan(profile_of(sizes), sizes, load_cluster("h100:8"), Workload(seq_len=512, global_batch=8))
    assert len(found.ranked) == 10 and found.estimated < 100


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "where", "batch", "seconds"),
    [
        ("llama-8b", "h100:8", 64, 1),
        ("mixtral-8x7b", "h100:8", 480, 1),
        ("gpt2-small", "rtx4090:8", 480, 1),
        ("vit-b-16", "mi300x:8", 2520, 1),
        ("llama-405b", "h100:8x2048", 16384, 10),
        ("llama-405b", "h100:8x2048", 2048, 10),
    ],
)
def test_processor_time_of_a_question(model: str, where: str, batch: int, seconds: float) -> None:
    sizes = preset(model)
    workload = Workload(seq_len=min(4096, sizes.max_seq_len), global_batch=batch)
    before = process_time()
    assert find_plan(profile_of(sizes), sizes, load_cluster(where), workload).best is not None
    assert process_time() - before < seconds


@pytest.mark.soak
def test_no_ring_through_all_of_sixteen_thousand_devices_is_chosen() -> None:
    sizes, workload = preset("llama-405b"), Workload(seq_len=8192, global_batch=16384)
    found = find_plan(profile_of(sizes), sizes, load_cluster("h100:8x2048"), workload)
    assert found.best is not None
    assert found.best.plan.axes.dp_shard * found.best.plan.axes.cp < 8192


# ---------------------------------------------------------------- what a search says


@cache
def eight() -> Search:
    return find(preset("llama-8b"), cluster("h100:8"), Workload(seq_len=8192, global_batch=64))


def test_every_ranked_plan_passes_the_table_of_constraints() -> None:
    for each in eight().ranked:
        findings = check(each.plan, spec=preset("llama-8b"), world=8, global_batch=64, seq_len=8192, device="cuda")
        assert not [finding for finding in findings if finding.severity == "error"]


def test_of_zero_1_and_2_that_are_as_fast_the_one_that_never_holds_more_is_taken() -> None:
    """With one micro-batch both reduce each gradient once, and hold the same."""
    spec, workload = preset("llama-8b"), Workload(seq_len=4096, global_batch=8)
    found = find(spec, cluster("h100:8"), workload, top=1)
    assert found.best is not None and found.best.plan.zero == 2
    one = estimated(found.space, found.best.plan.with_(zero=1))
    assert one.time.total == pytest.approx(found.best.time.total)
    assert one.memory.device == pytest.approx(found.best.memory.device)


def test_reasons() -> None:
    found = eight()
    assert found.best is not None
    fields = {decision.field: decision.reason for decision in decisions(found.best, found.space)}
    assert "do not fit" in fields["zero"]
    assert "slower" in why_lost(found.ranked[-1], found)
    assert "compute" in binds(found.best, found.space)


def test_what_binds_is_the_memory_that_is_needed_and_not_what_an_allocator_holds() -> None:
    found = eight()
    assert found.best is not None
    held = replace(found.best, memory=replace(found.best.memory, held=found.space.cluster.device.memory / 4))
    needed = held.needs / found.space.cluster.device.memory
    assert held.memory.device > 1.2 * held.needs
    assert f"{needed:.0%} of memory is needed" in binds(held, found.space)


def test_neighbours_of_an_axis_have_micro_batches_that_their_data_ranks_can_have() -> None:
    """With the plan's own number `pp2` was refused, and `pp8` and `tp2` had micro-batches of twice the size."""
    space = space_of(preset("llama-8b"), cluster("h100:8"), Workload(seq_len=8192, global_batch=32))
    given = estimated(space, Plan.parse("pp4 fsdp2 zero1 / 1f1b mb16 / bf16 / recompute=blocks"))
    reasons = {each.field: each.reason for each in decisions(given, space)}
    assert re.fullmatch(r"pp2 .*mb8: .*; pp8 .*mb32: \S+ (slower|faster)\S*.*", reasons["axes.pp"])
    assert reasons["axes.tp"].startswith("tp2 mb32: ") and "slower" in reasons["axes.tp"]
    assert not [text for text in reasons.values() if "does not divide" in text or "batch.divide" in text]
    fast = estimated(space, Plan.parse("fsdp8 / mb4 / bf16 / recompute=blocks"))
    assert "tp2: " in {each.field: each.reason for each in decisions(fast, space)}["axes.tp"], "fewer are faster there"


def test_neighbours_of_an_axis_take_ranks_from_shards_or_replicas_and_have_the_best_schedule() -> None:
    """`pp4` and `tp2` were refused for shards that were used up (`zero.axis`), and `pp` had a schedule nobody takes."""
    space = space_of(preset("llama-1b"), cluster("a100-80g:4x2"), Workload(seq_len=2048, global_batch=64))

    def reasons_of(plan: str) -> dict[str, str]:
        return {each.field: each.reason for each in decisions(estimated(space, Plan.parse(plan)), space)}

    reasons = reasons_of("pp2 dp2 fsdp2 zero2 / interleaved mb16 / bf16")
    assert "pp4" in reasons["axes.pp"] and "refused" not in reasons["axes.pp"] + reasons["axes.tp"]
    assert "dp2 fsdp1: refused" not in reasons_of("fsdp2 cp4 zero2 / mb16 / bf16")["data"]
    said = re.search(
        r"pp2( \S+ vs\d| zero-bubble\S*| interleaved)( mb\d+)?: ", reasons_of("fsdp8 / mb8 / bf16")["axes.pp"]
    )
    assert said, "one forward, one backward is not the best of two ranks"


def test_what_is_recomputed_is_said_as_a_plan_spells_it() -> None:
    space = space_of(preset("llama-1b"), cluster("h100:2"), Workload(seq_len=2048, global_batch=8))
    for word in ("every2", "75%", "ops"):
        why = decisions(estimated(space, Plan.parse(f"fsdp2 / bf16 / recompute={word}")), space)
        assert next(each.value for each in why if each.field == "recompute.mode") == word


def test_a_neighbour_that_is_forbidden_is_called_so() -> None:
    """It was faster, and nothing said why it was not taken."""
    work = Workload(seq_len=2048, global_batch=8)
    found = find(preset("llama-1b"), cluster("h100:8"), work, forbid=("tp", "dp_shard"))
    assert found.best is not None and found.best.plan.axes.cp == 8
    reasons = {each.field: each.reason for each in decisions(found.best, found.space)}
    assert re.fullmatch(r"cp4: \S+ faster, forbidden \(fsdp\)", reasons["axes.cp"])
    for word in ("compile", "zero2", "accumulation", "bf16", "sequence", "recompute=ops", "interleaved"):
        allow = ("fp16",) if word == "bf16" else ()
        ranked = find(preset("llama-1b"), cluster("h100:8"), work, forbid=(word,), allow=allow).ranked
        assert not [each.plan for each in ranked if word in features_of(each.plan)], word


def test_a_neighbour_without_context_has_none_of_its_options() -> None:
    """`cp1` was refused for an exchange that it does not have."""
    space = space_of(preset("llama-1b"), cluster("h100:2"), Workload(seq_len=2048, global_batch=8))
    given = estimated(space, Plan.parse("cp2 zero2 / mb8 / bf16 / context=gather"))
    reason = {each.field: each.reason for each in decisions(given, space)}["axes.cp"]
    assert re.match(r"cp1( mb\d)?: \S+ (slower|faster)", reason), reason


def test_reasons_speak_of_what_is_to_be_least() -> None:
    work = Workload(seq_len=2048, global_batch=64)
    lean = find(preset("llama-1b"), cluster("h100:8"), work, goal="memory")
    assert lean.best is not None
    for decision in decisions(lean.best, lean.space, "memory"):
        for said in decision.reason.split("; "):
            assert "iB" in said or not said.endswith(("faster", "slower")), said
    said_of = (why_lost(other, lean).split() for other in lean.ranked[1:])
    gaps = [float(words[0]) * {"GiB": 1024, "MiB": 1}[words[1]] for words in said_of if words[0] != "as"]
    assert len(gaps) > 2 and gaps == sorted(gaps), "ranked by what is said"
    cheap = find(preset("llama-1b"), cluster("h100:8x2"), work, goal="cost")
    assert cheap.best is not None and any(other.plan.world != cheap.best.plan.world for other in cheap.ranked)
    for other in cheap.ranked[1:]:
        said = why_lost(other, cheap)
        terms = [float(part.rpartition("+")[2].rstrip("%")) for part in said.split(", ") if "+" in part]
        assert all(term < 50 for term in terms), f"terms of device seconds: {said}"


def test_a_vocabulary_that_kernels_dislike_is_named() -> None:
    work = Workload(seq_len=1024, global_batch=32)
    for model, named in (("gpt2-large", True), ("llama-1b", False)):
        found = find(preset(model), cluster("h100:1"), work)
        assert found.best is not None
        assert ("the vocabulary's 50,257; 50,304 would be one" in binds(found.best, found.space)) == named


def test_the_front_holds_what_nothing_beats() -> None:
    found = eight()
    assert len(found.front) > 10
    for each in found.front:
        assert each in found.seen
        assert not any(other.time.total < each.time.total and other.needs < each.needs for other in found.seen)
    assert found.best is not None
    assert found.front[-1].time.total <= found.best.time.total * (1 + ALIKE)


FRONTS = [
    (SMALL, "h100:2", 80, 2048, 2),
    (SMALL, "h100:3x2", 12, 1024, 3),
    (MOE, "h100:4", 14, 1024, 2),
    (replace(preset("qwen-0.5b"), num_layers=4), "h100:2", 80, 1024, 6),
    (replace(preset("bert-base"), num_layers=3), "h100:4", 10, 512, 3),
]


@pytest.mark.share(4)
@pytest.mark.parametrize(("spec", "where", "gib", "seq_len", "batch"), FRONTS)
def test_the_front_is_that_of_all_plans(spec: ModelSpec, where: str, gib: float, seq_len: int, batch: int) -> None:
    """In full where no point is left out; else within the share that points are apart, and of plans of the whole."""
    there, workload = cluster(where, gib), Workload(seq_len=seq_len, global_batch=batch)
    space = space_of(spec, there, workload)
    fits = [each for each in (estimated(space, plan) for plan in every_plan(space)) if each.memory.fits]
    expected: list[tuple[float, float]] = []
    for time, size in sorted((each.time.total, each.needs) for each in fits):
        if not expected or size < expected[-1][1]:
            expected.append((time, size))
    limit = there.device.memory
    whole = [(each.time.total, each.needs) for each in front_of(space, limit, apart=0.0)]
    for got, needed in zip(whole, expected, strict=True):
        assert got == pytest.approx(needed, rel=1e-9)
    few = [(each.time.total, each.needs) for each in find(spec, there, workload).front]
    assert min(size for _, size in few) <= expected[-1][1] * (1 + 2 * ALIKE)
    for time, size in expected:
        assert any(t <= time * (1 + 2 * ALIKE) and s <= size * (1 + 1.1 * APART) for t, s in few)


def test_the_front_leaves_undivided_what_leaner_plans_rule_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes of which only plans with offloaded states fit wait until those could come out: 139 are divided."""
    divided, divide = [0], FrontWalk._divide_flow

    def counted(walk: FrontWalk, flow: Flow) -> None:
        divided[0] += 1
        divide(walk, flow)

    monkeypatch.setattr(FrontWalk, "_divide_flow", counted)
    spec, work = preset("llama-8b"), Workload(seq_len=4096, global_batch=8)
    assert len(find(spec, load_cluster("h100:8"), work, headroom=HEADROOM).front) > 20
    assert divided[0] < 1000


def test_rows_that_refuse_a_flow_refuse_all_its_plans() -> None:
    where, workload = cluster("h100:8"), Workload(seq_len=1024, global_batch=8)
    space = replace(space_of(MIXED, where, workload), allow=("fp8", "fp16"))
    refused = 0
    for core in list(space.cores(8, {}))[::23]:
        for pipe in space.pipes(core):
            for (schedule, offload), policy in product(space.flows(pipe), range(len(space.recomputes))):
                flow = Flow(pipe, schedule, policy, offload)
                for spread in list(space.spreads(pipe))[::3]:
                    row, legal = space.refuses(flow, spread.zero), not space.broken(space.plan(flow, spread))
                    assert not (row and legal), space.plan(flow, spread)
                    refused += bool(row)
    assert refused


def test_looped_schedules_are_tried_with_what_divides_the_blocks_of_a_rank() -> None:
    space = space_of(replace(preset("llama-1b"), num_layers=24), cluster("h100:8"), TINY)
    tried = {schedule.stages for schedule in space.schedules(4) if schedule.kind == "interleaved"}
    assert tried == {2, 3, 4, 6}


def test_nothing_fits_gives_the_plan_that_needs_least() -> None:
    found = find(SMALL, cluster("h100:2", 1.5), Workload(seq_len=8192, global_batch=2))
    assert found.best is None
    assert found.nearest is not None
    assert found.nearest.memory.device > 1.5 * GIB


def test_forbidden_features_are_not_used() -> None:
    where, workload = cluster("h100:8"), Workload(seq_len=8192, global_batch=64)
    plan = find(preset("llama-8b"), where, workload, forbid=("dp_shard", "cp"), top=1).ranked[0].plan
    assert plan.axes.dp_shard == plan.axes.cp == 1


def test_blocks_are_compiled_where_no_row_refuses_it() -> None:
    where, workload = cluster("h100:8"), Workload(seq_len=8192, global_batch=64)
    assert find(preset("llama-8b"), where, workload, top=1).ranked[0].plan.compile
    assert not find(preset("llama-8b"), where, workload, forbid=("compile",), top=1).ranked[0].plan.compile
    assert not find(MOE, where, Workload(seq_len=512, global_batch=64), top=1).ranked[0].plan.compile
    space = space_of(preset("llama-8b"), where, workload)
    plans = ("fsdp8 / mb8", "fsdp4 cp2 / mb8", "pp2 fsdp4 zero2 / zero-bubble mb8", "pp2 fsdp4 zero2 / 1f1b mb8")
    assert [space.compiles(Plan.parse(f"{text} bf16")) for text in plans] == [True, False, False, True]


def test_float8_only_where_it_is_allowed() -> None:
    where, workload = cluster("h100:8"), Workload(seq_len=8192, global_batch=64)
    allowed = find(preset("llama-8b"), where, workload, allow=("fp8",), top=1).ranked[0]
    assert allowed.plan.float8.recipe != "none"
    assert eight().best is not None
    assert eight().best.plan.float8.recipe == "none"  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="a100-80g has no unit"):
        find(preset("llama-8b"), cluster("a100-80g:8"), workload, allow=("fp8",))


@pytest.mark.parametrize(("option", "word"), [("allow", "fp9"), ("forbid", "tensor"), ("goal", "speed")])
def test_unknown_words_are_refused(option: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        find(
            SMALL,
            cluster("h100:1"),
            Workload(seq_len=128, global_batch=1),
            **{option: word if option == "goal" else (word,)},
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top": 0}, "top: found 0"),
        ({"headroom": float("nan")}, "headroom: found nan"),
        ({"headroom": 1.5}, "headroom: found 1.5"),
        ({"forbid": "pp"}, r"needed a list of words, as \['pp'\]"),
        ({"stack": "shardwise"}, "needed a Stack"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find(SMALL, cluster("h100:1"), Workload(seq_len=128, global_batch=1), **options)
    with pytest.raises(UsageError, match="needed a Cluster"):
        find(SMALL, cast(Cluster, "h100:1"), Workload(seq_len=128, global_batch=1))  # as a user may
    with pytest.raises(ConfigError, match="found True"):
        Workload(seq_len=True, global_batch=1)


def test_what_fits_nowhere_on_a_cpu_is_found_soon() -> None:
    """Gradients, which are there in the backward pass alone, are in the bounds: 22 plans are estimated, not 1,400."""
    sizes = preset("tiny-moe")
    walk = Walk(space_of(sizes, load_cluster("cpu:4"), Workload(seq_len=128, global_batch=64)), "memory", inf)
    assert walk.run(1) and walk.estimated < 100


def test_every_feature_can_be_forbidden() -> None:
    for word in (*FEATURES, *OPT_IN):
        allow = ("fp32",) if word == "bf16" else ()
        assert not replace(space_of(SMALL, cluster("h100:1"), TINY), forbid=(word,), allow=allow).has(word)


@pytest.mark.parametrize(
    ("where", "forbid", "allow", "precision"),
    [("cpu:2", "fp32", ("fp16",), "fp16"), ("h100:2", "bf16", ("fp32",), "fp32"), ("cpu:2", "bf16", (), "fp32")],
)
def test_the_usual_type_can_be_forbidden(where: str, forbid: str, allow: tuple[str, ...], precision: str) -> None:
    """It was planned in all the same; alone it is refused, as nothing would be left."""
    options: dict[str, Any] = {"forbid": (forbid,), "top": 1}
    best = find(SMALL, load_cluster(where), TINY, allow=allow, **options).best
    assert best is not None and best.plan.precision == precision
    if allow:
        with pytest.raises(UsageError, match=f"found '{forbid}', in which plans for .* allow one"):
            find(SMALL, load_cluster(where), TINY, **options)


def test_one_device_is_told_what_offloading_would_do() -> None:
    """Without data ranks too, where nothing fits: the host is what lacks."""
    found = find(preset("llama-70b"), load_cluster("h100:1"), Workload(seq_len=4096, global_batch=1))
    assert found.best is None and found.nearest is not None and str(found.nearest.plan).startswith("dp1 / ")
    [reason] = [each.reason for each in decisions(found.nearest, found.space) if each.field == "offload.state"]
    assert "GiB do not fit (with recompute=blocks" in reason and "of host memory per device" in reason


def test_plans_that_need_as_little_are_as_good() -> None:
    """Of the goal `memory`: within what counts as equal, where one that needs a little less stood with a minus."""
    found = find(preset("tiny"), load_cluster("cpu:4"), Workload(seq_len=64, global_batch=4), goal="memory")
    said = [why_lost(other, found) for other in found.ranked[1:]]
    assert "as good; the best one is simpler" in said and any(why.startswith("+") for why in said)
    assert not any(why.startswith("-") for why in said)


def test_a_batch_that_cannot_be_divided() -> None:
    where, workload = cluster("h100:7"), Workload(seq_len=1024, global_batch=3)
    with pytest.raises(PlanError, match="7"):
        find(SMALL, where, workload, forbid=("pp", "cp", "tp"))


def test_what_a_model_cannot_have_is_no_choice_and_no_advice() -> None:
    """As `forbid` but for what is said of it: nobody can forbid less, and neighbours give the reason."""
    left_out = (("tp", "module.chain"), ("pp", "module.no-blocks"), ("recompute", "module.no-blocks"))
    where, workload = cluster("h100:4"), Workload(seq_len=1024, global_batch=8)
    found = find(SMALL, where, workload, left_out=left_out)
    assert found.ranked == find(SMALL, where, workload, forbid=("tp", "pp")).ranked
    assert found.best is not None
    reasons = {each.field: each.reason for each in decisions(found.best, found.space)}
    assert reasons["axes.tp"] == "tp2: left out: a forward that is not a chain of blocks (module.chain)"
    blocks = "a model without repeated blocks, or whose blocks are not found (module.no-blocks)"
    assert f"recompute=ops: left out: {blocks}" in reasons["recompute.mode"]
    with pytest.raises(PlanError) as refused:
        find(SMALL, cluster("h100:3"), workload, left_out=(*left_out, ("cp", "module.chain")))
    assert "refused by: the batch, for a model without tp, pp, recompute, cp; a global batch" in str(refused.value)
    assert "forbid" not in str(refused.value)
    with pytest.raises(PlanError, match="what is forbidden, for a model without tp, .*; or forbid less than cp$"):
        find(SMALL, cluster("h100:3"), workload, left_out=left_out, forbid=("cp",))


def test_what_does_not_train_gets_no_plan() -> None:
    spec = replace(SMALL, tie_embeddings=False, vocab_size=1024)
    profile = profile_of(spec)
    blocks = [replace(block, frozen=block.params) for block in profile.blocks]
    where, workload = cluster("h100:2"), Workload(seq_len=1024, global_batch=8)
    head = replace(profile.head, frozen=profile.head.params)
    frozen = replace(profile, blocks=tuple(blocks), frozen=profile.embedding, head=head)
    with pytest.raises(ModelError, match="no trainable parameter: found requires_grad=False on all"):
        find_plan(frozen, spec, where, workload)
    later = replace(frozen, blocks=(*blocks[:2], *profile.blocks[2:]), head=profile.head)
    forbid = ("dp_replicate", "dp_shard", "tp", "cp")
    found = find_plan(later, spec, where, workload, forbid=forbid)
    assert found.best is not None and found.best.plan.schedule.stages > 1  # so that the first rank has a trained one
    forbid += ("interleaved", "looped-bfs", "zero-bubble", "zero-bubble-v", "dualpipe-v")
    assert find_plan(profile, spec, where, workload, forbid=forbid).best is not None
    with pytest.raises(PlanError, match=r"refused by: pp.frozen \("):
        find_plan(later, spec, where, workload, forbid=forbid)


# ---------------------------------------------------------------- properties

Pair = tuple[Profile, Plan]
PLANS = ["dp4", "fsdp4", "fsdp4 zero2", "fsdp4 zero1 / mb2", "dp2 fsdp2", "fsdp2 tp2", "tp4", "fsdp2 cp2", "cp4"]
PLANS += ["pp2 fsdp2 zero2 / mb4", "pp4 / mb8", "pp2 tp2 / interleaved mb4", "pp2 dp2 / zero-bubble-v mb4", "tp2 cp2"]
PLANS += ["fsdp4 / recompute=blocks", "fsdp4 / recompute=ops", "fsdp4 / recompute=every2", "fsdp4 / offload=state"]
PLANS += ["fsdp2 tp2 / seq loss-parallel", "fsdp2 cp2 / context=ulysses", "fsdp4 / offload=activations"]
dense = st.tuples(st.just(SMALL), st.sampled_from(PLANS))
FEW = [text for text in PLANS if (plan := Plan.parse(text)).axes.pp * plan.schedule.stages <= MOE.num_layers]
mixture = st.tuples(st.just(MOE), st.sampled_from([*FEW, "fsdp4 ep4", "fsdp4 ep2 zero1", "fsdp2 tp2 ep2 / seq"]))
pairs = st.one_of(dense, mixture).map(lambda pair: (profile_of(pair[0]), Plan.parse(f"{pair[1]} bf16")))
lengths, batches = st.sampled_from([512, 2048, 8192]), st.sampled_from([32, 64])
workloads = st.builds(Workload, seq_len=lengths, global_batch=batches)
CLUSTERS = st.sampled_from(["h100:4", "a100-80g:2x2", "l4:1x4", "b200:4", "mi300x:2x2"]).map(load_cluster)


@settings(max_examples=100, deadline=None)
@given(pairs, workloads, st.floats(1.0, 8.0))
def test_more_memory_never_makes_a_plan_illegal(pair: Pair, workload: Workload, more: float) -> None:
    profile, plan = pair
    device = cluster("h100:4", 4).device
    before = estimate_memory(profile, plan, workload, device=device)
    after = estimate_memory(profile, plan, workload, device=replace(device, memory=device.memory * more))
    assert after.device - after.held == pytest.approx(
        before.device - before.held, rel=1e-12
    )  # a full device gets back what streams hold
    assert after.fits or not before.fits


@settings(max_examples=100, deadline=None)
@given(pairs, workloads, CLUSTERS)
def test_doubling_all_bandwidths_never_slows_a_step(pair: Pair, workload: Workload, there: Cluster) -> None:
    profile, plan = pair
    faster = there.with_(
        device=replace(there.device, bandwidth=2 * there.device.bandwidth),
        local=replace(there.local, bandwidth=2 * there.local.bandwidth),
        network=replace(there.network, bandwidth=2 * there.network.bandwidth),
        host_bandwidth=2 * there.host_bandwidth,
    )
    before = estimate_time(profile, there, plan, workload).total
    assert estimate_time(profile, faster, plan, workload).total <= before * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(pairs, workloads, st.sampled_from(["cp1", "tp1", "pp1", "ep1", "dp1"]))
def test_an_axis_of_size_1_changes_nothing(pair: Pair, workload: Workload, axis: str) -> None:
    profile, plan = pair
    words = str(plan).split(" / ")
    if re.search(rf"\b{axis[:-1]}[0-9]", words[0]):
        return
    same, there = Plan.parse(" / ".join([f"{words[0]} {axis}", *words[1:]])), load_cluster("h100:4")
    assert estimate_time(profile, there, same, workload) == estimate_time(profile, there, plan, workload)
    assert estimate_memory(profile, same, workload) == estimate_memory(profile, plan, workload)


@settings(max_examples=100, deadline=None)
@given(pairs, workloads, CLUSTERS)
def test_terms_sum_to_the_total(pair: Pair, workload: Workload, there: Cluster) -> None:
    profile, plan = pair
    step = estimate_time(profile, there, plan, workload)
    assert sum(step.terms.values()) == pytest.approx(step.total)
    assert all(value >= 0 for value in step.terms.values())
    memory = estimate_memory(profile, plan, workload)
    for rank in memory.stages:
        assert sum(rank.terms.values()) == pytest.approx(rank.allocated)
        assert all(value >= 0 for value in rank.terms.values())


@pytest.mark.parametrize(
    ("model", "batch"), [("mixtral-8x7b", 8), ("mixtral-8x7b", 480), ("llama-70b", 8), ("llama-8b", 100_003)]
)
def test_bounds_leave_few_plans_where_states_must_be_on_the_host_or_the_batch_is_a_prime(
    model: str, batch: int
) -> None:
    sizes, work = preset(model), Workload(seq_len=4096, global_batch=batch)
    where = load_cluster("h100:8" if batch < 100_000 else "h100:8x2")
    found = find_plan(profile_of(sizes), sizes, where, work)
    assert found.ranked and found.estimated < 1500


@pytest.mark.parametrize(("where", "batch"), [("mi300x:8", 480), ("b200:8", 600)])
def test_of_plans_that_wait_for_data_alike_few_are_estimated_and_the_simplest_is_first(where: str, batch: int) -> None:
    sizes = preset("vit-b-16")
    work = Workload(seq_len=196, global_batch=batch, optimizer="adamw-8bit", sample_bytes=4.0 * 3 * 16**2 * 196)
    found = find_plan(profile_of(sizes), sizes, load_cluster(where), work, allow=("bf16-pure",))
    assert found.best is not None and found.best.time.terms["loading"] > 0
    assert found.estimated < 100
    assert [each.plan for each in found.ranked] == ranked_by_hand(found.met, top=len(found.ranked))


def test_what_is_nearest_to_fit_is_found_among_single_samples() -> None:
    sizes, work = preset("qwen3-235b-a22b"), Workload(seq_len=4096, global_batch=480)
    found = find_plan(profile_of(sizes), sizes, load_cluster("h100:8"), work)
    assert not found.ranked and found.nearest is not None and found.nearest.plan.batch.micro_batches >= 60
