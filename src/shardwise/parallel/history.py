"""`History`: the operations that a constructor performed, and how to perform again those that made one tensor.

Tensors are described by where they lie (`View`: storage, offset, size, stride), so aliasing needs no bookkeeping:
an operation reads some storages and writes some, and a view is only another way to look at one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

SEED_BITS = 63


@dataclass(frozen=True)
class View:
    """Where a tensor lies: a storage, and the window on it (in elements of `dtype`)."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, real: torch.Tensor) -> torch.Tensor:
        """The same window on the storage of a real tensor."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(real.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Operation:
    """One call that created or wrote storages. `args` and `kwargs` hold a `View` where a tensor stood."""

    call: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    creates: tuple[tuple[int, View], ...] = ()
    """(position among the output tensors, where it lies) of every output with a storage of its own."""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    overwrites: bool = False
    """The only storage it writes is filled whole, whatever it held."""
    random: bool = False


@dataclass
class History:
    """Operations in order, and which of them touched each storage. Grows while a constructor is recorded."""

    operations: list[Operation] = field(default_factory=list)
    num_bytes: dict[int, int] = field(default_factory=dict)
    """Storage -> its size, known when it was created."""
    touched: dict[int, list[int]] = field(default_factory=dict)
    """Storage -> indices of the operations that created or wrote it, ascending."""

    def add(self, operation: Operation) -> None:
        """Append one operation."""
        index = len(self.operations)
        self.operations.append(operation)
        for storage in {view.storage for _, view in operation.creates} | set(operation.writes):
            self.touched.setdefault(storage, []).append(index)

    def is_written(self, storage: int) -> bool:
        """False for a storage that was allocated and never given a value."""
        return any(
            self.operations[i].writes or not _allocates(self.operations[i]) for i in self.touched.get(storage, ())
        )

    def closure(self, storage: int) -> list[int]:
        """Indices, ascending, of the operations that the final value of a storage depends on."""
        needed: set[int] = set()
        seen: dict[int, int] = {}
        pending = [(storage, len(self.operations))]
        while pending:
            current, before = pending.pop()
            after = seen.get(current, -1)
            if before <= after:
                continue
            seen[current] = before
            for index in reversed([i for i in self.touched.get(current, ()) if i < before]):
                pending.extend(self._require(index, needed))
                if self.operations[index].overwrites:
                    # its allocation is needed too; what lay between is lost anyway
                    pending.extend(self._require(self.touched[current][0], needed))
                    break
        return sorted(needed)

    def _require(self, index: int, needed: set[int]) -> list[tuple[int, int]]:
        """Add an operation to those needed; (storage, before which operation) of what it needs in turn."""
        if index in needed:
            return []
        needed.add(index)
        operation = self.operations[index]
        return [(storage, index) for storage in (*operation.reads, *operation.writes)]

    def is_random(self, storage: int) -> bool:
        """True when a random operation contributes to the storage's value."""
        return any(self.operations[i].random for i in self.closure(storage))

    def replay(self, view: View, seed_of: Callable[[int], int]) -> torch.Tensor:
        """Perform again what made one tensor, on the CPU, and return it contiguous.

        Args:
            view: the tensor.
            seed_of: index of a random operation -> the seed that it draws from.

        Cost: the operations of its closure; the largest intermediates are freed after their last use.
        """
        indices = self.closure(view.storage)
        last_use = {s: i for i in indices for s in self._storages(self.operations[i])}
        storages: dict[int, torch.Tensor] = {}
        unread = self._filled_next(set(indices))
        with torch.device("cpu"), torch.no_grad():
            for index in indices:
                operation = self.operations[index]
                if operation.random:
                    with torch.random.fork_rng(devices=[]):
                        torch.default_generator.manual_seed(seed_of(index))
                        self._perform(operation, storages, unread)
                else:
                    self._perform(operation, storages, unread)
                for storage in self._storages(operation):
                    if last_use[storage] == index and storage != view.storage:
                        storages.pop(storage, None)
            value = view.of(storages[view.storage])
            whole = value.is_contiguous() and value.nbytes == value.untyped_storage().nbytes()
            return value if whole else value.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def _storages(operation: Operation) -> set[int]:
        return {view.storage for _, view in operation.creates} | set(operation.writes) | set(operation.reads)

    def _filled_next(self, needed: set[int]) -> set[int]:
        """Storages whose first needed write after their allocation fills them whole."""
        storages = {s for index in needed if self.operations[index].overwrites for s in self.operations[index].writes}
        first = {s: [i for i in self.touched[s] if i in needed][1:2] for s in storages}
        return {s for s, writes in first.items() if writes and self.operations[writes[0]].overwrites}

    def _perform(self, operation: Operation, storages: dict[int, torch.Tensor], unread: set[int]) -> None:
        args, kwargs = substitute((operation.args, operation.kwargs), View, lambda v: v.of(storages[v.storage]))
        outputs = list(tensors_in(operation.call(*args, **kwargs)))
        for position, view in operation.creates:
            real = outputs[position]
            if _allocates(operation) and view.storage not in unread:
                real.zero_()  # what the constructor leaves unset must not be memory's leftovers
            if (tuple(real.stride()), real.storage_offset()) != (view.stride, view.offset):
                # the real kernel laid its output out otherwise than the meta kernel: later views expect the latter
                same = torch.zeros(self.num_bytes[view.storage], dtype=torch.uint8)
                real = view.of(same).copy_(real)
            storages[view.storage] = real


def _allocates(operation: Operation) -> bool:
    return getattr(operation.call, "overloadpacket", None) in ALLOCATIONS


ALLOCATIONS = frozenset(
    (
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
        torch.ops.aten.empty_permuted,
    )
)
"""Operations whose output holds nothing yet."""


def substitute(tree: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """A copy of nested tuples, lists and dicts with every leaf of some type replaced."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(substitute(leaf, kind, function) for leaf in tree)
    if isinstance(tree, dict):
        return {key: substitute(leaf, kind, function) for key, leaf in tree.items()}
    return tree


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for leaf in tree:
            yield from tensors_in(leaf)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def unwrapped(name: str) -> str:
    """A name without what torch's wrappers put into it: `torch.compile(model)` draws as the model does.

    >>> unwrapped("_orig_mod.head.weight")
    'head.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def seed_for(seed: int, name: str, draw: int) -> int:
    """The seed of the `draw`-th random operation of a tensor: 63 bits of a hash of the job's seed and the name.

    >>> seed_for(0, "head.weight", 0) == seed_for(0, "head.weight", 0)
    True
    """
    digest = hashlib.blake2b(f"{seed}\n{name}\n{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
