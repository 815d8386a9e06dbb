"""Rules on `DistributedSampler`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.diagnose.linting.names import Scope, constant, dotted, last, line_of, own_nodes
from shardwise.diagnose.linting.script import Site
from shardwise.diagnose.linting.table import Facts, Hit, rules, source

SAMPLERS, _rule = rules()

_EVALUATION = re.compile(
    r"(^|[_.])(val|valid|validation|validate|eval|evaluate|evaluation|test|dev|predict|inference)"
    r"($|[_.]|s?$|loader|dataset|data|set|ds|dl|sampler|iter)",
    re.IGNORECASE,
)
_LOADER_NAME = re.compile(r"loader|(^|_)dl$|(^|_)batches$", re.IGNORECASE)
_NO_GRAD = {"no_grad", "inference_mode"}


def _names_of(facts: Facts, site: Site) -> set[str]:
    """What a call's value is bound to: directly, as a part of an expression, or by callers of its function."""
    names: set[str] = set()
    bindings = [(name, b) for scope in facts.script.scopes for name, bs in scope.bindings.items() for b in bs if name]
    for name, binding in bindings:
        if binding.value is not None and any(n is site.node for n in ast.walk(binding.value)):
            names.add(name)
    returned = [n.value for n in own_nodes(site.scope.node) if isinstance(n, ast.Return) and n.value is not None]
    for name, binding in bindings:
        call = binding.value
        if not isinstance(call, ast.Call) or binding.scope.find_function(dotted(call.func)) is not site.scope:
            continue
        parts = [_element(value, binding.index) for value in returned]
        if any(n is site.node or dotted(n) in names - {""} for part in parts for n in ast.walk(part)):
            names.add(name)
    return names


def _element(value: ast.expr, index: int | None) -> ast.expr:
    """An element of a returned tuple; anything else as it is."""
    if isinstance(value, ast.Tuple) and index is not None and index < len(value.elts):
        return value.elts[index]
    return value


def _loaders_of(facts: Facts, site: Site) -> set[str]:
    """The loaders that take a sampler: by its name, or made around it."""
    names = _names_of(facts, site)
    found: set[str] = set()
    for loader in facts.script.called("DataLoader", "StatefulDataLoader"):
        given = [*loader.node.args, *(k.value for k in loader.node.keywords)]
        if any(n is site.node or (dotted(n) in names and dotted(n)) for g in given for n in ast.walk(g)):
            found |= _names_of(facts, loader)
    return found


def _is_for_evaluation(facts: Facts, site: Site, loaders: set[str]) -> bool:
    dataset = site.argument(0, "dataset")
    words = {*_names_of(facts, site), *loaders, site.scope.name, source(dataset) if dataset is not None else ""}
    return any(_EVALUATION.search(word) for word in words) or bool(loaders & _evaluated(facts))


def _evaluated(facts: Facts) -> set[str]:
    """Names of what is iterated over without gradients."""
    found: set[str] = set()
    for site in facts.script.sites:
        decorators = getattr(site.scope.node, "decorator_list", [])
        without = [n for c in (*site.contexts, *decorators) for n in ast.walk(c) if last(dotted(n)) in _NO_GRAD]
        for loop in site.loops if without else ():
            if not isinstance(loop, ast.While):
                for name in {dotted(n) for n in ast.walk(loop.iter)} - {""}:
                    found |= _handed_over(site.scope, name) or {name}  # a parameter's name may be another one outside
    return found


def _handed_over(scope: Scope, name: str) -> set[str]:
    """What callers hand over under the name of a parameter."""
    return {dotted(b.value) for b in scope.bindings.get(name, ()) if b.value is not None} - {""}


_DIVIDES_DATA = (
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "deepspeed",
    "horovod",
    "shardwise",
    "webdataset",
    "ray",
)
"""Libraries that may divide the samples over ranks themselves."""


