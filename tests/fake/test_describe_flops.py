"""Forward operations of any module's profile, against those that torch counts, and the time that follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.diagnose.read_module import example_length, example_of, read_module
from shardwise.hardware.cluster import load_cluster
from shardwise.model.describe import describe
from shardwise.model.ops import Attention, Matmul
from shardwise.model.profile import Block, Profile
from shardwise.model.tracer import meta_copy, tensors_in
from shardwise.plan.memory_terms.states import states_of
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.division import divide
from shardwise.plan.stack import load_stack
from shardwise.plan.timing import estimate_time
from shardwise.plan.workload import Workload
from tests.modules import Frozen, Rows, factory

SEQ = 64
KINDS = ["pictures", "residual", "unet", "encoder-decoder", "rows", "gpt2", "bert", "qwen3_moe", "falcon"]


def counted(name: str, seq: int) -> float:
    """Operations per sample, as torch counts them."""
    example = example_of(factory(name))
    given = torch.zeros(1, seq, dtype=torch.long) if example is None else example
    inputs = [tensor.to("meta") for _, tensor in tensors_in(given)]
    with torch.device("meta"):
        module = meta_copy(factory(name)())
        with FlopCounterMode(display=False) as counter:
            module(*inputs)
    return counter.get_total_flops() / inputs[0].shape[0]


def whole(profile: Profile) -> Profile:
    """With attention that looks ahead, as torch counts it."""

    def of(block: Block) -> Block:
        ops = (replace(op, causal=False, window=0) if isinstance(op, Attention) else op for op in block.ops)
        return replace(block, ops=tuple(ops))

    return replace(profile, blocks=tuple(map(of, profile.blocks)), head=of(profile.head))


@pytest.mark.share(6)
@pytest.mark.parametrize("name", KINDS)
def test_every_product_counts_with_its_own_rows(name: str) -> None:
    example = example_of(factory(name))
    seq = SEQ if example is None else example_length(example)
    found = whole(read_module(name, factory(name), seq, "meta"))
    assert found.forward_flops(seq) * seq == pytest.approx(counted(name, seq), rel=0.01)
    with torch.device("meta"):
        assert found.num_params == sum(p.numel() for p in factory(name)().parameters())


def test_negative_control_one_row_per_token_is_another_count() -> None:
    found = whole(read_module("pictures", factory("pictures"), 3, "meta"))
    ops = (replace(op, rows=1.0) if isinstance(op, Matmul) else op for op in found.blocks[1].ops)
    blocks = (found.blocks[0], *[replace(found.blocks[1], ops=tuple(ops))] * 3)
    assert replace(found, blocks=blocks).forward_flops(3) * 3 < 0.5 * counted("pictures", 3)


def test_a_weight_that_is_used_twice_counts_once_and_multiplies_twice() -> None:
    found = describe(Rows, torch.zeros(4, 128))
    products = [op for block in (*found.blocks, found.head) for op in block.matmuls]
    assert sum(op.params for op in products) == 4 * 128 * 128
    assert [op.rows * 128 for op in products] == [1, 1, 1, 2]


def test_time_follows() -> None:
    """The same blocks on the same 64 places of a sample, be they counted as 64 tokens or as the 3 colours."""
    seconds = {}
    for name, seq in (("pictures", 3), ("two", 64)):
        profile = read_module(name, factory(name), seq, "meta")
        work = Workload(seq_len=seq, global_batch=4096)
        step = estimate_time(profile, load_cluster("h100:1"), Plan.parse("dp1 / bf16"), work)
        assert step.mfu < 1
        seconds[name] = step.terms["compute"]
    assert seconds["pictures"] == pytest.approx(seconds["two"], rel=0.15)


def test_what_is_trained_is_known() -> None:
    found = describe(Frozen, torch.zeros(2, SEQ, dtype=torch.long))
    layer = sum(p.numel() for p in Frozen().layers[0].parameters())
    assert [block.frozen for block in found.blocks] == [layer, 0, 0, 0] and found.frozen == 2048 * 64
    assert [op.trained for op in found.blocks[0].matmuls] == [False, False]
    assert all(op.trained for op in found.blocks[1].matmuls) and found.tied
    assert found.trained == pytest.approx(1 - (layer + 2048 * 64) / found.num_params)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ConvTranspose2d(8, 4, 4, 2, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers])


def test_a_transposed_convolution() -> None:
    product = describe(Transposed, torch.zeros(2, 8, 6, 6)).blocks[0].matmuls[0]
    assert (product.ins, product.outs) == (8, 4 * 4 * 4)
    assert product.takes * 8 == 8 * 6 * 6 and product.rows * 8 == 6 * 6


def test_what_is_frozen_has_no_gradient_no_state_and_no_update() -> None:
    """On devices, where all ranks' parameters are counted alike; a CPU's ranks are counted one by one."""
    found = describe(Frozen, torch.zeros(2, SEQ, dtype=torch.long))
    assert 0.1 < found.trained < 0.9
    blocks = tuple(replace(block, frozen=0) for block in found.blocks)
    whole = replace(found, frozen=0, blocks=blocks, head=replace(found.head, frozen=0))
    plan, work, cluster = Plan.parse("fsdp4 / bf16"), Workload(seq_len=SEQ, global_batch=8), load_cluster("h100:4")
    stack = load_stack("shardwise")
    divisions = [divide(profile, plan, work, stack.cut) for profile in (found, whole)]
    some, all_ = (states_of(division, division.ranks[0], stack) for division in divisions)
    for term in ("gradients", "optimizer"):
        assert some[term] == pytest.approx(found.trained * all_[term])
    assert some["weights"] == all_["weights"]
    times = [estimate_time(profile, cluster, plan, work, stack=stack).terms["optimizer"] for profile in (found, whole)]
    assert times[0] == pytest.approx(found.trained * times[1])
