"""Rules on modules whose parameters are not whole on a rank, and on the device that one has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.diagnose.linting.kinds import SHARDED
from shardwise.diagnose.linting.names import Scope, constant, dotted, last, line_of
from shardwise.diagnose.linting.script import Site
from shardwise.diagnose.linting.table import Facts, Hit, rules, source

SHARDS, _rule = rules()

_HOW = {
    "fsdp1": "FSDP",
    "fsdp2": "fully_shard",
    "tp": "parallelize_module",
    "placed": "shardwise.apply",
    "engine": "deepspeed.initialize",
    "stage": "PipelineStage",
    "prepared": "accelerator.prepare",
}
_SHARDERS = {"FullyShardedDataParallel", "fully_shard", "parallelize_module", "distribute_module"}


def expressions_behind(node: ast.expr, scope: Scope, depth: int = 2) -> Iterator[tuple[ast.expr, Scope]]:
    """All expressions in one, and in what the names in it were bound to."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.expr):
            yield inner, scope
        name = dotted(inner)
        if depth and name and isinstance(inner, ast.Name | ast.Attribute):
            for binding in scope.find(name, inner.lineno):
                if binding.value is not None and binding.value is not node:
                    yield from expressions_behind(binding.value, binding.scope, depth - 1)


def modules_of_parameters(node: ast.expr, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """The `m` of each `m.parameters()` in an expression and behind its names."""
    for inner, where in expressions_behind(node, scope):
        call = inner.func if isinstance(inner, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr in ("parameters", "named_parameters"):
            yield _without_module(call.value), where


def _without_module(node: ast.expr) -> ast.expr:
    """`m` of `m.module`: what a wrapper holds is sharded as the wrapper is."""
    return node.value if isinstance(node, ast.Attribute) and node.attr == "module" else node


_CLIPPED = {
    "fsdp1": ("each rank would clip by the norm of its own shard", "call `{m}.clip_grad_norm_(max_norm)`"),
    "placed": (
        "some parameters may live on other ranks, and the norm would miss them",
        "pass `clip=max_norm` to `shardwise.steps` or `make_step`: one norm over the whole mesh",
    ),
    "engine": (
        "the engine reduces and partitions gradients by itself, after this",
        'set "gradient_clipping" in the configuration of DeepSpeed',
    ),
    "stage": (
        "each rank would clip by the norm of its own stage",
        "sum the squared norms over the pipeline's group before clipping, or pass `clip=` to `shardwise.steps`",
    ),
    "prepared": (
        "under FSDP, DeepSpeed or fp16, which the configuration may choose, this norm is not the gradient's",
        "call `accelerator.clip_grad_norm_(model.parameters(), max_norm)`, when `accelerator.sync_gradients`",
    ),
}


@_rule(
    "clip.shard",
    "`torch.nn.utils.clip_grad_norm_` on a module of which a rank holds a part (FSDP, ZeRO, a pipeline stage): every "
    "rank scales by another norm, and the loss still falls. `fully_shard` alone is exact: its gradients are DTensors.",
)
def _clip(facts: Facts) -> Iterator[Hit]:
    stages = {dotted(site.argument(0, "submodule")) for site in facts.script.called("PipelineStage")} - {""}
    for site in facts.script.called("clip_grad_norm_", "clip_grad_norm"):
        if not site.node.args or not site.name.startswith(("torch.", "clip_grad_norm", "nn.utils")):
            continue
        if _of_a_group(facts, site.node.args[0]):
            yield Hit(
                node=site.node,
                what=f"{dotted(site.node.func)} on a group's parameters: each rank clips by the norm of its own part",
                found="the groups of an optimizer over what shardwise.apply has placed",
                fix="pass `clip=max_norm` to `shardwise.steps` or `make_step`; docs/optimizers.md has a norm per group",
            )
            continue
        for module, scope in modules_of_parameters(site.node.args[0], site.scope):
            kinds = facts.kinds.at(module, site, frozenset(_CLIPPED)) if scope is site.scope else frozenset()
            kinds |= facts.kinds.of(module, scope) & frozenset(_CLIPPED) if scope is not site.scope else frozenset()
            kinds |= {"stage"} if dotted(module) in stages else frozenset()
            if not facts.script.imports("accelerate"):
                kinds -= {"prepared"}
            kind = next((kind for kind in _CLIPPED if kind in kinds), None)
            if kind:
                why, fix = _CLIPPED[kind]
                yield Hit(
                    node=site.node,
                    what=f"{dotted(site.node.func)} on the parameters of `{source(module)}`: {why}",
                    found=f"`{source(module)}` comes from {_HOW[kind]}",
                    fix=fix.format(m=source(module)),
                    severity="warning" if kind == "prepared" else "error",
                )
                break


def _of_a_group(facts: Facts, argument: ast.expr) -> bool:
    """True of `group["params"]` in a script of Shardwise."""
    is_group = isinstance(argument, ast.Subscript) and constant(argument.slice) == "params"
    return is_group and any(site.name == "shardwise.apply" for site in facts.script.sites)


@_rule(
    "optimizer.before-sharding",
    "An optimizer built before the module is sharded (`FSDP`, `fully_shard`, `parallelize_module`, `apply`) holds the "
    "parameters that sharding replaced: it updates nothing that the module uses. Before DDP the order does not matter.",
)
def _optimizer(facts: Facts) -> Iterator[Hit]:
    shardings = [(site, name) for site in facts.script.sites for name in _shards(facts, site)]
    if not shardings:
        return
    optimizers = [site for site in facts.script.sites if "optimizer" in facts.kinds.of(site.node, site.scope)]
    for site in optimizers:
        names = {dotted(m) for m, _ in modules_of_parameters(_arguments(site), site.scope)}
        names |= {dotted(arg) for arg in site.node.args}
        for sharding, name in shardings:
            later = sharding.scope is site.scope and sharding.line > (site.node.end_lineno or site.line)
            if not later or name not in names or _is_made_again(facts, optimizers, site, sharding):
                continue
            yield Hit(
                node=site.node,
                what=f"{dotted(site.node.func)} is built before `{name}` is sharded",
                found=f"{dotted(sharding.node.func)}({name}, ...) comes later, in line {line_of(sharding.node)}",
                fix="shard the module first and build the optimizer from the sharded module's parameters",
            )
            break


def _arguments(site: Site) -> ast.expr:
    return ast.Tuple(elts=[*site.node.args, *(k.value for k in site.node.keywords)])


def _shards(facts: Facts, site: Site) -> Iterator[str]:
    """The names of the modules that a call shards."""
    if last(site.name) in _SHARDERS or site.name == "shardwise.apply":
        argument = site.argument(0, "module")
        if argument is not None:
            yield from facts.script.sharded_names(argument, site)


def _is_made_again(facts: Facts, optimizers: list[Site], first: Site, sharding: Site) -> bool:
    """True where an optimizer is bound to the same name after the sharding, or on another branch."""
    apart = {id(t) for t in first.tests} & {id(t) for t in sharding.tests}
    if apart and first.scope.node is not facts.script.tree:
        return any(o.scope is first.scope and o.line > sharding.line for o in optimizers)
    names = [name for name, bound in first.scope.bindings.items() if any(b.value is first.node for b in bound)]
    later = [b for name in names for b in first.scope.bindings[name] if b.line > sharding.line and b.value is not None]
    return any("optimizer" in facts.kinds.of_binding(b) for b in later)


@_rule(
    "save.sharded",
    "`torch.save(model.state_dict())` of a sharded module writes one rank's shards, or with FSDP 1 gathers the whole "
    "model on every rank and lets all write one file. A DDP module is whole: there this is right.",
)
def _save(facts: Facts) -> Iterator[Hit]:
    typed = bool(facts.script.called("state_dict_type", "set_state_dict_type"))
    sites = [
        s for s in facts.script.sites if s.name in ("torch.save", "accelerator.save") or last(s.name) == "save_file"
    ]
    for site in sites:
        value = site.argument(0, "obj")
        behind = [] if value is None else list(expressions_behind(value, site.scope))
        if any(isinstance(inner, ast.Attribute) and inner.attr == "full_tensor" for inner, _ in behind):
            continue
        for inner, scope in behind:
            kind = _sharded_state_dict(facts, site, inner, scope, typed=typed)
            if kind and isinstance(inner, ast.Call):
                yield Hit(
                    node=site.node,
                    what=f"{dotted(site.node.func)} of `{source(inner)}`, of a module that is sharded",
                    found=f"the module comes from {_HOW[kind]}",
                    fix=_FIXES.get(kind, _FIXES["fsdp2"]),
                )
                break


_FIXES = {
    "fsdp2": "use `torch.distributed.checkpoint.save` on every rank, or gather first with `get_model_state_dict("
    "model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))` on every rank and save on rank 0",
    "placed": "use `shardwise.Store(path).save(state)` on every rank",
    "engine": "use `engine.save_checkpoint(path)` or `engine.save_16bit_model(path)` on every rank",
}


def _sharded_state_dict(facts: Facts, site: Site, node: ast.expr, scope: Scope, *, typed: bool) -> str:
    """How the module of a `m.state_dict()` is sharded; "" of anything else."""
    call = node.func if isinstance(node, ast.Call) else None
    if not isinstance(call, ast.Attribute) or call.attr != "state_dict":
        return ""
    module = _without_module(call.value)
    kinds = facts.kinds.at(module, site, SHARDED) if scope is site.scope else facts.kinds.of(module, scope) & SHARDED
    if "engine" in kinds and not _is_zero3(facts):
        kinds -= {"engine"}
    if typed or "ddp" in facts.kinds.of(module, scope):
        kinds -= {"fsdp1"}
    return min(kinds, default="")


def _is_zero3(facts: Facts) -> bool:
    """True where a dictionary of the file has `"stage": 3`: only then are parameters partitioned."""
    dicts = [n for n in ast.walk(facts.script.tree) if isinstance(n, ast.Dict)]
    return any(
        constant(k) == "stage" and constant(v) == 3 for d in dicts for k, v in zip(d.keys, d.values, strict=True) if k
    )


@_rule(
    "ddp.device-ids",
    "DDP's `device_ids` names the one device of this process: not several, not the same for every rank, not the global "
    "rank, which exceeds the devices of the second node. Note: a global rank in a script that never asks for its local "
    "rank works on one node.",
)
def _device_ids(facts: Facts) -> Iterator[Hit]:
    for site in facts.script.called("DistributedDataParallel"):
        given = site.argument(1, "device_ids")
        devices = given.elts if isinstance(given, ast.List | ast.Tuple) else None
        if given is None or (isinstance(given, ast.Constant) and given.value is None):
            continue
        called = dotted(given.func) if isinstance(given, ast.Call) else ""
        if (devices is not None and len(devices) > 1) or called in ("range", "list"):
            yield Hit(
                node=site.node,
                what="DDP is given several devices, and each process has one",
                found=f"device_ids={source(given)}",
                fix="start one process per device and pass `device_ids=[local_rank]`",
            )
        elif devices:
            yield from _one_device(facts, site, devices[0])


def _one_device(facts: Facts, site: Site, device: ast.expr) -> Iterator[Hit]:
    module = site.argument(0, "module")
    fixed = constant(device.args[0]) if isinstance(device, ast.Call) and device.args else constant(device)
    if module is not None and _is_on_cpu(module, site):
        yield Hit(
            node=site.node,
            what="DDP is given a device, and the module is on the CPU",
            found=f"device_ids=[{source(device)}]",
            fix="leave device_ids out, or move the module to that device first",
        )
    elif fixed is not None and "CUDA_VISIBLE_DEVICES" not in facts.script.text:
        yield Hit(
            node=site.node,
            what="every process names the same device",
            found=f"device_ids=[{source(device)}]",
            fix='use `local_rank = int(os.environ["LOCAL_RANK"])` and `device_ids=[local_rank]`',
        )
    elif facts.script.ranks.kind(device, site.scope) == "global":
        knows_local = "LOCAL_RANK" in facts.script.text or "local_rank" in facts.script.text
        several = " (this script asks for its local rank elsewhere)" if knows_local else ""
        yield Hit(
            node=site.node,
            what="the global rank is used as the index of a device: on the second node there is no such device",
            found=f"device_ids=[{source(device)}]{several}",
            fix='use `local_rank = int(os.environ["LOCAL_RANK"])` for devices and the rank for everything else',
            severity="error" if knows_local else "note",
        )


def _is_on_cpu(module: ast.expr, site: Site) -> bool:
    """True where what the module was last bound to ends in `.cpu()` or `.to("cpu")`."""
    bound = [b.value for b in site.scope.find(dotted(module), site.line) if b.value]
    for node in [module, *bound] if len(bound) <= 1 else [module]:
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and isinstance(function, ast.Attribute):
            to_cpu = function.attr == "to" and node.args and constant(node.args[0]) == "cpu"
            if function.attr == "cpu" or to_cpu:
                return True
    return False


_NUMBERS = ("float", "int", "bool")
_WEIGHTS = {"weight", "bias", "parameters", "named_parameters"}
_NOT_VALUES = {"full_tensor", "to_local", "local_parameters", "numel", "dim", "size", "shape", "ndim", "element_size"}
"""What makes it the number of the whole, or no number of its elements."""


@_rule(
    "shard.number",
    "A number that is read off a weight after `shardwise.apply` (`float(weight.norm())`, `.item()`): of a sharded one "
    "torch gives each rank that of its own shard, which the run refuses. `full_tensor()` before it, on every rank, has "
    "the whole.",
)
def _number(facts: Facts) -> Iterator[Hit]:
    for site in facts.script.sites:
        call = site.node.func
        read = call.value if isinstance(call, ast.Attribute) and call.attr == "item" else None
        read = site.argument(0, "x") if site.name in _NUMBERS else read
        if read is not None and _is_of_weights(facts, site, read):
            yield Hit(
                node=site.node,
                what=f"`{source(site.node)}` reads a number off what may be a shard: each rank gets that of its part",
                found="a weight of what shardwise.apply gave, without full_tensor()",
                fix="on every rank take `.full_tensor()` of it where it is a DTensor, then the number (reduce first: "
                "`weight.norm().full_tensor().item()`)",
                severity="warning",
            )


def _is_of_weights(facts: Facts, site: Site, read: ast.expr) -> bool:
    """Whether an expression takes a weight of a placed module as it lies on this rank, by itself or in a loop."""
    inside = _attributes(read)
    if inside & _NOT_VALUES:
        return False
    names = {n.id for n in ast.walk(read) if isinstance(n, ast.Name)}
    loops = [loop for loop in site.loops if not isinstance(loop, ast.While)]
    over = [loop.iter for loop in loops if names & {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}]
    for place in (read, *over):
        attributes, roots = _attributes(place), {n.id for n in ast.walk(place) if isinstance(n, ast.Name)}
        found = [binding for root in roots for binding in site.scope.find(root, site.line)]
        is_placed = any("placed" in facts.kinds.of_binding(binding) for binding in found)
        if is_placed and attributes & _WEIGHTS and not attributes & _NOT_VALUES:
            return True
    return False


def _attributes(node: ast.expr) -> set[str]:
    return {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
