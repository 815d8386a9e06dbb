"""Modules that are no reference model: the closed form, read off their forward, against the trace of their step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.diagnose.read_module import read_module
from shardwise.diagnose.tracing.module import estimate_module_by_trace
from shardwise.diagnose.tracing.without_values import grouped
from shardwise.errors import ModelError, PlanError
from shardwise.model.course import DRAWN
from shardwise.model.profile import Profile
from shardwise.parallel.randomness import counter
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.stack import load_stack, stack_on
from shardwise.plan.workload import STATE_BYTES, Workload
from shardwise.train.updates import low_bits
from tests.forms import Denoiser, Einsum, Functions, Mixer, Scan, Texts, Valued
from tests.modules import Rows, TwoInputs, factory, hugging_face

BOUND = 0.03
SEQ = {"pictures": 3, "two": 64, "residual": 3, "unet": 3, "encoder-decoder": 32, "rows": 128}
"""What counts as the tokens of their examples; of the others 64."""
FAST = [
    ("llama", "fsdp2 / bf16"),
    ("gpt2", "dp2 / bf16"),
    ("qwen3", "fsdp2 / mb2"),
    ("window", "fsdp2 / zero2 / bf16"),
    ("gemma2", "fsdp2"),
    ("two", "dp2"),
    ("two", "pp2 / 1f1b mb2"),
    ("falcon", "fsdp2 / bf16"),
    ("qwen3_moe", "dp2"),
    ("residual", "fsdp2 / bf16"),
    ("unet", "dp2"),
    ("tied", "dp2 / bf16"),
    ("frozen", "dp2"),
]
PLANS = ["dp2", "dp2 / bf16", "fsdp2 / bf16", "fsdp4 / mb2", "dp2 fsdp2 / zero2 / mb2 / bf16", "fsdp2 / zero1 / bf16"]
MODELS = ["llama", "gpt2", "qwen3", "gemma2", "bert", "phi", "window", "falcon"]
MODELS += ["pictures", "residual", "encoder-decoder", "tied", "frozen"]


def cells() -> list[Any]:
    rest = [(model, plan) for model in MODELS for plan in PLANS if (model, plan) not in FAST]
    return [*FAST, *(pytest.param(*cell, marks=pytest.mark.soak) for cell in rest)]


@pytest.mark.share(18)
@pytest.mark.parametrize(("model", "plan"), cells())
def test_closed_form_is_near_the_trace(model: str, plan: str) -> None:
    made, parsed, seq = factory(model), Plan.parse(plan), SEQ.get(model, 64)
    work = Workload(seq_len=seq, global_batch=16)
    traced = estimate_module_by_trace(made, parsed, work)
    closed = of_a_step(read_module(model, made, seq, "meta"), parsed, work)
    assert abs(closed / traced.peak - 1) <= BOUND, (closed, traced)


def repeated() -> nn.Module:
    """With a checkpoint of its own in each block."""
    model = factory("llama")()
    for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
        object.__setattr__(block, "forward", partial(checkpoint, block.forward, use_reentrant=False))
    return model


@pytest.mark.share(6)
@pytest.mark.parametrize("plan", ["pp2 / 1f1b mb4", pytest.param("pp2 / zero-bubble-v mb4", marks=pytest.mark.soak)])
def test_so_it_is_where_blocks_recompute_themselves(plan: str) -> None:
    parsed, work = Plan.parse(plan), Workload(seq_len=64, global_batch=16)
    found = estimate_memory(read_module("llama", repeated, 64, "meta"), parsed, work, stack=stack_on("cpu"))
    for rank, stage in enumerate(found.stages):
        traced = estimate_module_by_trace(repeated, parsed, work, rank=rank)
        assert abs(stage.allocated / traced.peak - 1) <= BOUND, rank


def of_a_step(profile: Profile, plan: Plan, work: Workload) -> float:
    """The closed form's bytes of live tensors in a step, on the rank with the most."""
    return max(rank.allocated for rank in estimate_memory(profile, plan, work, stack=stack_on("cpu")).stages)


