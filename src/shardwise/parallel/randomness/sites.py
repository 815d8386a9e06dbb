"""`find_sites`: where a model's forward draws random numbers, found by running it twice on the meta device.

A second run with one row more tells which dim of a draw belongs to the rows of the batch. Both runs are of the
original model, so that a rank which holds a part of a tensor can tell which part.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError
from shardwise.findings import Finding
from shardwise.model.nested import leaves, put
from shardwise.model.tracer import Known, tensors_in
from shardwise.parallel.initial.shape_cache import ShapeCache
from shardwise.parallel.looks.reach import unseen
from shardwise.parallel.module_torch_private import global_hooks
from shardwise.parallel.randomness.counter import Elements, Numbers, Stream
from shardwise.parallel.randomness.draws import DRAWS, SKIP, UNKEYED, draws_by_itself
from shardwise.parallel.torch_private import OperationMode

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, order=True)
class Key:
    """One random call: the module that makes it, which call of that module in a forward, which draw of that call."""

    module: str
    call: int
    draw: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is known of a random call of the whole model in one process."""

    function: str
    shape: tuple[int, ...]
    path: tuple[str, ...] = ()
    """Names of the modules that run at that moment, outermost first."""
    row_dim: int | None = None
    """The dim that grows with the rows of the batch; None: there is none, and all rows share the numbers."""
    per_row: int = 1
    """Numbers along `row_dim` for each row: more than one where rows and tokens, or rows and heads, are one dim."""
    unclear: str = ""
    """Why it cannot be told how the shape belongs to the rows."""


@dataclass(frozen=True, kw_only=True)
class Sites:
    """The random calls of a forward, and those that cannot be keyed."""

    found: Mapping[Key, Site]
    findings: tuple[Finding, ...] = ()
    idle: frozenset[str] = frozenset()
    """Modules whose random calls drew nothing: a dropout of 0."""

    @property
    def modules(self) -> frozenset[str]:
        """Names of the modules that draw."""
        return frozenset(key.module for key in self.found)


def find_sites(module: nn.Module, inputs: Inputs, rows: int) -> Sites:
    """The random calls of a forward in training.

    Args:
        module: the whole model on the meta device, see `meta_copy`, in the modes in which it trains.
        inputs: positional and keyword arguments of forward; only shapes and types of tensors matter.
        rows: of the batch; tensors whose first dim has this size are taken to be made of rows.

    Raises:
        ModelError: the forward does not run without data.

    Cost: one forward without arithmetic, two where it draws: about 10 ms for the first block (torch's operations on
    meta are written in Python), less for those that make the same calls, no memory.
    """
    shapes = ShapeCache()
    count = rows or 2  # a rank may have none
    try:
        one = _trace(module, inputs, rows, count, shapes)
    except ModelError:
        if rows > 1:
            raise
        count = 2  # a batch norm refuses a row that is alone, which here is one of those of all ranks
        one = _trace(module, inputs, rows, count, shapes)
    other = _trace(module, inputs, rows, count + 1, shapes) if one.found else one
    findings = tuple(unkeyed(modules, call, advice) for (call, advice), modules in one.refused.items())
    sites = {key: _site(site, other.found.get(key), count) for key, site in one.found.items()}
    return Sites(found=sites, findings=findings, idle=frozenset(one.idle) - {k.module for k in sites})


def _site(site: Site, other: Site | None, rows: int) -> Site:
    if other is None or len(other.shape) != len(site.shape):
        return replace(site, unclear="it is made for some numbers of rows only")
    differ = [d for d, (a, b) in enumerate(zip(site.shape, other.shape, strict=True)) if a != b]
    if not differ:
        return site
    dim = differ[0]
    per_row, rest = divmod(site.shape[dim], rows)
    if len(differ) > 1 or rest or other.shape[dim] != per_row * (rows + 1):
        why = f"its shape is {site.shape} for {rows} rows and {other.shape} for {rows + 1}"
        return replace(site, unclear=why)
    return replace(site, row_dim=dim, per_row=per_row)


