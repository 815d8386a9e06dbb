"""Rules on gradients that are never summed over ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.diagnose.linting.names import dotted, last, line_of
from shardwise.diagnose.linting.script import Site
from shardwise.diagnose.linting.table import Facts, Hit, rules, source

SUMS, _rule = rules()

_BY_HAND = ("reduce", "average", "averager", "gather", "broadcast", "communicate")
"""In the names of calls that sum gradients, or bring weights together, by hand."""
_NO_GRAD = ("no_grad", "inference_mode")


@_rule(
    "accumulate.never-summed",
    "Every forward of a DDP module, or every backward of an FSDP one (what each looks at), within `no_sync()`: no "
    "gradient is ever summed over ranks, and each of them trains a model of its own. The last micro-batch of an update "
    "belongs outside.",
)
def _never_summed(facts: Facts) -> Iterator[Hit]:
    sites = facts.script.sites
    if any(word in last(site.name).lower() for site in sites for word in _BY_HAND):
        return
    deciding = _deciding(facts)
    without = [_unsynced(site) for site in deciding]
    if not all(without) or not any(last(site.name) == "step" for site in sites):
        return
    backwards = any(last(site.name) == "backward" and _unsynced(site) for site in deciding)
    for site, context in zip(deciding, without, strict=True):
        is_backward = last(site.name) == "backward"
        if context is None or is_backward is not backwards:
            continue
        yield Hit(
            node=site.node,
            what=f"no {'backward' if is_backward else 'forward of a DDP module'} is outside of `{source(context)}`: "
            "gradients are never summed over ranks",
            found=f"it stands within the `with` of line {line_of(context)}",
            fix="leave the last micro-batch of each update outside, forward and backward: "
            "`with model.no_sync() if k < n - 1 else contextlib.nullcontext():`",
        )


def _deciding(facts: Facts) -> list[Site]:
    """The calls within which gradients are left as they are: DDP looks for `no_sync()` in forward, FSDP in backward."""
    sites = facts.script.sites
    kinds = {id(site): facts.kinds.of(site.node.func, site.scope) for site in sites}
    forwards = [site for site in sites if kinds[id(site)] & {"ddp", "prepared"} and not _is_without_gradients(site)]
    backwards = [site for site in sites if last(site.name) == "backward"]
    ddp_alone = forwards and all(kinds[id(site)] & {"ddp"} and not kinds[id(site)] & {"fsdp1"} for site in forwards)
    if ddp_alone and not any(found & {"fsdp1"} for found in kinds.values()):
        return forwards if backwards else []
    return backwards + forwards


def _is_without_gradients(site: Site) -> bool:
    around = [*site.contexts, *getattr(site.scope.node, "decorator_list", [])]
    return any(last(dotted(node)) in _NO_GRAD for context in around for node in ast.walk(context))


def _unsynced(site: Site) -> ast.expr | None:
    """The `no_sync()` that surely holds around a call."""
    calls = (context for context in site.contexts if isinstance(context, ast.Call))
    return next((call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "no_sync"), None)
