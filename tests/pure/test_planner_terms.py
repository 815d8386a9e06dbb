"""Terms that few plans have: loading of data, uneven experts, Muon's update, memory outside of steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.hardware.cluster import Cluster, Link, Loading, load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec, preset
from shardwise.plan.costs.hosts import HOST_ALONE, hosted_times, moved_bytes
from shardwise.plan.costs.links import Group, collective_time
from shardwise.plan.hosting import assumed_of
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.division import divide
from shardwise.plan.ranks.imbalance import busiest
from shardwise.plan.search import every_plan, find_plan
from shardwise.plan.searching.space import Space
from shardwise.plan.stack import Stack, load_stack
from shardwise.plan.time_terms.datatime import Sends, exposed_time, rounds_of, sends_of, wire_of
from shardwise.plan.time_terms.loading import is_decoded, loading_time, said
from shardwise.plan.timing import STRAGGLERS, StepTime, estimate_time
from shardwise.plan.updating import Matrix, matrices, newton_schulz_time
from shardwise.plan.workload import Workload

H100 = load_cluster("h100:8")
LLAMA = profile_of(preset("llama-8b"))
MIXTRAL = profile_of(preset("mixtral-8x7b"))
WORK = Workload(seq_len=4096, global_batch=16)
PICTURES = replace(WORK, sample_bytes=3 * 224 * 224 * 4)


def time_of(plan: str, work: Workload = WORK, profile=LLAMA, cluster=H100) -> StepTime:
    return estimate_time(profile, cluster, Plan.parse(plan), work)


@pytest.mark.parametrize(
    ("stack", "times"),
    [("torchtitan", 8), ("deepspeed", 4.5), ("megatron-core", 1), ("megatron-bridge", 1)],
)
def test_what_stays_on_the_device_moves_once_a_step_beside_offloaded_states(stack: str, times: float) -> None:
    """Megatron-Core adds gradients up on the device and copies them and new weights once; DeepSpeed on the host."""
    moved = replace(load_stack(stack), overlap_data=0.0)
    work, node = replace(WORK, global_batch=64), load_cluster("h100:8")
    one, eight = (
        estimate_time(LLAMA, node, Plan.parse(f"dp8 zero1 / mb{n} / bf16 / offload=state"), work, stack=moved)
        for n in (1, 8)
    )
    assert eight.terms["offload"] == pytest.approx(times * one.terms["offload"])


def test_deepspeed_adds_gradients_of_offloaded_states_up_on_the_host() -> None:
    """By its code: in 16 bits there and back, the sum in fp32, and new weights, which zero 3 casts on the host."""
    stack, work = load_stack("deepspeed"), replace(WORK, global_batch=8)
    ways = {(zero, n): moved_bytes(work, (zero, n), stack) for zero in (2, 3) for n in (1, 4)}
    assert ways == {(2, 1): (0, 8), (2, 4): (0, 20), (3, 1): (0, 10), (3, 4): (0, 22)}
    assert moved_bytes(work, (3, 4), replace(stack, offloads_weights=True)) == (16, 22)
    assert moved_bytes(work, (2, 4), replace(stack, casts_on_host=True)) == (0, 18)
    node = load_cluster("h100:8")
    third, second = (hosted_times(work, (zero, 1), stack, node, 8)[0] for zero in (3, 2))
    assert third == 2 * second > 0 == hosted_times(work, (3, 1), load_stack("torchtitan"), node, 8)[0]


def test_a_rank_alone_has_its_hosts_cores_for_itself() -> None:
    one, eight = (
        time_of(f"{axes} zero3 / bf16 / offload=state", cluster=load_cluster(f"v100:{ranks}"))
        for axes, ranks in (("dp1", 1), ("fsdp8", 8))
    )
    assert one.terms["optimizer"] == pytest.approx(8 / HOST_ALONE * eight.terms["optimizer"])
    alone = load_cluster("v100:1")
    assert assumed_of(Plan.parse("dp1 zero3 / offload=state"), alone) == [
        "offloaded states are updated at 14 GB/s, 120% of a device's link to its host"
    ]


# ---------------------------------------------------------------- loading


def test_token_rows_are_loaded_behind_the_step() -> None:
    step = time_of("fsdp8 bf16")
    assert "loading" not in step.terms
    assert step.hidden["loading"] == pytest.approx(16 * 4096 * 8 / 2e9)


def test_a_node_loads_the_rows_of_each_of_its_ranks() -> None:
    """Ranks of `tp` have the same rows, and each reads them."""
    slow = H100.with_(loading=Loading(rows=1e6))
    for plan, rows in (("fsdp8", 16), ("tp8", 8 * 16), ("fsdp4 tp2 / mb2", 2 * 16)):
        division = divide(LLAMA, Plan.parse(plan), WORK)
        assert loading_time(division, slow) == pytest.approx(rows * 4096 * 8 / 1e6)
    division = divide(LLAMA, Plan.parse("fsdp16"), WORK)
    assert loading_time(division, load_cluster("h100:8x2").with_(loading=Loading(rows=1e6))) == pytest.approx(
        8 * 4096 * 8 / 1e6
    )


def test_what_a_step_does_not_hide_is_a_term() -> None:
    slow = H100.with_(loading=Loading(decoded=1e6))
    without, with_it = time_of("fsdp8 bf16", cluster=slow), time_of("fsdp8 bf16", PICTURES, cluster=slow)
    needed = 16 * 3 * 224 * 224 * 4 / 1e6
    assert with_it.total == pytest.approx(needed)
    assert with_it.terms["loading"] == pytest.approx(needed - without.total)
    assert with_it.hidden["loading"] == pytest.approx(without.total)
    many = load_cluster("h100:8x2").with_(loading=Loading(decoded=1e6))  # the slowest node's loaders set the pace
    assert time_of("fsdp16 bf16", PICTURES, cluster=many).total == pytest.approx(needed / 2 * (1 + STRAGGLERS))


def test_what_is_no_row_of_ids_is_decoded() -> None:
    assert not is_decoded(LLAMA, WORK) and is_decoded(LLAMA, PICTURES)
    assert not is_decoded(replace(LLAMA, given=24), WORK)  # ids, places, a mask
    assert is_decoded(replace(LLAMA, given=4), WORK) and is_decoded(replace(LLAMA, given=200_704), WORK)


def test_what_loads_is_assumed_and_said_so_until_somebody_says_it(tmp_path: Path) -> None:
    assert said(LLAMA, H100, WORK) == [
        "data loading: 2 GB/s of token rows per node, read ahead (`loading.rows` of a cluster file)"
    ]
    assert "4 GB/s of decoded samples" in said(LLAMA, H100, PICTURES)[0]
    path = tmp_path / "cluster.toml"
    H100.save(path)
    assert load_cluster(path).loading == Loading()
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('origin = "assumed"', 'origin = "read"').replace("2000000000.0", "5e9"), "utf-8")
    known = load_cluster(path)
    assert known.loading == Loading(rows=5e9, origin="read") and said(LLAMA, known, WORK) == []
    part = text.replace("decoded = 4000000000.0\n", "").replace('origin = "assumed"\n', "")
    assert part != text
    path.write_text(part, "utf-8")
    half = load_cluster(path)  # the file says one of both
    assert half.loading.origin == "read" and said(LLAMA, half, WORK) == []
    assert said(LLAMA, half, PICTURES)[0].startswith("data loading: 4 GB/s of decoded samples")
    path.write_text(text.replace("2000000000.0", "2.0"), "utf-8")
    with pytest.raises(ConfigError, match=r"loading.rows: found 2, needed bytes per second.*2 looks like GB/s"):
        load_cluster(path)


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("text", ["fsdp8 ep8 bf16", "fsdp8 ep4 bf16 / mb2", "pp2 fsdp4 ep4 bf16 / 1f1b mb4"])
def test_uneven_experts_have_a_term_of_their_own(text: str) -> None:
    even, uneven = time_of(text, profile=MIXTRAL), time_of(text, replace(WORK, imbalance=1.5), MIXTRAL)
    assert "imbalance" not in even.terms
    assert uneven.total == pytest.approx(sum(uneven.terms.values()))
    for name in ("compute", "expert"):
        assert uneven.terms[name] == pytest.approx(even.terms[name])
    assert uneven.terms["imbalance"] > 0.4 * even.terms["expert"] and min(uneven.terms.values()) >= 0
    assert uneven.flops == even.flops and uneven.mfu < even.mfu


def test_the_exchange_grows_with_the_busiest_rank() -> None:
    """Links so slow that nothing else counts."""
    slow = H100.with_(local=Link(bandwidth=1e8, latency=0.0))
    stack = replace(load_stack("megatron-core"), overlap_data=1.0, overlap_expert=0.0)

    def total(imbalance: float) -> float:
        work = replace(WORK, imbalance=imbalance)
        return estimate_time(MIXTRAL, slow, Plan.parse("fsdp8 ep8 bf16"), work, stack=stack).terms.get("imbalance", 0.0)

    expert = estimate_time(MIXTRAL, slow, Plan.parse("fsdp8 ep8 bf16"), WORK, stack=stack).terms["expert"]
    assert total(1.5) == pytest.approx(0.5 * expert, rel=0.02)
    assert total(8.0) == total(100.0), "at most all tokens come to one rank"


def test_without_ep_every_rank_has_as_many_tokens() -> None:
    plan = Plan.parse("fsdp8 bf16")
    assert busiest(MIXTRAL, plan, replace(WORK, imbalance=3.0)) is MIXTRAL
    assert busiest(LLAMA, Plan.parse("fsdp8 ep8"), replace(WORK, imbalance=3.0)).blocks == LLAMA.blocks


def test_the_busiest_rank_keeps_more() -> None:
    plan = Plan.parse("fsdp8 ep8 bf16")
    even, uneven = (
        estimate_memory(MIXTRAL, plan, replace(WORK, imbalance=imbalance)).worst.terms["activations"]
        for imbalance in (1.0, 1.5)
    )
    spec, tokens = preset("mixtral-8x7b"), 2 * 4096
    of_experts = 2 * (spec.dim + 4 * spec.ffn_dim) * 2 * tokens * spec.num_layers  # input, gate and up, silu, product
    assert uneven - even == pytest.approx(0.5 * of_experts, rel=0.01)


@pytest.mark.parametrize(("name", "value"), [("imbalance", 0.5), ("imbalance", float("inf")), ("sample_bytes", -1.0)])
def test_what_no_workload_has_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"workload: {name}: found {value}"):
        replace(WORK, **{name: value})


# ---------------------------------------------------------------- muon


def test_muon_makes_each_matrix_of_a_block_orthogonal() -> None:
    found = matrices(LLAMA.blocks[0])
    assert sorted(m.num_params for m in found) == sorted([4096 * 4096] * 2 + [1024 * 4096] * 2 + [4096 * 14336] * 3), (
        "queries, keys and values are three, gate and up two"
    )
    assert all(m.split for m in found)
    assert Matrix(1024, 4096, True).flops == 5 * (4 * 1024**2 * 4096 + 2 * 1024**3)
    assert {(m.rows, m.columns, m.split) for m in matrices(MIXTRAL.blocks[0])} == {
        (4096, 4096, True), (1024, 4096, True), (8, 4096, False)
    }, "experts are stacked, and stepped by AdamW"  # fmt: skip


def test_ranks_share_muons_matrices_out() -> None:
    work, stack = replace(WORK, optimizer="muon"), load_stack("shardwise")
    order = sorted(matrices(LLAMA.blocks[0]), key=lambda matrix: -matrix.flops)

    def seconds(layers: int, ranks: int) -> float:
        firsts = [matrix for matrix in order for _ in range(layers)][::ranks]
        return sum(newton_schulz_time(matrix, Plan.parse("bf16"), H100, stack) for matrix in firsts)

    for text in ("dp8 bf16", "fsdp8 bf16", "dp2 fsdp4 bf16", "fsdp4 tp2 bf16", "tp8 bf16"):
        terms = time_of(text, work).terms
        assert terms["muon"] == pytest.approx(seconds(32, 8)) and terms["update-sends"] > 0
    assert time_of("pp2 fsdp4 bf16 / mb2", work).terms["muon"] == pytest.approx(
        seconds(17, 4)
    )  # the other has the head
    nominal = 32 * sum(matrix.flops for matrix in order) / 8 / H100.device.rates.fp32
    assert nominal < seconds(32, 8) < 2.5 * nominal
    wide = Matrix(4096, 4096, False)
    plan = Plan.parse("bf16")
    fast = newton_schulz_time(wide, plan.with_(tf32=True), H100, stack)
    assert fast < newton_schulz_time(wide, plan, H100, stack) / 3
    assert not {"muon", "update-sends"} & time_of("fsdp8 bf16").terms.keys()


def test_on_a_device_alone_all_codes_iterate_alike_and_others_in_16_bits() -> None:
    work, other = replace(WORK, optimizer="muon"), load_stack("eager")

    def muon(plan: str, cluster: Cluster, stack: Stack | None) -> float:
        time = estimate_time(profile_of(preset("llama-1b")), cluster, Plan.parse(plan), work, stack=stack)
        return time.terms.get("muon", 0.0)

    ours, theirs = (muon("bf16", load_cluster("h100:1"), stack) for stack in (None, other))
    assert 0 < theirs < 0.5 * ours
    assert muon("fsdp8 bf16", H100, None) > 0 == muon("fsdp8 bf16", H100, other), "how others share them is not known"


def test_the_search_finds_the_fastest_plan_with_muon() -> None:
    """Bounds that divide the iterations by fewer ranks than share them would cut it off."""
    spec, where = replace(preset("llama-1b"), num_layers=4), load_cluster("h100:3x2")
    work = Workload(seq_len=1024, global_batch=3, optimizer="muon")
    space = Space(profile_of(spec), spec, where, work, load_stack("shardwise"))
    plans = [plan for plan in every_plan(space) if plan.axes.pp == 1]
    fastest = min(estimate_time(space.profile, where, plan, work, stack=space.stack).total for plan in plans)
    found = find_plan(space.profile, spec, where, work, headroom=0.0).best
    assert found.time.total < fastest * 1.02, "of plans that are as fast the simplest"


def test_what_other_rules_send_takes_time() -> None:
    """Adafactor gathers 32 GB of gradients in fp32; LAMB sums a few numbers."""
    adafactor, lamb = (time_of("fsdp8 bf16", replace(WORK, optimizer=name)).terms for name in ("adafactor", "lamb"))
    wire = 4 * 8e9 * 7 / 8 / H100.local.bandwidth
    assert wire < adafactor["update-sends"] < 2 * wire
    assert 0 < lamb["update-sends"] < 1e-3
    assert "update-sends" not in time_of("dp8 bf16", replace(WORK, optimizer="adafactor")).terms


def test_muon_keeps_two_averages_of_what_is_no_matrix() -> None:
    stack, plan = load_stack("shardwise"), Plan.parse("fsdp8 bf16")
    work = replace(WORK, optimizer="muon")
    for profile, in_matrices in ((LLAMA, 32 * sum(m.num_params for m in matrices(LLAMA.blocks[0]))),):
        terms = estimate_memory(profile, plan, work, stack=stack).worst.terms
        assert terms["optimizer"] == pytest.approx((8 * profile.num_params - 4 * in_matrices) / 8)


# ---------------------------------------------------------------- outside of steps

SMALL = ModelSpec(num_layers=8, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=192, vocab_size=512, max_seq_len=128)


def test_a_load_has_the_weights_twice() -> None:
    """fp32 weights and Adam's averages: 12 bytes per parameter, of which the averages are those that were read."""
    work = Workload(seq_len=128, global_batch=8)
    memory = estimate_memory(profile_of(SMALL), Plan.parse("fsdp8 bf16"), work)
    assert memory.peaks["load"] == pytest.approx(16 * SMALL.num_params / 8)
    assert memory.peaks["save"] == pytest.approx(12 * SMALL.num_params / 8)
    assert memory.host == pytest.approx(memory.peaks["save"]), "the copy that is written"
    pure = estimate_memory(profile_of(SMALL), Plan.parse("fsdp8 bf16-pure"), work)
    assert pure.peaks["load"] == pytest.approx(20 * SMALL.num_params / 8)
    replicas = estimate_memory(profile_of(SMALL), Plan.parse("dp8 fp32"), work)
    assert replicas.peaks["load"] == pytest.approx((16 + 4) * SMALL.num_params), "and DDP's buckets"
    assert replicas.host == pytest.approx(12 * SMALL.num_params / 8), "what all ranks hold is stored once"


