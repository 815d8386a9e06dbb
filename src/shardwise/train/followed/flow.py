"""Where what is of a rank's part alone goes, within the hooks and the step of an optimizer: into weights it must not.

`p.grad / p.grad.abs().max()` of a shard is another thing than of the whole, and so is `torch.stack(norms).norm()` over
the parameters of one stage of a pipeline. No name of a function shows it: it begins with a sum, and a sum may be one
over ranks, too. So every operation is followed: what it is given, and what becomes of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import ModelError
from shardwise.parallel.history import tensors_in
from shardwise.parallel.torch_private import OperationMode, storage_key

_weakly: Any = StorageWeakRef
"""Of a storage: while it is held the address is not another's, and the memory is free. torch says no types of it."""


@dataclass(frozen=True)
class Source:
    """What a tensor is made of."""

    names: frozenset[str]
    """Parameters: their values, gradients or states."""
    cut: frozenset[int] = frozenset()
    """Dims along which this rank has a part."""
    mixed: str = ""
    """A parameter of which elements along such a dim have been put together; empty: of none."""
    is_apart: bool = False
    """Each of its numbers is of one of these alone: they lie side by side."""


@dataclass(frozen=True)
class Held:
    """A parameter, its gradient or its state, as this rank holds it."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int
    cut: frozenset[int]


_SAME = {"detach", "alias", "clone", "_to_copy", "contiguous", "lift_fresh", "positive"}
_TURNED = {"t", "transpose", "permute", "numpy_T"}
_VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "expand",
    "as_strided",
    "_reshape_alias",
    "flatten",
}
_PIECES = {"slice", "select", "split", "split_with_sizes", "unbind", "chunk", "narrow"}
_EMPTY = {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_empty", "new_ones", "new_full",
          "zero_", "fill_", "_local_scalar_dense", "is_same_size", "empty_strided", "new_empty_strided"}  # fmt: skip


class Flow(OperationMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Within it an optimizer steps, and what each operation gives is known by its sources.

    Raises:
        ModelError: within it, of what would be written into a parameter, gradient or state.

    Cost: some 20 microseconds per operation.
    """

    def __init__(
        self,
        held: Iterable[tuple[Held, Tensor]],
        groups: Iterable[frozenset[str]],
        in_rule: Callable[[], bool],
        says: Callable[[str, str, str], str],
        tell: Callable[[str], None],
    ) -> None:
        """Make one for a step.

        Args:
            held: what is of parts, or of a stage.
            groups: names of parameters that are of one stage, by the optimizer's groups; none: there are no stages.
            in_rule: whether what runs is a rule that needs no look, whose sums are over ranks.
            says: a message of an operation, where its result goes, and the parameter of which elements are in it; the
                last is empty where it is of all parameters of a group.
            tell: warns.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.groups = [group for group in groups if len(group) > 1]
        self.in_rule, self.says, self.tell = in_rule, says, tell
        self._read_of: set[str] = set()
        self._held: dict[int, list[Held]] = {}
        self._kept: list[Tensor] = []
        for one, tensor in held:
            self._kept.append(tensor)
            self._held.setdefault(storage_key(tensor), []).append(one)
        self._of: Any = WeakIdKeyDictionary()
        self._mixed: dict[int, tuple[StorageWeakRef, Source]] = {}
        self._ends: dict[int, tuple[StorageWeakRef, list[tuple[int, str]]]] = {}
        """Of what lies side by side, flattened: where each parameter ends."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation comes here."""
        kwargs = kwargs or {}
        if self.in_rule():  # takes gradients that a hook has made, all the same
            for tensor in tensors_in((args, kwargs)):
                self._check_taken(tensor)
            return func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            result = func(*args, **kwargs)
            self._forget(tensors_in((args, kwargs)))  # a sum over ranks is of the whole
            return result
        given = list(tensors_in((args, kwargs)))
        known = [(tensor, source) for tensor in given if (source := self._source(tensor)) is not None]
        if not known:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            self._read(known[0][1], given[0])
        if name.startswith(("_foreach_", "_fused_")):
            return self._each(func, name, args, kwargs)
        written = [tensor for tensor in _written(func, args, kwargs) if tensor is not None]
        whole = None if name in _EMPTY else _result(func, name, args, kwargs, known)
        if whole is not None:
            for tensor in written:
                self._check(tensor, whole, name)
        result = func(*args, **kwargs)
        if whole is not None:
            for tensor in tensors_in(result):
                if whole.is_apart:
                    self._lay(tensor, name, known)
                self._keep(tensor, _placed(whole, name, known, tensor, _dims(func, args, kwargs)))
        return result

    def _lay(self, result: Tensor, name: str, known: list[tuple[Tensor, Source]]) -> None:
        """Remember where parameters lie in a vector that a rule makes of them, and in what it makes of that."""
        key, ends, end = storage_key(result), list[tuple[int, str]](), 0
        if name == "cat" and result.dim() == 1 and all(len(source.names) == 1 for _, source in known):
            for tensor, source in known:
                ends.append((end := end + tensor.numel(), min(source.names)))
        else:
            same = [t for t, s in known if s.is_apart and t.numel() == result.numel() and storage_key(t) in self._ends]
            ends = self._ends[storage_key(same[0])][1] if same else []
        if key not in self._ends and ends and ends[-1][0] == result.numel() and result.is_contiguous():
            self._ends[key] = _weakly(result.untyped_storage()), ends

    def _each(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on lists is one on each of their tensors."""
        lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
        others = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        result, made = None, []
        for place in range(len(lists[0])):
            tensors = [each[place] for each in lists if place < len(each)] + others
            known = [(t, source) for t in tensors if (source := self._source(t)) is not None]
            joined = _joined([source for _, source in known])
            if joined is not None and ("norm" in name or name == "_foreach_max") and joined.cut:
                joined = replace(joined, cut=frozenset(), mixed=joined.mixed or min(joined.names))
            if joined is not None and func._schema.is_mutable:
                self._check(lists[0][place], joined, name)
            made.append(joined)
        result = func(*args, **kwargs)
        for tensor, source in zip(lists[0] if result is None else result, made, strict=False):
            if source is not None:
                self._keep(tensor, source if "norm" not in name else replace(source, cut=frozenset()))
        return result

    def _source(self, tensor: Tensor) -> Source | None:
        if tensor in self._of:
            found: Source = self._of[tensor]
            return found
        key = storage_key(tensor)
        if key in self._mixed:
            return self._mixed[key][1]
        for held in self._held.get(key, ()):
            if held.start <= tensor.storage_offset() < held.end or (tensor.numel() and held.end == held.start):
                is_it = tuple(tensor.shape) == held.shape and tensor.storage_offset() == held.start
                cut = held.cut if is_it or not held.cut else frozenset(range(tensor.dim()))
                return Source(frozenset({held.name}), cut)
        return None

    def _keep(self, tensor: Tensor, source: Source) -> None:
        if source.is_apart and storage_key(tensor) in self._ends and tensor.is_contiguous():
            first, start = tensor.storage_offset(), 0
            names = set()
            for end, name in self._ends[storage_key(tensor)][1]:
                if start < first + tensor.numel() and first < end:
                    names.add(name)
                start = end
            source = replace(source, names=frozenset(names), is_apart=len(names) > 1)
        self._of[tensor] = source
        key = storage_key(tensor)
        if key not in self._held and self._is_wrong(source):
            self._mixed[key] = _weakly(tensor.untyped_storage()), source

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._of.pop(tensor, None)
            self._mixed.pop(storage_key(tensor), None)

    def _is_wrong(self, source: Source) -> bool:
        return bool(source.mixed) or (not source.is_apart and self._spans(source.names))

    def _spans(self, names: frozenset[str]) -> bool:
        """Whether all of a group of one stage is in it."""
        return any(group <= names for group in self.groups)

    def _check(self, target: Tensor, source: Source, operation: str) -> None:
        """Before something is written."""
        if not self._is_wrong(source):
            return
        for held in self._held.get(storage_key(target), ()):
            if held.start <= target.storage_offset() < max(held.end, held.start + 1):
                if not source.mixed and len(source.names) == 2:
                    self.tell(f"{self.says(operation, held.name, '')}. Two that belong together may be meant: a rule "
                              "that pairs them does the same under every plan, and one of all does not")  # fmt: skip
                    return
                raise ModelError(self.says(operation, held.name, source.mixed))

    def _check_taken(self, tensor: Tensor) -> None:
        source = self._of.get(tensor)
        if source is not None and storage_key(tensor) not in self._held and self._is_wrong(source):
            raise ModelError(self.says("a new gradient", min(source.names), source.mixed))

    def _read(self, source: Source, tensor: Tensor) -> None:
        """Numbers of Python's are followed no further."""
        if not tensor.is_floating_point():
            return
        self._read_of |= source.names
        if self._is_wrong(source) or self._spans(frozenset(self._read_of)):
            self.tell(self.says("a number that is read and, if it is more than printed,", "them", source.mixed))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    if func._schema.is_mutable:
        for place, each in enumerate(func._schema.arguments):
            if each.alias_info is not None and each.alias_info.is_write:
                yield from tensors_in(args[place] if place < len(args) else kwargs.get(each.name))


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for place, each in enumerate(func._schema.arguments):
        if each.name == name:
            return args[place] if place < len(args) else kwargs.get(name, each.default_value)
    return None


def _dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Along which dims an operation works; None: it says none."""
    dims = _argument(func, "dim", args, kwargs)
    return (dims,) if isinstance(dims, int) else tuple(dims) if isinstance(dims, list | tuple) and dims else None


def _joined(sources: list[Source]) -> Source | None:
    if not sources:
        return None
    names, cut = (frozenset().union(*each) for each in zip(*((s.names, s.cut) for s in sources), strict=True))
    apart = all(s.is_apart or len(s.names) == 1 for s in sources) and any(
        s.is_apart and s.names == names for s in sources
    )
    return Source(names, cut, next((source.mixed for source in sources if source.mixed), ""), apart)


def _result(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: list[tuple[Tensor, Source]]
) -> Source | None:
    """What comes of an operation; dims are those of its input still, see `_placed`."""
    joined = _joined([source for _, source in known])
    base = name.removesuffix("_")
    if joined is not None and base in ("cat", "stack"):
        is_apart = len(joined.names) > 1 and all(s.is_apart or len(s.names) == 1 for _, s in known)
        joined = replace(joined, is_apart=is_apart)
    elif joined is not None and not _is_of_each(func, base):
        joined = replace(joined, is_apart=False)
    if joined is None or not joined.cut or base in _SAME | _TURNED | _VIEWS or base == "copy":
        return joined
    if torch.Tag.pointwise in func.tags or base in ("where", "lerp", "addcmul", "addcdiv", "masked_fill"):
        return joined
    tensor, source = known[0]
    dims = _dims(func, args, kwargs)
    if base in ("mm", "mv") and len(known) == 1 and tensor is args[0] and source.cut == {0}:
        return joined
    if dims is not None and len(known) == 1 and not any(dim % max(1, tensor.dim()) in source.cut for dim in dims):
        return joined
    if base in ("stack", "cat") and (dims is None or base == "stack"):
        return joined
    return replace(joined, mixed=joined.mixed or min(joined.names), cut=frozenset())


def _is_of_each(func: Any, base: str) -> bool:
    """Whether each number that an operation gives is of numbers at one place."""
    return torch.Tag.pointwise in func.tags or base in _SAME | _TURNED | _VIEWS | _PIECES | {"copy"}


def _placed(
    source: Source, name: str, known: list[tuple[Tensor, Source]], result: Tensor, dims: tuple[int, ...] | None
) -> Source:
    """The same, with the dims of the result."""
    if not source.cut:
        return source
    whole, base = replace(source, cut=frozenset(range(result.dim()))), name.removesuffix("_")
    if base in _VIEWS or base == "stack":
        return whole
    if base in _TURNED:
        return whole if len(source.cut) < result.dim() else source
    cut: set[int] = set()
    for tensor, each in known:
        gone = sorted(dim % max(1, tensor.dim()) for dim in dims or ())
        if dims is not None and result.dim() == tensor.dim() - len(gone):
            cut |= {dim - sum(g < dim for g in gone) for dim in each.cut}
        else:
            cut |= {dim + result.dim() - tensor.dim() for dim in each.cut}
    return replace(source, cut=frozenset(dim for dim in cut if 0 <= dim < max(1, result.dim())))
