"""One forward on the meta device, in which outputs of linear layers are followed until something needs them whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.model.infer.flow import PIECES, Call, EndsSplitError, Shape, Split, after
from shardwise.model.infer.record import TOKENS, Flow, Mark, Step, Stream, Use
from shardwise.model.infer.torch_private import TorchDispatchMode
from shardwise.model.nested import put
from shardwise.model.tracer import tensors_in

Key = tuple[int, int, Shape, Shape]
_SOFTMAX = ("_softmax", "_safe_softmax")


def run(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sources: frozenset[str],
    stream: Stream | None = None,
) -> Flow:
    """Run a forward without data and follow the outputs of `sources`, or the shards of the sequence.

    Args:
        module: on the meta device, in evaluation mode.
        args: of forward; only the shapes and types of tensors are used.
        kwargs: likewise.
        sources: names of linear layers.
        stream: where the sequence is sharded; None: nowhere.

    Raises:
        ModelError: forward reads the values of tensors, or does not take the sample.
    """
    follow = _Follow(module, sources, stream)
    found = _as_meta((tuple(args), dict(kwargs)))
    follow.given(found)
    hooks = []
    for name, child in module.named_modules():
        hooks.append(child.register_forward_pre_hook(partial(follow.enter, name), with_kwargs=True, prepend=True))
        hooks.append(child.register_forward_hook(partial(follow.leave, name)))
    try:
        with ExitStack() as stack:
            for context in (torch.no_grad(), torch.device("meta"), _Devices(), follow):
                stack.enter_context(context)
            output = module(*found[0], **found[1])
    except ModelError:
        raise
    except Exception as error:  # the module's own
        where = follow.frames[-1] if follow.frames else ""
        raise ModelError(
            f"rules for {type(module).__name__}: its forward failed without data in {where or 'the model itself'} "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0].partition('. ')[0]}); needed: a sample as the "
            "model takes it (--sample 2x16, or 2x3x32x32:float32) and a forward whose course does not depend on the "
            "values of tensors (.item(), if tensor:, x[mask])"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return follow.finish(output)


def _as_meta(value: Any) -> Any:
    return put(value, {path: torch.empty_like(t, device="meta") for path, t in tensors_in(value)})


class _Devices(TorchFunctionMode):
    """Whatever a forward makes or moves, it makes on meta."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call with `meta` in place of any device."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        moves = getattr(func, "__name__", "") == "to"
        args = tuple(
            torch.device("meta") if isinstance(a, torch.device) or (moves and isinstance(a, str)) else a for a in args
        )
        operands = [tensor for _, tensor in tensors_in((args, kwargs))]
        if any(t.is_meta for t in operands) and not all(t.is_meta for t in operands):
            args, kwargs = _as_meta(args), _as_meta(kwargs)
        return func(*args, **kwargs)