def test_what_a_load_needs_must_fit_too() -> None:
    work, plan = Workload(seq_len=8, global_batch=1), Plan.parse("bf16-pure")
    whole = estimate_memory(profile_of(SMALL), plan, work)
    assert whole.peaks["load"] == whole.peaks["update"], "fresh copies of weights and masters, or gradients of both"
    work = replace(work, trained=0.01)  # frozen weights have no gradients, and are read all the same
    memory = estimate_memory(profile_of(SMALL), plan, work)
    assert memory.peak.phase == "load" and memory.peak.allocated == memory.peaks["load"] > memory.allocated
    device = replace(H100.device, memory=memory.device - 1.0)
    assert not estimate_memory(profile_of(SMALL), plan, work, device=device).fits
    offloaded = estimate_memory(
        profile_of(SMALL), Plan.parse("fsdp8 bf16 / offload=state"), replace(work, global_batch=8, trained=1.0)
    )
    assert offloaded.peaks["load"] == 0.0, "states are in the host's memory"


def test_nothing_is_held_for_streams_while_a_checkpoint_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load needs beyond a step takes the place of what is held within the step."""
    work, plan, count = Workload(seq_len=128, global_batch=512), Plan.parse("dp1 zero1 / bf16"), SMALL.num_params
    step = estimate_memory(profile_of(SMALL), plan, work)
    assert step.peak is step.worst and step.held == pytest.approx(4 * count)
    for beyond, least, most in ((1.0, 2.0, 3.0), (9.0, 0.0, 0.0)):  # the allocator's holes are a part of what is taken
        load = {"load": {"loaded": step.allocated + beyond * count}}
        monkeypatch.setattr("shardwise.plan.memory.outside_step", lambda *_, load=load: load)
        memory = estimate_memory(profile_of(SMALL), plan, work)
        assert memory.peak is memory.outside[0] and least * count <= memory.held <= most * count


def test_checkpoints_of_other_stacks_are_not_known() -> None:
    memory = estimate_memory(LLAMA, Plan.parse("fsdp8 bf16"), WORK, stack=load_stack("torchtitan"))
    assert not memory.outside and "load" not in memory.peaks and memory.host == 0.0


# ---------------------------------------------------------------- kernels and copies that few plans have


def test_a_rank_whose_shards_nobody_shares_copies_what_it_gathers() -> None:
    alone = time_of("tp8 bf16", cluster=H100).terms["copies"]
    device = H100.device
    assert alone == pytest.approx(44 * LLAMA.num_params / 8 / (device.bandwidth * device.stream), rel=0.01)
    for plan in ("fsdp8 bf16", "tp8", "tp8 bf16-pure"):
        assert "copies" not in time_of(plan).terms


def test_rows_that_are_no_multiples_of_8_are_slow_in_16_bits_on_devices_of_which_it_is_known() -> None:
    odd, even = (profile_of(replace(preset("gpt2-medium"), vocab_size=size)) for size in (50257, 50304))
    work, there = Workload(seq_len=1024, global_batch=8), load_cluster("h100:1")

    def ratio(plan: str, cluster=there) -> float:
        return time_of(plan, work, odd, cluster).total / time_of(plan, work, even, cluster).total

    assert ratio("bf16-pure / compile") > 1.15
    assert ratio("fp32") == pytest.approx(1.0, abs=0.01)
    assert 1.05 < ratio("bf16-pure / compile", load_cluster("a100-80g:1")) < ratio("bf16-pure / compile")
    assert ratio("bf16-pure / compile", load_cluster("b200:1")) == pytest.approx(1.0, abs=0.01)  # not known


def test_autocast_casts_weights_on_every_rank_and_in_every_micro_batch() -> None:
    wide = replace(load_stack("eager"), residual_bytes=4.0, cast_copies=12.0)
    device = H100.device
    for plan, count in (("dp8 bf16", 1), ("dp8 / mb4 gbs64 / bf16", 4)):
        terms = estimate_time(LLAMA, H100, Plan.parse(plan), replace(WORK, global_batch=64), stack=wide).terms
        assert terms["copies"] == pytest.approx(
            12 * count * LLAMA.num_params / (device.bandwidth * device.stream), rel=0.01
        ), plan


def test_attention_in_fp32_uses_no_matrix_units() -> None:
    long, there = Workload(seq_len=65536, global_batch=1), load_cluster("h100:1")
    profile = profile_of(preset("llama-1b"))
    wide, narrow = (time_of(plan, long, profile, there).total for plan in ("tf32", "bf16-pure / compile"))
    assert wide > 8 * narrow


def test_the_rate_of_hosts_that_update_is_said_to_be_assumed() -> None:
    (said,) = assumed_of(Plan.parse("fsdp8 / offload=state"), H100)
    assert "offloaded states are updated at 30 GB/s, 60% of a device's link" in said
    assert not assumed_of(Plan.parse("fsdp8"), H100)


def test_an_mfu_above_one_is_explained() -> None:
    """405 billion parameters in fp8 do more than an H200's nominal rate in bf16."""
    text, work = "fsdp128 / bf16 fp8=rowwise / compile", Workload(seq_len=8192, global_batch=512)
    where = load_cluster("h200:8x16")
    assert time_of(text, work, profile_of(preset("llama-405b")), where).mfu > 1
    (said,) = assumed_of(Plan.parse(text), where)
    assert said == "MFU is over the rate in bf16, of products in fp8 too, and so may be above 100%"
    (said,) = assumed_of(Plan.parse("fsdp8 / bf16 fp8=tensorwise+emulate"), H100)
    assert said == "emulated products in float8 are counted as those in bf16: in fp32 a step is longer"


