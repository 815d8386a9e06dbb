"""What a rank sends in a step of a user's module: what is predicted from its parts against its traced step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from torch import nn

from shardwise.diagnose.read_module import example_length, example_of
from shardwise.diagnose.tracing.module import estimate_module_by_trace
from shardwise.diagnose.tracing.module_step import module_step
from shardwise.errors import ModelError, PlanError
from shardwise.findings import errors_in
from shardwise.plan.constraints import check
from shardwise.plan.messages.modules import collectives_of_module, unlisted
from shardwise.plan.messages.scene import Collective
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from tests import brought, forms
from tests.fake.test_modules_brought import FACTORIES
from tests.fake.test_modules_of_all_forms import Generator, LastTwice, Latents, Pairs, Rounds, TwoTowers
from tests.modules import Perceptron, factory

pytestmark = [  # what is deprecated is brought all the same
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning"),
]


class Gated(brought.Words):
    """A number without dims in each block, and one in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight.detach())[0, 0])
        for layer in self.layers:
            layer.gate = nn.Parameter(self.scale.detach().clone())

    def hidden(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer.gate * layer(x)
        return x * self.scale


class Sharing(brought.Words):
    """Its first and its last block share a product, and two others a norm."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        self.layers[4].up.weight = self.layers[0].up.weight
        self.layers[2].norm = self.layers[1].norm


MODULES: dict[str, Callable[[], nn.Module]] = {
    name: factory(name)
    for name in ("pictures", "two", "residual", "unet", "encoder-decoder", "rows", "tables", "tied", "frozen")
}
MODULES |= {name: factory(name) for name in ("gpt2", "llama", "bert", "t5", "qwen3_moe")}
MODULES |= FACTORIES
MODULES |= {
    "half frozen": brought.HalfFrozen,
    "adapted": partial(brought.Words, brought.Adapted),
    "two streams": brought.TwoStreams,
    "balanced": brought.Balanced,
    "narrowing": brought.Narrowing,
    "tabled": partial(brought.Words, brought.Tabled),
    "chunked": brought.ChunkedLoss,
    "all experts": partial(brought.Words, brought.AllExperts),
    "pooled": brought.Pooled,
    "tables beside": brought.Tables,
    "scan": partial(forms.Texts, forms.Scan),
    "einsum": partial(forms.Texts, forms.Einsum),
    "functions": partial(forms.Texts, forms.Functions),
    "valued": partial(forms.Texts, Perceptron, forms.Valued),
    "denoiser": forms.Denoiser,
    "mixer": forms.Mixer,
    "rounds": Rounds,
    "last twice": LastTwice,
    "pairs": Pairs,
    "latents": Latents,
    "generator": Generator,
    "two towers": TwoTowers,
    "gated": Gated,
    "sharing": Sharing,
}
FAST = [
    ("dp2 / bucket=0.05 mb2", "tied"),
    ("dp2 / find-unused / bucket=0.05", "unused"),
    ("fsdp3 / mb2", "rounds"),
    ("fsdp3 / mb2", "half frozen"),
    ("fsdp2 / bf16", "gated"),
    ("fsdp2 / recompute=blocks", "residual"),
    ("dp2 fsdp2 / zero2 / mb2 / bf16", "last twice"),
    ("fsdp4 / zero1 / mb2 / bf16", "unused"),
    ("pp2 fsdp2 / 1f1b mb4 / bf16", "tied"),
    ("pp2 / interleaved mb4 vs2", "two streams"),
    ("pp2 fsdp2 / 1f1b mb4", "generator"),
    ("pp2 fsdp2 / zero2 / zero-bubble-v mb4", "tied"),
    ("dp2 / bf16", "tables beside"),
    ("fsdp3 / mb2", "mixer"),  # it draws
    ("pp2 fsdp2 / 1f1b mb4 / bf16", "sharing"),
    ("fsdp2 / wrap=5000 / mb2", "residual"),
    ("fsdp4 / prefetch=3 / mb2", "half frozen"),
]
DATA = [
    "dp2",
    "dp2 / bucket=0.05 mb2",
    "dp2 / find-unused / bucket=0.05",
    "dp2 / static-graph",
    "dp2 / bf16",
    "dp2 / bf16-pure",
    "dp2 / fp64",
    "fsdp2 / bf16",
    "fsdp2 / bf16-pure / mb2",
    "fsdp3 / mb2",
    "fsdp4 / zero1 / mb2 / bf16",
    "fsdp4 / zero2 / mb2",
    "fsdp4 / fp16 / reduce=bf16",
    "fsdp2 / reshard=false / mb2",
    "fsdp2 / offload=state",
    "fsdp4 / prefetch=3 / mb2",
    "fsdp4 / reshard=2 / mb2",
    "fsdp2 / wrap=5000 / mb2",
    "dp2 fsdp2 / wrap=500 / bf16",
    "dp2 fsdp2 / zero2 / mb2 / bf16",
    "dp2 fsdp4 / mb3",
    "fsdp2 / recompute=blocks",
    "fsdp2 / recompute=every2 / mb2",
    "fsdp2 / recompute=ops",
]
PIPELINES = [
    "pp2 / gpipe mb2",
    "pp2 fsdp2 / 1f1b mb4 / bf16",
    "pp2 / interleaved mb4 vs2",
    "pp2 dp2 / 1f1b mb4 / recompute=blocks",
    "pp2 fsdp2 / reshard=false / looped-bfs mb2",
    "pp2 fsdp2 / zero2 / zero-bubble mb4",
    "pp2 fsdp2 / zero2 / zero-bubble-v mb4",
    "pp2 / dualpipe-v mb4 / fp64",
]


@cache
def work_of(name: str) -> Workload:
    example = example_of(MODULES[name])
    return Workload(seq_len=64 if example is None else example_length(example), global_batch=24)


def differences(text: str, name: str, rank: int, optimizer: str = "adamw") -> list[tuple[Any, ...]]:
    """Messages of which another number is predicted than traced: message, predicted, traced.

    None where the plan or the module does not allow the other: no chain of blocks, fewer than stages, nothing to train
    on a rank; and where it is said that none is predicted.
    """
    plan, work, made = Plan.parse(text), replace(work_of(name), optimizer=optimizer), MODULES[name]
    if errors_in(check(plan, world=plan.world, device="cpu", global_batch=24, seq_len=work.seq_len)):
        return []
    try:
        traced = estimate_module_by_trace(made, plan, work, rank=rank).messages
    except (ModelError, PlanError):
        return []
    step = module_step(made, plan, work)
    if plan.communication.static_graph and "static-graph" in unlisted(plan, step):
        return []
    mine = collectives_of_module(step, plan, work, rank=rank, is_cpu=True)
    both = {key: (mine.get(key), traced.get(key)) for key in {*mine, *traced}}
    return [(text, rank, optimizer, *key, *pair) for key, pair in sorted(both.items()) if pair[0] != pair[1]]


@pytest.mark.share(6)
@pytest.mark.parametrize(("plan", "name"), FAST)
def test_what_is_predicted_equals_the_trace(plan: str, name: str) -> None:
    assert not differences(plan, name, Plan.parse(plan).world - 1)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ("dp2 / static-graph", "pictures"),  # buffers are compared after its fourth step
        ("dp2 / mb2", "qwen3_moe"),  # products by group in fp32
    ],
)
def test_what_was_traced_or_predicted_otherwise(plan: str, name: str) -> None:
    assert not differences(plan, name, 1)


UPDATES = ["dp2", "fsdp4 / mb2", "dp2 fsdp3 / bf16", "fsdp2 / bf16-pure", "pp2 fsdp2 / 1f1b mb4"]


@pytest.mark.share(16)
@pytest.mark.parametrize("name", ["tied", "narrowing", "gated", "half frozen", "unused"])
@pytest.mark.parametrize("optimizer", ["muon", "lamb", "adafactor", "adamw-8bit"])
@pytest.mark.parametrize("plan", UPDATES)
def test_updates_that_send(plan: str, optimizer: str, name: str) -> None:
    assert not differences(plan, name, Plan.parse(plan).world - 1, optimizer)


def test_an_update_that_sends_of_a_model_with_a_parameter_without_dims() -> None:
    assert not differences("dp2", "gated", 1, "lamb")


@pytest.mark.soak
@pytest.mark.parametrize("name", MODULES)
def test_of_every_module_under_every_plan(name: str) -> None:
    cells = [(plan, rank) for plan in DATA + PIPELINES for rank in sorted({0, Plan.parse(plan).world - 1})]
    found = [difference for plan, rank in cells for difference in differences(plan, name, rank)]
    assert not found


def test_what_is_not_predicted_is_said() -> None:
    work = work_of("tied")
    for text, why in (("tp2", "tp"), ("cp2", "cp"), ("fsdp2 ep2", "ep"), ("fsdp2 / wrap=9 prefetch=2", "wrap")):
        assert unlisted(Plan.parse(text)).startswith(why)
    plan = Plan.parse("dp2")
    step = module_step(MODULES["unused"], plan, work)
    assert "for which DDP waits" in unlisted(plan, step)
    with pytest.raises(PlanError, match=r"what `dp2 / fp32` sends of a module is not listed: parameters .*\(--trace\)"):
        collectives_of_module(step, plan, work)
    with pytest.raises(ModelError, match="embed gives sparse gradients"):
        module_step(brought.Sparse, plan, work)


def test_negative_control_other_rows_send_other_activations() -> None:
    plan, work = Plan.parse("pp2 / gpipe mb2"), work_of("tied")
    sent = [
        collectives_of_module(module_step(MODULES["tied"], plan, each), plan, each)
        for each in (work, replace(work, global_batch=12))
    ]
    halves = {Collective("send", "pp", size): 2 for size in (12 * 64 * 64 * 4, 6 * 64 * 64 * 4)}
    assert all(each in sent[i] and each not in sent[1 - i] for i, each in enumerate(halves))
