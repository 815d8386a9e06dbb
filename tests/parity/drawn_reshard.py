"""What `test_drawn_reshard.py` draws and runs: a run under one plan, its checkpoint, and the run under another plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, PlanError
from shardwise.findings import errors_in
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.moe import MoEConfig, MoEDecoder
from shardwise.plan.plan import LOOPED, SCHEDULES, V_SHAPED
from shardwise.train.updates.low_bits import STATE_KINDS
from tests.parity import drawn_models, grid, moe_models
from tests.parity.drawn_models import AXES, EPS, LLAMA, MOE, SEED, SEQ, VOCAB, Drawable, Rows
from tests.parity.random_models import RULES

WIDE = {"dim": 64, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 96}
"""Some matrices are large enough for averages in 8 and 4 bits."""
PRECISIONS = ("fp32", "bf16", "fp16")
"""All keep fp32 parameters: a checkpoint of one loads into the others as it is."""
STEPS = 8
"""Length of the schedule."""


class Normed(nn.Module):
    """A block with running statistics, a buffer that no checkpoint holds, and one that is a constant."""

    fixed: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.register_buffer("fixed", torch.ones(16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (self.scale * self.fixed).to(x)  # buffers keep fp32 where a plan computes in 16 bits
        return x + self.norm((self.up(x) * scale).mT).mT.tanh()


class Buffered(nn.Module):
    """Token ids (batch, seq) -> logits; statistics are those of whole batches, so micro-batches are left alone."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(Normed() for _ in range(layers))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + 0  # FSDP2 warns of a view


class Counted(Buffered):
    """Beside its buffers it keeps a number in its extra state, and a parameter that no forward uses."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.idle, self.seen = nn.Parameter(torch.ones(3, 5)), 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        return super().forward(input_ids) * (1 + 0.01 * self.seen)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def _adapted(layers: int) -> nn.Module:
    peft = import_module("peft")  # three seconds that the cheap draws do without
    targets = ["wq", "wv", "wo", "w2"]
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: nn.Module = peft.get_peft_model(Decoder(DecoderConfig(**LLAMA | {"num_layers": layers})), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # at zero A has no gradient
                nn.init.normal_(parameter, std=0.1)
    return model


def _wide(layers: int) -> nn.Module:
    return Decoder(DecoderConfig(**LLAMA | WIDE | {"num_layers": layers}))


def _wide_moe(layers: int) -> nn.Module:
    return MoEDecoder(MoEConfig(**MOE | WIDE | {"num_layers": layers}))


COARSE = {
    "wide": Drawable(_wide, LLAMA | WIDE),
    "wide moe": Drawable(
        _wide_moe, LLAMA | WIDE | {"kind": "moe", "num_experts": 4, "experts_per_token": 2}, has_experts=True
    ),
}
"""Models for averages in few bits."""
MODELS = {
    **drawn_models.MODELS,
    **COARSE,
    "buffered": Drawable(Buffered, axes=("pp", "dp", "fsdp")),
    "counted": Drawable(Counted, axes=("dp", "fsdp")),
    "adapters": Drawable(_adapted, LLAMA, axes=("pp", "dp", "fsdp", "tp")),
}
WHOLE = ("buffered", "counted")
"""Their batches are not cut into micro-batches."""
GIVEN = ("adapters",)
"""Built with values, and not by a factory on `meta`."""


def _torch(kind: str, **dials: Any) -> Callable[[sw.Placed], Any]:
    """One of torch's optimizers, as a user builds it."""

    def make(placed: sw.Placed) -> Any:
        trained = [p for p in placed.parameters() if p.requires_grad]
        return getattr(torch.optim, kind)(trained, lr=1e-2, **dials)

    return make


def _several(placed: sw.Placed) -> Any:
    return sw.several(
        placed,
        {
            "*.0.*": lambda p: sw.adafactor(p, lr=1e-2),
            "*.1.*": lambda p: sw.sgd(p, lr=0.05, momentum=0.9),
            "*": lambda p: sw.adamw(p, lr=1e-2, eps=EPS),
        },
    )


def _adamw(kind: str) -> Callable[[sw.Placed], Any]:
    return lambda placed: sw.adamw(placed, lr=1e-2, eps=EPS, state_dtype=kind)