class _Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Marks tensors, and passes the marks on from operation to operation."""

    def __init__(self, module: nn.Module, sources: frozenset[str], stream: Stream | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.sources, self.stream, self.flow = sources, stream, Flow()
        self.frames: list[str] = []
        self.marks: dict[Key, Mark] = {}
        self.alive: list[Any] = []  # a storage that is freed would give its key to another
        self.made_by: dict[Key, str] = {}
        self.is_input: set[int] = set()
        self.weights: dict[int, set[str]] = {}
        self.learned: set[int] = set()
        """Storages of what parameters have a part in: a backward pass goes through them."""
        self.inputs: dict[str, torch.Tensor] = {}
        self.modules = dict(module.named_modules())
        self.hidden = 0
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.weights.setdefault(_storage(parameter), set()).add(name)

    def given(self, arguments: Any) -> None:
        """What the model is called with."""
        for _, tensor in tensors_in(arguments):
            self.is_input.add(_storage(tensor))
            self.alive.append(tensor)

    # ------------------------------------------------------------ modules

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called."""
        args, kwargs = self._sequence_in(name, args, kwargs)
        self.frames.append(name)
        if name not in self.flow.order:
            self.flow.order.append(name)
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        if is_linear(module) and tensors:
            self.inputs[name] = tensors[0]
            self.hidden += 1
        elif isinstance(module, nn.Embedding) and tensors and not tensors[0].is_floating_point():
            self.flow.from_ids |= {name} if _storage(tensors[0]) in self.is_input else set()
        return args, kwargs

    def _sequence_in(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Sequence shards begin at the first block, and are gathered where column layers are."""
        if self.stream is None or name not in {self.stream.first, *self.stream.holders}:
            return args, kwargs
        found = [(path, t) for path, t in tensors_in((args, kwargs)) if t.is_floating_point() and t.dim() > 1]
        if not found:
            return args, kwargs
        path, tensor = found[0]
        twin = tensor.clone()  # outside it stays what it was
        self.is_input |= {_storage(twin)}
        self.marks.pop(_key(twin), None)
        self.alive.append(twin)
        if name == self.stream.first:
            self._put(twin, Mark(Split(1, 1, tensor.shape[1], 1), frozenset({TOKENS})))
        elif self._mark(tensor) is None:
            self._end(frozenset({TOKENS}), f"{name} is not given the sequence as the blocks pass it on", fused=False)
        put_in: tuple[Any, Any] = put((args, kwargs), {path: twin})
        return put_in

    def _sequence_out(self, name: str, output: Any) -> None:
        """Row layers give sequence shards; after the last block they are gathered."""
        stream, tensor = self.stream, next((t for _, t in tensors_in(output) if t.is_floating_point()), None)
        if stream is None or tensor is None:
            return
        if name in stream.rows and tensor.dim() > 1:
            self._put(tensor, Mark(Split(1, 1, tensor.shape[1], 1), frozenset({TOKENS})))
        if name in stream.holders and self._mark(tensor) is None:
            self._end(
                frozenset({TOKENS}), f"the last layer of {name} is no row, and gives whole sequences", fused=False
            )
        if name == stream.last:
            mark = self.marks.pop(_key(tensor), None)
            if mark is None or mark.split != Split(1, 1, tensor.shape[1], 1):
                self._end(frozenset({TOKENS}), f"{name} does not return the sequence", fused=False)

    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module returned."""
        self.frames.pop()
        if is_linear(module) and name in self.inputs:
            self.hidden -= 1
            self._linear(name, self.inputs.pop(name), output)
        self._sequence_out(name, output)
        first = next((tensor for _, tensor in tensors_in(output)), None)
        if first is not None and _key(first) in self.made_by:
            self.flow.results[name] = self.made_by[_key(first)]

    def _linear(self, name: str, given: torch.Tensor, output: torch.Tensor) -> None:
        mark = self._mark(given)
        self.alive += [given, output]
        self.is_input |= {_storage(output)} if _storage(given) in self.is_input else set()
        goes_in = mark is not None and mark.split.dim == given.dim() - 1
        if mark is not None and goes_in and mark.split.pre != 1:
            self._end(mark.sources, f"{name} takes it in another order", fused=False)
            mark = None
        self.flow.calls.setdefault(name, []).append(mark)
        self.learned.add(_storage(output))
        self.made_by[_key(output)] = name
        self.marks.pop(_key(output), None)
        if mark is not None and not goes_in:  # a layer that works on each head alone
            if name in self.sources:
                self._end(frozenset({name}), "it works on the heads of another layer", fused=False)
            self._put(output, Mark(mark.split, mark.sources))
        elif name in self.sources and name not in self.flow.dead:
            size = output.shape[-1]
            self._put(output, Mark(Split(output.dim() - 1, 1, size, 1), frozenset({name})))
        self.flow.steps.append(Step(f"linear {name}", (), (tuple(output.shape),), (self._mark(output),)))

    # ------------------------------------------------------------ operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation on the meta device and pass marks on from its operands to its results."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "embedding" and args[1].is_floating_point():  # torch 2.11 refuses it with data only
            raise TypeError(f"an embedding takes integers, found {args[1].dtype}")
        operands = [tensor for _, tensor in tensors_in((args, kwargs))]
        marks = [self._mark(t) for t in operands]
        result = func(*args, **kwargs)
        if self.hidden:
            return result
        results = [tensor for _, tensor in tensors_in(result)]
        self.alive += [*operands, *results]
        taken = any(_storage(t) in self.is_input for t in operands)
        if results and any(marks):
            self._pass_on(func, name, (args, kwargs), (operands, marks), results)
        elif results:
            for tensor in results:
                self.marks.pop(_key(tensor), None)
        self._note_weights(name, (operands, marks), results, taken=taken)
        if any(_storage(t) in self.learned or _storage(t) in self.weights for t in operands):
            self.learned |= {_storage(t) for t in results if t.is_floating_point()}
        if taken:
            self.is_input |= {_storage(t) for t in results}
        maker = self.made_by.get(_key(operands[0])) if len(operands) == 1 and results else None
        if maker and torch.Tag.pointwise in func.tags:
            self.made_by[_key(results[0])] = maker
        shapes = tuple(tuple(t.shape) for t in results)
        numbers = tuple(float(a) for a in args if isinstance(a, float)) if torch.Tag.pointwise in func.tags else ()
        self.flow.steps.append(Step(name, numbers, shapes, tuple(self._mark(t) for t in results)))
        return result

    def _pass_on(
        self,
        func: Any,
        name: str,
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        operands: tuple[list[torch.Tensor], list[Mark | None]],
        results: list[torch.Tensor],
    ) -> None:
        sources = frozenset().union(*(mark.sources for mark in operands[1] if mark))
        call = Call(
            name=name,
            args=given[0],
            kwargs=given[1],
            operands=tuple(operands[0]),
            splits=tuple(mark.split if mark else None for mark in operands[1]),
            result=tuple(results[0].shape),
        )
        try:
            self._check_whole(name, *operands)
            split = after(call, pointwise=torch.Tag.pointwise in func.tags)
        except EndsSplitError as error:
            where = f", in {self.frames[-1]}" if TOKENS in sources and self.frames and self.frames[-1] else ""
            self._end(sources, f"{error}{where}", fused=name in PIECES or "reshape" in str(error))
            return
        if name in _SOFTMAX:
            self.flow.softmax |= sources
        for source in sources:
            self.flow.joined.setdefault(source, set()).update(sources)
        for tensor in results:
            if split is not None and tensor.dim() > split.dim:
                self._put(tensor, Mark(split, sources))

    def _check_whole(self, name: str, operands: list[torch.Tensor], marks: list[Mark | None]) -> None:
        """Refuse what is whole and learned beside a split: of its gradient each rank would have the part of its slice.

        Parameters themselves are taken care of, and so are outputs of whole linear layers.

        Raises:
            EndsSplitError: there is such a tensor.
        """
        for tensor, mark in zip(operands, marks, strict=True):
            held = _storage(tensor)
            if mark is None and held in self.learned and held not in self.weights and _key(tensor) not in self.made_by:
                raise EndsSplitError(
                    f"`{name}` joins it with a whole {list(tensor.shape)}, whose gradient would be a part"
                )

    def _note_weights(
        self,
        name: str,
        operands: tuple[list[torch.Tensor], list[Mark | None]],
        results: list[torch.Tensor],
        *,
        taken: bool,
    ) -> None:
        """Which parameters an operation uses; what is made of parameters alone stands for them."""
        names = {tensor: self.weights.get(_storage(tensor), set()) for tensor in operands[0]}
        if not any(names.values()) or not results:
            return
        marked = [mark for mark in operands[1] if mark]
        if not taken and not marked and not self._is_index(name):
            for tensor in results:
                self.weights.setdefault(_storage(tensor), set()).update(*names.values())
            return
        sources = frozenset().union(*(mark.sources for mark in marked))
        frame = self.frames[-1] if self.frames else ""
        for tensor, weights in names.items():
            use = Use(frame=frame, operation=name, sources=sources, per_token=_per_token(name, tensor, results[0]))
            for weight in weights:
                self.flow.uses.setdefault(weight, []).append(use)

    @staticmethod
    def _is_index(name: str) -> bool:
        return name in ("embedding", "index")

    # ------------------------------------------------------------ marks

    def _mark(self, tensor: torch.Tensor) -> Mark | None:
        mark = self.marks.get(_key(tensor))
        return mark if mark is not None and not mark.sources & self.flow.dead.keys() else None

    def _put(self, tensor: torch.Tensor, mark: Mark) -> None:
        self.marks[_key(tensor)] = mark
        self.alive.append(tensor)

    def _end(self, sources: frozenset[str], why: str, *, fused: bool) -> None:
        for source in sources:
            self.flow.dead.setdefault(source, why)
            if fused and len(sources) == 1:
                self.flow.fused.add(source)

    def finish(self, output: Any) -> Flow:
        """Forward returned."""
        tensors = [tensor for _, tensor in tensors_in(output)]
        for tensor in tensors:
            mark = self._mark(tensor)
            if mark:
                self._end(mark.sources, "it is an output of the model", fused=False)
            if _key(tensor) in self.made_by:
                self.flow.outputs.add(self.made_by[_key(tensor)])
        self.flow.output_shapes = tuple(tuple(t.shape) for t in tensors)
        return self.flow


def is_linear(module: nn.Module) -> bool:
    """True of an `nn.Linear` as torch runs it, with a weight and a bias only."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def _per_token(name: str, weight: torch.Tensor, result: torch.Tensor) -> bool:
    """True where every token of (batch, tokens, ...) meets the same numbers of the parameter."""
    if name in ("native_layer_norm", "_fused_rms_norm"):
        return weight.dim() == 1
    if name in ("mm", "addmm"):
        return weight.dim() <= 2
    dim = 1 - result.dim() + weight.dim()
    pointwise = result.dim() >= 2 and (dim < 0 or weight.shape[dim] == 1)
    return pointwise and name in ("mul", "add", "sub", "div", "mul_", "add_", "sub_", "div_", "prelu", "_prelu_kernel")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _key(tensor: torch.Tensor) -> Key:
    """A view of a storage: wrappers of one tensor have the same."""
    return _storage(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