@_rule(
    "sampler.missing",
    "A shuffled `DataLoader` without a sampler beside DDP or FSDP: every rank goes through the whole data set, so that "
    "an epoch is as many times longer; with one seed all ranks read the same batches, and more of them change nothing.",
)
def _missing(facts: Facts) -> Iterator[Hit]:
    wrapped = facts.script.called("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
    if not wrapped or facts.script.imports(*_DIVIDES_DATA) or facts.script.called("DistributedSampler"):
        return
    for site in facts.script.called("DataLoader", "StatefulDataLoader"):
        chosen = {keyword.arg for keyword in site.node.keywords} & {"sampler", "batch_sampler", None}
        if constant(site.argument(2, "shuffle")) is not True or chosen or len(site.node.args) > 3:
            continue
        if _is_for_evaluation(facts, site, set()) or _knows_rank(site):
            continue
        yield Hit(
            node=site.node,
            what="every rank goes through all samples",
            found=f"`{source(site.node)}`, whose samples nobody divides over the ranks",
            fix="give it `sampler=DistributedSampler(dataset)` in place of `shuffle=True`, and call `set_epoch`",
        )


def _knows_rank(site: Site) -> bool:
    """Whether what a loader is given may be this rank's part: a rank, a shard or a subset is spoken of."""
    dataset = site.argument(0, "dataset")
    known = [dataset] if dataset is not None else []
    for name in {dotted(node) for value in known for node in ast.walk(value)} - {""}:
        known += [bound.value for bound in site.scope.find(name) if bound.value is not None]
    return any(re.search(r"rank|shard|world|by_node|partition", source(value, 1000), re.IGNORECASE) for value in known)


@_rule(
    "sampler.set-epoch",
    "`DistributedSampler` shuffles by its epoch, which stays 0 until `set_epoch`: every epoch has the same order. "
    "Accelerate and Lightning call it by themselves.",
)
def _set_epoch(facts: Facts) -> Iterator[Hit]:
    if facts.script.imports("lightning", "pytorch_lightning", "accelerate"):
        return
    for site in facts.script.called("DistributedSampler"):
        shuffle = site.argument(3, "shuffle")
        loaders = _loaders_of(facts, site)
        if constant(shuffle) is False or _is_for_evaluation(facts, site, loaders) or _has_epoch(facts, site):
            continue
        loop = _epoch_loop(facts, site, loaders)
        if loop is not None:
            yield Hit(
                node=site.node,
                what="every epoch goes through the samples in the same order",
                found=f"no `set_epoch` of this sampler; it is run through repeatedly from line {loop}",
                fix="call `sampler.set_epoch(epoch)` at the start of each epoch",
                severity="warning",
            )


def _has_epoch(facts: Facts, site: Site) -> bool:
    """True where `set_epoch` is called on this sampler, or on what may be it."""
    others = {id(s.node) for s in facts.script.called("DistributedSampler")} - {id(site.node)}
    for call in facts.script.called("set_epoch"):
        receiver = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
        bound = call.scope.find(dotted(receiver)) if dotted(receiver) else []
        values = [n for b in bound if b.value is not None for n in ast.walk(b.value)]
        if not values or any(n is site.node for n in values) or not any(id(n) in others for n in values):
            return True
    return any(isinstance(n, ast.Constant) and n.value == "set_epoch" for n in ast.walk(facts.script.tree))


def _epoch_loop(facts: Facts, site: Site, loaders: set[str]) -> int | None:
    """The line of a loop that runs through a loader again and again; None where there is none."""
    names = loaders | _names_of(facts, site)
    for call in facts.script.sites:
        for depth, loop in enumerate(call.loops):
            if isinstance(loop, ast.While) or not _runs_over(call, loop, names):
                continue
            if depth:
                return line_of(call.loops[0])
            callers = [c for c in facts.script.sites if facts.script.function_of(c) is call.scope and c.loops]
            if callers:
                return line_of(callers[0].loops[0])
        if call.loops and last(call.name) == "iter" and any(dotted(arg) in names for arg in call.node.args):
            return line_of(call.loops[0])
    return None


def _runs_over(call: Site, loop: ast.For | ast.AsyncFor, names: set[str]) -> bool:
    for node in ast.walk(loop.iter):
        name = dotted(node)
        if name and (name in names or _LOADER_NAME.search(last(name)) and (_handed_over(call.scope, name) & names)):
            return True
        if name and _LOADER_NAME.search(last(name)) and not _EVALUATION.search(name) and not call.scope.find(name):
            return True
    return False


@_rule(
    "eval.padding",
    "`DistributedSampler` repeats samples until every rank has as many: a metric over an evaluation set counts some "
    "twice. So does `accelerator.gather` of the last batch, which `gather_for_metrics` cuts.",
)
def _padding(facts: Facts) -> Iterator[Hit]:
    if facts.script.called("gather_for_metrics") or _cuts_padding(facts):
        return
    for site in facts.script.called("DistributedSampler"):
        if constant(site.argument(5, "drop_last")) is True or not _is_for_evaluation(
            facts, site, _loaders_of(facts, site)
        ):
            continue
        yield Hit(
            node=site.node,
            what="the evaluation set is padded with repeated samples",
            found=f"`{source(site.node)}`",
            fix="use `shardwise.eval_batches` (no sample twice, uneven ranks included), or give each rank "
            "`Subset(dataset, range(rank, len(dataset), world_size))` and reduce sums and counts",
            severity="warning",
        )
    yield from _gathered(facts)


def _gathered(facts: Facts) -> Iterator[Hit]:
    for site in facts.script.called("gather"):
        owner = site.node.func.value if isinstance(site.node.func, ast.Attribute) else None
        is_accelerator = last(dotted(owner)) == "accelerator" or "accelerator" in facts.kinds.of(owner, site.scope)
        names = {dotted(n) for loop in site.loops if not isinstance(loop, ast.While) for n in ast.walk(loop.iter)} - {
            ""
        }
        evaluated = any(_EVALUATION.search(name) for name in names) or names & _evaluated(facts)
        if is_accelerator and evaluated:
            yield Hit(
                node=site.node,
                what="the last batch of the evaluation set is padded with repeated samples, and gathered with them",
                found=f"`{source(site.node)}` in the loop of line {line_of(site.loops[-1])}",
                fix="use `accelerator.gather_for_metrics`",
                severity="warning",
            )


def _cuts_padding(facts: Facts) -> bool:
    """True where something is cut to the length of a dataset: `predictions[: len(dataset)]`."""
    cuts = [n.upper for n in ast.walk(facts.script.tree) if isinstance(n, ast.Slice) and n.upper is not None]
    calls = [n for cut in cuts for n in ast.walk(cut) if isinstance(n, ast.Call) and dotted(n.func) == "len"]
    return any("data" in source(call) for call in calls)
