"""What experts cost beyond their products: the exchange of tokens, casts, tiles; and scans, of hybrids of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwise.hardware.cluster import load_cluster
from shardwise.model.ops import Attention, Matmul, Pointwise
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.costs.kernels import SCANS, attention_rate, matmul_time, passes_of
from shardwise.plan.costs.links import Group, collective_time
from shardwise.plan.plan import Plan
from shardwise.plan.stack import Stack, load_stack
from shardwise.plan.time_terms.blocktime import EXPERT_CASTS, _host, _kernels, _matmul, _op_time, block_time
from shardwise.plan.time_terms.exchange import crossing, exchange_time
from shardwise.plan.time_terms.setting import Setting
from tests.pure.test_published import variant

SPARSE = profile_of(preset("qwen3-30b-a3b")).blocks[-1]
CORE = load_stack("megatron-core")


def setting(plan: str, stack: Stack = CORE, cluster: str = "h100:8x4", dtype: str = "bf16") -> Setting:
    return Setting(load_cluster(cluster), stack, Plan.parse(plan).axes, dtype)


def exchange(matmuls: Sequence[Matmul], tokens: float, here: Setting) -> float:
    return exchange_time(matmuls, tokens, here.width, here.axes.ep, (here.cluster, here.stack))


def test_deepep_sends_a_token_once_to_a_rank_inside_a_node() -> None:
    """Of 8 choices among 8 ranks, `8 (1 - (7/8)^8) = 5.3` are expected to be other ranks than those before."""
    often, once = (
        exchange(SPARSE.matmuls, 65536, setting("fsdp32 ep8 zero1", replace(CORE, once_per_rank=once)))
        for once in (False, True)
    )
    assert once / often == pytest.approx(8 * (1 - 0.875**8) / 8, rel=0.02)
    across = (
        exchange(SPARSE.matmuls, 65536, setting("fsdp32 ep32 zero1", replace(CORE, once_per_rank=once)))
        for once in (False, True)
    )
    assert len(set(across)) == 1, "between nodes it is once to a node, `once_per_node`"


def test_ranks_that_share_an_expert_each_take_a_part_of_its_tokens_and_gather_it() -> None:
    """Four parts of one expert count as four choices: one of them crosses, the rest is gathered beside one another."""
    up = Matmul("experts-up", 5120, 4096, "column", 5120, 512, 4)
    shared = setting("fsdp512 ep512 zero1", replace(CORE, expert_parts=4, overlap_expert=0.0), "h100:8x64")
    size = 2048 * up.takes * shared.width
    sent = collective_time("all_to_all", size / 4, Group(128, 4), shared.cluster)
    gathered = collective_time("all_gather", size, Group(4, 1), shared.cluster)
    assert exchange([up], 2048, shared) == pytest.approx(4 * (sent + gathered))
    apart = exchange([up], 2048, replace(shared, stack=replace(shared.stack, expert_parts=1)))
    assert exchange([up], 2048, shared) < 0.5 * apart
    assert crossing(1, 64) == 1


def test_the_host_casts_operands_of_each_expert_in_few_bits() -> None:
    wide, low = (_host(SPARSE, 1.0, 0, setting("fsdp32 ep8 zero1", dtype=dtype)) for dtype in ("bf16", "fp8"))
    for pass_ in range(2):
        assert low[pass_] - wide[pass_] == pytest.approx(EXPERT_CASTS * CORE.expert_host * 128 / 8)


def test_a_tile_with_rows_of_two_experts_is_computed_for_both() -> None:
    """128 experts of 512 rows in tiles of 512: each is met by one more tile than its rows fill."""
    op = next(op for op in SPARSE.matmuls if op.experts)
    jax = load_stack("jax")
    shared, apart = (
        _matmul(op, 8192, setting("fsdp32", replace(jax, expert_tile=tile), "tpu-v5p:4x8"))
        for tile in (jax.expert_tile, 0)
    )
    assert 8192 * op.chosen / op.experts == jax.expert_tile == 512
    for both, own in zip(shared, apart, strict=True):
        assert both / own == pytest.approx(2, rel=0.1)


def test_a_scan_is_no_faster_on_faster_memory_than_an_h100s() -> None:
    scan, norm = (Pointwise(name, 60 * 8192, "heads") for name in ("scan", "norm"))
    devices = {name: load_cluster(name).device for name in ("h100", "b200", "a100-80g")}
    assert devices["h100"].bandwidth == pytest.approx(SCANS) and devices["b200"].bandwidth > 2 * SCANS

    def pace(op: Pointwise, name: str) -> float:
        return _op_time(op, (1.0, 8192), setting("dp8", cluster=f"{name}:8"))[0] * devices[name].stream

    assert (
        pace(scan, "b200") == pytest.approx(pace(scan, "h100"), rel=0.01)
        and pace(norm, "b200") < pace(norm, "h100") / 2
    )
    assert pace(scan, "a100-80g") == pytest.approx(pace(norm, "a100-80g"))


def test_biases_of_experts_are_spelled_out_and_added() -> None:
    """gpt-oss: rows of both products' biases, for each choice: no grouped product adds them."""
    spec = preset("gpt-oss-20b")
    own, plain = (profile_of(each).blocks[0].ops for each in (spec, replace(spec, hf="")))
    (bias,) = (op for op in own if op.name == "expert-bias")
    assert bias.moved == 2 * (2 * spec.ffn_dim + spec.dim) and bias.per_choice == spec.experts_per_token
    assert not any(op.name == "expert-bias" for op in plain)


