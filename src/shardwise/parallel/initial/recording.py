"""Run a constructor on the meta device and keep what it did, so that any one tensor can be made later on its own.

Nothing is allocated: an 8-billion-parameter model is recorded in seconds in a few megabytes. Values that reach the
constructor from outside torch (lists, numpy arrays, files) are kept as constants. A constructor that looks at a value
(`linspace(...).tolist()`, `nonzero`) is served as long as the value involves no random draw.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.parallel.history import History, Operation, View, substitute, tensors_in
from shardwise.parallel.torch_private import IS_META, SET_DATA, OperationMode, skipped_init, storage_key

CONSTRUCTORS = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer))
"""Calls that carry data from Python's side: under the meta device they would lose it."""
WITHOUT_DEVICE = frozenset((torch.from_numpy, torch.frombuffer))
READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")
)
"""Calls that look at a tensor's values."""
FILLS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("normal_", "uniform_", "fill_", "zero_", "exponential_", "log_normal_", "cauchy_", "geometric_")
)
"""In-place operations whose result does not depend on what the tensor held."""
DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
PACKAGE = str(Path(__file__).resolve().parents[2])
TORCH = str(Path(torch.__file__).resolve().parent)


@dataclass
class Recorder:
    """The history of one constructor while it runs, and the tensors that stand for its storages."""

    history: History = field(default_factory=History)
    numbers: dict[int, int] = field(default_factory=dict)
    """Address of a meta storage -> its number in the history."""
    twins: dict[int, torch.Tensor] = field(default_factory=dict)
    """Address of a real storage that joined the recording -> the meta tensor over the whole of it."""
    keep: list[torch.Tensor] = field(default_factory=list)
    """Everything numbered, so that no address is used twice."""
    paused: bool = False

    def view(self, tensor: torch.Tensor) -> View:
        """Where a meta tensor lies; a storage not seen before counts as allocated now."""
        with self.pause():
            return self._view(tensor)

    def _view(self, tensor: torch.Tensor) -> View:
        key = storage_key(tensor)
        if key not in self.numbers:
            whole = self.number(tensor)
            call = torch.ops.aten.empty.memory_format
            self.history.add(
                Operation(call, ((self.history.num_bytes[whole.storage],),), {"dtype": torch.uint8}, ((0, whole),))
            )
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return View(self.numbers[key], tensor.dtype, size, stride, int(tensor.storage_offset()))

    def number(self, tensor: torch.Tensor) -> View:
        """Give a new storage its number; the view of all its bytes."""
        number = len(self.numbers)
        self.numbers[storage_key(tensor)] = number
        self.keep.append(tensor.detach())
        num_bytes = int(tensor.untyped_storage().nbytes())
        self.history.num_bytes[number] = num_bytes
        return View(number, torch.uint8, (num_bytes,), (1,), 0)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """True for a real tensor that has not joined the recording."""
        return not tensor.is_meta and storage_key(tensor) not in self.twins

    def twin(self, real: torch.Tensor) -> torch.Tensor:
        """The meta tensor that stands for a real one, its storage kept as a constant of the recording."""
        if real.is_meta:
            return real
        with self.pause():
            return self._twin(real)

    def _twin(self, real: torch.Tensor) -> torch.Tensor:
        key = storage_key(real)
        if key not in self.twins:
            storage = real.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=real.device).set_(storage)
            meta = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            whole = self.number(meta)
            self.history.add(
                Operation(lambda: flat.to("cpu", copy=True), (), {}, ((0, whole),), writes=(whole.storage,))
            )
            self.twins[key] = meta
            self.keep.append(real)
        empty = torch.empty(0, dtype=real.dtype, device="meta")
        return empty.set_(
            self.twins[key].untyped_storage(), real.storage_offset(), tuple(real.shape), tuple(real.stride())
        )

    def read(self, tensor: torch.Tensor, asked_by: str) -> torch.Tensor:
        """The value, now, of a tensor that no random draw contributes to.

        Raises:
            ModelError: it depends on a random draw, so its value would decide the model's shape.
        """
        if not tensor.is_meta:
            return tensor
        with self.pause():
            view = self.view(tensor)
            if self.history.is_random(view.storage):
                raise ModelError(
                    f"the module's constructor reads a random value: `{asked_by}` at {user_line(sys._getframe())} "
                    f"of a tensor of shape {tuple(tensor.shape)} drawn at random; a factory is built without values, "
                    f"so it may only read values that involve no draw; compute it with Python's numbers, "
                    f"or pass a module instance instead of a factory"
                )
            return self.history.replay(view, lambda index: index)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What torch does inside is not recorded."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


