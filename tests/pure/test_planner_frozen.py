"""Frozen weights in 4 and 8 bits below adapters: what they take and what each use costs, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import ConfigError
from shardwise.hardware.cluster import load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.costs.hosts import moved_bytes
from shardwise.plan.costs.kernels import TAIL
from shardwise.plan.frozen import adapted_share, adapter_time, packed_share
from shardwise.plan.memory import Memory, estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import saved_bytes, saving_of
from shardwise.plan.stack import load_stack
from shardwise.plan.timing import StepTime, estimate_time
from shardwise.plan.workload import PACKED, Adapters, Workload
from tests.pure.test_planner_memory import LLAMA

EAGER, FSDP1 = load_stack("eager"), load_stack("fsdp1")
SPEC = preset("llama-8b")
EIGHT = profile_of(SPEC)
INSIDE = sum(op.params for op in EIGHT.blocks[0].matmuls) * 32
"""Weights of products, but for the head's."""
LARGEST = 4096 * 14336
ALONE = "bf16-pure / recompute=blocks"


def _work(base: str = "", keeps: bool = False, rest: float = 0.0) -> Workload:
    adapters = Adapters(on=("q", "v"), base=base, keeps=keeps, rest=rest)
    return Workload(seq_len=2048, global_batch=8, trained=0.001, adapters=adapters)


def _memory(work: Workload, plan: str = ALONE) -> Memory:
    stack = EAGER if plan == ALONE else FSDP1
    return estimate_memory(EIGHT, Plan.parse(plan), work, stack=stack)


def _time(work: Workload, plan: str = ALONE, where: str = "a100-80g:1") -> StepTime:
    return estimate_time(EIGHT, load_cluster(where), Plan.parse(plan), work, stack=EAGER if plan == ALONE else FSDP1)


@pytest.mark.parametrize("base", list(PACKED))
def test_packed_weights_are_those_of_products_and_the_rest_is_as_the_plan_has_it(base: str) -> None:
    weights = _memory(_work(base)).worst.terms["weights"]
    assert weights == pytest.approx(INSIDE * PACKED[base].width + (SPEC.num_params - INSIDE) * 2)
    assert packed_share(EIGHT.blocks[0]) == pytest.approx(1 - 2 * 4096 / EIGHT.blocks[0].params)


def test_bits_per_weight_are_those_of_the_paper() -> None:
    """arXiv:2305.14314, section 3: quantization constants take 0.5 bits per weight, packed in turn 0.127."""
    assert 8 * PACKED["nf4"].width == 4.5 and 8 * PACKED["nf4-double"].width == pytest.approx(4.127, abs=1e-3)


def test_what_is_not_packed_may_be_in_fp32_and_so_is_the_stream() -> None:
    wide, usual = (_memory(_work("nf4", rest=rest)).worst.terms for rest in (4.0, 0.0))
    assert wide["weights"] - usual["weights"] == pytest.approx((SPEC.num_params - INSIDE) * 2)
    assert wide["gathered"] == EIGHT.head.params * 2, "autocast casts the head"
    streams = [
        saving_of(Plan.parse(ALONE), EAGER, 2048, adapters=_work("nf4", rest=rest).adapters) for rest in (4.0, 0)
    ]
    assert [how.residual for how in streams] == [4.0, 2.0]


def test_a_weight_is_whole_for_a_moment_in_the_backward_pass() -> None:
    plan = Plan.parse("bf16-pure")
    backward = {
        base: estimate_memory(EIGHT, plan, _work(base), stack=EAGER).peaks["backward"] for base in ("", "nf4", "gptq")
    }
    saved = (2 - PACKED["nf4"].width) * INSIDE
    assert backward[""] - backward["nf4"] == pytest.approx(saved - LARGEST * 2)
    packed = (2 - PACKED["gptq"].width) * INSIDE
    assert backward[""] - backward["gptq"] == pytest.approx(packed - INSIDE * 2), "autograd keeps them all"
    plain, again = (estimate_memory(EIGHT, Plan.parse(ALONE), _work(base), stack=EAGER).peaks for base in ("", "gptq"))
    assert plain["backward"] - again["backward"] == pytest.approx(packed - INSIDE / 32 * 2), "those of a block"


