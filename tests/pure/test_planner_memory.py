"""Terms of the memory estimate against cases worked by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

import pytest

from shardwise.errors import PlanError
from shardwise.hardware.cluster import load_cluster
from shardwise.model.ops import Matmul
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec, preset
from shardwise.plan.eager import rank as eager_rank
from shardwise.plan.hosting import host_lack, on_host
from shardwise.plan.memory import WORKSPACE, Memory, RankMemory, estimate_memory, gathered_of
from shardwise.plan.memory_terms.states import STATES, states_of
from shardwise.plan.plan import Axes, Offload, Plan, Schedule
from shardwise.plan.ranks.activations import again_in, kept_in, kept_outputs, saved_bytes, saving_of, working_bytes
from shardwise.plan.ranks.division import divide
from shardwise.plan.ranks.stages import Stage, cut
from shardwise.plan.reasons import decisions
from shardwise.plan.search import find_plan
from shardwise.plan.stack import load_stack, stack_of
from shardwise.plan.time_terms.stalls import BUFFERS, HELD, held_ahead, stalled
from shardwise.plan.timing import RankCosts, rank_costs
from shardwise.plan.workload import Workload

GPT = ModelSpec(
    kind="gpt", num_layers=4, dim=64, num_heads=4, ffn_dim=256, vocab_size=512, max_seq_len=128, dropout=True
)
LLAMA = ModelSpec(num_layers=8, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=192, vocab_size=512, max_seq_len=128)
WORK = Workload(seq_len=128, global_batch=8)
MEGATRON = load_stack("megatron-core")
TORCH = load_stack("shardwise")


def _terms(plan: str, spec: ModelSpec = LLAMA, stack=TORCH) -> dict[str, float]:
    return dict(estimate_memory(profile_of(spec), Plan.parse(plan), WORK, stack=stack).worst.terms)


def test_a_gpt_block_saves_34_bytes_per_token_and_width_with_fused_attention() -> None:
    """arXiv:2205.05198, equation 1 without the 5 a s / h of the score matrix; the log-sum-exp comes on top."""
    how = saving_of(Plan.parse("bf16"), replace(MEGATRON, attention="flash2"), 128)
    assert saved_bytes(profile_of(GPT).blocks[0], how) == 34 * 64 + 4 * 4


def test_score_matrices_add_5_a_s() -> None:
    how = saving_of(Plan.parse("bf16"), replace(MEGATRON, attention="fused-softmax"), 128)
    assert saved_bytes(profile_of(GPT).blocks[0], how) == 34 * 64 + 5 * 4 * 128


def test_tensor_parallelism_divides_24_of_34_and_sequence_parallelism_all() -> None:
    flash = replace(MEGATRON, attention="flash2")
    block = profile_of(GPT).blocks[0]
    split = saved_bytes(block, saving_of(Plan.parse("tp4 bf16"), flash, 128))
    whole = saved_bytes(block, saving_of(Plan.parse("tp4 bf16 / seq"), flash, 128))
    assert split == (10 + 24 / 4) * 64 + 4
    assert whole == 34 / 4 * 64 + 4


@pytest.mark.parametrize(
    ("plan", "weights", "optimizer"),
    [("dp8", 1, 1), ("fsdp8 zero1", 8, 8), ("fsdp8 zero2", 8, 8), ("fsdp8", 8, 8), ("fsdp4 tp2", 8, 8)],
)
def test_states_in_fp32(plan: str, weights: int, optimizer: int) -> None:
    """arXiv:1910.02054: 4 bytes of weights and 8 of Adam per parameter, over its shards; norms are whole under tp.

    Under zero 1 and 2 torch keeps the shards, and the whole parameters beside them between forward and backward.
    """
    terms = _terms(plan)
    count = LLAMA.num_params
    norms = 17 * 64 * 4 / 4 if "tp2" in plan else 0
    assert terms["weights"] == pytest.approx(count * 4 / weights, abs=norms * 4)
    assert terms["optimizer"] == pytest.approx(count * 8 / optimizer, abs=norms * 8)
    if "zero" in plan:
        assert terms["gathered"] == count * 4


def test_megatron_keeps_18_bytes_per_parameter_and_divides_12_by_zero_1() -> None:
    whole, shared = _terms("dp4 bf16 / mb2", stack=MEGATRON), _terms("fsdp4 zero1 bf16 / mb2", stack=MEGATRON)
    count = LLAMA.num_params
    states = ("weights", "master", "gradients", "optimizer")
    assert sum(whole[name] for name in states) == 18 * count
    assert sum(shared[name] for name in states) == (2 + 4 + 12 / 4) * count


@pytest.mark.parametrize(("plan", "tp"), [("dp4 bf16", 1), ("tp2 fsdp2 zero1 bf16 / mb2", 2), ("pp2 bf16 / mb4", 1)])
def test_placeholders_for_gradients_are_of_one_block_in_the_type_of_what_is_computed(plan: str, tp: int) -> None:
    block = profile_of(LLAMA).blocks[0]
    share = block.params - block.split_params + block.split_params / tp
    without = _terms(plan, stack=replace(MEGATRON, placeholds_grads=False))
    assert _terms(plan, stack=MEGATRON)["buckets"] - without.get("buckets", 0.0) == 2 * share
    frozen = replace(WORK, trained=0.01)
    few = estimate_memory(profile_of(LLAMA), Plan.parse(plan), frozen, stack=MEGATRON).worst.terms
    assert "buckets" not in few, "the gradients of adapters are no product's of the stack"


def test_one_f_one_b_keeps_as_many_micro_batches_as_stages_follow() -> None:
    stages = estimate_memory(profile_of(LLAMA), Plan.parse("pp4 / mb8"), WORK, stack=TORCH).stages
    block = (
        saved_bytes(profile_of(LLAMA).blocks[0], saving_of(Plan.parse("pp4"), stack_of(Plan.parse("pp4")), 128)) * 128
    )
    held = [rank.terms["activations"] for rank in stages[:3]]
    counts = [len(part) for part in cut(profile_of(LLAMA), 4, "balanced", WORK.seq_len)]
    assert held == [pytest.approx(block * counts[rank] * (4 - rank)) for rank in range(3)]


@pytest.mark.parametrize(("kind", "held"), [("gpipe", 4 + 1), ("1f1b", 2 + 1), ("interleaved", 5 + 2)])
def test_messages_of_a_pipeline_are_held(kind: str, held: int) -> None:
    """On the first of two ranks, of four micro-batches: what it sent, with its micro-batch, and what is received.

    Two stages on a rank receive three ways: a gradient that is used, and an activation ahead of its turn.
    """
    terms = estimate_memory(profile_of(LLAMA), Plan.parse(f"pp2 / {kind} mb4"), WORK, stack=TORCH).stages[0].terms
    assert terms["buffers"] == held * 2 * 128 * 64 * 4


def test_micro_batches_that_wait_behind_the_loss_keep_their_logits() -> None:
    """All but the one that goes backward, of which the loss has more; and the input and output of the head's norm."""
    few, all_four = (
        estimate_memory(profile_of(LLAMA), Plan.parse(f"pp2 / {kind} mb4"), WORK, stack=TORCH).stages[1].terms
        for kind in ("1f1b", "gpipe")
    )
    per_micro_batch = few["activations"] + 2 * 128 * (512 + 2 * 64) * 4
    assert all_four["activations"] == pytest.approx(few["activations"] + 3 * per_micro_batch)
    assert few["logits"] == all_four["logits"]