def test_dials_that_have_no_part_in_an_estimate_are_said() -> None:
    ruled, wrapped = "fsdp8 / bf16 precision=layers.*.attn:fp32,head:fp32", "fsdp8 / bf16 / wrap=1000000"
    assert assumed_of(Plan.parse(ruled), H100) == [
        "modules with a type of their own (layers.*.attn, head) count like all others, in bf16"
    ]
    assert assumed_of(Plan.parse(wrapped), H100) == ["blocks are gathered whole, and not by the units of wrap=1000000"]
    assert not assumed_of(Plan.parse("dp8 / wrap=1000000"), H100)  # which has no effect there


@pytest.mark.parametrize("schedule", ["gpipe", "looped-bfs vs2", "1f1b", "interleaved vs2", "zero-bubble vs2"])
def test_each_micro_batch_beyond_the_first_rounds_takes_as_long_as_those_before(schedule: str) -> None:
    """Where forwards and backwards are apart, each is as slow as its own slowest stage, and pays all that is sent."""
    sizes, cluster = preset("llama-8b"), load_cluster("h100:1x4@eth100")

    def seconds(count: int) -> float:
        plan = Plan.parse(f"pp4 / {schedule} mb{count} / bf16")
        step = estimate_time(profile_of(sizes), cluster, plan, Workload(seq_len=4096, global_batch=count))
        return step.terms["compute"] + step.terms["pipeline"]

    assert seconds(48) - seconds(32) == pytest.approx(seconds(32) - seconds(16), rel=1e-3)


