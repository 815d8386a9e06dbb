"""What `test_drawn_models.py` draws, and what it runs in the processes of the world: model x plan x options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.findings import errors_in
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.moe import MoEConfig, MoEDecoder
from shardwise.plan.plan import LOOPED, SCHEDULES, V_SHAPED
from tests.parity import grid, moe_models
from tests.parity.random_models import RULES, Net

VOCAB, SEQ, ROWS, SEED, STEPS, EPS = 32, 8, 28, 7, 2, 1e-7
SIZES = {"vocab_size": VOCAB, "dim": 16, "num_layers": 4, "num_heads": 4, "max_seq_len": SEQ}
LLAMA = {**SIZES, "num_kv_heads": 2, "ffn_dim": 24}
AXES = ("pp", "dp", "fsdp", "cp", "tp")
MOE = {**LLAMA, "num_experts": 4, "experts_per_token": 2, "init_std": 0.2}


@dataclass(frozen=True)
class Drawable:
    """A model, and the sizes that say which plans fit it."""

    build: Callable[[int], nn.Module]
    """From the number of layers."""
    spec: dict[str, Any] | None = None
    """None: told by rules, and without a spec."""
    has_experts: bool = False
    axes: tuple[str, ...] = AXES


def _decoder(**changes: Any) -> Drawable:
    return Drawable(lambda layers: Decoder(DecoderConfig(**LLAMA | changes | {"num_layers": layers})), LLAMA | changes)


def _gpt(**changes: Any) -> Drawable:
    sizes = SIZES | changes
    return Drawable(
        lambda layers: GPT(GPTConfig(**sizes | {"num_layers": layers})), sizes | {"ffn_dim": 64, "kind": "gpt"}
    )


def _moe(*axes: str, **changes: Any) -> Drawable:
    spec = LLAMA | {"kind": "moe", "num_experts": 4, "experts_per_token": changes.get("experts_per_token", 2)}
    sizes = MOE | changes
    return Drawable(
        lambda layers: MoEDecoder(MoEConfig(**sizes | {"num_layers": layers})),
        spec,
        has_experts=True,
        axes=axes or AXES,
    )


def _drawing(fused: bool, layers: int) -> nn.Module:
    return Net(fused=fused, layers=layers)


MODELS = {
    "decoder": _decoder(),
    "decoder tied": _decoder(tie_embeddings=True),
    "decoder mha": _decoder(num_kv_heads=4),
    "gpt": _gpt(),
    "gpt tied": _gpt(tie_embeddings=True),
    "moe": _moe(),
    "moe top1 tied": _moe(experts_per_token=1, normalise=False, tie_embeddings=True),
    "moe bias": _moe(score="sigmoid", bias_rate=0.05, num_shared_experts=1),
    "moe capacity": _moe("pp", "dp", "fsdp", capacity_factor=0.75),  # its rows stay whole
    "dropout": Drawable(
        functools.partial(_drawing, False), axes=("pp", "dp", "fsdp", "tp")
    ),  # its attention is no torch call: it cannot be divided
    "dropout fused": Drawable(functools.partial(_drawing, True)),
}


@dataclass(frozen=True)
class Options:
    """What the maths of a run is, beside its model. Equal options are one run of one process."""

    global_batch: int = 8
    optimizer: str = "adamw"
    clip: str = "norm"
    """`norm`, `value` or empty."""
    frozen: bool = False
    """The first block is not trained."""
    ema: bool = False
    layers: int = 4


@dataclass(frozen=True)
class Case:
    """One draw."""

    model: str
    plan: str
    options: Options

    @property
    def truth(self) -> Case:
        """The same on one process, in one micro-batch."""
        return Case(self.model, "dp1 / fp64", self.options)

    @property
    def world(self) -> int:
        return sw.Plan.parse(self.plan).world


def draw(random: Random, world: int) -> Case:
    """A case that no constraint refuses."""
    while True:
        model = random.choice(list(MODELS))
        options = Options(
            global_batch=random.choice((5, 8, 11, 16)),
            optimizer=random.choice(("adamw", "adamw", "sgd", "lamb")),
            clip=random.choice(("norm", "norm", "value", "")),
            frozen=random.random() < 0.25,
            ema=random.random() < 0.25,
        )
        case = Case(model, _plan(random, world, MODELS[model]), options)
        if not _refusals(case):
            plan = sw.Plan.parse(case.plan)
            return Case(model, str(plan), replace(options, layers=4 if plan.axes.pp > 1 else 2))


def _refusals(case: Case) -> bool:
    plan, sizes = sw.Plan.parse(case.plan), MODELS[case.model].spec
    spec = sw.ModelSpec(**sizes) if sizes else None
    found = sw.check(
        plan, spec=spec, world=plan.world, device="cpu", global_batch=case.options.global_batch, seq_len=SEQ
    )
    return bool(errors_in(found))


def _plan(random: Random, world: int, model: Drawable) -> str:
    def maybe(*tokens: str) -> str:
        return random.choice(("", *tokens)) if random.random() < 0.5 else ""

    degrees = dict.fromkeys(AXES, 1)
    for _ in range(world.bit_length() - 1):
        degrees[random.choice(model.axes)] *= 2
    words = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1]
    shared = degrees["fsdp"] * degrees["cp"] * degrees["tp"]
    if model.has_experts and shared > 1:
        words.append(maybe("ep2", f"ep{min(shared, 4)}"))
    words.append(random.choice(("mb1", "mb2", "mb3", "mb4")))
    if degrees["fsdp"] > 1:
        words += [maybe("zero1", "zero2"), maybe("offload=state"), maybe("prefetch=2"), maybe("reshard=false")]
    elif degrees["dp"] == world > 1:
        words += [maybe("bucket=0.01", "no-bucket-view")]
    if degrees["pp"] > 1:
        kind = random.choice(SCHEDULES)
        words += [kind, "vs2" if kind in LOOPED and kind not in V_SHAPED else ""]
    if degrees["tp"] > 1:
        words += [maybe("seq"), maybe("loss-parallel")]
    if degrees["cp"] > 1:
        words.append(maybe("context=gather", "context=ulysses"))
    words.append(maybe("recompute=blocks", "recompute=every2", "recompute=50%", "recompute=ops"))
    words.append(maybe("offload=activations") if "offload=state" not in words else "")
    return " ".join([*filter(None, words), "fp64"])


# ---------------------------------------------------------------- in the processes of the world


class Rows:
    """Token rows with ragged masks."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(11)
        self.ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=random)
        keep = torch.randint(2, SEQ + 1, (ROWS, 1), generator=random)
        self.labels = torch.where(torch.arange(SEQ) < keep, self.ids[:, 1:], -100)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index, :-1], "labels": self.labels[index]}