class _Operations(OperationMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Below autograd: every aten operation, its tensors on the meta device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        recorder = self.recorder
        inputs = list(tensors_in((args, kwargs)))
        random = torch.Tag.nondeterministic_seeded in func.tags
        to_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu"
        native = inputs and not random and not to_meta and all(recorder.is_constant(t) for t in inputs)
        if recorder.paused or native or func.overloadpacket is torch.ops.aten.set_:
            return func(*args, **kwargs)
        if any(tag in func.tags for tag in DATA_DEPENDENT):
            args, kwargs = substitute((args, kwargs), torch.Tensor, lambda t: recorder.read(t, str(func)))
            with recorder.pause():
                return func(*args, **kwargs)
        args, kwargs = substitute((args, kwargs), torch.Tensor, recorder.twin)
        args = substitute(args, torch.device, lambda _: torch.device("meta"))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
        if "generator" in kwargs:  # the seed and the name decide; some overloads have none without it
            kwargs["generator"] = None
        template = substitute((args, kwargs), torch.Tensor, recorder.view)
        # torch works out in Python, tenth of a millisecond by tenth, that a fill gives back its first argument
        out = args[0] if func.overloadpacket in FILLS else _on_meta(func, args, kwargs)
        self._keep(func, template, (args, kwargs), out)
        return out

    def _keep(self, func: Any, template: Any, inputs: Any, out: Any) -> None:
        recorder = self.recorder
        written = written_tensors(func, *inputs)
        creates = []
        for position, tensor in enumerate(tensors_in(out)):
            if storage_key(tensor) not in recorder.numbers:
                recorder.number(tensor)
                creates.append((position, recorder.view(tensor)))
        if not creates and not written:
            return
        writes = tuple(dict.fromkeys(recorder.view(t).storage for t in written))
        views = [v for v in _views(template)]
        args, kwargs = substitute(template, torch.device, lambda _: torch.device("cpu"))
        recorder.history.add(
            Operation(
                func,
                args,
                kwargs,
                tuple(creates),
                reads=tuple(dict.fromkeys(v.storage for v in views)),
                writes=writes,
                overwrites=_overwrites(recorder, func, written, views),
                random=torch.Tag.nondeterministic_seeded in func.tags,
            )
        )


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives on meta; of one that has no kernel there (`geqrf`), as it is on zeros.

    Torch's parametrizations take its error for a map without an inverse, and go on with a half-made module.
    """
    try:
        return func(*args, **kwargs)
    except NotImplementedError:  # torch's own, of an operation without a kernel on meta
        if written_tensors(func, args, kwargs):
            raise
    args, kwargs = substitute((args, kwargs), torch.Tensor, lambda t: torch.zeros_like(t, device="cpu"))
    args, kwargs = substitute((args, kwargs), torch.device, lambda _: torch.device("cpu"))
    return substitute(func(*args, **kwargs), torch.Tensor, lambda t: torch.empty_like(t, device="meta"))


class _Calls(TorchFunctionMode):
    """Above autograd: calls that carry or read values, name devices, or skip their work on the meta device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        recorder = self.recorder
        first: Any = args[0] if args else None
        if recorder.paused:
            return func(*args, **kwargs)
        if func in CONSTRUCTORS and not isinstance(first, torch.Tensor):
            return func(*args, **kwargs) if func in WITHOUT_DEVICE else func(*args, **{**kwargs, "device": "cpu"})
        if func is torch.Tensor.new_tensor and not isinstance(args[1] if len(args) > 1 else None, torch.Tensor):
            data = args[1] if len(args) > 1 else kwargs["data"]
            return torch.tensor(data, dtype=kwargs.get("dtype") or first.dtype, device="cpu")
        if func in READS and isinstance(first, torch.Tensor) and (first.is_meta or not recorder.is_constant(first)):
            return func(recorder.read(recorder.twin(first), func.__name__), *args[1:], **kwargs)
        if func is torch.Tensor.__deepcopy__ and type(first) is torch.Tensor and recorder.is_constant(first):
            return args[1].setdefault(id(first), first.clone())  # torch's way goes over a new storage, on meta here
        if func == IS_META:
            self._skipped(sys._getframe(1))
        elif func == SET_DATA and first.is_meta:
            args = (first, recorder.twin(args[1]))
        elif func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return first if first.is_meta else func(*args, **kwargs)
        elif func is torch.Tensor.to and isinstance(first, torch.Tensor) and first.is_meta:
            args = (first, *(_meta_device(arg) for arg in args[1:]))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)

    def _skipped(self, frame: FrameType) -> None:
        """Torch's own `trunc_normal_`, `orthogonal_`, `sparse_` do nothing to a meta tensor: keep the call whole."""
        call = skipped_init(frame)
        if call is None:
            return
        function, arguments = call
        tensor = arguments["tensor"]
        if not tensor.is_meta:
            return
        view = self.recorder.view(tensor)
        arguments = {**arguments, "tensor": view, "generator": None}
        overwrites = _covers(self.recorder, view)
        self.recorder.history.add(
            Operation(
                function,
                (),
                arguments,
                reads=(view.storage,),
                writes=(view.storage,),
                overwrites=overwrites,
                random=True,
            )
        )