# ---------------------------------------------------------------- replicas


def test_replicas_add_their_gradients_beside_what_shards_send_inside_a_node() -> None:
    def sent(text: str) -> Sends:
        plan = Plan.parse(text)
        division = divide(LLAMA, plan, replace(WORK, global_batch=64), "balanced")
        return sends_of(wire_of(division, division.ranks[0], load_cluster("h100:8x4"), load_stack("torchtitan")))

    assert [sent(text).shared for text in ("dp4 fsdp8", "dp2 fsdp16", "fsdp32", "dp32")] == [False, True, True, True]
    inside = sent("dp4 fsdp8")
    both = inside.again + inside.reduce
    assert inside.backward(1, inside.again) == max(both, inside.across) < both + inside.across
    assert inside._replace(shared=True).backward(2, inside.again) == both + inside.across / 2
    rounds, stack, passes = rounds_of(Plan.parse("dp4 fsdp8")), load_stack("torchtitan"), (0.01, 0.02)
    times = [
        exposed_time(rounds, each, passes, stack, waits=32, groups=33)[0]
        for each in (inside, inside._replace(shared=True))
    ]
    assert times[1] - times[0] == pytest.approx(both + inside.across - max(both, inside.across))


def test_stages_that_take_turns_are_sent_behind_the_turns_of_those_that_are_left() -> None:
    """As Megatron-Core's `grad_sync_func` and `param_sync_func`; the others as before, and never more than is sent."""
    passes, sends = (0.01, 0.02), Sends(gather=0.1, again=0.0, reduce=0.1, across=0.0)

    def exposed(schedule: str, stack: str = "megatron-bridge") -> float:
        rounds = rounds_of(Plan.parse(f"pp4 dp8 zero1 / {schedule} / bf16"))
        return exposed_time(rounds, sends, passes, load_stack(stack), waits=0, groups=1)[0]

    alone = 0.2 - sum(passes)
    assert exposed("1f1b mb8") == pytest.approx(alone)
    assert exposed("zero-bubble vs2 mb8") == pytest.approx(alone)
    four, two = (exposed(f"interleaved vs{stages} mb8") for stages in (4, 2))
    assert four == pytest.approx(0.2 - 4 * 3 / 4 * sum(passes)), "three of four stages of four micro-batches are left"
    assert two == pytest.approx(0.2 - 4 * 1 / 2 * sum(passes))
    assert exposed("interleaved vs12 mb8", "megatron-core") == pytest.approx(0.2 - 0.7 * 4 * 11 / 12 * sum(passes))
    rich = exposed_time(
        rounds_of(Plan.parse("pp4 dp8 zero1 / interleaved vs4 mb8 / bf16")), sends, (1.0, 2.0),
        load_stack("megatron-bridge"), waits=0, groups=1,
    )  # fmt: skip
    assert rich == pytest.approx((0.0, 0.2))


