"""`Writes`: what is written into tensors that were there before is put back, with the versions that autograd counts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from shardwise.parallel.history import tensors_in
from shardwise.parallel.looks.effects import LeftError
from shardwise.parallel.torch_private import BareOperationMode, storage_key, version_kept


class Writes(BareOperationMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Within it a function runs; a storage that it did not make itself is copied before it is written into.

    Raises:
        LeftError: within it, of more numbers than may be copied, and of tensors of other classes.

    Cost: some 10 microseconds per operation, and a copy of what is written.
    """

    supports_higher_order_operators = True

    def __init__(self, most: int) -> None:
        """`most`: bytes to copy."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._room, self._is_copying = most, False
        self._made = set[int]()
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._seen: dict[int, torch.Tensor] = {}
        self._versions = ExitStack()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation comes here."""
        kwargs = kwargs or {}
        if self._is_copying:
            return func(*args, **kwargs)
        for tensor in _written(func, args, kwargs):
            self.keep(tensor)
        result = func(*args, **kwargs)
        given = {storage_key(tensor) for tensor in tensors_in((args, kwargs)) if type(tensor) in _PLAIN}
        is_new = func._schema.name == "aten::lift_fresh"
        for tensor in tensors_in(result):
            if type(tensor) in _PLAIN and (is_new or storage_key(tensor) not in given):
                self._made.add(storage_key(tensor))
        return result

    def keep(self, tensor: torch.Tensor) -> None:
        """Before it is written into, or given to what writes without a word of torch's."""
        if type(tensor) not in _PLAIN or tensor.is_meta:
            raise LeftError("a tensor of another class is written into")
        key = storage_key(tensor)
        if key in self._made:
            return
        if key not in self._kept:
            storage: Any = tensor.untyped_storage()
            self._room -= storage.nbytes()
            if self._room < 0:
                raise LeftError("more is written into than can be copied")
            self._is_copying = True
            self._kept[key] = storage, storage.clone()
            self._is_copying = False
        if id(tensor) not in self._seen and not tensor.is_inference():
            self._seen[id(tensor)] = tensor
            self._versions.enter_context(version_kept(tensor))

    def put_back(self) -> None:
        """When it is over."""
        for storage, copy in self._kept.values():
            storage.copy_(copy)
        self._versions.close()


_PLAIN = (torch.Tensor, nn.Parameter)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    if func._schema.is_mutable:
        for place, each in enumerate(func._schema.arguments):
            if each.alias_info is not None and each.alias_info.is_write:
                yield from tensors_in(args[place] if place < len(args) else kwargs.get(each.name))
    elif "batch_norm" in func._schema.name:  # of which torch does not say that they write running statistics
        for place, each in enumerate(func._schema.arguments):
            if each.name in ("running_mean", "running_var"):
                yield from tensors_in(args[place] if place < len(args) else kwargs.get(each.name))
