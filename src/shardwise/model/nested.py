"""Tensors, or anything else, inside nested tuples, lists, dicts and dataclasses: found, read and replaced by path."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

Path = tuple[Any, ...]
"""Where a leaf sits: `("args", 0)`, `("kwargs", "hidden")`."""


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf of nested tuples, lists, dicts and dataclasses with its path."""
    items = _items(value)
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from leaves(item, (*path, key))


def at(value: Any, path: Path) -> Any:
    """The leaf at a path.

    Raises:
        KeyError: there is no such path.
    """
    for key in path:
        value = dict(_items(value) or ())[key]
    return value


def put(value: Any, new: Mapping[Path, Any], path: Path = ()) -> Any:
    """The nested value with the leaves at some paths replaced; what holds none of them is the same object."""
    if path in new:
        return new[path]
    items = _items(value)
    if items is None or not any(key[: len(path)] == path for key in new):
        return value
    replaced = {key: put(item, new, (*path, key)) for key, item in items}
    if isinstance(value, tuple | list):
        return type(value)(*replaced.values()) if hasattr(value, "_fields") else type(value)(replaced.values())
    changed = copy.copy(value)
    for key, item in replaced.items():
        if isinstance(changed, dict):
            changed[key] = item
        else:
            object.__setattr__(changed, key, item)
    return changed


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """What a container holds; None for a leaf."""
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        held = getattr(
            value, "__dict__", {}
        )  # first: a configuration may refuse to be asked for what its layers differ in
        return [(f.name, held[f.name] if f.name in held else getattr(value, f.name)) for f in fields(value)]
    return None