@pytest.mark.parametrize(("plan", "times"), [("dp2", 1), ("dp2 / mb2", 2), ("dp2 / no-bucket-view", 2)])
def test_gradients_lie_beside_the_buckets_of_ddp(plan: str, times: int) -> None:
    """That stay from step to step: those of micro-batches before the last one, and those that are no views of them."""
    memory = estimate_memory(profile_of(LLAMA), Plan.parse(plan), Workload(seq_len=1, global_batch=4), stack=TORCH)
    assert memory.worst.terms["gradients"] == times * 4 * LLAMA.num_params
    assert memory.peaks["loss"] >= (16 + 4 * ("mb2" in plan)) * LLAMA.num_params


def test_of_one_micro_batch_shards_of_gradients_are_all_that_is_left_whatever_zero_is() -> None:
    divided = [divide(profile_of(LLAMA), Plan.parse(f"fsdp4 zero{zero} / bf16"), WORK) for zero in (1, 2, 3)]
    assert len({states_of(each, each.ranks[0], TORCH)["gradients"] for each in divided}) == 1


def test_weights_that_nobody_shares_go_while_gradients_come() -> None:
    """Of one micro-batch: neither all in bf16 beside all gradients, as of several, nor less than these."""
    peaks = [
        estimate_memory(profile_of(LLAMA), Plan.parse(plan), Workload(seq_len=1, global_batch=4)).peaks["backward"]
        for plan in ("dp2 / bf16", "dp2 / bf16 / mb2")
    ]
    assert 16 * LLAMA.num_params < peaks[0] < peaks[1] - LLAMA.num_params / 2


def test_what_a_plan_does_not_compile_keeps_more() -> None:
    apart, fused = _terms("bf16"), _terms("bf16 / compile")
    assert apart["activations"] > 1.2 * fused["activations"]
    assert {**apart, "activations": 0.0} == {**fused, "activations": 0.0}
    assert _terms("bf16", stack=MEGATRON) == _terms("bf16 / compile", stack=MEGATRON)


def test_gradients_of_the_step_before_hold_memory_of_their_own() -> None:
    work, large = Workload(seq_len=128, global_batch=512), profile_of(LLAMA)
    memory = estimate_memory(large, Plan.parse("dp1 zero1 / bf16"), work)
    assert "gradients" not in memory.worst.terms  # they are not there yet at the loss
    assert memory.held == pytest.approx(4 * LLAMA.num_params)
    assert memory.fits_in(memory.device - memory.held)
    for text in ("fp32", "bf16", "bf16-pure"):  # no shards
        assert estimate_memory(large, Plan.parse(text), work).held == 0.0
    added = estimate_memory(large, Plan.parse("dp1 zero1 / bf16 / mb2"), work)
    assert added.held == added.worst.terms["gradients"] == pytest.approx(4 * LLAMA.num_params)