def test_inputs_of_reentrant_checkpoints_stay_below_frozen_units() -> None:
    """As FSDP1 does in one process: its memory grows by a hidden state per block of the backward pass."""
    plan = Plan.parse("fsdp8 / bf16-pure / recompute=blocks")
    freed = _work("nf4")
    assert freed.adapters
    kept = replace(freed, adapters=replace(freed.adapters, stays=True))
    one, all_of = (estimate_memory(EIGHT, plan, work, stack=FSDP1).peaks for work in (freed, kept))
    inputs = 32 * 2048 * 4096 * 2
    assert all_of["backward"] - one["backward"] == pytest.approx(2 * inputs), "each, and its gradient"
    assert all_of["loss"] == one["loss"]
    twice = Plan.parse("fsdp8 / mb1 / bf16-pure / recompute=blocks")
    summed = (
        estimate_memory(EIGHT, twice, replace(work, global_batch=16), stack=FSDP1).peaks for work in (freed, kept)
    )
    one, all_of = summed
    assert all_of["backward"] > one["backward"], "of each micro-batch too"
    whole = estimate_memory(EIGHT, Plan.parse("fsdp8 / bf16-pure"), kept, stack=FSDP1).peaks
    assert whole == estimate_memory(EIGHT, Plan.parse("fsdp8 / bf16-pure"), freed, stack=FSDP1).peaks


def test_shards_are_packed_and_gathered_so() -> None:
    plan = "fsdp8 / bf16-pure / recompute=blocks"
    packed, plain = (_memory(_work(base), plan).worst.terms for base in ("nf4", ""))
    block = EIGHT.blocks[0].params
    ends = EIGHT.embedding + EIGHT.head.params
    assert plain["gathered"] == pytest.approx((2 * block + ends) * 2)
    share = packed_share(EIGHT.blocks[0])
    each = share * PACKED["nf4"].width + (1 - share) * 2
    assert packed["gathered"] == pytest.approx(2 * block * each + ends * 2)
    kept = estimate_memory(EIGHT, Plan.parse("fsdp8 zero2 / bf16"), _work("nf4"), stack=load_stack("shardwise"))
    assert kept.worst.terms["gathered"] == pytest.approx(INSIDE * PACKED["nf4"].width + (SPEC.num_params - INSIDE) * 2)


def test_ranks_share_the_states_of_adapters() -> None:
    sharded, alone = (_memory(_work("nf4"), plan).worst.terms for plan in ("fsdp8 / bf16-pure", "dp8 / bf16-pure"))
    for name in ("optimizer", "gradients"):
        assert alone.get(name, 0.0) == pytest.approx(8 * sharded.get(name, 0.0))


def test_each_use_moves_the_packed_weight_and_the_whole_one() -> None:
    """Forward, again where blocks are recomputed, and for the gradients of inputs."""
    plain, packed = (_time(_work(base)) for base in ("", "nf4"))
    device = load_cluster("a100-80g:1").device
    once = INSIDE * (PACKED["nf4"].moved + 2) / (device.bandwidth * device.stream) + 4 * 32 * TAIL
    assert packed.terms["recompute"] - plain.terms["recompute"] == pytest.approx(once, rel=1e-6)
    assert packed.terms["compute"] - plain.terms["compute"] == pytest.approx(2 * once, rel=1e-6)
    assert packed.flops == plain.flops
    kept, each = _time(_work("gptq")).terms, PACKED["gptq"].moved + 2  # made in both forward passes
    twice = INSIDE * each / (device.bandwidth * device.stream) + 4 * 32 * TAIL
    assert kept["compute"] - plain.terms["compute"] == pytest.approx(twice, rel=1e-6)
    assert kept["recompute"] - plain.terms["recompute"] == pytest.approx(twice, rel=1e-6)


def test_fewer_bytes_are_gathered_and_moved_to_the_host() -> None:
    plan, where = "fsdp8 / bf16-pure / recompute=blocks", "a100-80g:2x4"
    sent = [
        time.terms["data"] + time.hidden["data"] for time in (_time(_work(base), plan, where) for base in ("", "nf4"))
    ]
    assert 0.3 < sent[1] / sent[0] < 0.5
    plain, packed = Workload(seq_len=1, global_batch=1), _work("nf4")
    assert sum(moved_bytes(plain, (3, 1), load_stack("torchtitan"))) == 12
    assert sum(moved_bytes(packed, (3, 1), load_stack("torchtitan"))) == pytest.approx(2 * 0.5625 + 0.004)


