"""Modules as engineers bring them: the closed form against the trace of their step, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.diagnose.read_module import example_length, example_of, read_module
from shardwise.diagnose.tracing.module import estimate_module_by_trace
from shardwise.errors import ModelError
from shardwise.hardware.cluster import load_cluster
from shardwise.model.course import Held
from shardwise.model.describe import describe
from shardwise.model.known import Known
from shardwise.model.seen import added_to_loss, taken_by_loss
from shardwise.model.stacks import blocks_of, find_blocks
from shardwise.model.torch_private import READ_NUMBER, fake_tensors, is_fake, with_values
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import kept_bytes, saved_bytes, saving_of
from shardwise.plan.ranks.division import divide
from shardwise.plan.search import find_plan
from shardwise.plan.stack import stack_of, stack_on
from shardwise.plan.workload import Workload
from tests.brought import (
    VOCAB,
    Adapted,
    AllExperts,
    Asks,
    Balanced,
    Checkpointed,
    ChunkedLoss,
    HalfFrozen,
    Masked,
    Narrowing,
    OwnLoss,
    Pooled,
    Recurrent,
    Routed,
    Sparse,
    Staged,
    Tabled,
    Tables,
    Told,
    TwoStreams,
    Unused,
    Volumes,
    WeightNormed,
    Words,
)
from tests.modules import factory

pytestmark = [  # what is deprecated is brought all the same
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*jit.script. is deprecated:DeprecationWarning"),
]
BOUND = 0.03
FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "lstm": partial(Words, Recurrent),
    "routed": partial(Words, Routed, 2),
    "checkpointed": partial(Words, Checkpointed),
    "staged": Staged,
    "masked": Masked,
    "weight norm": WeightNormed,
    "weight norm by hooks": partial(WeightNormed, old=True),
    "unused": Unused,
    "dict": Told,
    "own loss": OwnLoss,
    "volumes": Volumes,
}
PLANS = ("dp1", "fsdp2 / bf16", "fsdp4 / mb2", "dp2 fsdp2 / zero2 / mb2 / bf16", "dp1 / mb2 / recompute=blocks")
FAST = [
    ("staged", "fsdp2 / bf16"),
    ("lstm", "dp1"),
    ("lstm", "fsdp2 / bf16"),
    ("routed", "dp1"),
    ("checkpointed", "dp1"),
    ("weight norm", "fsdp4 / mb2"),
    ("weight norm by hooks", "dp1"),
    ("unused", "dp1 / mb2 / recompute=blocks"),
    ("dict", "fsdp4 / mb2"),
    ("own loss", "fsdp2 / bf16"),
    ("volumes", "fsdp2 / bf16"),
    ("lstm", "pp2 / 1f1b mb4"),
    ("checkpointed", "pp2 / 1f1b mb4"),
    ("dict", "pp2 / gpipe mb4 / bf16"),
    ("masked", "fsdp4 / mb2"),
]


def cells() -> list[Any]:
    rest = [(name, plan) for name in FACTORIES for plan in PLANS if (name, plan) not in FAST]
    return [*FAST, *(pytest.param(*cell, marks=pytest.mark.soak) for cell in rest)]


@pytest.mark.share(16)
@pytest.mark.parametrize(("name", "plan"), cells())
def test_closed_form_is_near_the_trace(name: str, plan: str) -> None:
    made, parsed = FACTORIES[name], Plan.parse(plan)
    example = example_of(made)
    seq = 64 if example is None else example_length(example)
    work = Workload(seq_len=seq, global_batch=32)
    profile = read_module(name, made, seq, "meta", blocks_of(made, "auto"))
    assert not profile.unseen and profile.blocks[0].courses
    stages = estimate_memory(profile, parsed, work, stack=stack_on("cpu")).stages
    for closed, rank in ((stages[0], 0), (stages[-1], parsed.world - 1)):
        traced = estimate_module_by_trace(made, parsed, work, rank=rank)
        assert abs(closed.allocated / traced.peak - 1) <= BOUND, (closed, traced)
        if len(stages) == 1:
            break


def test_what_grows_with_the_square_of_the_rows_is_told_from_the_rest() -> None:
    kept = read_module("", FACTORIES["routed"], 64, "meta").blocks[0].courses[-1][1].kept
    assert kept.squared > 0
    assert Held(per_token=2.0, squared=0.5).size(10) == 2.0 * 10 + 0.5 * 100
    plain = read_module("", Words, 64, "meta").blocks[0].courses[-1][1]
    assert not any(held.squared for held in (plain.kept, *plain.forward, *plain.backward))


def test_lists_of_lists_are_no_blocks_and_computed_weights_make_no_other_class() -> None:
    assert find_blocks(Staged()) == ("stages.1.0", "stages.1.1", "stages.1.2")
    assert find_blocks(WeightNormed()) == tuple(f"layers.{i}" for i in range(4))


def test_a_step_goes_backward_from_a_loss_of_its_own_or_logits() -> None:
    hidden, logits = torch.zeros(2, 3), torch.zeros(2, 5)
    loss = torch.zeros((), requires_grad=True)
    assert taken_by_loss({"hidden": hidden, "logits": logits}) is logits
    assert taken_by_loss((logits, hidden)) is logits
    assert taken_by_loss((logits, loss)) is loss
    assert taken_by_loss({"logits": logits, "loss": loss, "hidden": hidden}) is loss
    assert taken_by_loss(torch.zeros(2, dtype=torch.long)) is None


def test_what_cannot_be_seen_is_said() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    assert describe(Sparse, ids).unseen.startswith("embed gives sparse gradients")
    with pytest.raises(ModelError, match="embed gives sparse gradients .*: make them dense"):
        estimate_module_by_trace(Sparse, Plan(), Workload(seq_len=16, global_batch=2))
    with pytest.raises(ModelError, match="spare.weight .* got no gradient .* add find-unused to the plan"):
        estimate_module_by_trace(Unused, Plan.parse("dp2"), Workload(seq_len=16, global_batch=2))


def test_a_module_that_asks_for_values_is_seen_all_the_same_where_it_is_read_with_them() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    with pytest.raises(ModelError, match=r"`__bool__` in forward \(Asks\)"):
        describe(Asks, ids)
    found = describe(Asks, ids, device="cpu")
    assert not found.unseen and found.blocks[0].courses


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # from torch 2.14 on
def test_scripted_modules_are_refused() -> None:
    def scripted() -> nn.Module:
        module = Words()
        module.head = torch.jit.script(nn.Linear(8, 8))
        return module

    with pytest.raises(ModelError, match="head .* was made by torch.jit, whose modules take no hooks"):
        describe(scripted(), torch.zeros(2, 16, dtype=torch.long), device="cpu")


def test_private_names_of_torch() -> None:
    with fake_tensors():
        fake = torch.zeros(3)
        with with_values():
            real = torch.ones(2)
    assert is_fake(fake) and not is_fake(real) and real.sum() == 2
    assert READ_NUMBER(real.sum()) == 2


def test_known_values_keep_no_tensor_alive() -> None:
    known = Known()
    made = torch.arange(4, device="meta")
    known.follow(torch.arange, (4,), {}, made)
    assert known.read(torch.Tensor.tolist, (made,), {}) == ([0, 1, 2, 3],)
    other = F.relu(torch.zeros(4, device="meta"))
    assert known.read(torch.Tensor.tolist, (other,), {}) == ()


def near_the_trace(made: Callable[[], nn.Module], plan: str, seq: int, batch: int = 32, within: float = BOUND) -> None:
    """Every rank of a pipeline, or the first."""
    parsed, work = Plan.parse(plan), Workload(seq_len=seq, global_batch=batch)
    profile = read_module("", made, seq, "meta", blocks_of(made, "auto"))
    stages = estimate_memory(profile, parsed, work, stack=stack_on("cpu")).stages
    for rank, closed in enumerate(stages):
        traced = estimate_module_by_trace(made, parsed, work, rank=rank * parsed.world // len(stages))
        assert abs(closed.allocated / traced.peak - 1) <= within, (rank, closed, traced)


@pytest.mark.share(3)
@pytest.mark.parametrize("plan", ["pp2 / looped-bfs mb4 / bf16", "pp2 / interleaved mb4", "dp1 / recompute=blocks"])
def test_frozen_blocks_keep_nothing_but_in_later_stages(plan: str) -> None:
    near_the_trace(HalfFrozen, plan, 64)


def test_so_they_do_on_accelerators() -> None:
    profile = read_module("", HalfFrozen, 64, "meta")
    plan, work = Plan.parse("pp2 / looped-bfs mb4"), Workload(seq_len=64, global_batch=32)
    first, second = (stages[0].blocks[0] for stages in divide(profile, plan, work).ranks)
    how = saving_of(plan, stack_of(plan), 64)
    assert first.frozen == second.frozen == first.params
    assert saved_bytes(first, how) == 0 < saved_bytes(second, how)


@pytest.mark.parametrize("plan", ["dp2 / bf16-pure", "fsdp2 / zero1 / bf16-pure"])
def test_frozen_parameters_have_no_masters(plan: str) -> None:
    def adapted() -> nn.Module:
        model = Words(Adapted)
        model.embed.requires_grad_(False)
        return model

    near_the_trace(adapted, plan, 16, 16)  # of fewer rows the first update needs most: replicas are compared in it


def test_pipelines_of_frozen_blocks_are_searched() -> None:
    profile, work = read_module("", HalfFrozen, 64, "meta"), Workload(seq_len=64, global_batch=32)
    forbid = ("dp_replicate", "dp_shard", "tp", "cp")
    best = find_plan(profile, None, load_cluster("cpu:2"), work, forbid=forbid).ranked[0].plan
    assert best.axes.pp == 2


@pytest.mark.parametrize("plan", ["dp1 / recompute=blocks", "fsdp2 / mb2 / bf16 / recompute=blocks"])
def test_recomputed_blocks_keep_each_stream_that_they_are_given(plan: str) -> None:
    near_the_trace(TwoStreams, plan, 64)
    block, parsed = read_module("", TwoStreams, 64, "meta").blocks[1], Plan.parse(plan)
    how = saving_of(parsed, stack_of(parsed), 64)
    assert kept_bytes(block, 1, parsed, how) == 2 * block.width * how.residual


def test_a_number_that_is_not_the_loss_of_the_logits_is_added_to_it() -> None:
    model, ids = Balanced(), torch.zeros(2, 16, dtype=torch.long)
    output = model(ids)
    assert taken_by_loss(output) is output["logits"] and added_to_loss(output) == [output["aux_loss"]]
    assert taken_by_loss(pair := (output["logits"], output["aux_loss"])) is pair[0]
    whole = output["aux_loss"] + output["logits"].mean()
    assert taken_by_loss((*pair, whole)) is whole and added_to_loss((*pair, whole)) == []
    profile = describe(Balanced, ids)
    assert profile.added == 1 and not profile.one_number and profile.outputs == VOCAB
    work, plan = Workload(seq_len=64, global_batch=32), Plan.parse("fsdp2 / bf16")
    with_it, without = (estimate_module_by_trace(made, plan, work).peak for made in (Balanced, Words))
    assert with_it >= without
    near_the_trace(Balanced, "fsdp2 / bf16", 64)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("plan", "within"), [("pp2 / gpipe mb4", 0.01), ("pp4 / 1f1b mb8", 0.01), ("pp2 / interleaved mb4", BOUND)]
)
def test_stages_of_unlike_blocks_send_and_keep_what_is_theirs(plan: str, within: float) -> None:
    near_the_trace(Narrowing, plan, 3, within=within)
    parsed, work = Plan.parse(plan), Workload(seq_len=3, global_batch=32)
    sent = {
        stage.handed for rank in divide(read_module("", Narrowing, 3, "meta"), parsed, work).ranks for stage in rank
    }
    assert len(sent) > 1  # what each hands on is of its own size


@pytest.mark.share(6)
@pytest.mark.parametrize("plan", ["pp2 / 1f1b mb4", "pp2 / gpipe mb4 / bf16"])
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(partial(Words, Tabled), id="buffers of blocks are with their stage alone"),
        pytest.param(ChunkedLoss, id="a head's own moments count in pipelines too"),
        pytest.param(partial(Words, AllExperts), id="of experts that were seen nothing is put together"),
    ],
)
def test_in_pipelines(made: Callable[[], nn.Module], plan: str) -> None:
    near_the_trace(made, plan, 64)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "plan", ["fsdp4 / mb2", "pp2 fsdp2 / 1f1b mb4", "fsdp2 / bf16", "dp1 / bf16", "dp2 / find-unused"]
)
def test_what_nobody_uses_is_where_apply_puts_it(plan: str) -> None:
    """And is reduced as zeros where ranks share it, and not cast where one process casts what it uses."""
    near_the_trace(Unused, plan, 64, 8, within=0.01)


def test_recomputed_stages_keep_each_tensor_between_blocks_once() -> None:
    near_the_trace(Words, "pp2 / 1f1b mb4 / recompute=blocks", 64, within=0.01)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("made", "plan"),
    [
        (Pooled, "fsdp2 zero1 / bf16"),
        (Pooled, "fsdp2 zero2 / mb2 / bf16"),
        (partial(Pooled, 40 * VOCAB), "fsdp4 / bf16"),
        (partial(Pooled, 40 * VOCAB), "pp2 fsdp2 / 1f1b mb2 / bf16"),
        (partial(Pooled, 40 * VOCAB), "fsdp2 / mb2"),  # the table comes again beside what is left of its gradient
        (partial(Pooled, 40 * VOCAB), "fsdp2 zero2 / mb2"),  # all weights are there beside it
    ],
)
def test_gradients_that_are_sharded_lie_in_a_copy_of_gloos(made: Callable[[], nn.Module], plan: str) -> None:
    """Where parameters need most: a block's or a table's, whole in fp32."""
    near_the_trace(made, plan, 16, 16)


def test_what_torch_logs_of_a_step_that_misses_a_block_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    blocks = read_module("", Tables, 8, "meta").blocks
    assert "aten.mm" not in capfd.readouterr().err
    assert all(block.apart for block in blocks)
    others = (read_module("", made, 8, "meta").blocks for made in (HalfFrozen, Pooled))
    assert [sum(block.apart for block in blocks) for blocks in others] == [1, 0]


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["fsdp2 / mb2", "fsdp2 zero1 / mb2 / bf16", "dp2", "fsdp4 zero2 / mb4"])
def test_blocks_that_are_fed_what_has_no_gradient_are_reduced_at_the_end(plan: str) -> None:
    """Whole until then. And the first update compares replicas, of a large table part by part."""
    near_the_trace(factory("tables"), plan, 16, 16, within=0.01)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("base", "plan"),
    [
        (Words, "fsdp2 / mb2"),  # the output before, and weights that were gathered for a backward pass
        (Pooled, "dp2"),  # frozen parameters are compared too
        (Words, "dp1 / bf16"),  # no cast weights are kept
        (Words, "fsdp4 / recompute=blocks"),  # nothing runs again
    ],
)
def test_a_head_alone_is_trained(base: type[Words], plan: str) -> None:
    def probe() -> nn.Module:
        model = base().requires_grad_(False)
        model.head.requires_grad_(True)
        return model

    near_the_trace(probe, plan, 64 if base is Words else 16, 8, within=0.015)


class Normed(nn.Module):
    """Batch norms before an activation, and before the sum with the stream."""

    def __init__(self) -> None:
        super().__init__()
        narrow, wide = nn.Conv2d(32, 8, 1, bias=False), nn.Conv2d(8, 32, 3, padding=1, bias=False)
        self.inner = nn.Sequential(narrow, nn.BatchNorm2d(8), nn.ReLU(), wide, nn.BatchNorm2d(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.inner(x))


class Bottlenecks(nn.Module):
    """As ResNet-50 is made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(Normed() for _ in range(4))
        self.example_input_array = torch.zeros(2, 3, 16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("made", "plan"),
    [
        (Bottlenecks, "dp2"),
        (Bottlenecks, "fsdp2 / mb2"),
        (Bottlenecks, "pp2 dp2 / 1f1b mb2"),
        (factory("residual"), "fsdp2 / bf16"),  # which has its sums outside of blocks
    ],
)
def test_batch_norms_over_data_ranks(made: Callable[[], nn.Module], plan: str) -> None:
    near_the_trace(made, plan, 3, 16, within=0.01)


class OneUnit(nn.Module):
    """No repeated blocks, and no labels for each feature that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.Linear(256, 300)
        self.example_input_array = torch.zeros(2, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.down(torch.relu(self.up(x)))))


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("plan", "batch"),
    [
        ("fsdp2 / mb2", 16),  # what was sent of its weights stays to the end of the forward pass
        ("fsdp2 / mb4", 256),  # and no weights are there beside all gradients
        ("fsdp2 / bf16", 2048),  # a square is made in fp32
        ("dp2 / mb2", 2048),  # gradients go into the buckets one by one
        ("dp1 / bf16", 256),  # cast weights are used up one by one
    ],
)
def test_modules_of_one_unit(plan: str, batch: int) -> None:
    near_the_trace(OneUnit, plan, 256, batch)