def test_the_most_that_the_gradients_stream_and_all_else_need_is_reserved_though_not_at_once() -> None:
    spec = preset("llama-3b")
    memory = estimate_memory(profile_of(spec), Plan.parse("dp1 zero1 / bf16"), Workload(seq_len=512, global_batch=1))
    assert memory.worst.terms["gradients"] == pytest.approx(4 * spec.num_params)  # the peak is behind the loss
    assert memory.worst.allocated + memory.held == pytest.approx(memory.peaks["loss"] + 4 * spec.num_params)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zero-bubble-v"])
def test_rounds_of_micro_batches_beyond_the_first_add_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs every action is looked at: of the first rounds, and a million micro-batches take as long."""
    small = profile_of(replace(LLAMA, num_layers=16, dim=256, ffn_dim=704, num_heads=8, num_kv_heads=4))
    for text in ("pp4", "pp2 fsdp2", "pp2 / bf16 / recompute=50%"):
        plan = Plan.parse(f"{text} / {kind} mb64")
        work, stack = Workload(seq_len=64, global_batch=64 * plan.axes.data), load_stack("shardwise-cpu")
        found = []
        for rounds in (1000, 6):
            monkeypatch.setattr(eager_rank, "ROUNDS", rounds)
            found.append([rank.allocated for rank in estimate_memory(small, plan, work, stack=stack).stages])
        assert found[1] == pytest.approx(found[0], rel=1e-9), text


def test_gpipe_keeps_all_micro_batches() -> None:
    one = estimate_memory(profile_of(LLAMA), Plan.parse("pp4 / mb8"), WORK).stages[0].terms["activations"]
    all_of_them = estimate_memory(profile_of(LLAMA), Plan.parse("pp4 / gpipe mb8"), WORK).stages[0].terms["activations"]
    assert all_of_them == 2 * one


def test_recompute_keeps_inputs_and_one_block() -> None:
    none, blocks = _terms("bf16"), _terms("bf16 / recompute=blocks")
    block = (
        saved_bytes(profile_of(LLAMA).blocks[0], saving_of(Plan.parse("bf16"), stack_of(Plan.parse("bf16")), 128))
        * 128
        * 8
    )
    assert none["activations"] == 8 * block
    inputs = 8 * 64 * 2 * 128 * 8
    assert blocks["activations"] == inputs, "at the loss nothing is computed again yet"
    plan = Plan.parse("bf16 / recompute=blocks")
    peaks = [
        estimate_memory(profile_of(LLAMA), plan, WORK, stack=replace(TORCH, logit_bytes=size)).peaks["loss"]
        for size in (0.1, 1000.0)
    ]
    working = working_bytes(profile_of(LLAMA).blocks[0], saving_of(plan, stack_of(plan), 128)) * 128 * 8
    logits = (512 * 1000 + 2 * 64 * 2) * 128 * 8
    assert peaks[0] - (peaks[1] - logits) == block + working, "but behind a small one it is more than that"


@pytest.mark.parametrize("plan", ["bf16", "bf16 / recompute=blocks"])
def test_what_a_recomputed_block_left_in_the_forward_pass_is_reserved_beside_the_loss(plan: str) -> None:
    """Measured so on an H200 (docs/benchmarks.md): blocks freed in other sizes than the loss asks for."""
    memory = estimate_memory(profile_of(LLAMA), Plan.parse(plan), WORK, stack=TORCH)
    stack = stack_of(Plan.parse(plan))
    block = saved_bytes(profile_of(LLAMA).blocks[0], saving_of(Plan.parse(plan), stack, 128)) * 128 * 8
    freed = block if "recompute" in plan else 0.0
    assert memory.worst.phase == "loss" and memory.worst.freed == memory.held == freed
    holes = stack.fragmentation * memory.worst.passing
    assert memory.reserved == pytest.approx(memory.allocated + freed + WORKSPACE + holes)
    need = replace(memory, limit=memory.device - memory.held)
    assert need.fits, "and given back before memory runs out"


def test_scores_in_primitives_have_gradients_beside_what_is_still_kept() -> None:
    """Two of the width of a score, once the feed-forward behind attention has given back what it kept."""
    spec = replace(LLAMA, max_seq_len=4096)
    block, plan = profile_of(spec).blocks[0], Plan.parse("bf16")
    how = saving_of(plan, replace(stack_of(plan), attention="unfused"), 4096)
    place = next(n for n, op in enumerate(block.ops) if op.name == "attention")
    behind = saved_bytes(replace(block, ops=block.ops[place + 1 :]), how)
    assert working_bytes(block, how) == 2 * 2 * 4 * 4096 - behind
    assert working_bytes(block, replace(how, attention="flash2")) == (2 * 192 + 64) * 2


def test_products_under_autocast_cast_what_they_are_fed_for_themselves() -> None:
    """torch.autocast keeps casts of weights alone: queries, keys and values have three of one norm's output in fp32,
    gate and up two; a GPT's one product for all three has one."""
    plan, wide = Plan.parse("bf16"), replace(load_stack("eager"), residual_bytes=4.0)
    for spec, more in ((LLAMA, 3), (GPT, 0)):
        block = profile_of(spec).blocks[0]
        found = [
            sum(saved_bytes(replace(block, ops=(op,)), saving_of(plan, stack, 128)) for op in block.matmuls)
            for stack in (wide, load_stack("eager"))
        ]
        assert found[0] - found[1] == more * 64 * 2, spec.kind