OWN: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "scan": (lambda: Texts(Scan), 64),
    "einsum": (lambda: Texts(Einsum), 64),
    "functions": (lambda: Texts(Functions), 64),
    "heads": (lambda: Texts(Functions, Valued), 64),
    "two texts": (lambda: two_texts(), 64),
    "conditioned": (lambda: Denoiser(), 4),
    "mixer": (lambda: Mixer(), 3),
    "two": (TwoInputs, 64),
    "rows": (Rows, 128),
}
"""Of what each form of a module needs beyond its products; and tokens of a sample."""
OWN_PLANS = ["dp1", "dp2", "fsdp2 / bf16", "fsdp2 / zero1 / bf16", "fsdp4 / mb2", "dp1 / mb2 / recompute=blocks"]
FAST_OWN = [
    ("scan", "fsdp2 / bf16"),
    ("scan", "dp1 / mb2 / recompute=blocks"),
    ("einsum", "dp1 / mb2 / recompute=blocks"),
    ("functions", "fsdp2 / bf16"),
    ("heads", "dp1"),
    ("conditioned", "fsdp2 / bf16"),
    ("two texts", "fsdp2"),
    ("mixer", "fsdp2 / bf16"),
    ("two", "fsdp4 / mb2"),
    ("rows", "dp2"),
    ("rows", "fsdp2 / zero1 / bf16"),
]
FURTHER = [
    ("mixer", "dp1 / mb2 / recompute=blocks"),  # what draws need again
]
"""Off by more; see docs/planner.md."""


def two_texts() -> nn.Module:
    """A t5: its bias of relative positions has a gradient, which fused attention on a CPU does not give."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
    module = hugging_face("t5", **sizes, dropout_rate=0.0)()
    ids = torch.zeros(2, 64, dtype=torch.long)
    module.example_input_array = {"input_ids": ids, "decoder_input_ids": ids}
    return module


def own_cells() -> list[Any]:
    rest = [(name, plan) for name in OWN for plan in OWN_PLANS if (name, plan) not in (*FAST_OWN, *FURTHER)]
    return [*FAST_OWN, *(pytest.param(*cell, marks=pytest.mark.soak) for cell in rest)]


@pytest.mark.share(9)
@pytest.mark.parametrize(("name", "plan"), own_cells())
def test_what_a_backward_pass_needs_is_seen(name: str, plan: str) -> None:
    made, seq = OWN[name]
    parsed, work = Plan.parse(plan), Workload(seq_len=seq, global_batch=16)
    traced = estimate_module_by_trace(made, parsed, work)
    closed = of_a_step(read_module(name, made, seq, "meta"), parsed, work)
    assert abs(closed / traced.peak - 1) <= BOUND, (closed, traced)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("bloom", "fsdp4 / mb2"),
        pytest.param("bloom", "dp2", marks=pytest.mark.soak),
        pytest.param("bloom", "dp1 / recompute=blocks", marks=pytest.mark.soak),
        pytest.param("mamba", "fsdp2 / bf16", marks=pytest.mark.soak),
        pytest.param("mamba", "dp1 / recompute=blocks", marks=pytest.mark.soak),
    ],
)
def test_transformers_written_in_primitives(model: str, plan: str) -> None:
    test_closed_form_is_near_the_trace(model, plan)


@pytest.mark.soak  # in every run: the scan itself, and the other control
def test_negative_control_by_operators_alone_a_scan_is_too_small() -> None:
    made, plan, work = OWN["scan"][0], Plan.parse("dp1 / mb2 / recompute=blocks"), Workload(seq_len=64, global_batch=16)
    profile = read_module("scan", made, 64, "meta")
    blocks = tuple(replace(block, courses=(), courses_ahead=()) for block in profile.blocks)
    unseen = replace(profile, blocks=blocks, head=replace(profile.head, courses=()))
    assert of_a_step(unseen, plan, work) < (1 - BOUND) * estimate_module_by_trace(made, plan, work).peak


@pytest.mark.soak  # in every run: a few layers alone
def test_many_layers_are_seen_by_a_few() -> None:
    few, many = (read_module("", lambda n=n: Texts(Einsum, layers=n), 64, "meta") for n in (4, 9))
    assert many.blocks[0].courses[0][1].backward == few.blocks[0].courses[0][1].backward
    assert many.blocks[-1].courses and len(set(many.blocks)) == len(set(few.blocks))


def test_what_a_batch_has_once_is_told_from_what_each_row_has() -> None:
    """The bias of relative positions is one for all rows: 64 x 64 numbers of 4 heads, in two layouts."""
    *_, (_, low), (_, full) = read_module("", OWN["einsum"][0], 64, "meta").blocks[0].courses
    for width, course in ((2, low), (4, full)):
        assert 0 <= course.kept.once - 64 * 64 * 8 <= 2 * 64 * 64 * 4 * width


def test_a_chunk_of_draws_is_that_of_the_keyed_ones() -> None:
    assert DRAWN == counter.CPU_CHUNK


def test_what_is_said_of_a_trace() -> None:
    traced = estimate_module_by_trace(factory("two"), Plan.parse("fsdp2"), Workload(seq_len=64, global_batch=4))
    assert (traced.layers, traced.traced) == (4, (4,))
    assert traced.num_params == sum(p.numel() for p in factory("two")().parameters())
    assert traced.traffic["reduce-scatter", "dp_shard"].num_bytes >= traced.num_params * 4


def test_negative_control_another_length_keeps_something_else() -> None:
    made, plan = factory("llama"), Plan.parse("fsdp2 / bf16")
    closed = of_a_step(read_module("llama", made, 32, "meta"), plan, Workload(seq_len=32, global_batch=16))
    traced = estimate_module_by_trace(made, plan, Workload(seq_len=64, global_batch=16))
    assert abs(closed / traced.peak - 1) > 5 * BOUND


def test_what_is_refused() -> None:
    work = Workload(seq_len=64, global_batch=4)
    with pytest.raises(ModelError, match=r"the module's example_input_array has 3; needed the same: give --seq 3"):
        estimate_module_by_trace(factory("pictures"), Plan.parse("fsdp2"), work)
    with pytest.raises(PlanError, match="is not divided by 8 data ranks"):
        estimate_module_by_trace(factory("two"), Plan.parse("fsdp8"), work)
    with pytest.raises(ModelError, match="returned no floating tensor, and a step needs a loss"):
        estimate_module_by_trace(Classes, Plan(), work)


class Classes(TwoInputs):
    """Returns what has no gradient."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(one, other).argmax(-1)


