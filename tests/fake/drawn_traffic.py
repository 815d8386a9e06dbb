"""What `test_traffic_drawn.py` draws: sizes of a reference model x plan x options, and both counts of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from shardwise.diagnose.tracing.estimate import training_of
from shardwise.diagnose.tracing.step import StepPeaks, trace_step
from shardwise.findings import errors_in
from shardwise.model.spec import ModelSpec
from shardwise.plan.constraints import check
from shardwise.plan.plan import LOOPED, SCHEDULES, V_SHAPED, ZERO_BUBBLE, Plan
from shardwise.plan.traffic import collectives_of
from shardwise.plan.workload import Workload
from tests.fake.references import references

MOST_RANKS = 32
OPTIMIZERS = ("adamw", "adamw", "adamw-bf16", "lion", "sgd-momentum", "sgd")
"""Of those that work on a rank's own shards."""
SIZES = references(vocab_size=36, dim=24, num_heads=4, ffn_dim=28, max_seq_len=48, num_layers=4, experts=4)
"""For what is not drawn."""
RULED = {
    "llama": ("embed", "norm", "head", "layers.*", "layers.0", "layers.*.attn", "layers.*.attn.wq", "layers.*.attn.wo")
    + ("layers.*.attn_norm", "layers.*.ffn_norm", "layers.*.ffn", "layers.1.ffn.w1", "layers.*.ffn.w2"),
    "gpt": ("wte", "wpe", "ln_f", "lm_head", "h.*", "h.1", "h.*.attn", "h.*.attn.q", "h.*.attn.proj", "h.*.ln_1")
    + ("h.*.ln_2", "h.*.mlp", "h.0.mlp.fc", "h.*.mlp.down"),
    "moe": ("embed", "norm", "head", "layers.*", "layers.0", "layers.*.attn", "layers.*.attn.wk", "layers.*.attn.wo")
    + ("layers.*.ffn_norm", "layers.*.moe", "layers.1.moe", "layers.*.moe.router", "layers.*.moe.experts"),
}
"""Modules to which a precision rule is given."""


@dataclass(frozen=True)
class Case:
    """One draw, of which `repr` is code that makes it again."""

    spec: ModelSpec
    plan: str
    work: Workload
    clip: float | None
    rank: int


def draw(random: Random) -> Case:
    """A case that no constraint refuses."""
    while True:
        kind = random.choice(("llama", "gpt", "moe"))
        words, degrees = _words(random, kind)
        plan = Plan.parse(" ".join(words))
        spec = _spec(random, kind, plan, max(2, degrees["pp"] * plan.schedule.stages))
        rows = plan.axes.data * plan.batch.micro_batches * random.choice((1, 1, 2, 3))
        optimizer = random.choice(OPTIMIZERS)
        work = Workload(seq_len=random.choice((16, 23, 24, 48, 50)), global_batch=rows, optimizer=optimizer)
        found = check(
            plan, spec=spec, world=plan.world, device="cpu", global_batch=work.global_batch, seq_len=work.seq_len
        )
        if plan.world <= MOST_RANKS and not errors_in(found) and not is_known(plan):
            return Case(spec, str(plan), work, random.choice((1.0, None)), random.randrange(plan.world))


def is_known(plan: Plan) -> bool:
    """Where the engine sends more than a step needs, which the closed form does not follow.

    A backward pass in two parts takes the scales of float8 again, once for each group of weights. Modules inside of
    blocks are gathered ahead in the order in which they are registered, also once more behind their backward pass.
    """
    split = plan.axes.pp > 1 and plan.schedule.kind in ZERO_BUBBLE
    again = plan.float8.recipe != "none" and plan.axes.tp > 1
    return (split and again) or (plan.wrap_min_params > 0 and plan.communication.prefetch > 1)


def _spec(random: Random, kind: Any, plan: Plan, least_layers: int) -> ModelSpec:
    """Few things divide that need not; under float8 the attention has multiples of 16, other parts may have."""
    unit, heads = random.choice((4, 16)), random.choice((4, 6, 8, 12))
    size = random.choice((4, 6, 8)) if plan.float8.recipe == "none" else 16
    experts = random.choice((4, 6, 8)) if kind == "moe" else 0
    spec = ModelSpec(
        kind=kind,
        num_layers=random.randint(least_layers, least_layers + 1),
        dim=heads * size,
        num_heads=heads,
        ffn_dim=unit * random.randint(3, 9),
        vocab_size=unit * random.randint(6, 25) if random.random() < 0.8 else 6 * random.randint(20, 60),
        max_seq_len=64,
        tie_embeddings=random.random() < 0.3,
        num_experts=experts,
        experts_per_token=random.choice((1, 2, 3)) if experts else 0,
    )
    if kind == "gpt":
        return spec
    return replace(
        spec,
        num_kv_heads=random.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
        head_dim=16 if size == 16 else random.choice((size, size, 10)),
        qkv_bias=random.random() < 0.3,
        qk_norm=random.random() < 0.3,
    )