def test_gelu_in_primitives_keeps_four_tensors() -> None:
    """transformers' gelu_new: a trace of GPT-2 keeps four of its feed-forward's width beside the input of the next."""
    plan, stack = Plan.parse("bf16"), load_stack("eager")
    block = profile_of(GPT).blocks[0]
    one, four = (saved_bytes(block, saving_of(plan, replace(stack, gelu_apart=apart), 128)) for apart in (False, True))
    assert four - one == 3 * 256 * 2


def test_what_gathers_product_by_product_holds_no_whole_blocks() -> None:
    """XLA: the product at work, the next, and its gradient; DeepSpeed: what is used again within half of 1e9."""
    profile = profile_of(preset("llama-70b"))
    work, plan = Workload(seq_len=4096, global_batch=64), Plan.parse("fsdp64 bf16 / recompute=blocks")
    stack = replace(load_stack("fsdp1"), one_root=False)
    ends, product, block = 8192 * 128256, 2 * 8192 * 28672, profile.blocks[0].params
    for most, inside in ((inf, 3 * block), (0.0, 3 * product), (1e9, 1e9 + product)):
        memory = estimate_memory(profile, plan, work, stack=replace(stack, most_gathered=most))
        assert memory.worst.terms["gathered"] == pytest.approx((inside + ends) * 2, rel=1e-3), most


def test_resharding_to_few_ranks_leaves_a_part_of_all_blocks_but_those_at_work() -> None:
    profile, work = profile_of(preset("llama-2-7b")), Workload(seq_len=4096, global_batch=64)

    def gathered(dial: str) -> float:
        return estimate_memory(profile, Plan.parse(f"fsdp8 / bf16 / {dial}"), work).worst.terms["gathered"]

    block = 2 * profile.blocks[0].params
    assert gathered("reshard=2") - gathered("reshard=true") == pytest.approx(30 * block / 2)
    assert gathered("reshard=8") == gathered("reshard=true")  # all ranks: nothing is left


@pytest.mark.parametrize(("axes", "held"), [("dp2 fsdp4", 4.0), ("fsdp8", 0.0)])
def test_sums_over_replicas_stay_until_a_backward_pass_ends_where_gradients_have_another_type(
    axes: str, held: float
) -> None:
    profile, work = profile_of(preset("llama-2-7b")), Workload(seq_len=4096, global_batch=8)

    def backward(reduce: str) -> float:
        return estimate_memory(profile, Plan.parse(f"{axes} / bf16-pure / reduce={reduce}"), work).peaks["backward"]

    shards, sent = Plan.parse(axes).axes.dp_shard, 2 * max(block.params for block in profile.blocks)
    assert backward("fp32") - backward("bf16") - sent == pytest.approx(held * profile.num_params / shards, rel=0.01)


def test_the_gradients_of_a_block_are_sent_while_the_block_ahead_of_it_goes_backward() -> None:
    """In a buffer of the type on the wire, whole; of one flat unit the gradient of the head waits too."""
    profile, work = profile_of(preset("llama-2-7b")), Workload(seq_len=128, global_batch=32)
    block, head = max(block.params for block in profile.blocks), profile.head.params

    def backward(plan: str, one_root: bool = False) -> float:
        stack = replace(load_stack("torchtitan"), one_root=one_root)
        return estimate_memory(profile, Plan.parse(plan), work, stack=stack).peaks["backward"]

    fp32, bf16 = (backward(f"fsdp8 / bf16 / reduce={dtype}") for dtype in ("fp32", "bf16"))
    assert fp32 - bf16 == pytest.approx(2 * block)
    gathered = estimate_memory(profile, Plan.parse("fsdp8 / bf16"), work, stack=load_stack("torchtitan"))
    assert gathered.worst.phase == "backward"
    assert gathered.worst.terms["gathered"] == pytest.approx((3 * 2 + 4) * block + 2 * head)
    flat = backward("fsdp8 / bf16", one_root=True) - backward("fsdp8 / bf16")
    assert flat == pytest.approx(2 * head + 2 * profile.embedding)  # its gradient, and the table beside it
    sums = [backward(f"fsdp8 / zero1 / mb4 / bf16 / reduce={dtype}") for dtype in ("fp32", "bf16")]
    assert sums[0] == sums[1], "what adds up over micro-batches is whole as it is"


def test_of_a_pipeline_no_rank_is_looked_at_behind_one_that_needs_more_than_there_is_room() -> None:
    """And with room for all nothing is left out."""
    plan, work = Plan.parse("pp8 / zero-bubble vs2 mb32 / bf16"), Workload(seq_len=2048, global_batch=32)
    eight, h100 = profile_of(preset("llama-8b")), load_cluster("h100:8").device
    whole = estimate_memory(eight, plan, work, device=h100)
    need = whole.device - whole.held
    assert estimate_memory(eight, plan, work, device=h100, room=need) == whole
    some = estimate_memory(eight, plan, work, device=h100, room=need * 0.99)
    assert len(some.stages) < 8 and not some.fits_in(need * 0.99)


