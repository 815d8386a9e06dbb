"""`trace_chain`: what a module's forward does with its repeated blocks, found out and not believed.

A pipeline cuts a forward between two blocks. That is right only where the forward is a chain: each block once, in
order, what one gives is what the next takes, and nothing reaches past it. `trace_chain` runs the module's own
forward once on the meta device, where tensors have shapes and no data, and follows every tensor by its storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from shardwise.errors import ModelError
from shardwise.model.copies import copy_module as copy_module
from shardwise.model.copies import meta_copy as meta_copy
from shardwise.model.copies import refuse_parameters as refuse_parameters
from shardwise.model.copies import tensors_in as tensors_in
from shardwise.model.known import Known as Known
from shardwise.model.nested import Path, put
from shardwise.model.stacks import find_blocks as find_blocks
from shardwise.model.stacks import is_called as is_called
from shardwise.model.torch_private import hooked_modules
from shardwise.model.torch_private import keeps_costly as keeps_costly

BEFORE, BETWEEN, AFTER = "before the blocks", "between two blocks", "after the blocks"
"""Phases of a forward that are not a block's; a block's phase is its name."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What flows from one block into the next: the tensors at `outputs` are those at `inputs`, in this order."""

    outputs: tuple[Path, ...]
    inputs: tuple[Path, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A forward that is a chain of blocks, as traced.

    `phases` holds, for each parameter and buffer that the forward used, the phases that used it, in order.
    """

    blocks: tuple[str, ...]
    links: tuple[Link, ...]
    """One per pair of neighbours: `links[i]` joins block i to block i + 1."""
    forms: tuple[Any, ...]
    """The output of each block with None in place of its tensors."""
    phases: Mapping[str, tuple[str, ...]]
    written: frozenset[str]
    """Buffers that the forward writes to, as the running statistics of a batch norm."""
    flops: Mapping[str, int]
    """Floating-point operations of the matrix products of each phase, as torch counts them."""

    @property
    def shared(self) -> dict[str, tuple[str, ...]]:
        """Parameters and buffers that more than one phase uses: tied or re-used."""
        return {name: phases for name, phases in self.phases.items() if len(phases) > 1}


_HOOKED = "it takes what forward hooks (of {}) collect, and stages are copies that have none of it: return that instead"


def trace_chain(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], blocks: tuple[str, ...]) -> Chain:
    """Run a forward once without data, and check that it is a chain of `blocks`.

    Args:
        module: on the meta device (see `meta_copy`).
        args: positional arguments of forward; tensors on any device, only their shapes and types are used.
        kwargs: keyword arguments, likewise.
        blocks: names of the blocks in the order of the chain.

    Returns:
        Which phase uses each parameter and buffer, and what flows between the blocks.

    Raises:
        ModelError: a block is called twice, not at all or out of order; its input is not the output of the block
            before it; something reaches around a block (a skip connection, a parameter's value handed to all
            blocks); or forward reads the values of tensors, which have none here.

    Cost: one forward without arithmetic: milliseconds per block, no memory.

    >>> trace_chain(meta_copy(model), (tokens,), {}, find_blocks(model)).links[0].shapes  # doctest: +SKIP
    ((2, 16, 64),)
    """
    trace = _Trace(module, blocks)
    for inner in module.modules():
        if isinstance(counted := getattr(inner, "num_batches_tracked", None), torch.Tensor):
            trace.known.give(counted, torch.tensor(0))  # batch norm with momentum=None divides by it
    found = (without_values(args), without_values(dict(kwargs)))
    hooked, hooks = hooked_modules(module), []
    for index, block in enumerate(map(module.get_submodule, blocks)):
        hooks.append(block.register_forward_pre_hook(partial(_enter, trace, index), with_kwargs=True))
        hooks.append(block.register_forward_hook(partial(_leave, trace, index), with_kwargs=True))
    try:
        with torch.enable_grad(), torch.device("meta"), trace, trace.counter:
            output = module(*found[0], **found[1])
    except ModelError:
        raise
    except Exception as error:  # the module's own
        raise ModelError(
            f"trace_chain: the forward of {type(module).__name__} failed without data ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0].partition('. ')[0]}) {trace.phase}; a pipeline needs a forward whose "
            "course does not depend on the values of tensors (.item(), if tensor:, x[mask]) and a sample as the model "
            "takes it" + (f"; or {_HOOKED.format(', '.join(hooked[:3]))}" if hooked else ""),
            row="module.needs-values",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return trace.finish(output)


def without_values(value: Any) -> Any:
    """A nested value with tensors of meta in place of its tensors."""
    return put(value, {path: torch.empty_like(t, device="meta") for path, t in tensors_in(value)})


def _enter(trace: _Trace, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.is_grad_enabled():
        raise without_gradients(trace.blocks[index])
    trace.enter(index, {"args": args, "kwargs": kwargs})


def _leave(trace: _Trace, index: int, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    trace.leave(index, output)


def without_gradients(block: str) -> ModelError:
    """What is said of a block that forward calls with gradients off: what another stage sent would get none."""
    return ModelError(
        f"forward calls {block} with gradients off, found as in torch.utils.checkpoint with use_reentrant=True, where "
        "what another stage of the pipeline sent would get no gradient; needed use_reentrant=False, no torch.no_grad() "
        "around blocks, or a plan with pp1",
        row="module.gradients-off",
    )


def _no_chain(text: str) -> ModelError:
    return ModelError(f"forward is not a chain: {text}", row="module.chain")


class _Trace(TorchFunctionMode):
    """Follows each tensor through the forward: from which phase of it does its content come?

    A label sits on the storage, so views and in-place operations need no rules of their own. Labels are names of
    phases; a tensor made of inputs and buffers alone has none, and every stage of a pipeline can make it itself.
    """

    def __init__(self, module: nn.Module, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks, self.phase, self.next = blocks, BEFORE, 0
        self.names: dict[int, list[str]] = {}
        self.parameters = set()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.names.setdefault(_key(parameter), []).append(name)
            self.parameters.add(_key(parameter))
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self.names.setdefault(_key(buffer), []).append(name)
        self.labels: dict[int, frozenset[str]] = {}
        self.alive: list[Any] = []  # a storage that is freed would give its key to another
        self.phases: dict[str, list[str]] = {}
        self.written: set[str] = set()
        self.outputs: list[tuple[Path, torch.Tensor]] = []  # of the block before
        self.given: set[int] = set()  # storages that the running block was given by the block before
        self.links: list[Link] = []
        self.forms: list[Any] = []
        self.counter = FlopCounterMode(display=False)
        self.known = Known()
        self.flops: dict[str, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call of forward on the meta device and pass labels on from its operands to its results."""
        args, kwargs = _without_device(func, args, dict(kwargs or {}))
        if read := self.known.read(func, args, kwargs):
            return read[0]
        if func is torch.Tensor.register_hook and self.phase == BETWEEN and not _is_of_torch(args[1]):
            raise _no_chain(
                f"`register_hook`, between two blocks, hooks the gradient of what {self.blocks[self.next - 1]} "
                "returned; every stage runs forward from the top, and what stages exchange would meet the hook more "
                "than once: hook it inside of a block, or use a plan with pp1"
            )
        operands = [tensor for _, tensor in tensors_in((args, kwargs))]
        if any(t.is_meta for t in operands) and not all(t.is_meta for t in operands):
            args, kwargs = without_values(args), without_values(kwargs)
        versions = [t._version for t in operands]
        result = func(*args, **kwargs)
        self.known.follow(func, args, kwargs, result)
        results = [tensor for _, tensor in tensors_in(result)]
        norm = getattr(func, "__name__", "") in ("batch_norm", "instance_norm")
        changed = [t for t, version in zip(operands, versions, strict=True) if t._version != version]
        changed += [t for t in operands if norm and _key(t) in self.names and _key(t) not in self.parameters]
        if results or changed:  # else it asked for a shape or a device
            self._follow(getattr(func, "__name__", "an operation"), operands, results, changed)
        return result

    def _follow(
        self, func: str, operands: list[torch.Tensor], results: list[torch.Tensor], changed: list[torch.Tensor]
    ) -> None:
        labels: set[str] = set()
        for tensor in operands:
            key = _key(tensor)
            for name in self.names.get(key, ()):
                phases = self.phases.setdefault(name, [])
                if self.phase not in phases:
                    phases.append(self.phase)
            if key in self.parameters or key in self.given:
                labels.add(self.phase)
            else:
                labels |= self.labels.get(key, frozenset())
        allowed = self._allowed()
        if allowed is not None and labels - allowed:
            raise self._around(f"`{func}` in {self.phase}", labels - allowed)
        for tensor in changed:
            self.written.update(self.names.get(_key(tensor), ()))
            if self.phase == BETWEEN and self.labels.get(_key(tensor)):
                raise self._around(f"`{func}`, in place, {BETWEEN}", self.labels[_key(tensor)])
        if labels:
            made = frozenset(labels if allowed is None else (self.phase,))
            new = [t for t in results if _key(t) not in self.labels or _key(t) in self.given]  # the others are views
            for tensor in (*new, *changed):
                if _key(tensor) not in self.parameters:
                    self._label(tensor, made)

    def _allowed(self) -> frozenset[str] | None:
        """Labels that an operation of this phase may meet; None: any (they are passed on)."""
        if self.phase in (BEFORE, BETWEEN):
            return None
        if self.phase == AFTER:
            return frozenset((AFTER, self.blocks[-1]))
        return frozenset((self.phase, BEFORE) if self.phase == self.blocks[0] else (self.phase,))

    def _label(self, tensor: torch.Tensor, labels: frozenset[str]) -> None:
        self.labels[_key(tensor)] = labels
        self.alive.append(tensor)

    def _around(self, where: str, labels: set[str] | frozenset[str]) -> ModelError:
        return _no_chain(
            f"{where} uses a tensor made {_of(labels)}, which did not come through the blocks in between; a pipeline "
            "hands on only what a block returns and the next takes: pass it through the blocks, or use a plan with pp1"
        )

    def enter(self, index: int, arguments: dict[str, Any]) -> None:
        """Block `index` is called: check the order, and that it takes what the block before it gave."""
        name = self.blocks[index]
        if index != self.next or self.phase not in (BEFORE, BETWEEN):
            done = f"after {self.blocks[self.next - 1]}" if self.next else "first"
            expected = self.blocks[self.next] if self.next < len(self.blocks) else "none"
            raise _no_chain(
                f"{name} is called {done}, expected {expected}; a pipeline needs each block called once, in the order "
                "of its name: register them in the order of use, or use a plan with pp1"
            )
        if index:
            self.links.append(self._link(index, arguments))
        self._turn_to(name)

    def _link(self, index: int, arguments: dict[str, Any]) -> Link:
        name, previous, taken = self.blocks[index], self.blocks[index - 1], set[Path]()
        carried: list[tuple[Path, Path, torch.Tensor]] = []
        for path, tensor in tensors_in(arguments):
            source = next((p for p, out in self.outputs if out is tensor), None)
            if source is None:
                labels = self.labels.get(_key(tensor), frozenset())
                if labels or _key(tensor) in self.parameters:
                    raise _no_chain(
                        f"input {_spell(path)} of {name} is not the output of {previous}; it is "
                        f"{'made ' + _of(labels) if labels else 'a parameter'}. A pipeline hands on only what a block "
                        "returns: move that computation into a block, or use a plan with pp1"
                    )
            elif source not in taken:
                taken.add(source)
                carried.append((source, path, tensor))
        if not carried:
            what = f"no input of {name} is the output of {previous}, which returned {len(self.outputs)} tensors"
            raise _no_chain(f"{what}; give each block what the one before returned, or use a plan with pp1")
        self.given = {_key(tensor) for _, _, tensor in carried}
        return Link(
            outputs=tuple(source for source, _, _ in carried),
            inputs=tuple(path for _, path, _ in carried),
            shapes=tuple(tuple(tensor.shape) for _, _, tensor in carried),
            dtypes=tuple(tensor.dtype for _, _, tensor in carried),
        )

    def leave(self, index: int, output: Any) -> None:
        """Block `index` returned."""
        self.outputs, self.given = tensors_in(output), set()
        for _, tensor in self.outputs:
            self._label(tensor, frozenset((self.blocks[index],)))
        self.forms.append(put(output, {path: None for path, _ in self.outputs}))
        self.next = index + 1
        self._turn_to(AFTER if self.next == len(self.blocks) else BETWEEN)

    def _turn_to(self, phase: str) -> None:
        counted = self.counter.get_total_flops() - sum(self.flops.values())
        self.flops[self.phase] = self.flops.get(self.phase, 0) + counted
        self.phase = phase

    def finish(self, output: Any) -> Chain:
        """Forward returned."""
        if self.next < len(self.blocks):
            raise _no_chain(
                f"{self.blocks[self.next]} was never called ({self.next} of {len(self.blocks)} "
                "blocks were); name the blocks that forward calls with blocks=PATTERN, or use a plan with pp1"
            )
        self._turn_to(AFTER)
        for path, tensor in tensors_in(output):
            labels = self.labels.get(_key(tensor), frozenset()) - {AFTER, self.blocks[-1]}
            if labels:
                raise self._around(f"output {_spell(path)} of forward", labels)
        return Chain(
            blocks=self.blocks,
            links=tuple(self.links),
            forms=tuple(self.forms),
            phases={name: tuple(phases) for name, phases in self.phases.items()},
            written=frozenset(self.written),
            flops=self.flops,
        )


def _is_of_torch(function: Any) -> bool:
    """Whether a hook is one of those by which operations are counted."""
    return str(getattr(function, "__module__", "")).startswith("torch.")


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _spell(path: Path) -> str:
    return ".".join(map(str, path[1:] if path and path[0] in ("args", "kwargs") else path)) or "0"


def _of(labels: set[str] | frozenset[str]) -> str:
    parts = [f"in {x}" if x not in (BEFORE, BETWEEN, AFTER) else f"{x} from parameters" for x in sorted(labels)]
    return " and ".join(parts)


def _without_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Calls that name a device, moved to meta."""
    meta = torch.device("meta")
    if kwargs.get("device") is not None:
        kwargs["device"] = meta
    moves = getattr(func, "__name__", "") == "to"
    return tuple(meta if isinstance(a, torch.device) or (moves and isinstance(a, str)) else a for a in args), kwargs
