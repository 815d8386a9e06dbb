"""Which blocks of a module are alike, and a module with the first of each kind alone: deep ones are read by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.model.stacks import find_blocks

Facts = list[tuple[object, object]]
"""What a block is made of: (where, value)."""
FEWEST = 3
"""Blocks of a list that are left at least."""
_OWN = vars(nn.Module()).keys()
_HELD = {"_parameters", "_buffers", "_modules"}


def kinds_of(module: nn.Module, names: Sequence[str]) -> tuple[int, ...]:
    """The kind of each block: the index of the first that is made alike.

    Alike are blocks of the same modules with the same shapes and attributes; a number that is a block's place in its
    list may differ by that, parameters that are used elsewhere too are the same ones, and so are objects of other
    types. What the module's own forward does with a place is not seen.

    Args:
        module: on any device.
        names: of its blocks.

    Cost: a pass over the attributes of every block.

    >>> kinds_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(2, 2)), ("0", "1", "2"))
    (0, 1, 0)
    """
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    found: list[int] = []
    firsts: dict[int, tuple[int, Facts]] = {}
    for index, name in enumerate(names):
        place = int(name.rpartition(".")[2]) if name.rpartition(".")[2].isdecimal() else index
        facts = list(_facts(module.get_submodule(name), uses))
        kind = next((k for k, (at, first) in firsts.items() if _same(first, at, facts, place)), index)
        firsts.setdefault(kind, (place, facts))
        found.append(kind)
    return tuple(found)


def enough(module: nn.Module, names: tuple[str, ...], kinds: Sequence[Hashable], times: int = 2) -> tuple[str, ...]:
    """The first blocks of each list, as far as there are two of each kind: those show what the others hold.

    Args:
        module: on any device.
        names: of its blocks.
        kinds: of each: equal for two that are alike.
        times: in place of two of each kind.
    """
    lists: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        lists.setdefault(name.rpartition(".")[0], []).append(index)
    chosen: list[int] = []
    for parent, members in lists.items():
        met = Counter[Hashable]()
        first = min(FEWEST, len(members))
        for place, index in enumerate(members):
            met[kinds[index]] += 1
            first = max(first, place + 1) if met[kinds[index]] <= times else first
        container = module.get_submodule(parent)
        whole = not isinstance(container, nn.ModuleList) or len(container) != len(members)
        chosen += members if whole else members[:first]
    return tuple(names[index] for index in sorted(chosen))


def shorten(module: nn.Module, names: Sequence[str], chosen: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Leave the chosen ones of its blocks in a module; what each list held before, by its name."""
    before: dict[str, dict[str, Any]] = {}
    for name in set(names) - set(chosen):
        parent, _, key = name.rpartition(".")
        container = module.get_submodule(parent)
        before.setdefault(parent, dict(container._modules))
        del container._modules[key]
    return before


def shorter(factory: Callable[[], nn.Module], blocks: str, times: int = 2) -> Callable[[], nn.Module]:
    """The factory of a model with as many of its blocks as show each kind: a pipeline's cut runs every one twice.

    Args:
        factory: of the whole.
        blocks: the pattern of its blocks, see `find_blocks`.
        times: see `enough`.
    """

    def made() -> nn.Module:
        module = factory()
        names = find_blocks(module, blocks)
        shorten(module, names, enough(module, names, kinds_of(module, names), times))
        return module

    return made


def _facts(block: nn.Module, uses: Counter[int]) -> Iterator[tuple[object, object]]:
    for name, inner in block.named_modules(remove_duplicate=False):
        yield name, type(inner)
        for key, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            yield (name, key), _plain(tensor)
            if tensor is not None:
                yield (name, key), (tensor.requires_grad, id(tensor) if uses[id(tensor)] > 1 else 0)
        for key, value in vars(inner).items():
            if key in _HELD or (key in _OWN and value == {}):
                continue
            yield from _leaves((name, key), value)


def _leaves(where: object, value: Any) -> Iterator[tuple[object, object]]:
    if isinstance(value, partial):
        value = (value.func, value.args, value.keywords)
    elif isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        yield where, (type(value), len(value))
        for index, each in enumerate(value):
            yield from _leaves((where, index), each)
    elif isinstance(value, dict):
        yield where, (type(value), len(value))
        for key, each in value.items():
            yield from _leaves((where, key), each)
    else:
        yield where, _plain(value)


def _plain(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | type):
        return type(value), value
    return type(value), id(value)


def _same(first: Facts, at: int, other: Facts, place: int) -> bool:
    """Whether two blocks, at these places of their lists, are made alike."""
    pairs = ((int, at), (int, place))
    return len(first) == len(other) and all(
        a == b or (a[0] == b[0] and (a[1], b[1]) == pairs) for a, b in zip(first, other, strict=True)
    )
