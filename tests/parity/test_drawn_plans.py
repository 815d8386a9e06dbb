"""Plans that hypothesis draws: legal ones train as one process does, illegal ones are refused before torch sees them.

`SHARDWISE_SOAK=200 pytest tests/parity/test_drawn_plans.py` draws so many, others on every run. A failure names the
plan; `check_parity(world, "<plan>", <global batch>)` repeats it.
"""

from __future__ import annotations

import functools
import os
import re

from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, PlanError, ShardwiseError
from shardwise.findings import errors_in
from shardwise.plan.plan import LOOPED, SCHEDULES, V_SHAPED
from shardwise.testing import World, fake_world
from tests.parity import grid
from tests.parity.drawn import MODEL, static_graph_accumulates, train

SPEC = sw.ModelSpec(
    num_layers=8, dim=32, num_heads=8, num_kv_heads=4, ffn_dim=64, vocab_size=grid.VOCAB, max_seq_len=grid.SEQ
)
BATCHES = (8, 16, 24)  # of 40 rows: 24 leaves a last window of 16
SOAK = int(os.environ.get("SHARDWISE_SOAK", "0"))


def drawing(num: int) -> settings:
    """The same draws in every run, but in a soak. No shrinking: a plan is its own smallest example."""
    return settings(
        max_examples=SOAK or num,
        derandomize=not SOAK,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def maybe(*tokens: str) -> st.SearchStrategy[str]:
    """One of the tokens, or none of them: none in half of the draws."""
    return st.one_of(st.just(""), st.sampled_from(tokens))


@st.composite
def axes(draw: st.DrawFn, worlds: tuple[int, ...]) -> str:
    """A world of a power of two, dealt out over the axes one factor at a time."""
    degrees = {"pp": 1, "dp": 1, "fsdp": 1, "tp": 1}
    for _ in range(draw(st.sampled_from(worlds)).bit_length() - 1):
        degrees[draw(st.sampled_from(tuple(degrees)))] *= 2
    return " ".join(f"{axis}{n}" for axis, n in degrees.items())


@st.composite
def sensible(draw: st.DrawFn, worlds: tuple[int, ...]) -> str:
    """Tokens that are mostly legal together."""
    text = draw(axes(worlds))
    pp, tp = "pp1" not in text, "tp1" not in text
    words = [text, draw(st.sampled_from(["mb1", "mb2", "mb3", "mb4", "mb8"]))]
    if "fsdp1" not in text:
        words += [draw(maybe("zero1", "zero2", "zero3")), draw(maybe("offload=state")), draw(maybe("prefetch=2"))]
        words += [draw(maybe("wrap=2000")), draw(maybe("reshard=true", "reshard=false", "reshard=2"))]
    elif not (pp or tp):
        words += [draw(maybe("static-graph", "find-unused")), draw(maybe("bucket=0.01", "no-bucket-view"))]
    if pp:
        kind = draw(st.sampled_from(SCHEDULES))
        words += [kind, draw(maybe("vs1", "vs2", "vs3", "vs4")) if kind in LOOPED and kind not in V_SHAPED else ""]
    if tp:
        words += [draw(maybe("seq")), draw(maybe("loss-parallel")), draw(maybe("recipe=llama"))]
    words += [draw(maybe("recompute=blocks", "recompute=every2", "recompute=50%", "recompute=ops"))]
    words += [draw(maybe("offload=activations")) if "offload=state" not in words else ""]
    return " ".join([*filter(None, words), "fp64"])


@st.composite
def anything(draw: st.DrawFn) -> str:
    """Tokens that parse, whether they go together or not."""
    counts = st.sampled_from([1, 1, 1, 2, 3, 4, 8])
    words = [f"{axis}{draw(counts)}" for axis in ("pp", "dp", "fsdp", "tp")]
    words += [draw(maybe("cp2")), draw(maybe("ep2")), f"mb{draw(counts)}", draw(maybe("gbs1", "gbs12", "gbs96"))]
    words += [
        draw(maybe("zero0", "zero1", "zero2", "zero3")),
        draw(maybe(*SCHEDULES)),
        draw(maybe("vs1", "vs2", "vs3")),
    ]
    words += [draw(maybe("split=layers.4", "split=layers.2,layers.6", "split=layers.9", "split=layers.0"))]
    words += [draw(st.sampled_from(["fp32", "fp64", "bf16", "fp16", "bf16-pure"])), draw(maybe("reduce=bf16"))]
    words += [draw(maybe("seq")), draw(maybe("loss-parallel")), draw(maybe("recipe=llama", "recipe=gpt", "recipe=x"))]
    words += [draw(maybe("recompute=blocks", "recompute=every0", "recompute=0%", "recompute=ops", "recompute=300%"))]
    words += [
        draw(maybe("offload=state", "offload=activations")),
        draw(maybe("reshard=2", "reshard=true", "reshard=3")),
    ]
    words += [draw(maybe("static-graph")), draw(maybe("find-unused")), draw(maybe("bucket=1", "prefetch=2", "wrap=99"))]
    words += [draw(maybe("blocks=layers.*", "blocks=layer.*"))]
    return " ".join(filter(None, words))


def refusals(plan: sw.Plan, global_batch: int | None = None) -> list[str]:
    """Ids of the constraints that a plan breaks with the model of these tests."""
    found = sw.check(plan, spec=SPEC, world=plan.world, device="cpu", global_batch=global_batch, seq_len=grid.SEQ)
    return [finding.id for finding in errors_in(found)]


@functools.cache
def truth(world: World, global_batch: int) -> grid.Trace:
    trace: grid.Trace = world(1, train, "reference", global_batch)[0]
    return trace


def check_parity(world: World, text: str, global_batch: int) -> None:
    ranks = world(sw.Plan.parse(text).world, train, text, global_batch)
    worst = grid.differences(ranks, truth(world, global_batch))
    assert max(worst.values()) <= 1e-11, (text, global_batch, worst)


@drawing(2)
@given(text=sensible((1, 2, 4, 4, 8, 8, 8)), global_batch=st.sampled_from(BATCHES))
def test_legal_plans_train_as_one_process(world: World, text: str, global_batch: int) -> None:
    plan = sw.Plan.parse(text)
    assume(not refusals(plan, global_batch))
    note(f"{plan} with a global batch of {global_batch}")
    check_parity(world, str(plan), global_batch)


def test_torch_fails_where_the_row_of_static_graph_says_so(world: World) -> None:
    text = "dp2 / mb2 / fp64 / static-graph"
    assert refusals(sw.Plan.parse(text)) == ["ddp.static-accumulation"]
    assert all("expect_autograd_hooks_ INTERNAL ASSERT" in said for said in world(2, static_graph_accumulates, text))


@drawing(40)
@given(text=anything() | sensible((1, 2, 4, 8, 16)))
def test_plans_are_refused_by_the_table_or_applied(text: str) -> None:
    plan = sw.Plan.parse(text)
    assert sw.Plan.parse(str(plan)) == plan
    assume(plan.world <= 256)
    ids, outcome = refusals(plan), apply_in_a_fake_world(plan)
    if ids:
        assert isinstance(outcome, ShardwiseError), f"{plan} breaks {ids} and was applied"
    else:
        assert outcome is None, f"{plan} breaks no row and failed: {outcome}"


def apply_in_a_fake_world(plan: sw.Plan) -> PlanError | ModelError | None:
    """What `apply` says on rank 0. Refused by the table alone, it must not have looked at the model."""
    built: list[nn.Module] = []

    def factory() -> nn.Module:
        built.append(MODEL())
        return built[-1]

    alone = [f.id for f in errors_in(sw.check(plan, world=plan.world, device="cpu"))]
    with fake_world(plan.world), sw.open_mesh(plan, device="cpu") as mesh:
        try:
            sw.apply(factory, plan, mesh)
        except (PlanError, ModelError) as error:
            named = re.findall(r"^  \[([\w.-]+)\] ", str(error), re.MULTILINE)
            assert named == alone, "the error names the rows"
            assert bool(built) != bool(alone), "the model was built before the plan was refused"
            return error
    assert not alone
    return None
