"""Techniques two by two: which tokens of a plan are a technique, and the plans that prove their pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations

from shardwise.errors import PlanError
from shardwise.findings import errors_in
from shardwise.plan.constraints import check
from shardwise.plan.plan import SCHEDULES, Plan


@dataclass(frozen=True)
class Technique:
    """A name, the tokens that ask for it, and how to see it in a plan. Of one family a plan has one at most."""

    name: str
    tokens: str
    is_in: Callable[[Plan], bool]
    family: str = ""


def _zero(level: int) -> Callable[[Plan], bool]:
    return lambda plan: plan.zero == level and plan.axes.dp_shard > 1


def _schedule(kind: str) -> Callable[[Plan], bool]:
    return lambda plan: plan.axes.pp > 1 and plan.schedule.kind == kind


def _context(kind: str) -> Callable[[Plan], bool]:
    return lambda plan: plan.axes.cp > 1 and plan.context.kind == kind


def _recompute(mode: str) -> Callable[[Plan], bool]:
    return lambda plan: plan.recompute.mode == mode


TECHNIQUES = (
    Technique("replicas", "dp2", lambda p: p.axes.dp_replicate > 1),
    Technique("zero 1", "fsdp2 zero1", _zero(1), "zero"),
    Technique("zero 2", "fsdp2 zero2", _zero(2), "zero"),
    Technique("zero 3", "fsdp2", _zero(3), "zero"),
    Technique("tensor", "tp2", lambda p: p.axes.tp > 1),
    Technique("sequence", "tp2 seq", lambda p: p.tensor.sequence),
    Technique("loss-parallel", "tp2 loss-parallel", lambda p: p.tensor.loss),
    Technique("context: ring", "cp2", _context("ring"), "context"),
    Technique("context: gather", "cp2 context=gather", _context("gather"), "context"),
    Technique("context: ulysses", "cp2 context=ulysses", _context("ulysses"), "context"),
    Technique("experts", "ep2", lambda p: p.axes.ep > 1),
    *(Technique(kind, f"pp2 {kind} mb4", _schedule(kind), "schedule") for kind in SCHEDULES),
    Technique("accumulation", "mb4", lambda p: p.batch.micro_batches > 1),
    Technique("recompute: blocks", "recompute=blocks", _recompute("blocks"), "recompute"),
    Technique("recompute: every n-th", "recompute=every2", _recompute("every"), "recompute"),
    Technique("recompute: ratio", "recompute=50%", _recompute("ratio"), "recompute"),
    Technique("recompute: operations", "recompute=ops", _recompute("ops"), "recompute"),
    Technique("offload: state", "fsdp2 offload=state", lambda p: p.offload.state),
    Technique("offload: activations", "offload=activations", lambda p: p.offload.activations),
    Technique("compile", "compile", lambda p: p.compile),
    Technique("float8", "fp8=emulate", lambda p: p.float8.recipe != "none"),
    Technique("prefetch", "fsdp2 prefetch=2", lambda p: p.communication.prefetch > 1),
    Technique("reshard to a group", "fsdp4 reshard=2", lambda p: type(p.communication.reshard_after_forward) is int),
)

Pair = tuple[str, str]


def joined(*techniques: Technique) -> str:
    """One shorthand that asks for all of them: the larger of two degrees, each other token once."""
    tokens: dict[str, str] = {}
    for token in " ".join(technique.tokens for technique in techniques).split():
        key = token.rstrip("0123456789") if token[-1].isdigit() and "=" not in token else token.split("=")[0]
        if key == "offload" and key in tokens and tokens[key] != token:
            token = "offload=state+activations"
        if key not in tokens or token > tokens[key]:
            tokens[key] = token
    if "ep" in tokens and not {"fsdp", "cp", "tp"} & tokens.keys():
        tokens["fsdp"] = "fsdp2"  # experts are dealt out over ranks that are there
    return " ".join(tokens.values())


def techniques_in(plan: Plan) -> set[str]:
    """Names of the techniques that a plan uses."""
    return {technique.name for technique in TECHNIQUES if technique.is_in(plan)}


def pairs_in(plan: Plan) -> set[Pair]:
    """The pairs that a plan proves when it trains as one process does."""
    used = techniques_in(plan)
    return {(a.name, b.name) for a, b in combinations(TECHNIQUES, 2) if {a.name, b.name} <= used}


def refusal(a: Technique, b: Technique) -> tuple[str, ...]:
    """Ids of the constraints that refuse the pair; empty: it is legal. One of a family excludes the others."""
    if a.family and a.family == b.family:
        return ("one of a kind",)
    asked = joined(a, b)
    ids = _errors(asked)
    if ids and "zero 3" not in (a.name, b.name):  # `fsdp` alone means zero 3; another level may do
        ids = () if not _errors(f"{asked} zero2") else ids
    return ids


def _errors(text: str) -> tuple[str, ...]:
    try:
        return tuple(finding.id for finding in errors_in(check(Plan.parse(text))))
    except PlanError as error:
        return (f"plan.syntax ({error})",)


def open_pairs(proven: Iterable[str]) -> set[Pair]:
    """Pairs that no constraint refuses and none of the proven plans has."""
    done = set().union(*(pairs_in(Plan.parse(text)) for text in proven))
    legal = {(a.name, b.name) for a, b in combinations(TECHNIQUES, 2) if not refusal(a, b)}
    return legal - done


PLANS = (  # chosen so that with the plans of the other grids every legal pair is in one that is run
    "pp2 fsdp2 tp2 ep2 zero2 / looped-bfs mb4 / seq recompute=50% offload=activations prefetch=2",
    "pp2 fsdp2 tp2 ep2 zero1 / zero-bubble mb4 / loss-parallel recompute=every2 offload=state+activations",
    "pp2 fsdp2 cp2 ep2 / interleaved mb4 / context=gather recompute=blocks offload=state prefetch=2",
    "pp2 fsdp2 cp2 ep2 zero2 / zero-bubble-v mb4 / recompute=blocks offload=state+activations prefetch=2",
    "pp2 fsdp2 cp2 ep2 zero2 / dualpipe-v mb4 / context=ulysses recompute=every2 offload=activations prefetch=2",
    "dp2 fsdp2 tp2 ep2 zero2 / mb4 / seq loss-parallel prefetch=2",
    "pp2 dp2 cp2 ep2 / 1f1b mb4 / context=gather recompute=50% offload=activations",
    "cp2 tp2 / mb4 / seq loss-parallel context=gather recompute=every2 offload=activations",
    "fsdp4 cp2 / mb4 / context=ulysses recompute=ops offload=state reshard=2",
    "pp2 fsdp2 cp2 zero1 / dualpipe-v mb4 / context=gather recompute=50% offload=state+activations",
    "pp2 cp2 tp2 / gpipe mb4 / loss-parallel context=ulysses recompute=blocks",
    "pp2 fsdp2 cp2 ep2 zero2 / gpipe mb4 / recompute=every2 offload=state",
    "pp2 cp2 tp2 / looped-bfs mb4 / seq loss-parallel recompute=ops",
    "pp2 dp2 fsdp2 ep2 zero1 / looped-bfs mb4 / recompute=every2 offload=state",
    "pp2 dp2 cp2 ep2 / zero-bubble-v mb4 / context=ulysses recompute=every2",
    "pp2 fsdp2 cp2 ep2 zero2 / zero-bubble mb4 / context=ulysses recompute=50% prefetch=2",
    "pp2 cp2 / interleaved mb4 / context=ulysses recompute=ops offload=activations",
    "pp2 fsdp2 tp2 zero1 / zero-bubble-v mb4 / seq loss-parallel recompute=every2 offload=state+activations",
    "fsdp4 / mb4 / recompute=50% offload=state+activations reshard=2",
    "pp2 fsdp2 / gpipe mb4 / recompute=50% offload=state+activations",
    "pp2 fsdp2 cp2 zero1 / interleaved mb4 / recompute=every2",
    "fsdp4 / mb4 / recompute=blocks reshard=2 prefetch=2",
    "pp2 fsdp2 / 1f1b mb4 / recompute=blocks prefetch=2",
    "pp2 cp2 / dualpipe-v mb4 / recompute=blocks",
    "pp2 cp2 / zero-bubble-v mb4 / context=gather recompute=50%",
    "pp2 cp2 tp2 / zero-bubble mb4 / seq context=gather offload=activations",
    "pp2 dp2 tp2 / dualpipe-v mb4 / loss-parallel recompute=50%",
    "pp2 cp2 / 1f1b mb4 / recompute=ops",
    "dp2 fsdp2 zero2 / recompute=ops",
    "pp2 cp2 / gpipe mb4 / context=gather",
    "pp2 cp2 ep2 / looped-bfs mb4 / context=gather recompute=every2",
    "pp2 cp2 / looped-bfs mb4 / context=ulysses",
    "dp2 fsdp4 / reshard=2",
    "fsdp4 cp2 / context=gather reshard=2",
    "fsdp4 cp2 / reshard=2",
)
COMPILED = (  # minutes of compilation: `make soak`
    "pp2 fsdp2 zero1 / gpipe mb4 / recompute=ops offload=state+activations compile prefetch=2",
    "fsdp4 / recompute=every2 offload=activations compile reshard=2 prefetch=2",
    "pp2 tp2 / interleaved mb4 / loss-parallel recompute=50% compile",
    "pp2 fsdp2 zero1 / looped-bfs mb4 / recompute=blocks compile",
    "pp2 fsdp2 zero2 / 1f1b mb4 / recompute=every2 offload=state compile",
)
