"""Rules on what only some ranks reach: a collective, a save that all ranks take part in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from shardwise.diagnose.linting.names import OPPOSITE, Scope, dotted, last, line_of
from shardwise.diagnose.linting.script import Guard, Script, Site, functions_below
from shardwise.diagnose.linting.table import Facts, Hit, rules, source

RANKS, _rule = rules()

_TORCH = {
    "all_reduce", "all_reduce_coalesced", "broadcast", "broadcast_object_list", "reduce", "all_gather",
    "all_gather_into_tensor", "all_gather_object", "all_gather_coalesced", "all_gather_single", "gather",
    "gather_object", "scatter", "scatter_object_list", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "new_group",
    "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh", "distribute_tensor",
    "get_model_state_dict", "get_optimizer_state_dict", "set_model_state_dict", "set_optimizer_state_dict",
    "get_state_dict",
}  # fmt: skip
_SHARDWISE = {"apply", "evaluate", "predict", "steps", "open_mesh", "generate", "export_hf"}
_TORCH_SAVES = {"save", "load", "async_save"}  # of torch.distributed.checkpoint
_METHODS = {
    "accelerator": {
        "wait_for_everyone", "gather", "gather_for_metrics", "reduce", "pad_across_processes", "get_state_dict",
        "save_state", "load_state", "save_model",
    },
    "engine": {"save_checkpoint", "load_checkpoint", "save_16bit_model", "backward", "step", "forward"},
    "fabric": {"barrier", "all_reduce", "all_gather", "broadcast", "save", "load"},
    "mesh": {"barrier", "all_reduce_sum", "all_reduce_max", "all_reduce_min"},
    "store": {"save", "load", "load_latest"},
    "step": {"__call__"},
    "zero": {"consolidate_state_dict"},
    "fsdp1": {"state_dict", "load_state_dict", "clip_grad_norm_", "forward", "__call__"},
    "fsdp2": {"forward", "__call__"},
    "placed": {"forward", "__call__"},
    "trainer": {"save_checkpoint"},
    "hf_trainer": {"train", "evaluate", "predict"},  # save_model is the first process's own affair under DDP
}  # fmt: skip
_NAMED = {"accelerator": "accelerator", "fabric": "fabric", "model_engine": "engine", "ds_engine": "engine"}
_HOROVOD = {
    "allreduce", "allreduce_", "allgather", "allgather_object", "broadcast", "broadcast_", "broadcast_parameters",
    "broadcast_object", "broadcast_optimizer_state", "alltoall", "reducescatter", "barrier", "join",
}  # fmt: skip
_SAVES = {"save", "async_save", "save_state", "save_model", "save_checkpoint", "save_16bit_model", "state_dict"}
_READS = {"load", "load_latest", "load_state", "load_checkpoint", "load_state_dict"}
_STATE_DICTS = {"get_state_dict", "get_model_state_dict", "get_optimizer_state_dict", "optim_state_dict"}
_STATE_DICTS |= {"full_optim_state_dict", "sharded_optim_state_dict", "consolidate_state_dict"}


_LIGHTNING = ("lightning", "pytorch_lightning")


def collective(facts: Facts, site: Site) -> str:
    """The collective that a call is, as it is spelled; "" of any other call."""
    name, word = site.name, last(site.name)
    spelled = dotted(site.node.func) or name
    if name.startswith(("torch.distributed.", "deepspeed.comm.")) and word in _TORCH:
        return spelled
    if name.startswith("torch.distributed.checkpoint.") and word in _TORCH_SAVES:
        return spelled
    if name.startswith("horovod.") and word in _HOROVOD:
        return spelled
    if name.startswith("accelerate.") and word in {"gather", "gather_object", "broadcast", "broadcast_object_list"}:
        return spelled
    if name.startswith("shardwise.") and word in _SHARDWISE:
        return spelled
    if word in _STATE_DICTS and facts.kinds.of(_first(site), site.scope) & {"fsdp1"}:
        return spelled
    if word == "full_tensor" and isinstance(site.node.func, ast.Attribute):
        return spelled
    if word == "log" and any(k.arg == "sync_dist" and source(k.value) == "True" for k in site.node.keywords):
        return f"{spelled}(sync_dist=True)"
    if spelled == "self.all_gather" and facts.script.imports(*_LIGHTNING):  # a LightningModule's
        return spelled
    return _of_method(facts, site, spelled)


def _first(site: Site) -> ast.expr | None:
    return site.node.args[0] if site.node.args else None


def _of_method(facts: Facts, site: Site, spelled: str) -> str:
    function = site.node.func
    receiver, word = (function.value, function.attr) if isinstance(function, ast.Attribute) else (function, "__call__")
    kinds = facts.kinds.of(receiver, site.scope)
    if "ddp" not in kinds and any(word in _METHODS.get(kind, ()) for kind in kinds):
        return spelled
    if kinds or word == "__call__":
        return ""
    name = dotted(receiver)
    owner = last(name)
    if word in _METHODS.get(_NAMED.get(owner, ""), ()):
        return spelled
    if name.startswith("mesh") and owner == "mesh" and word in _METHODS["mesh"] and not function_named(site, name):
        return spelled
    if owner == "trainer" and word == "save_checkpoint" and facts.script.imports(*_LIGHTNING):
        return spelled
    return spelled if owner == "strategy" and word in {"barrier", "broadcast", "reduce"} else ""


def function_named(site: Site, name: str) -> bool:
    """True where the name is bound in the file to something else."""
    return bool(site.scope.find(name))


class _Reach:
    """Which collectives a call makes, directly or through functions of the file."""

    def __init__(self, facts: Facts) -> None:
        self.script: Script = facts.script
        self.direct = {id(site): collective(facts, site) for site in self.script.sites}
        self.unguarded: dict[Scope, list[Site]] = {}
        for site in self.script.sites:
            if self.direct[id(site)] and not site.guards and not has_group(site):
                self.unguarded.setdefault(site.scope, []).append(site)

    def through(self, site: Site) -> list[Site]:
        """The unguarded collectives in the function that a call means and in those that it calls."""
        function = self.script.function_of(site)
        if function is None:
            return []
        below = [function, *sorted(functions_below(self.script, function), key=lambda s: getattr(s.node, "lineno", 0))]
        return [inner for scope in below for inner in self.unguarded.get(scope, ())]

    def names(self, site: Site) -> set[str]:
        """The last words of the collectives that a call makes."""
        own = self.direct[id(site)]
        return {last(own)} if own else {last(self.direct[id(inner)]) for inner in self.through(site)}


def has_group(site: Site) -> bool:
    """True where a collective names its group: not all ranks take part."""
    named = any(k.arg in ("group", "process_group", "pg") and source(k.value) != "None" for k in site.node.keywords)
    words = [last(dotted(arg)) for arg in site.node.args]
    return named or any("group" in word for word in words)


def _balanced(site: Site, reach: _Reach) -> bool:
    """True where those who do not pass the test make the same collective elsewhere in the function."""
    mine = reach.names(site)
    for other in reach.script.sites:
        if other.scope is not site.scope or other is site or not other.guards:
            continue
        if any(_apart(a, b) for a in site.guards for b in other.guards) and mine & reach.names(other):
            return True
    return False


def _apart(a: Guard, b: Guard) -> bool:
    """True where a rank passes either the one guard or the other."""
    return OPPOSITE[a.side] == b.side and (a.test is b.test or {a.side, b.side} == {"first", "others"})


def who(guard: Guard) -> str:
    """Which ranks pass a test, as a sentence."""
    text = f"`{source(guard.test)}` (line {line_of(guard.test)})"
    return {
        "first": f"rank 0 alone passes {text}",
        "others": f"rank 0 is left out by {text}",
        "some": f"only some ranks pass {text}",
        "rest": f"only some ranks go on after {text}",
    }[guard.side]


def _guarded(facts: Facts, *, saves: bool) -> Iterator[Hit]:
    reach = _Reach(facts)
    if not facts.script.is_distributed:
        return
    for site in facts.script.sites:
        if not site.guards:
            continue
        own = reach.direct[id(site)]
        inner = [] if own else reach.through(site)
        if not own and not inner or _balanced(site, reach):
            continue
        if own and has_group(site) and not all(_is_global(facts, site, g) for g in site.guards):
            continue
        name = own or reach.direct[id(inner[0])]
        is_save = last(name) in _SAVES | _READS | _STATE_DICTS
        if is_save == saves:
            yield (_save if saves else _collective)(site, name, inner)


def _is_global(facts: Facts, site: Site, guard: Guard) -> bool:
    """True of a test for rank 0 of the world: no group of several has only that rank."""
    names = {facts.script.ranks.kind(n, site.scope) for n in ast.walk(guard.test) if isinstance(n, ast.expr)}
    return guard.side == "first" and "global" in names and "local" not in names


def _collective(site: Site, name: str, inner: list[Site]) -> Hit:
    reached = (
        f"{dotted(site.node.func)}() reaches {name} (line {line_of(inner[0].node)})" if inner else f"{name} is called"
    )
    return Hit(
        node=site.node,
        what=f"{reached}, and not by every rank",
        found=who(site.guards[-1]),
        fix=f"call {name} on every rank, outside the test, and keep only printing and plain files inside",
    )


def _save(site: Site, name: str, inner: list[Site]) -> Hit:
    reached = (
        f"{dotted(site.node.func)}() reaches {name} (line {line_of(inner[0].node)})" if inner else f"{name} is called"
    )
    verb = "reads" if last(name) in _READS else "gathers or writes"
    return Hit(
        node=site.node,
        what=f"{reached}, which {verb} every rank's part, and not by every rank",
        found=who(site.guards[-1]),
        fix=f"call {name} on every rank, outside the test; it decides by itself who writes what",
    )


_rule(
    "rank.collective",
    "A collective, or a function that makes one, that only some ranks reach: the others are not there, and those that "
    "are wait until the time limit. Also after `if rank != 0: return`.",
)(partial(_guarded, saves=False))
_rule(
    "rank.save",
    "A checkpoint that every rank takes part in (of a sharded model, `store.save`, `accelerator.save_state`, "
    "`engine.save_checkpoint`, `dcp.save`), saved or read by some ranks only: it hangs, or parts are missing.",
)(partial(_guarded, saves=True))