def test_experts_in_fp32_have_the_grouped_products_of_the_real_step() -> None:
    """torch knows their shapes in bf16 only."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    work = Workload(seq_len=16, global_batch=4)
    for plan in ("fsdp2", "dp2 / bf16"):
        traced = estimate_module_by_trace(hugging_face("qwen3_moe", **sizes), Plan.parse(plan), work)
        assert traced.layers == 4 and traced.held["activations"] > 0
    left, right = torch.empty(6, 8), torch.empty(3, 8, 12)
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)
    for given in ((left, right, ends), (left.T, left, ends), (torch.empty(3, 4, 8), right, None)):
        ours, real = grouped(*given), torch.nn.functional.grouped_mm(given[0], given[1], offs=given[2])
        assert (ours.shape, ours.stride(), ours.dtype) == (real.shape, real.stride(), real.dtype)


class Wide(TwoInputs):
    """Multiplies what does not go together."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(one, other) * torch.mm(one[0], other[0, :3])[0, 0]


class Convolutions(nn.Module):
    """The output of its last block is not kept, that of all others is: by the block behind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        convolution = partial(nn.Conv2d, 16, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(convolution(), nn.GroupNorm(4, 16), nn.GELU(), convolution()) for _ in range(6)
        )
        self.example_input_array = torch.zeros(2, 3, 32, 32)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixels)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp1", "fsdp2", "fsdp2 zero2", "fsdp2 / recompute=blocks"])
def test_the_last_block_may_keep_less_than_the_others(plan: str) -> None:
    work, parsed = Workload(seq_len=3, global_batch=16), Plan.parse(plan)
    traced = estimate_module_by_trace(Convolutions, parsed, work)
    closed = of_a_step(read_module("convolutions", Convolutions, 3, "meta"), parsed, work)
    assert closed == pytest.approx(traced.peak, rel=0.002)


class Fails(TwoInputs):
    """Its own code fails."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(one, other[None][1:, None][0])


def test_what_cannot_be_run_on_shapes_is_refused_with_the_operator() -> None:
    work = Workload(seq_len=64, global_batch=4)
    with pytest.raises(ModelError, match=r"aten.mm.default of float32 \(64, 64\).* failed on shapes alone.*--trace"):
        estimate_module_by_trace(Wide, Plan.parse("dp2"), work)
    with pytest.raises(ModelError, match="the step of the module failed without values: IndexError: index 0"):
        estimate_module_by_trace(Fails, Plan.parse("dp2"), work)


class Fed(nn.Module):
    """Whatever it is fed with, token ids are the first of it."""

    def __init__(self, example: Any) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.example_input_array = example

    def forward(self, first: Any, other: torch.Tensor | None = None) -> torch.Tensor:
        inner = (
            next(iter(first.values())) if isinstance(first, dict) else first[0] if isinstance(first, list) else first
        )
        x = self.embed(inner)
        if other is not None:
            x = x + other.float().sum()
        for layer in self.layers:
            x = layer(x)
        return x


def ids() -> torch.Tensor:
    return torch.zeros(2, 16, dtype=torch.long)


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["fsdp2 / bf16 / mb2", "pp2 / gpipe mb2"])
@pytest.mark.parametrize(
    "example",
    [
        lambda: {"first": ids(), "other": torch.arange(16)},
        lambda: (ids(), torch.ones(16, 16)),
        lambda: (ids(), torch.tensor(1.0)),
        lambda: ({"ids": ids(), "none": None},),
        lambda: ([ids(), ids()],),
    ],
    ids=["positions", "mask", "number", "dict", "list"],
)
def test_what_a_batch_has_once_and_what_is_nested(example: Callable[[], Any], plan: str) -> None:
    traced = estimate_module_by_trace(lambda: Fed(example()), Plan.parse(plan), Workload(seq_len=16, global_batch=8))
    assert traced.held["activations"] > 0