@pytest.mark.parametrize(
    ("text", "sends", "sent"),
    [
        ("fsdp2", Sends(gather=3.0, again=2.0, reduce=3.0, across=0.0), 8),
        ("fsdp2 / reshard=false", Sends(gather=3.0, again=0.0, reduce=3.0, across=0.0), 6),
        ("dp2 fsdp2 / mb4", Sends(gather=3.0, again=2.0, reduce=3.0, across=1.0), 4 * 8 + 1),
        (
            "pp2 fsdp2 / 1f1b mb4 / reshard=true",
            Sends(gather=3.0, again=2.0, reduce=3.0, across=0.0),
            4 * 2 + 2 * 3 + 3,
        ),
        ("fsdp2 zero1 / mb4", Sends(gather=3.0, again=0.0, reduce=3.0, across=0.0), 6),
        ("dp2", Sends(gather=0.0, again=0.0, reduce=3.0, across=0.0), 3),
    ],
)
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_the_first_gather_and_the_last_reduction_are_sent_once(
    text: str, sends: Sends, sent: float, groups: int
) -> None:
    """Where nothing hides all is exposed, and no more; where all that can hides, these two are; a deeper model waits
    no less."""
    rounds, stack = rounds_of(Plan.parse(text)), replace(load_stack("torchtitan"), gather_wait=0.0)

    def exposed(passes: tuple[float, float], depth: int = 1) -> float:
        longer = Sends(*(depth * seconds for seconds in sends[:4]))
        there = depth * passes[0], depth * passes[1]
        return exposed_time(rounds, longer, there, stack, waits=0, groups=depth * groups)[0]

    nothing = exposed_time(rounds, sends, (0.0, 0.0), stack, waits=0, groups=groups)
    assert nothing == pytest.approx((sent, sent))
    for compute in (0.1, 1.0, 3.0, 10.0):
        passes = compute, 2 * compute
        assert exposed(passes) <= nothing[0] * (1 + 1e-9)
        assert exposed(passes, 2) >= exposed(passes) * (1 - 1e-9)
    alone = exposed((1e3, 2e3))
    assert alone == pytest.approx(exposed((1e6, 2e6))) and alone <= nothing[0] / groups * (1 + 1e-9)


