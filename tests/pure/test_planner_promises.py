"""What a planner's numbers promise one another: more sharding needs less, `estimate` says what `plan` said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware.cluster import GIB, load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.advice import advise
from shardwise.plan.memory import Memory, estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.search import find_plan
from shardwise.plan.timing import estimate_time
from shardwise.plan.workload import Workload

H100 = load_cluster("h100:8")
SPEC = preset("llama-8b")
LLAMA = profile_of(SPEC)
WORK = Workload(seq_len=8192, global_batch=8)


def memory(text: str, layers: int = 32, work: Workload = WORK) -> Memory:
    return estimate_memory(profile_of(replace(SPEC, num_layers=layers)), Plan.parse(text), work, device=H100.device)


@pytest.mark.parametrize("layers", [1, 2, 32])
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16", "fp32"])
def test_a_higher_stage_of_zero_never_needs_more(precision: str, layers: int) -> None:
    sizes = [memory(f"fsdp8 zero{stage} / {precision}", layers).allocated for stage in (1, 2, 3)]
    assert sizes[0] >= sizes[1] * (1 - 1e-9) and sizes[1] >= sizes[2] * (1 - 1e-9), sizes


def test_whole_weights_are_gathered_below_zero_3_where_shards_are_kept() -> None:
    for text in ("fsdp8 zero1 / bf16-pure", "fsdp8 zero2 / bf16-pure"):
        assert memory(text).worst.terms["gathered"] == pytest.approx(2 * LLAMA.num_params)
    assert "gathered" not in memory("dp8 / bf16-pure").worst.terms


def test_a_rank_of_one_block_gathers_one() -> None:
    """And its gradient, and the larger of embedding and head: no block lies ahead of it."""
    block, end = (memory("fsdp8 / bf16", layers).worst.terms["gathered"] for layers in (1, 2))
    params = SPEC.num_params - replace(SPEC, num_layers=31).num_params
    assert end - block == pytest.approx(2 * params)
    assert memory("fsdp8 / bf16", 3).worst.terms["gathered"] == end


@pytest.mark.parametrize("policy", ["", " recompute=blocks", " recompute=ops", " recompute=every2", " recompute=50%"])
@pytest.mark.parametrize("axes", ["fsdp8", "fsdp2 pp4", "dp8"])
@pytest.mark.parametrize("layers", [8, 32])
def test_offloaded_activations_never_need_more(axes: str, policy: str, layers: int) -> None:
    texts = [f"{axes} / mb4 bf16{policy}{more}" for more in (" offload=activations", "")]
    there, here = (memory(text, layers, replace(WORK, global_batch=32)) for text in texts)
    assert there.allocated <= here.allocated * (1 + 1e-9)


def test_what_a_recomputed_block_keeps_on_the_host_is_its_input() -> None:
    whole, inputs = (
        memory(f"fsdp8 bf16 / {policy} offload=activations").worst.terms["activations"]
        for policy in ("recompute=every99", "recompute=blocks")
    )
    block = 8192 * 4096 * 2
    assert memory("fsdp8 bf16 / recompute=blocks").worst.terms["activations"] - inputs == pytest.approx(30 * block)
    assert whole > inputs


def test_gradients_of_offloaded_states_are_on_the_host() -> None:
    assert memory("fsdp8 / bf16 / recompute=blocks").held > GIB
    offloaded = memory("fsdp8 / bf16 / recompute=blocks offload=state")
    assert offloaded.held == offloaded.worst.freed > 0, "what a recomputed block left"


def test_more_memory_changes_no_answer_for_least_memory() -> None:
    spec, work = replace(SPEC, num_layers=8), Workload(seq_len=1024, global_batch=24)
    answers = set()
    for gib in (14, 40, 80):
        cluster = H100.with_(device=replace(H100.device, memory=gib * GIB))
        best = find_plan(profile_of(spec), spec, cluster, work, goal="memory", top=1).best
        assert best is not None
        answers.add((str(best.plan), round(best.needs)))
    assert len(answers) == 1


def test_what_is_nearest_is_what_needs_least() -> None:
    spec, work = replace(SPEC, num_layers=4), Workload(seq_len=512, global_batch=2)
    words = {"forbid": ("offload", "compile"), "top": 1}
    small = H100.with_(device=replace(H100.device, memory=GIB))
    nearest = find_plan(profile_of(spec), spec, small, work, **words).nearest
    best = find_plan(profile_of(spec), spec, H100, work, goal="memory", **words).best
    assert nearest is not None and best is not None and nearest.plan == best.plan


def test_float8_is_in_the_estimate_of_its_plan() -> None:
    found = find_plan(LLAMA, SPEC, H100, Workload(seq_len=8192, global_batch=64), allow=("fp8",), top=1).best
    assert found is not None and found.plan.float8.recipe != "none"
    work = Workload(seq_len=8192, global_batch=64)
    assert estimate_time(LLAMA, H100, found.plan, work).total == found.time.total
    assert estimate_memory(LLAMA, found.plan, work, device=H100.device) == found.memory
    slower = found.plan.with_(float8=Plan().float8)
    assert estimate_time(LLAMA, H100, slower, work).total > 1.1 * found.time.total


def test_advice_names_a_preset_only_where_it_is_one() -> None:
    spec, work = preset("llama-70b"), Workload(seq_len=2048, global_batch=16)
    named, measured = load_cluster("l4:2"), replace(load_cluster("l4:2"), name="l4:2x1, measured", host_bandwidth=9e9)
    for cluster, says in ((named, "(l4:2x"), (measured, "nodes in place of 1")):
        found = find_plan(profile_of(spec), spec, cluster, work)
        assert found.best is None
        (nodes,) = (each.change for each in advise(found.space) if "nodes in place" in each.change)
        assert says in nodes and ("(" in nodes) == (cluster is named)