@pytest.mark.parametrize(("recompute", "kept"), [("", 32), (" / recompute=0.25", 24), (" / recompute=blocks", 0)])
def test_autograd_keeps_what_is_gathered_of_blocks_that_are_not_computed_again(recompute: str, kept: int) -> None:
    """Beside them a gradient, and the table; where all are computed again, one ahead of the block at work."""
    profile = profile_of(preset("llama-2-7b"))
    plan, work = Plan.parse(f"fsdp8 bf16{recompute}"), Workload(seq_len=4096, global_batch=64)
    stack = replace(load_stack("deepspeed"), keeps_gathered=True, widens_grads=False, flattens_grads=False)
    block = profile.blocks[0].params
    terms = estimate_memory(profile, plan, work, stack=stack).worst.terms
    assert terms["gathered"] == pytest.approx(((max(kept, 2) + 1) * block + 4096 * 32000) * 2, rel=1e-4)


def test_deepspeed_scales_no_gradients_in_fp32_but_for_its_update() -> None:
    deepspeed = load_stack("deepspeed")
    found = [_terms(f"fsdp8 / {kind} / recompute=blocks", stack=deepspeed)["gradients"] for kind in ("fp16", "bf16")]
    assert found[0] == found[1] == LLAMA.num_params / 8 * 2


def test_a_large_block_is_computed_again_when_those_behind_it_have_given_back() -> None:
    (small, *_), (large, *_) = (profile_of(preset(name)).blocks for name in ("llama-1b", "llama-8b"))
    plan = Plan.parse("bf16 / recompute=blocks")
    how = saving_of(plan, stack_of(plan), 2048)
    chains = {each: Stage(each, 0, True, True) for each in ((large, small), (large, *[small] * 64), (small, large))}
    found = [again_in(stage, plan, how) for stage in chains.values()]
    behind = kept_in(Stage((small,), 1, False, True), plan, how)
    assert found == [saved_bytes(large, how) - behind, saved_bytes(small, how), saved_bytes(large, how)]
    assert again_in(chains[large, small], plan.with_(offload=Offload(activations=True)), how) == found[2]


def test_a_block_that_is_not_recomputed_has_given_back_when_the_one_ahead_of_it_is_computed_again() -> None:
    """The last of `every2` keeps as much itself; that of `50%` is computed again, beside all that the others keep."""
    work, spec = Workload(seq_len=8192, global_batch=8), replace(preset("llama-8b"), vocab_size=128)
    tokens = work.seq_len * work.global_batch / 8
    for policy, computed_again in (("every2", 0), ("50%", 1)):
        plan = Plan.parse(f"fsdp8 / mb1 / bf16 / recompute={policy}")
        how, stage = saving_of(plan, stack_of(plan), work.seq_len), Stage(profile_of(spec).blocks, 0, True, True)
        block = saved_bytes(stage.blocks[0], how)
        assert again_in(stage, plan, how) == computed_again * block
        (loss,) = {rank.terms["activations"] for rank in estimate_memory(profile_of(spec), plan, work).stages}
        assert loss == pytest.approx((kept_in(stage, plan, how) + computed_again * block) * tokens), policy


def test_a_rank_without_blocks_offloads_no_activations() -> None:
    spec, plan = replace(preset("llama-1b"), num_layers=2), Plan.parse("pp4 / gpipe mb4 / bf16 / offload=activations")
    memory = estimate_memory(profile_of(spec), plan, WORK, stack=load_stack("nanotron"))
    assert any(rank.terms.get("activations", 0.0) == 0 for rank in memory.stages)


def test_offload_leaves_no_states_on_the_device() -> None:
    assert not {"weights", "optimizer", "gradients"} & set(_terms("fsdp8 / offload=state"))


def test_a_batch_that_does_not_divide_names_the_nearest_that_does() -> None:
    with pytest.raises(PlanError, match="nearest: 6 or 9"):
        divide(profile_of(LLAMA), Plan.parse("dp3"), WORK)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="16 stages for 8 blocks"):
        divide(profile_of(LLAMA), Plan.parse("pp16"), Workload(seq_len=128, global_batch=8))


def test_each_stage_of_ours_needs_a_block() -> None:
    """Where embedding and head are no stages of their own two stages more than blocks are too many as well."""
    for plan, found in (("pp2 / 1f1b mb4", "2 stages for 1 blocks"), ("pp2 / zero-bubble-v mb4", "4 stages for 3")):
        spec = replace(LLAMA, num_layers=int(found.split()[3]))
        with pytest.raises(PlanError, match=found):
            _terms(plan, spec)


def test_experts_are_divided_by_ep() -> None:
    spec = replace(LLAMA, kind="moe", num_experts=8, experts_per_token=2)
    one, four = _terms("fsdp4 zero1", spec), _terms("fsdp4 ep4 zero1", spec)
    experts = 8 * 8 * 3 * 64 * 192 * 4
    assert one["gathered"] - four["gathered"] == experts * 3 / 4
    assert one["optimizer"] == pytest.approx(four["optimizer"])


def test_boundaries_of_the_plan_are_the_stages() -> None:
    plan = Plan(axes=Axes(pp=2), schedule=Schedule(boundaries=("layers.5",)))
    ranks = divide(profile_of(LLAMA), plan, WORK).ranks
    assert [(rank[0].start, len(rank[0].blocks)) for rank in ranks] == [(0, 5), (5, 3)]