class Clip(Fed):
    """With a number that is trained."""

    def __init__(self) -> None:
        super().__init__((ids(),))
        self.scale, self.unused = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        return super().forward(first) * self.scale.exp()


def test_parameters_without_dims_are_summed_by_themselves() -> None:
    traced = estimate_module_by_trace(Clip, Plan.parse("fsdp2 / bf16"), Workload(seq_len=16, global_batch=8))
    summed = [each for (kind, axis), each in traced.traffic.items() if kind == "all-reduce" and "dp_shard" in axis]
    assert sum(each.num_bytes for each in summed) >= 2 * 2 * 4


QUICK = ("adamw-8bit", "muon")


@pytest.mark.parametrize(
    ("name", "state"),
    [pytest.param(*each, marks=[] if each[0] in QUICK else pytest.mark.soak) for each in STATE_BYTES.items()],
)
def test_every_optimizer_that_is_planned_for_is_traced(name: str, state: float) -> None:
    work = Workload(seq_len=64, global_batch=4, optimizer=name)
    low_bits.table.cache_clear()  # so that it is made while there are no values
    traced = estimate_module_by_trace(factory("two"), Plan.parse("fsdp2"), work)
    kept = traced.held["optimizer"] * 2 / traced.num_params
    assert state - 0.1 <= kept <= state + 0.7  # parameters of one dim, and tables, are kept wide
    if name == "adamw-8bit":  # what the process trains with afterwards was made with values
        codes = low_bits.table(8, signed=True)
        assert len(codes) == 256 and bool((codes.diff() > 0).all()) and codes[-1] == 1


class Widening(nn.Module):
    """Normed and activated, and made twice as wide or half."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, ins), nn.Conv2d(ins, outs, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(nn.functional.silu(self.norm(x)))


class Denoising(nn.Module):
    """Down and up again; what goes up is joined with what was kept, and most of the work is behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
        self.down = nn.ModuleList([Widening(32, 64), Widening(64, 128), Widening(128, 256)])
        self.up = nn.ModuleList([Widening(512, 64), Widening(128, 32)])
        self.example_input_array = torch.zeros(2, 4, 32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.stem(x), []
        for layer in self.down:
            kept.append(x := layer(x))
            x = nn.functional.avg_pool2d(x, 2)
        x = nn.functional.interpolate(x, scale_factor=2)
        x = nn.functional.interpolate(self.up[0](torch.cat([x, kept[2]], 1)), scale_factor=2)
        x = nn.functional.interpolate(self.up[1](torch.cat([x, kept[1][:, :64]], 1)), scale_factor=2)
        return self.out(x)


@pytest.mark.parametrize("plan", ["dp1", "dp1 / bf16", "dp2"])
def test_modules_on_gpus_are_walked_too(plan: str) -> None:
    """What is there for a moment within a forward is two fifths of what such a net has at most."""
    parsed, work = Plan.parse(plan), Workload(seq_len=4, global_batch=32)
    traced = estimate_module_by_trace(Denoising, parsed, work)
    profile = read_module("denoising", Denoising, 4, "meta")
    closed = estimate_memory(profile, parsed, work, stack=load_stack("shardwise")).stages[0].allocated
    assert abs(closed / traced.peak - 1) <= BOUND, (closed, traced)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("text", "rank", "seq", "batch"),
    [
        ("pp2 / interleaved mb4", 0, 64, 32),
        ("pp2 / interleaved mb4", 1, 64, 32),
        ("pp2 fsdp2 / 1f1b mb4", 1, 4, 8),
    ],
)
def test_what_ranks_send_of_a_module_has_no_copy_on_gpus(text: str, rank: int, seq: int, batch: int) -> None:
    """Gloo holds what was sent until the step ends, and sums in a copy: here a twentieth of the rest and more."""
    made, plan, work = factory("tied"), Plan.parse(text), Workload(seq_len=seq, global_batch=batch)
    traced = estimate_module_by_trace(made, plan, work, rank=rank * plan.world // plan.axes.pp, is_cpu=False)
    memory = estimate_memory(read_module("tied", made, seq, "meta"), plan, work, stack=load_stack("shardwise"))
    assert abs(memory.stages[rank].allocated / traced.peak - 1) <= BOUND, (memory.stages[rank], traced)
