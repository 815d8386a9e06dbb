"""The modules of which each holds, gathers or casts its parameters by itself; see also `plan.ranks.groups`."""

from __future__ import annotations

from torch import nn

from shardwise.parallel.blocks import own_blocks
from shardwise.parallel.placed import Part, Placed


def experts_in(placed: Placed, part: Part) -> list[nn.Module]:
    """The modules of a stage whose parameters `ep` divides."""
    modules = dict(part.root.named_modules())
    return [modules[name] for name in placed.experts if name in modules]


def groups_in(placed: Placed, part: Part) -> list[nn.Module]:
    """Modules whose parameters are gathered together, innermost first: blocks, or modules of a given size."""
    if placed.plan.wrap_min_params:
        return _untied(part.root, modules_by_size(part.root, placed.plan.wrap_min_params)[0])
    inside = set(part.root.modules())
    return _untied(part.root, [block for _, block in own_blocks(placed) if block in inside])


def _untied(root: nn.Module, groups: list[nn.Module]) -> list[nn.Module]:
    """Without the groups that share a parameter with something outside of them: it is gathered with the root."""
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    paths = {module: name for name, module in root.named_modules()}
    tied = [found for found in names.values() if len(found) > 1]
    return [
        group
        for group in groups
        if not any(0 < sum(name.startswith(f"{paths[group]}.") for name in found) < len(found) for found in tied)
    ]


def modules_by_size(module: nn.Module, min_params: int) -> tuple[list[nn.Module], int]:
    """Modules below `module` that hold at least `min_params` not yet grouped, and how many stay ungrouped."""
    found: list[nn.Module] = []
    left = sum(p.numel() for p in module.parameters(recurse=False))
    for child in module.children():
        groups, rest = modules_by_size(child, min_params)
        found += groups
        callable_child = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if rest >= min_params and callable_child:
            found.append(child)
        else:
            left += rest
    return found, left