def _trace(module: nn.Module, inputs: Inputs, rows: int, new_rows: int, shapes: ShapeCache) -> _Trace:
    meta = {
        path: t.new_empty((new_rows, *t.shape[1:]) if t.dim() and t.shape[0] == rows else t.shape)
        for path, t in _on_meta(inputs)
    }
    args, kwargs = put(inputs, meta)
    trace, hooks = _Trace(shapes), list[RemovableHandle]()
    for name, inner in module.named_modules():
        hooks.append(inner.register_forward_pre_hook(partial(trace.enter, name)))
        hooks.append(inner.register_forward_hook(trace.leave, prepend=True))
    try:
        with unseen(module, global_hooks()), torch.no_grad(), torch.device("meta"), _Unkeyed(trace), trace:
            module(*args, **kwargs)
    except Exception as error:  # the module's own
        raise ModelError(
            f"the forward of {type(module).__name__} does not run without data ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def _on_meta(value: Any) -> list[tuple[Any, torch.Tensor]]:
    return [(path, torch.empty_like(t, device="meta")) for path, t in tensors_in(value)]


@dataclass
class _Running:
    name: str
    call: int
    draws: int = 0


@dataclass
class _Source:
    """Takes note of a draw's shape, and gives numbers without values."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def numbers(self, shape: tuple[int, ...], device: torch.device) -> Numbers:
        self.shapes.append(shape)
        return Numbers(Stream(0, 1), Elements(shape, ()), torch.device("meta"))


class _Trace(TorchFunctionMode):
    """Notes every random call with the innermost module that makes it."""

    def __init__(self, shapes: ShapeCache) -> None:
        super().__init__()
        self.shapes = shapes
        self.running: list[_Running] = [_Running("", 0)]
        self.calls: dict[str, int] = {}
        self.found: dict[Key, Site] = {}
        self.refused: dict[tuple[str, str], list[str]] = {}
        """(what is called, what to do) -> the modules that call it."""
        self.idle: set[str] = set()
        self.function: Any = None
        self.known = Known()

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        """A module is called."""
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        self.running.append(_Running(name, call))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """It returned."""
        self.running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call of forward on the meta device; note it if it is random."""
        args, kwargs = _moved(func, args, dict(kwargs or {}))
        if read := self.known.read(func, args, kwargs):
            return read[0]
        self.function = func
        if func in UNKEYED and draws_by_itself(func, args, kwargs):
            self.refuse(func, UNKEYED[func])
        draw = DRAWS.get(func)
        if draw is None:
            refused = len(self.refused)
            result = self.shapes.call(func, args, kwargs, lambda: len(self.refused) == refused)
            self.known.follow(func, args, kwargs, result)
            return result
        now = self.running[-1]
        key = Key(now.name, now.call, now.draws)
        now.draws += 1
        source = _Source()
        result = draw(source, *args, **kwargs)
        if result is SKIP:
            self.idle.add(now.name)
            return func(*args, **kwargs)
        if _is_recomputed_by_the_model():
            advice = "turn the model's own recompute off, and use the plan's: recompute=blocks"
            self.refuse(
                func, advice, " inside torch.utils.checkpoint, which would draw other numbers when it runs again"
            )
        self.found[key] = Site(
            function=name_of(func), shape=source.shapes[0], path=tuple(module.name for module in self.running[1:])
        )
        return result

    def refuse(self, func: Any, advice: str, where: str = "") -> None:
        """A random call that cannot be keyed."""
        name = self.running[-1].name
        if not any(name in names for names in self.refused.values()):  # what runs below a function is no other call
            self.refused.setdefault((name_of(func) + where, advice), []).append(name)


def unkeyed(modules: list[str], call: str, advice: str) -> Finding:
    """The finding about a random call that cannot be keyed, in one module or in several."""
    others = f" (and {len(modules) - 1} more modules)" if len(modules) > 1 else ""
    return Finding(
        id="random.unkeyed",
        severity="error",
        what="a random call cannot be keyed by location, so it would differ between plans, under recompute and "
        "after a resume",
        evidence=f"{modules[0] or 'the model itself'} calls {call}{others}",
        fix=advice,
    )


def name_of(func: Any) -> str:
    """How a function of torch is called."""
    return str(getattr(func, "__name__", func))


class _Unkeyed(OperationMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Sees the random operations that no row of `DRAWS` has taken: what runs below torch's Python functions."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; note it if it draws."""
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, given):
            advice = "draw with torch.rand, torch.randn, torch.bernoulli or F.dropout, which are keyed"
            self.trace.refuse(self.trace.function or func, advice)
        return func(*args, **given)


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Fused attention is marked as random whatever its dropout."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    return not (args[at] if len(args) > at else kwargs.get("dropout_p", 0.0))


def _is_recomputed_by_the_model() -> bool:
    """Whether torch's checkpoint is among the callers: it leaves no other trace in a forward without gradients."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments on meta: named devices, and real tensors that the module holds as plain attributes."""
    meta = torch.device("meta")
    if kwargs.get("device") is not None:
        kwargs["device"] = meta
    to = name_of(func) == "to"
    if any(isinstance(a, torch.device) or (to and isinstance(a, str)) for a in args):
        args = tuple(meta if isinstance(a, torch.device) or (to and isinstance(a, str)) else a for a in args)
    operands = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(t.is_meta for t in operands) and not all(t.is_meta for t in operands):
        args, kwargs = put((args, kwargs), dict(_on_meta((args, kwargs))))
    return args, kwargs