def _meta_device(argument: Any) -> Any:
    if isinstance(argument, torch.device | str):
        return torch.device("meta")
    return argument


def _views(template: Any) -> list[View]:
    found: list[View] = []
    substitute(template, View, found.append)
    return found


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The argument tensors that an operation's schema says it writes."""
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.name in kwargs else None
        if value is None and position < len(args):
            value = args[position]
        written.extend(tensors_in(value))
    return written


def _covers(recorder: Recorder, view: View) -> bool:
    numel = 1
    for size in view.size:
        numel *= size
    num_bytes = numel * torch.empty(0, dtype=view.dtype, device="cpu").element_size()
    contiguous = torch.empty(view.size, device="meta", dtype=view.dtype).stride() == view.stride
    return contiguous and num_bytes == recorder.history.num_bytes[view.storage]


def _overwrites(recorder: Recorder, func: Any, written: list[torch.Tensor], views: list[View]) -> bool:
    fills = func.overloadpacket in FILLS or func.overloadpacket is torch.ops.aten.copy_
    if not fills or len(written) != 1:
        return False
    target = recorder.view(written[0])
    aliased = sum(v.storage == target.storage for v in views) > 1
    with recorder.pause():
        return not aliased and _covers(recorder, target)


def user_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost caller that is neither torch nor Shardwise."""
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, PACKAGE)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "an unknown line"


_WRAPPERS = ("torch/nn/parallel/distributed.py", "torch/distributed/fsdp/fully_sharded_data_parallel.py")


def record_call(recorder: Recorder, what: str, call: Callable[[], Any]) -> Any:
    """Run a constructor, or an initialiser of a module on meta, and keep what it does.

    Raises:
        ModelError: it needs values that do not exist yet, or wraps a model in DDP or FSDP. Errors of the constructor's
            own pass unchanged.
    """
    try:
        with torch.device("meta"), _Calls(recorder), _Operations(recorder):
            return call()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if any(frame.filename.endswith(_WRAPPERS) for frame in extract_tb(error.__traceback__)):
            raise ModelError(
                f"{what} wraps the model in data parallelism of torch's (DDP, FSDP), which would sum gradients beside "
                "apply: return the module inside; the plan says the rest"
            ) from error
        if "meta" not in str(error).lower():
            raise
        user = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith((TORCH, PACKAGE))]
        line = f"{Path(user[-1].filename).name}:{user[-1].lineno} `{user[-1].line}`" if user else "an unknown line"
        raise ModelError(
            f"{what} cannot run without values: at {line} torch says {str(error).splitlines()[0]!r}; a factory is "
            f"built on the meta device, where tensors have shapes only; pass a module instance instead of a factory "
            f"(every rank then builds it whole), or move that line out of the constructor"
        ) from error


def check_module(module: Any, what: str) -> nn.Module:
    """The built object, when it is a module whose parameters have shapes.

    Raises:
        ModelError: it is not a module, or has parameters of lazy modules.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{what} returned {type(module).__name__}, needed a torch.nn.Module; pass the class or a function that "
            f"returns a new module"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name} of {what} has no shape yet (a Lazy module); every parameter needs its shape when a "
                f"plan is applied; give the module its input size, or pass an instance after one forward pass"
            )
    return module