def test_deepspeed_adds_gradients_up_on_all_ranks_below_zero_3() -> None:
    stack, cluster = load_stack("deepspeed"), load_cluster("a10:1x4").with_(network=Link(bandwidth=1e9, latency=0.0))
    share = replace(stack, reduces_whole=False)

    def reduced(text: str) -> float:
        division = divide(LLAMA, Plan.parse(text), WORK, "balanced")
        times = [sends_of(wire_of(division, division.ranks[0], cluster, each)) for each in (stack, share)]
        assert times[0].gather == times[1].gather
        return times[0].reduce / times[1].reduce

    assert [reduced(text) for text in ("fsdp4 zero1 bf16", "fsdp4 zero2 bf16")] == pytest.approx([2.0, 2.0], rel=0.1)
    assert reduced("fsdp4 bf16") == 1.0


def test_what_goes_to_the_next_stage_has_the_adapters_of_the_stages_beside_it() -> None:
    far = load_cluster("h100:8x4").with_(network=Link(bandwidth=10e9, latency=0.0))
    alone, pair = (collective_time("send", 1e9, Group(4, stride), far) for stride in (8, 4))
    here = collective_time("send", 1e9, Group(2, 4), far)
    assert alone == pytest.approx(0.1), "of two stages in a node one sends out, and one to the other"
    assert pair == pytest.approx((alone / 2 + here) / 2)
    for bus, seconds in ((15e9, 1 / 15), (5e9, 0.1)):  # the other adapter is reached over it, the own one is not
        slow = far.with_(local=Link(bandwidth=bus, latency=0.0))
        assert collective_time("send", 1e9, Group(4, 4), slow) == pytest.approx((seconds + 1e9 / bus) / 2)