def run_cases(cases: list[Case]) -> list[grid.Trace]:
    """Several draws of one world size, one after the other in the same processes and group."""
    whole = sw.Plan.parse(f"dp{cases[0].world}")
    with sw.open_mesh(whole) if whole.world > 1 else nullcontext():
        return [_named(case) for case in cases]


def _named(case: Case) -> grid.Trace:
    try:
        return _run(case)
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


def _run(case: Case) -> grid.Trace:
    plan, options, trace = sw.Plan.parse(case.plan), case.options, grid.Trace()
    with sw.open_mesh(plan) as mesh:
        rules = RULES if MODELS[case.model].spec is None and plan.axes.tp > 1 else None
        placed = sw.apply(_factory(case), plan, mesh, seed=SEED, rules=rules)
        batch = sw.Batch(global_size=options.global_batch, micro_batches=plan.batch.micro_batches)
        ema = sw.Ema(placed, 0.9) if options.ema else None
        batches = sw.loader(Rows(), batch, mesh, seed=SEED)
        state = sw.TrainState(placed, _optimizer(placed, options.optimizer), batches, ema=ema)
        grid.spy_on_gradients(state, trace)
        loss_fn = moe_models.LOSSES if MODELS[case.model].has_experts else grid.loss_fn
        clips = {"norm": {"clip_norm": 0.5}, "value": {"clip_value": 0.01}}.get(options.clip, {})
        for metrics in sw.steps(state, loss_fn, until=STEPS, options=sw.StepOptions(**clips)):
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        trace.params = {n: grid.whole(p) for n, p in placed.named_parameters().items()}
        if ema is not None:
            with ema.applied():
                trace.params |= {f"ema.{n}": grid.whole(p) for n, p in placed.named_parameters().items()}
    return trace


def _factory(case: Case) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = MODELS[case.model].build(case.options.layers)
        if case.options.frozen:
            blocks = next(module for module in model.children() if isinstance(module, nn.ModuleList))
            blocks[0].requires_grad_(False)
        return model

    return build


def _optimizer(placed: sw.Placed, name: str) -> Any:
    if name == "sgd":
        return sw.sgd(placed, lr=0.05, momentum=0.9)
    return sw.lamb(placed, lr=1e-2) if name == "lamb" else sw.adamw(placed, lr=1e-2, eps=EPS)
