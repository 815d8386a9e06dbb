"""Rules on gradients that are never summed over ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.diagnose.lint_names import last
from shardwise.diagnose.lint_script import Site
from shardwise.diagnose.lint_table import Facts, Hit, rules, source

SUMS, _rule = rules()

_BY_HAND = ("reduce", "average", "averager", "gather", "broadcast", "communicate")
"""In the names of calls that sum gradients, or bring weights together, by hand."""


@_rule(
    "accumulate.never-summed",
    "Every forward and backward of a DDP or FSDP module within `no_sync()`: no gradient is ever summed over ranks, and "
    "each of them trains a model of its own. The last micro-batch of an update belongs outside.",
)
def _never_summed(facts: Facts) -> Iterator[Hit]:
    sites = facts.script.sites
    wrapped = {id(site.node) for site in sites if facts.kinds.of(site.node.func, site.scope) & {"ddp", "fsdp1"}}
    passes = [site for site in sites if last(site.name) == "backward" or id(site.node) in wrapped]
    if any(word in last(site.name).lower() for site in sites for word in _BY_HAND):
        return
    without = [_unsynced(site) for site in passes]
    if not all(without) or not any(last(site.name) == "step" for site in sites):
        return
    for site, context in zip(passes, without, strict=True):
        if context is not None and last(site.name) == "backward":
            yield Hit(
                node=site.node,
                what=f"no backward is outside of `{source(context)}`: gradients are never summed over ranks",
                found=f"it stands within the `with` of line {context.lineno}",
                fix="leave the last micro-batch of each update outside, forward and backward: "
                "`with model.no_sync() if k < n - 1 else contextlib.nullcontext():`",
            )


def _unsynced(site: Site) -> ast.expr | None:
    """The `no_sync()` that surely holds around a call."""
    calls = (context for context in site.contexts if isinstance(context, ast.Call))
    return next((call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "no_sync"), None)