AVERAGES = {f"adamw {kind}": _adamw(kind) for kind in ("fp32", *STATE_KINDS)}
OPTIMIZERS: dict[str, Callable[[sw.Placed], Any]] = {
    **AVERAGES,
    "sgd": lambda placed: sw.sgd(placed, lr=0.05, momentum=0.9),
    "lamb": lambda placed: sw.lamb(placed, lr=1e-2),
    "lion": lambda placed: sw.lion(placed, lr=1e-3),
    "muon": lambda placed: sw.muon(placed, lr=1e-2),
    "adafactor": lambda placed: sw.adafactor(placed, lr=1e-2),
    "several": _several,
    "Adam": _torch("Adam", amsgrad=True, eps=EPS),
    "NAdam": _torch("NAdam", eps=EPS),
    "RMSprop": _torch("RMSprop", momentum=0.9, centered=True, eps=1e-4),
    "Adagrad": _torch("Adagrad", initial_accumulator_value=0.1),
    "Adamax": _torch("Adamax", eps=EPS),
}


@dataclass(frozen=True)
class Half:
    """One of the two runs."""

    plan: str
    optimizer: str
    global_batch: int
    steps: int
    workers: int


@dataclass(frozen=True)
class Case:
    """One draw: a run that saves after its last step, and the run that goes on."""

    model: str
    before: Half
    after: Half
    clip: float | None
    frozen: bool
    ema: bool
    layers: int
    beside: bool
    """Saved beside training."""
    own: bool
    """Trained by `make_step`, and not by `steps`."""
    probed: bool
    """Loss and norm of a few rows are kept with the checkpoint, and compared at the load."""

    @property
    def truth(self) -> Half:
        """What one process does after the load, in one micro-batch."""
        return replace(self.after, plan=f"dp1 / {sw.Plan.parse(self.after.plan).precision}", workers=0)

    @property
    def same(self) -> bool:
        """Whether the second run is the first one, going on."""
        return replace(self.before, workers=0, steps=0) == replace(self.after, workers=0, steps=0)

    @property
    def converts(self) -> bool:
        """Whether what is stored is of other types than what is kept."""
        kept = [sw.Plan.parse(half.plan).precision for half in (self.before, self.after)]
        types = {"fp32" if kind in PRECISIONS else kind for kind in kept}
        return self.before.optimizer != self.after.optimizer or len(types) > 1


def draw(random: Random, worlds: tuple[int, int], *, same: bool = False, light: bool = False) -> Case:
    """A case that no constraint refuses.

    Args:
        random: what decides.
        worlds: of the two runs.
        same: the mesh of the save goes on.
        light: without what needs seconds to import, peft and torchao.
    """
    averages = [name for name in AVERAGES if not (light and name.endswith("bit"))]
    optimizers = [name for name in OPTIMIZERS if name in averages or name not in AVERAGES]
    models = [name for name in MODELS if not (light and name in GIVEN)]
    while True:
        optimizer = random.choice([*optimizers, *averages])
        coarse = optimizer in AVERAGES and optimizer != "adamw fp32"
        model = random.choice([*COARSE] if coarse and random.random() < 0.7 else models)
        types = random.choice((("fp64", "fp64"), ("fp64", "fp64"), ("bf16-pure", "bf16-pure"), None))
        types = types or (random.choice(PRECISIONS), random.choice(PRECISIONS))
        if random.random() < 0.3:
            types = random.choice(PRECISIONS + ("bf16-pure", "fp64")), random.choice(("fp32", "bf16-pure", "fp64"))
        if same:
            types = random.choice((("fp32",) * 2, ("fp16",) * 2, ("fp16",) * 2, ("fp64",) * 2, ("bf16-pure",) * 2))
        if model in WHOLE and "bf16-pure" in types:
            continue  # torch's batch norm of one process does not take statistics in fp32 there
        if model in GIVEN and optimizer == "several":
            continue  # its adapters are all in the first two blocks, and the last pattern would take none
        size = random.choice((5, 8, 11, 16))
        before = Half(_plan(random, worlds[0], model, types[0]), optimizer, size, random.choice((1, 2, 2, 3)), 0)
        if optimizer in AVERAGES and random.random() < 0.4 and not same:
            optimizer = random.choice(averages)
        size = random.choice((size, size, 5, 8, 16))
        after = Half(_plan(random, worlds[1], model, types[1]), optimizer, size, random.choice((1, 2)), 0)
        if same:
            before = replace(before, workers=random.choice((0, 0, 1, 2)))
            after = replace(before, steps=random.choice((1, 2, 3)), workers=random.choice((0, 0, 1, 2)))
        if not any(_refused(model, half) or _few_tokens(model, half) for half in (before, after)):
            break
    deep = any(sw.Plan.parse(half.plan).axes.pp > 1 for half in (before, after))
    return Case(
        model=model,
        before=replace(before, plan=str(sw.Plan.parse(before.plan))),
        after=replace(after, plan=str(sw.Plan.parse(after.plan))),
        clip=random.choice((0.5, 0.5, None)),
        frozen=model not in GIVEN and before.optimizer != "several" and random.random() < 0.25,
        ema=random.random() < 0.3,
        layers=4 if deep else 2,
        beside=random.random() < 0.5,
        own=random.random() < 0.3,
        probed=random.random() < 0.3 and (same or not MODELS[model].has_experts),
    )