@pytest.mark.parametrize("names", [("layers.9",), ("layers.0",), ("blocks",), ("layers.2", "layers.5")])
def test_boundaries_that_make_no_stages_are_refused(names: tuple[str, ...]) -> None:
    plan = Plan(axes=Axes(pp=2), schedule=Schedule(boundaries=names))
    with pytest.raises(PlanError, match="boundaries: found"):
        _ = divide(profile_of(LLAMA), plan, WORK).ranks


def test_holes_arise_in_what_comes_and_goes() -> None:
    memory = estimate_memory(profile_of(LLAMA), Plan.parse("dp8 bf16"), WORK, stack=MEGATRON)
    passing = memory.allocated - sum(memory.worst.terms[name] for name in STATES)
    assert memory.worst.passing == pytest.approx(passing)
    assert memory.reserved - memory.held == pytest.approx(
        memory.allocated + MEGATRON.fragmentation * passing + WORKSPACE
    )


def test_a_host_that_is_ahead_holds_whole_activations() -> None:
    nanotron, device = load_stack("nanotron"), load_cluster("h100").device

    def held(plan: str, dim: int = 4096, layers: int = 32) -> float:
        spec = ModelSpec(num_layers=layers, dim=dim, num_heads=32, ffn_dim=4 * dim, vocab_size=512, max_seq_len=4096)
        parsed = Plan.parse(plan)
        work = Workload(seq_len=4096, global_batch=parsed.axes.data * parsed.batch.micro_batches)
        return held_ahead(divide(profile_of(spec), parsed, work, "greedy"), nanotron, device) / (4096 * dim * 2)

    full = nanotron.runs_ahead
    assert held("tp4 / mb8 / bf16") == held("tp16 / mb2 / bf16") == full
    assert held("tp16 / bf16", layers=10) == HELD * 10, "a single micro-batch: what its forward pass leaves"
    assert 0 < held("tp4 / bf16", layers=10) < HELD * 10, "within a node the device has done some of it by then"
    assert held("tp4 / bf16", 1024) == 0.0, "nor is the host ahead of a device that is faster than it"
    assert held("tp4 / mb8 / bf16", 1024) == full / 2 and held("tp4 / mb99 / bf16", 1024) == full, "but by chance"
    assert held("dp8 / mb8 / bf16") == 0.0, "no collectives inside of blocks"
    assert held("dp64 tp8 / mb8 / bf16") == 0.0, "512 devices, and rings of 64 ranks, stall the host"
    assert held("pp4 tp4 / mb4 / bf16", 8192) == 38.4 < held("pp4 tp4 / mb8 / bf16", 8192) == full, "the warm-up alone"
    assert held("pp4 tp4 / bf16", 8192, layers=8) == 9.6 < held("pp2 tp4 / bf16", 8192) == HELD * 16
    assert held("pp2 tp8 / mb8 / bf16") == BUFFERS, "the host waits for the ranks of tp, the device for the host"
    assert held("pp2 dp64 tp4 / mb8 / bf16", 8192) == BUFFERS, "512 devices stall"
    assert held_ahead(divide(profile_of(LLAMA), Plan.parse("tp4 / mb8 bf16"), WORK, "even"), MEGATRON, device) == 0.0


def test_what_is_given_back_before_memory_runs_out_does_not_count() -> None:
    memory = replace(estimate_memory(profile_of(LLAMA), Plan.parse("dp8 bf16"), WORK), held=3e9)
    needed = memory.device - 3e9
    assert memory.fits_in(needed + 1) and not memory.fits_in(needed - 1) and not memory.fits
    assert replace(memory, limit=needed + 1).fits


def test_a_full_device_gets_back_what_streams_hold() -> None:
    nanotron, device = load_stack("nanotron"), load_cluster("h100").device
    spec = ModelSpec(num_layers=8, dim=4096, num_heads=32, ffn_dim=16384, vocab_size=512, max_seq_len=4096)
    work, plan = Workload(seq_len=4096, global_batch=16), Plan.parse("tp8 / mb2 / bf16 / seq")
    memory = estimate_memory(profile_of(spec), plan, work, stack=nanotron, device=device)
    assert memory.held > 5e9
    small = replace(device, memory=memory.device - 1e9)
    full = estimate_memory(profile_of(spec), plan, work, stack=nanotron, device=small)
    assert full.held == 0.0 and full.fits and full.allocated == memory.allocated


def test_buckets_hold_a_gradient_where_data_ranks_reduce_it() -> None:
    nanotron = load_stack("nanotron")
    alone, many = _terms("bf16", stack=nanotron), _terms("dp8 bf16", stack=nanotron)
    assert many["gradients"] == 1.5 * alone["gradients"]
    assert _terms("bf16", stack=replace(nanotron, bucket_grads=False))["gradients"] == many["gradients"]