def test_of_stages_that_share_a_node_one_at_its_edge_sends_one_of_two_ways_over_the_network() -> None:
    cluster = load_cluster("a100-80gb:8x2").with_(network=Link(bandwidth=1e9, latency=0.0))
    ways = [collective_time("send", 1e9, Group(size, stride), cluster) for size, stride in ((2, 8), (4, 4), (2, 4))]
    far, edge, here = ways
    assert edge == pytest.approx((far / 2 + here) / 2)
    bus = cluster.with_(local=Link(bandwidth=1e8, latency=0.0))  # slower than the network: inside both ways are
    assert collective_time("send", 1e9, Group(16, 1), bus) == collective_time("send", 1e9, Group(8, 1), bus)
    plan, work = Plan.parse("pp4 tp4 / mb16 bf16"), Workload(seq_len=2048, global_batch=16)
    stack = replace(load_stack("megatron-core"), overlap_pipeline=0.0)
    apart = cluster.with_(domain=4)  # the same links, but no two stages share a node
    time = [estimate_time(LLAMA, each, plan, work, stack=stack).terms["pipeline"] for each in (cluster, apart)]
    assert time[0] < 0.6 * time[1]


def test_ranks_of_tp_share_what_goes_to_the_next_stage_where_a_stack_has_it_so() -> None:
    slow = load_cluster("v100:8x4").with_(network=Link(bandwidth=1e8, latency=0.0))
    plan, work = Plan.parse("pp4 tp8 / mb32 fp16"), Workload(seq_len=1024, global_batch=32)
    stack, model = load_stack("megatron-2021"), profile_of(preset("gpt2-xl"))
    whole, shared = (
        estimate_time(model, slow, plan, work, stack=replace(stack, splits_sends=splits)).terms["pipeline"]
        for splits in (False, True)
    )
    assert stack.splits_sends and whole > 4 * shared