def _refused(model: str, half: Half) -> bool:
    plan, sizes = sw.Plan.parse(half.plan), MODELS[model].spec
    spec = sw.ModelSpec(**sizes) if sizes else None
    found = sw.check(plan, spec=spec, world=plan.world, device="cpu", global_batch=half.global_batch, seq_len=SEQ)
    return bool(errors_in(found))


def _few_tokens(model: str, half: Half) -> bool:
    """Whether a rank has two tokens, and its share of them as many rows as it has sequences.

    A token's two experts then look like a sequence, whose sum is refused.
    """
    axes = sw.Plan.parse(half.plan).axes
    return MODELS[model].has_experts and axes.cp > 2 and axes.tp == 2


def _plan(random: Random, world: int, name: str, precision: str) -> str:
    def maybe(*tokens: str) -> str:
        return random.choice(("", *tokens)) if random.random() < 0.5 else ""

    model, degrees = MODELS[name], dict.fromkeys(AXES, 1)
    for factor in _factors(world):
        degrees[random.choice(model.axes)] *= factor
    words = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1] or ["dp1"]
    shared = degrees["fsdp"] * degrees["cp"] * degrees["tp"]
    if model.has_experts and shared > 1:
        words.append(maybe("ep2", f"ep{min(shared, 4)}"))
    words.append("mb1" if name in WHOLE else random.choice(("mb1", "mb2", "mb3", "mb4")))
    if degrees["fsdp"] > 1:
        words += [maybe("zero1", "zero2"), maybe("offload=state"), maybe("prefetch=2"), maybe("reshard=false")]
        words.append(maybe("wrap=100000"))
    elif name == "counted" and degrees["dp"] > 1 and precision not in PRECISIONS[1:]:
        words.append("find-unused")  # DDP waits for the gradient of every parameter
    if degrees["pp"] > 1:
        kind = "gpipe" if name in WHOLE else random.choice(SCHEDULES)
        words += [kind, "vs2" if kind in LOOPED and kind not in V_SHAPED else ""]
    if degrees["tp"] > 1:
        words += [maybe("seq") if name not in GIVEN else "", maybe("loss-parallel")]
    if degrees["cp"] > 1:
        words.append(maybe("context=gather", "context=ulysses"))
    words.append(maybe("recompute=blocks", "recompute=every2", "recompute=ops") if name not in WHOLE else "")
    words.append(maybe("offload=activations") if "offload=state" not in words else "")
    return " ".join([*filter(None, words), precision])