def test_a_clamped_gate_in_primitives_reads_halves_by_every_second_number() -> None:
    """gpt-oss in torchtitan's code and that of transformers: `x[..., ::2]`, and the zeros that put halves back."""
    (gate,) = (op for op in profile_of(preset("gpt-oss-20b")).blocks[0].ops if op.name == "clamped-swiglu")
    assert isinstance(gate, Pointwise) and gate.moved == 3 * preset("gpt-oss-20b").ffn_dim
    eager = replace(load_stack("torchtitan"), fused=False)
    ahead, back = passes_of(gate, eager, 2.0)
    assert ahead * 3 == 6 + 2 + 2 + 3 + 2 + 3 and back == pytest.approx(44 / 18, rel=0.02)
    assert passes_of(gate, load_stack("torchtitan"), 2.0)[0] == 1, "compiled it is one kernel"


def test_attention_on_b300_is_not_slower_than_on_b200() -> None:
    """FlashAttention 4 and cuDNN reach 1,240 to 1,605 TFLOP/s on B200, where softmax binds; B300 take half of it."""
    op, stack = Attention(32, 32, 128, 128), load_stack("megatron-bridge")
    for name in ("b200", "b300", "gb300"):
        device = load_cluster(name).device
        assert 1200e12 < attention_rate(op, 32768, device, stack) * device.rates.bf16 < 1700e12, name


def test_tokens_that_go_to_experts_by_masks_are_multiplied_by_them() -> None:
    """Places at experts, tokens of a sequence and width: 2 products forward, 3 backward (MaxText's `dense_matmul`)."""
    plain, block = load_stack("jax"), SPARSE
    masked = replace(plain, capacity=1.25)
    there, axes = load_cluster("b200:8"), Plan.parse("fsdp8 bf16").axes
    one, other = (block_time(block, (4, 4096), Setting(there, stack, axes, "bf16")) for stack in (masked, plain))
    product = matmul_time(40960, block.width, 4096, there.device, "bf16", 4)
    assert one.forward - other.forward == pytest.approx(2 * product, rel=1e-6)
    assert one.backward - other.backward == pytest.approx(3 * product, rel=1e-6)
    dense = profile_of(preset("llama-8b")).blocks[0]
    assert block_time(dense, (4, 4096), Setting(there, masked, axes, "bf16")) == block_time(
        dense, (4, 4096), Setting(there, plain, axes, "bf16")
    )


def test_what_the_host_starts_behind_the_counts_of_experts_waits_for_the_device() -> None:
    """Attention of a long sequence, then the launches of 128 experts: a host that needs counts is not ahead of them."""
    here = setting("fsdp8 zero1", replace(CORE, expert_host=3e-4))
    apart = replace(here, stack=replace(here.stack, waits_for_counts=False))
    behind = [op.name for op in SPARSE.ops].index("permute")
    for tokens in (1024, 16384, 131072):
        shape = (1.0, tokens)
        waits, ahead = (block_time(SPARSE, shape, each) for each in (here, apart))
        before = sum(_op_time(op, shape, here)[0] for op in SPARSE.ops[:behind])
        device = sum(_op_time(op, shape, here)[0] for op in SPARSE.ops)
        late = (
            here.stack.route_host + 128 * 3e-4 + here.launch * sum(_kernels(o, 1.0, here) for o in SPARSE.ops[behind:])
        )
        assert waits.forward == pytest.approx(max(ahead.forward, device, before + late))
        assert waits.backward == ahead.backward, "the backward pass has the counts"
    dense = profile_of(preset("llama-8b")).blocks[0]
    assert block_time(dense, (1.0, 16384), here) == block_time(dense, (1.0, 16384), apart)


def test_primus_turbos_grouped_products_are_started_once() -> None:
    cells = {"source": "a report of Primus", "model": "Qwen3-30B-A3B", "n_params": "", "n_layers": "", "d_model": ""}
    own, plain = (variant("core-2", **cells, notes=notes).stack for notes in ("grouped products of Primus-Turbo", ""))
    assert plain.expert_host == CORE.expert_host and own == replace(plain, expert_host=0.0)