def _words(random: Random, kind: str) -> tuple[list[str], dict[str, int]]:
    def maybe(*tokens: str) -> str:
        return random.choice(tokens) if random.random() < 0.35 else ""

    axes = ("pp", "dp", "fsdp", "cp", "tp")
    degrees = dict.fromkeys(axes, 1)
    for _ in range(random.choice((1, 1, 2, 2, 3, 3, 4))):
        degrees[random.choice(axes)] *= random.choice((2, 2, 3))
    words = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1] or ["dp1"]
    shared = degrees["fsdp"] * degrees["cp"] * degrees["tp"]
    if kind == "moe" and shared > 1:
        words.append(maybe("ep2", "ep2", "ep3", "ep4", f"ep{shared}"))
    words.append(f"mb{random.choice((1, 1, 2, 3, 4))}")
    words += _data_words(random, maybe, degrees)
    if degrees["pp"] > 1:
        name = random.choice(SCHEDULES)
        words += [name, maybe("vs2", "vs3") if name in LOOPED and name not in V_SHAPED else ""]
    if degrees["tp"] > 1:
        words += [random.choice(("", "seq")), maybe("loss-parallel")]
    if degrees["cp"] > 1:
        words += [random.choice(("", "context=gather", "context=ulysses")), maybe("balance=contiguous")]
    words.append(maybe("recompute=blocks", "recompute=every2", "recompute=50%", "recompute=67%", "recompute=ops"))
    return [*filter(None, words), *_types(random, maybe, kind)], degrees


def _data_words(random: Random, maybe: Any, degrees: dict[str, int]) -> list[str]:
    words = [maybe("offload=activations")]
    if degrees["fsdp"] > 1 or random.random() < 0.1:
        words += [random.choice(("", "", "zero1", "zero2", "zero3")), maybe("prefetch=2", "prefetch=3")]
        words += [maybe("reshard=false", "reshard=true", "reshard=2", "reshard=3"), maybe("wrap=500", "wrap=3000")]
        words.append("" if words[0] else maybe("offload=state"))
    elif degrees["dp"] > 1:
        words += [maybe("bucket=0.01", "bucket=0.003"), maybe("no-bucket-view"), maybe("static-graph", "find-unused")]
    return words


def _types(random: Random, maybe: Any, kind: str) -> list[str]:
    words = [random.choice(("fp32", "bf16", "bf16", "fp16", "fp64", "bf16-pure")), maybe("reduce=bf16", "reduce=fp32")]
    float8 = maybe("tensorwise", "rowwise", "rowwise-hp", "tensorwise+gather")
    words += [f"fp8={float8}+emulate"] if float8 else []
    if random.random() < 0.25:
        names = random.sample(RULED[kind], random.choice((1, 1, 2)))
        types = ("fp32", "bf16", "fp8") if float8 else ("fp32", "bf16")
        words.append("precision=" + ",".join(f"{name}:{random.choice(types)}" for name in names))
    return [*filter(None, words)]


def traced(case: Case) -> StepPeaks:
    """A later step of the rank."""
    training = replace(training_of(case.spec, case.work), clip=case.clip)
    return trace_step(training, Plan.parse(case.plan), rank=case.rank).later


def differences(case: Case) -> list[tuple[Any, int, int]]:
    """Messages of which the closed form has another number than the traced step: message, predicted, traced.

    What a rank sends to itself alone is none.
    """
    mine = collectives_of(case.spec, Plan.parse(case.plan), case.work, rank=case.rank, is_cpu=True)
    theirs = traced(case).collectives
    keys = sorted({tuple(key) for key in (*mine, *theirs)}, key=str)
    mine_of = {tuple(key): times for key, times in mine.items()}
    theirs_of = {tuple(key): times for key, times in theirs.items()}
    both = ((key, mine_of.get(key, 0), theirs_of.get(key, 0)) for key in keys)
    return [each for each in both if each[1] != each[2] and each[0][1] != "rank"]