def _factors(number: int) -> list[int]:
    """Prime factors.

    >>> _factors(6)
    [2, 3]
    """
    least = next((n for n in range(2, number + 1) if number % n == 0), None)
    return [] if least is None else [least, *_factors(number // least)]


# ---------------------------------------------------------------- in the processes of the world


@dataclass
class Told:
    """What a rank reports of one run."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Whole, at the save or after the load."""
    scalars: dict[str, Any] = field(default_factory=dict)
    trace: grid.Trace = field(default_factory=grid.Trace)
    """Of the steps after the save."""
    end: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every tensor of the state after them."""
    last: dict[str, Any] = field(default_factory=dict)
    """The scalars after them."""
    rows: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Of each step, from 0, the positions and samples that were this rank's."""
    refused: str = ""


class Recorded:
    """A loader that remembers the positions and samples of each step; a step that is rehearsed counts once."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.rows = batches, dict[int, tuple[tuple[int, int], ...]]()

    def __next__(self) -> Any:
        window = next(self.batches)
        self.rows[window.step] = window.sample_ids
        return window

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


class Run:
    """A training run in fresh objects."""

    def __init__(self, case: Case, half: Half, mesh: sw.Mesh) -> None:
        plan, model = sw.Plan.parse(half.plan), MODELS[case.model]
        rules = RULES if model.spec is None and plan.axes.tp > 1 else None
        sample = Rows()[0]["input_ids"][None].repeat(2, 1) if case.model in WHOLE else None
        build = functools.partial(_build, case)
        self.placed = sw.apply(
            build() if case.model in GIVEN else build, plan, mesh, seed=SEED, rules=rules,
            sample=None if sample is None else {"input_ids": sample},
        )  # fmt: skip
        batch = sw.Batch(global_size=half.global_batch, micro_batches=plan.batch.micro_batches)
        self.batches = Recorded(sw.loader(Rows(), batch, mesh, seed=SEED, workers=half.workers))
        ema = sw.Ema(self.placed, 0.9) if case.ema else None
        optimizer = OPTIMIZERS[half.optimizer](self.placed)
        self.state = sw.TrainState(self.placed, optimizer, self.batches, schedule=sw.warmup_cosine(2, STEPS), ema=ema)
        if self.state.loss_scale is not None:  # it moves within a few steps, up and down
            self.state.loss_scale.scale, self.state.loss_scale.period = 2.0**13, 2
        self.loss_fn = moe_models.LOSSES if model.has_experts else grid.loss_fn
        self.case = case
        self.step = sw.make_step(self.state, self.loss_fn, clip=case.clip) if case.own else None
        self.placed.train(True)

    def go(self, steps: int, trace: grid.Trace) -> None:
        if self.step is not None:
            done = (self.step(next(self.batches)) for _ in range(steps))
        else:
            done = sw.steps(self.state, self.loss_fn, until=self.state.step + steps, clip=self.case.clip)
        for metrics in done:
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)

    def store(self, folder: str) -> sw.Store:
        rows = Rows()
        probe = sw.Probe([rows[i] for i in range(4)], self.loss_fn) if self.case.probed else None
        return sw.Store(folder, probe=probe)

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: grid.whole(tensor).cpu() for name, tensor in self.state.tensors().items()}

    def finish(self, told: Told) -> Told:
        told.end, told.last, told.rows = self.whole(), self.state.scalars(), self.batches.rows
        told.trace.params = {n: told.end[f"model.{n}"] for n in self.placed.named_parameters()}
        return told


def _build(case: Case) -> nn.Module:
    model = MODELS[case.model].build(case.layers)
    if case.frozen:
        next(module for module in model.children() if isinstance(module, nn.ModuleList))[0].requires_grad_(False)
    return model


def save(case: Case, folder: str) -> Told:
    """The run up to the save; where the same mesh goes on, also the steps after it that nothing disturbed."""
    with sw.open_mesh(sw.Plan.parse(case.before.plan)) as mesh:
        run, told = Run(case, case.before, mesh), Told()
        store = run.store(folder)
        run.go(case.before.steps, grid.Trace())
        if case.beside:
            store.save_async(run.state)
        else:
            store.save(run.state)
        told.tensors, told.scalars = run.whole(), run.state.scalars()
        run.go(case.after.steps if case.same else 1, told.trace)
        store.wait()
        assert not store.take_findings()
        return run.finish(told)


def go_on(case: Case, folder: str, *, truth: bool = False) -> Told:
    """The load, and the steps after it."""
    half = case.truth if truth else case.after
    with sw.open_mesh(sw.Plan.parse(half.plan)) as mesh:
        torch.manual_seed(len(folder))  # the generator of the process is not part of a run
        run, told = Run(case, half, mesh), Told()
        loaded = run.store(folder).load_latest(run.state, convert_state=case.converts)
        assert loaded is not None and loaded.step == case.before.steps and not loaded.skipped
        told.tensors, told.scalars = run.whole(), run.state.scalars()
        run.go(half.steps, told.trace)
        return run.finish(told)


def run_all(cases: list[Case], kind: str, folder: str) -> list[Told]:
    """Several draws of one world size, one after the other in the same processes and group."""
    half = cases[0].before if kind == "save" else cases[0].truth if kind == "truth" else cases[0].after
    whole = sw.Plan.parse(f"dp{sw.Plan.parse(half.plan).world}")
    with sw.open_mesh(whole) if whole.world > 1 else nullcontext():
        return [_named(case, kind, str(Path(folder) / str(i))) for i, case in enumerate(cases)]


def _named(case: Case, kind: str, folder: str) -> Told:
    try:
        if kind == "save":
            return save(case, folder)
        return go_on(case, folder, truth=kind == "truth") if Path(folder).exists() else Told(refused="no save")
    except (ModelError, PlanError) as error:  # for reasons that the table of constraints cannot know
        return Told(refused=f"{type(error).__name__}: {error}")
    except Exception as error:
        raise AssertionError(f"{kind} of {case}: {type(error).__name__}: {error}") from error
