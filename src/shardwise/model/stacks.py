"""Which modules of a model are its repeated blocks: a pattern, those that are found, or the whole as one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.tracer import find_blocks

SHARE = 0.05
"""Of all parameters, which a list of layers has at least that is a stack of blocks."""
MORE = 2
"""Times the parameters of what is found, from which on a list of unlike layers is the stack (adapters within them are
alike too)."""
WHOLE = ""
"""In place of a pattern of blocks: the whole module is the one block."""


def blocks_of(factory: Callable[[], nn.Module], pattern: str) -> str:
    """The pattern, or `WHOLE` for a module that is asked for its repeated blocks and has none.

    Raises:
        ModelError: a pattern that matches nothing.
    """
    return _found(_on_meta(factory), pattern)


def stacks_of(factory: Callable[[], nn.Module], pattern: str, *, several: bool) -> str:
    """`blocks_of`; for a model that is fed as several stacks are, shows no blocks, or small ones, `block_pattern`."""
    module = _on_meta(factory)
    found = _found(module, pattern)
    unlike = block_pattern(module) if pattern == "auto" else ""
    if not unlike or several or found == WHOLE:
        return unlike or found
    held = [sum(_size(module, name) for name in find_blocks(module, each)) for each in (unlike, found)]
    return unlike if held[0] > MORE * held[1] else found


def _on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


def _found(module: nn.Module, pattern: str) -> str:
    try:
        find_blocks(module, pattern)
    except ModelError as error:
        if pattern != "auto" or error.row != "module.no-blocks":
            raise
        return WHOLE
    return pattern


def block_pattern(module: nn.Module) -> str:
    """The pattern of the blocks of a model of several stacks, or of one of unlike layers; empty: it has none.

    Stacks are lists of at least two modules in no other list, with a share of the parameters; of those at several
    depths the ones that hold the most.

    >>> block_pattern(t5)  # doctest: +SKIP
    '*.block.*'
    """
    total = sum(p.numel() for p in module.parameters())
    stacks: list[str] = []
    for name, inner in module.named_modules():
        if not isinstance(inner, nn.ModuleList) or len(inner) < 2 or any(name.startswith(f"{s}.") for s in stacks):
            continue
        called = all(type(layer).forward is not nn.Module.forward for layer in inner)
        if called and sum(p.numel() for p in inner.parameters()) >= SHARE * total:
            stacks.append(name)
    if not stacks:
        return ""
    alike: dict[int, list[str]] = {}
    for name in stacks:
        alike.setdefault(name.count("."), []).append(name)
    stacks = max(alike.values(), key=lambda names: sum(_size(module, name) for name in names))
    parts = [name.split(".") for name in stacks]
    shared = [each[0] if len(set(each)) == 1 else "*" for each in zip(*parts, strict=True)]
    pattern = ".".join([*shared, "*"])
    needed = {f"{name}.{i}" for name in stacks for i in range(len(list(module.get_submodule(name).children())))}
    return pattern if set(find_blocks(module, pattern)) == needed else f"{stacks[0]}.*"


def _size(module: nn.Module, name: str) -> int:
    return sum(p.numel() for p in module.get_submodule(name).parameters())