def test_frozen_weights_are_gathered_without_a_gradient() -> None:
    def gathered(trained: float) -> float:
        work = replace(WORK, trained=trained)
        stack = replace(TORCH, one_root=False)  # else what is outside of blocks is gathered at the loss, in their place
        memory = estimate_memory(profile_of(LLAMA), Plan.parse("fsdp8 bf16"), work, stack=stack)
        return memory.worst.terms["gathered"]

    assert gathered(1.0) - gathered(0.01) == max(block.params for block in profile_of(LLAMA).blocks) * 2
    (whole, *_), (frozen, *_) = (divided(replace(WORK, trained=trained)) for trained in (1.0, 0.01))
    assert whole[True] - whole[False] == max(block.params for block in profile_of(LLAMA).blocks) * 2
    assert frozen[True] == frozen[False] == whole[False]


def divided(work: Workload) -> list[dict[bool, float]]:
    """What is gathered on each rank of a pipeline where the backward pass goes on, and at the loss."""
    division = divide(profile_of(LLAMA), Plan.parse("fsdp8 bf16"), work)
    return [
        {back: gathered_of(division, stages, TORCH, goes_back=back) for back in (True, False)}
        for stages in division.ranks
    ]


@pytest.mark.parametrize(
    "plan", ["pp2 / 1f1b mb2", "pp2 / 1f1b mb2 / bf16", "pp2 fsdp2 / zero2 / zero-bubble mb4 / bf16"]
)
def test_a_rank_of_a_pipeline_without_a_trained_weight_has_no_gradients(plan: str) -> None:
    whole, parsed = profile_of(LLAMA), Plan.parse(plan)
    ops = [replace(op, trained=False) if isinstance(op, Matmul) else op for op in whole.blocks[0].ops]
    frozen = replace(whole.blocks[0], ops=tuple(ops), frozen=whole.blocks[0].params)
    profile = replace(whole, blocks=(frozen,) * len(whole.blocks), frozen=whole.embedding)
    work = Workload(seq_len=128, global_batch=parsed.axes.data * parsed.batch.micro_batches)
    first, last = estimate_memory(profile, parsed, work, stack=load_stack("shardwise-cpu")).stages
    assert not first.terms.get("gradients") and last.terms["gradients"] > 0, "the head alone is trained"


