"""Which modules of a model are its repeated blocks: a pattern, those that are found, or the whole as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from shardwise.errors import ModelError
from shardwise.findings import nearest

SHARE = 0.05
"""Of all parameters, which a list of layers has at least that is a stack of blocks."""
MORE = 2
"""Times the parameters of the largest list of modules of one class, from which on a list of unlike layers is the stack:
experts and adapters within them are alike too."""
PART = 0.2
"""Of all parameters, which a list of unlike layers has at least that is the stack: else they may be heads of a body."""
WHOLE = ""
"""In place of a pattern of blocks: the whole module is the one block."""


def find_blocks(module: nn.Module, pattern: str = "auto") -> tuple[str, ...]:
    """Names of the repeated blocks of a module, in order.

    Args:
        module: on any device.
        pattern: `layers.*`, where `*` stands for one part of a dotted name; or `auto`: the list, dict or sequence
            of at least two modules of one class that holds the most parameters, the longest of such; or a list of
            unlike ones, each with parameters, that holds `MORE` times as many (dense and sparse layers in turns).
            Lists of lists (stages of blocks) are looked into: what is never called is no block.

    Raises:
        ModelError: no module matches, or none looks repeated.

    >>> find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    ('0', '1')
    """
    names = [name for name, _ in module.named_modules() if name]
    if pattern != "auto":
        expression = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
        found = tuple(name for name in names if expression.fullmatch(name))
        if not found:
            generic = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})
            raise ModelError(
                f"find_blocks: blocks={pattern} matches no module of {type(module).__name__}, which has "
                f"{len(names)} named modules; give a pattern with * for one part of a name: {nearest(pattern, generic)}"
            )
        return found
    like, unlike = _largest_lists(module)
    if unlike.size < PART * sum(p.numel() for p in module.parameters()):
        unlike = Listed()
    if not (like.size or unlike.size):
        raise ModelError(
            f"find_blocks: {type(module).__name__} has no ModuleList, ModuleDict or Sequential of two or more modules "
            "of one class with parameters, and no ModuleList of unlike ones that all have some; put the blocks in an "
            "nn.ModuleList, or name them: blocks=PATTERN",
            row="module.no-blocks",
        )
    return unlike.names if unlike.size > MORE * like.size else like.names


class Listed(NamedTuple):
    """A list of modules: all its parameters, how many modules, and their names."""

    size: int = 0
    length: int = 0
    names: tuple[str, ...] = ()


def _largest_lists(module: nn.Module) -> list[Listed]:
    """The list of modules of one class that holds most parameters, the longest of such; and that of unlike ones."""
    best = [Listed(), Listed()]
    for name, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        children = list(container.named_children())
        if len(children) < 2 or not all(is_called(child) for _, child in children):
            continue
        are_unlike = len({type_before_parametrizations(child) for _, child in children}) > 1
        held = [sum(p.numel() for p in child.parameters()) for _, child in children]
        if are_unlike and not (isinstance(container, nn.ModuleList) and all(held)):
            continue
        names = tuple(f"{name}.{child}" if name else child for child, _ in children)
        found = Listed(sum(p.numel() for p in container.parameters()), len(children), names)
        if found.size and found[:2] > best[are_unlike][:2]:
            best[are_unlike] = found
    return best


def is_called(module: nn.Module) -> bool:
    """Whether it has a forward, its class's or, as one that is compiled already, its own; a container has none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


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
    depths, or below several parents, the ones that one pattern has and that hold the most.

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
    found = {pattern: names for names in _together(stacks) if (pattern := _exact(module, names))}
    return max(found, key=lambda pattern: sum(_size(module, name) for name in found[pattern]))


def _together(stacks: list[str]) -> Iterator[list[str]]:
    """Stacks at one depth: all, and those below one parent (a decoder's with an encoder's, not with a tower's)."""
    for share in range(max(name.count(".") for name in stacks) + 2):
        alike: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        for name in stacks:
            alike.setdefault((name.count("."), tuple(name.split(".")[:share])), []).append(name)
        yield from alike.values()


def _exact(module: nn.Module, stacks: list[str]) -> str:
    """The pattern of the layers of some stacks; empty: it has other modules too."""
    parts = [name.split(".") for name in stacks]
    shared = [each[0] if len(set(each)) == 1 else "*" for each in zip(*parts, strict=True)]
    pattern = ".".join([*shared, "*"])
    needed = {f"{name}.{i}" for name in stacks for i in range(len(list(module.get_submodule(name).children())))}
    return pattern if set(find_blocks(module, pattern)) == needed or len(stacks) == 1 else ""


def _size(module: nn.Module, name: str) -> int:
    return sum(p.numel() for p in module.get_submodule(name).parameters())