@pytest.mark.parametrize(
    ("base", "keeps", "kept"),
    [
        ("nf4", False, 2 * 64),  # what the adapters of q and v share
        ("nf4", True, 2 * (64 + 64 + 192)),  # every product's input, but for what attention keeps anyway
        ("int8", False, 2 * (64 + 64 + 192) + 64 + 64 + 64 + 192),  # and beside it a copy in 8 bits
    ],
)
def test_inputs_that_packed_products_keep(base: str, keeps: bool, kept: int) -> None:
    block, plan = profile_of(LLAMA).blocks[0], Plan.parse("bf16-pure")
    none = saved_bytes(block, saving_of(plan, EAGER, 128, adapters=Adapters(on=())))
    some = Adapters(on=("q", "v"), base=base, keeps=keeps)
    assert saved_bytes(block, saving_of(plan, EAGER, 128, adapters=some)) - none == kept


def test_a_device_alone_copies_frozen_weights_as_they_are_and_casts_none() -> None:
    """Into the buffer, in the place of the collective, and out: six times; a step casts what is trained alone."""
    one, device = load_cluster("a100-80g:1"), load_cluster("a100-80g:1").device
    rate = device.bandwidth * device.stream
    for plan, base, moved in (
        ("dp1 zero1 / bf16", "nf4", 6 * PACKED["nf4"].width),
        ("dp1 zero1 / bf16", "", 6 * 2),
        ("dp1 / bf16", "nf4", 24 * 0.001),
    ):
        copies = estimate_time(EIGHT, one, Plan.parse(plan), _work(base)).terms["copies"]
        assert copies == pytest.approx(moved * SPEC.num_params / rate), plan


def test_an_unknown_base_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapters: base: found 'nf5'.*nf4"):
        Adapters(on=(), base="nf5")


def test_parameters_of_adapters() -> None:
    """On queries, keys, values and the output: rank times both sides of each."""
    sides = 2 * 4096 + 2 * (4096 + 1024) + 2 * 4096
    assert adapted_share(SPEC, 8, ("q", "k", "v", "o")) == pytest.approx(8 * 32 * sides / SPEC.num_params)
    assert adapted_share(SPEC, 8, ("qkv",)) == pytest.approx(8 * 32 * (4096 + 6144) / SPEC.num_params)


def test_adapters_in_fp32_move_twice_the_bytes() -> None:
    product = next(op for op in EIGHT.blocks[0].matmuls if op.name == "down")
    there = Plan.parse(ALONE).axes, Adapters(on=("down",)), load_cluster("a100-80g").device, 2.0
    wide = (there[0], Adapters(on=("down",), wide=True), *there[2:])
    half, full = (adapter_time(product, 4096, each, None, fused=False) for each in (there, wide))
    assert [f - TAIL for f in full] == pytest.approx([2 * (h - TAIL) for h in half])


@pytest.mark.parametrize(
    "text", ["fsdp4 zero1 / mb2", "dp1 zero1 / mb2", "dp4 / mb2", "pp2 fsdp2 / mb4", "pp2 dp2 / mb4"]
)
def test_frozen_weights_are_gathered_packed_and_have_no_gradients_where_these_are_reduced_once(text: str) -> None:
    """Behind the last micro-batch, as at its loss: no more weights are there, and gradients of adapters alone."""
    plan, profile = Plan.parse(f"{text} / bf16"), profile_of(preset("llama-8b"))
    whole = Workload(seq_len=512, global_batch=16, trained=0.005, adapters=Adapters(on=("q", "v")))
    packed = replace(whole, adapters=Adapters(on=("q", "v"), base="nf4"))
    for work in (whole, packed):
        peaks = estimate_memory(profile, plan, work).peaks
        assert peaks["backward"] <= peaks["loss"] * (1 + 1e-9)


def test_a_rank_without_blocks_holds_no_packed_weights() -> None:
    """Nanotron's last ranks may hold the head alone, or nothing."""
    spec = replace(preset("llama-1b"), num_layers=12, dim=512, num_heads=8, num_kv_heads=8, vocab_size=151936)
    work = Workload(seq_len=512, global_batch=8, trained=0.01, adapters=Adapters(on=("q",), base="nf4"))
    memory = estimate_memory(profile_of(spec), Plan.parse("pp8 / mb8 / bf16"), work, stack=load_stack("nanotron"))
    assert min(sum(rank.terms.values()) for rank in memory.stages) < memory.allocated