def test_large_jobs_stall_sooner_with_large_messages() -> None:
    def stalls(plan: str, dim: int) -> bool:
        spec = ModelSpec(num_layers=32, dim=dim, num_heads=32, ffn_dim=4 * dim, vocab_size=512, max_seq_len=4096)
        parsed = Plan.parse(plan)
        work = Workload(seq_len=4096, global_batch=parsed.axes.data * parsed.batch.micro_batches)
        return stalled(divide(profile_of(spec), parsed, work, "greedy"), parsed.world // 8, 8)

    assert stalls("pp2 dp256 bf16", 2048) and not stalls("pp2 dp128 bf16", 2048) and stalls("pp2 dp128 bf16", 8192)
    assert stalls("pp2 tp32 bf16", 2048) and not stalls("pp2 tp16 bf16", 2048)
    assert stalls("pp2 fsdp32 tp4 zero1 bf16", 2048) and not stalls("pp2 fsdp16 tp8 zero1 bf16", 2048), "rings of 32"


def test_a_pipeline_holds_whole_gradients_until_its_last_micro_batch() -> None:
    """`fully_shard` reduces once there, and after each micro-batch without a pipeline, from zero 2 on."""
    sizes, device = preset("llama-8b"), load_cluster("l40s").device
    work = Workload(seq_len=4096, global_batch=64)

    def gradients(text: str) -> float:
        plan = Plan.parse(text)
        memory = estimate_memory(profile_of(sizes), plan, work, stack=load_stack("shardwise"), device=device)
        return max(stage.terms.get("gradients", 0.0) for stage in memory.stages)

    whole = sizes.num_params / 2 * 4.0
    for zero in (1, 2, 3):
        assert gradients(f"pp2 fsdp16 zero{zero} / interleaved mb4 gbs64 / bf16 / recompute=blocks") > 0.9 * whole
    assert gradients("fsdp32 zero2 / mb2 gbs64 / bf16 / recompute=blocks") < 0.1 * whole
    beside = gradients("fsdp32 zero1 / mb2 gbs64 / bf16 / recompute=blocks offload=state")
    assert beside > 1.8 * whole, "what waits for the last reduction is not on the host"


def _first_rank(axes: str, spec: ModelSpec) -> RankMemory:
    """Of two stages of two blocks."""
    plan = Plan.parse(f"{axes} / 1f1b mb4 / bf16")
    plan = plan.with_(schedule=replace(plan.schedule, boundaries=spec.block_names[2:3]))
    work = Workload(seq_len=32, global_batch=4 * plan.axes.data)
    return estimate_memory(profile_of(spec), plan, work, stack=load_stack("shardwise-cpu")).stages[0]


@pytest.mark.parametrize(("axes", "given"), [("pp2 fsdp2", 3 / 2), ("pp2 fsdp4", 5 / 4), ("pp2", 1.0)])
def test_a_large_table_is_given_back_before_its_gradients_are_reduced(axes: str, given: float) -> None:
    """As traced within 0.1 %: beside the gathered blocks all gradients, those that are sent, and what comes of them.

    Where they are sharded, gloo's copy too.
    """
    spec = replace(LLAMA, num_layers=4, vocab_size=50_000)
    first, blocks = _first_rank(axes, spec), 2 * spec.block_params
    assert first.phase == "reduction"
    assert first.terms["gathered"] == pytest.approx(2 * blocks)
    assert first.terms["gradients"] == pytest.approx(4 * (blocks + spec.embedding_params * (2 + given)))


def test_of_several_tensors_that_are_reduced_together_only_the_last_is_held() -> None:
    """Positions behind the table of tokens: of all that autograd gave they alone are there. As traced within 0.1 %."""
    spec = replace(GPT, vocab_size=50_000, dropout=False)
    first = _first_rank("pp2 fsdp2", spec)
    assert first.phase == "reduction"
    table = spec.vocab_size * spec.dim
    held = 2 * spec.block_params + (spec.embedding_params - table) + 2.5 * spec.embedding_params
    assert first.terms["gradients"] == pytest.approx(4 * held)


def test_the_worst_rank_is_the_one_that_reserves_the_most() -> None:
    """`fits` compares what is reserved: of few live tensors more, with holes, another rank may take the most."""
    states = RankMemory(0, {"weights": 30e9, "activations": 10e9}, "backward")
    passing = RankMemory(1, {"weights": 9e9, "activations": 30e9}, "backward")
    memory = Memory((states, passing), fragmentation=0.1, context=1e9, limit=42.5e9)
    assert memory.worst is passing
    assert memory.reserved == pytest.approx(42e9)
    assert not memory.fits


# ---------------------------------------------------------------- the memory of hosts


def test_offloaded_states_are_those_of_the_node_that_holds_most() -> None:
    """zero-bubble-v gives each rank a stage of both ends, and 56 layers on 16 stages are not even."""
    profile, work = profile_of(preset("mixtral-8x22b")), Workload(seq_len=512, global_batch=32)
    plan = Plan.parse("pp8 zero1 / zero-bubble-v mb32 / bf16 / offload=state")
    memory = estimate_memory(profile, plan, work)
    assert len(memory.offloaded) == 8 and max(memory.offloaded) > 1.1 * memory.offloaded[0]
    assert on_host(memory, plan, 1) == max(memory.offloaded)
    pairs = [sum(memory.offloaded[i : i + 2]) / 2 for i in range(0, 8, 2)]
    assert on_host(memory, plan, 2) == pytest.approx(max(pairs)) and on_host(memory, plan, 8) < max(pairs)
    assert on_host(memory, plan, 3) == pytest.approx(max(sum(memory.offloaded[i : i + 3]) / 3 for i in (0, 3, 6)))
    kept = estimate_memory(profile, plan.with_(offload=Plan().offload), work)
    assert not kept.offloaded and on_host(kept, plan, 1) == 0.0
    cluster = load_cluster("h100:1x8").with_(host_memory=memory.offloaded[0])
    assert "of host memory per device" in host_lack(memory, plan, cluster)
    assert not host_lack(memory, plan, cluster.with_(host_memory=max(memory.offloaded)))


def test_no_plan_is_chosen_that_the_hosts_cannot_hold() -> None:
    spec, work = preset("llama-30b"), Workload(seq_len=2048, global_batch=16)
    cluster = load_cluster("h100:8").with_(host_memory=2e11)
    found = find_plan(profile_of(spec), spec, cluster, work)
    assert found.best is not None and not host_lack(found.best.memory, found.best.plan, cluster)
    reasons = {decision.field: decision.reason for decision in decisions(found.best, found.space)}
    assert "of host memory per device" in reasons["offload.state"]


@pytest.mark.parametrize(
    "text",
    [
        "pp4 / 1f1b mb4",
        "pp4 / 1f1b mb4 / recompute=every3",
        "pp4 / 1f1b mb4 / recompute=50%",
        "pp2 tp2 / zero-bubble-v mb4",
    ],
)
def test_what_is_asked_of_ranks_that_hold_the_same_is_that_of_each(text: str) -> None:
    """The last rank has as many blocks as the others, and the head; which blocks are recomputed goes by their place."""
    plan, spec = Plan.parse(text), replace(preset("llama-1b"), num_layers=8, tie_embeddings=False)
    division = divide(profile_of(spec), plan, Workload(seq_len=512, global_batch=16), "even")
    stack, cluster = load_stack("shardwise"), load_cluster("h100:8")

    def costs(stages: tuple[Stage, ...]) -> RankCosts:
        return replace(rank_costs(division, stages, cluster, stack), stages=())

    for ask in (partial(states_of, division, stack=stack), division.whole, costs):
        assert division.of_ranks(ask) == [ask(stages) for stages in division.ranks]


def test_torchtitans_list_keeps_every_second_product_of_a_block_that_is_not_compiled() -> None:
    profile, stack = profile_of(preset("llama-8b")), load_stack("torchtitan")
    block, plan = profile.blocks[0], Plan.parse("fsdp8 / bf16 / recompute=ops")
    eager, compiled = (
        kept_outputs(block, saving_of(plan, replace(stack, fused=fused), 4096)) for fused in (False, True)
    )
    inputs, attention = 2 * 4096, 2 * 4096 + 4 * 32
    q, k, v, out, gate, up, down = 4096, 1024, 1024, 4096, 14336, 14336, 4096
    assert eager == inputs + attention + 2 * (q + v + gate + down)
    assert compiled == inputs + attention + (q + k + v + out + gate + up + down)
