"""The globals that a foreign checkpoint may mention, and the plain value or record that a call of each becomes.

What is not in this table is refused by name. Nothing here imports what it names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from shardwise.checkpoint.foreign.machine import Calls, Name, Record, RefusedError, Storage, Tensor, key_of
from shardwise.checkpoint.format import DTYPES, MAX_DIMS, MAX_ELEMENTS

UNTYPED = "untyped"
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "UntypedStorage": UNTYPED,
}  # fmt: skip
TORCH_DTYPES = (*DTYPES, "complex128", "complex32", "qint8", "quint8", "qint32", "float8_e4m3fnuz", "float8_e5m2fnuz")
_Call = Callable[[Name, tuple[Any, ...]], Any]


def item_size(dtype: str) -> int:
    """Bytes of an element; 1 of an untyped storage."""
    return 1 if dtype == UNTYPED else DTYPES[dtype].size


def storage_of(persistent: Any) -> Storage:
    """What torch's persistent id stands for: ("storage", type, key, device, number of elements).

    Raises:
        RefusedError: it is anything else, or claims more than any tensor has.
    """
    if not isinstance(persistent, tuple) or len(persistent) not in (5, 6) or persistent[0] != "storage":
        raise _bad("a persistent id that is no storage")
    kind, key, device, numel = persistent[1:5]
    if len(persistent) == 6 and persistent[5] is not None:
        raise _bad("a storage that is a view of another")
    if not isinstance(kind, Name) or kind.name not in STORAGES or kind.module not in ("torch", "torch.storage"):
        raise _bad(f"a storage of the type {str(kind)[:80]}")
    if type(numel) is not int or not 0 <= numel <= MAX_ELEMENTS or not isinstance(key, str | int):
        raise _bad(f"a storage of {str(numel)[:40]} elements")
    return Storage(str(key)[:80], STORAGES[kind.name], numel, device[:32] if isinstance(device, str) else "")


def _tensor(name: Name, args: tuple[Any, ...]) -> Tensor:
    """_rebuild_tensor(storage, offset, size, stride, ...); v3 gives the type of an untyped storage."""
    storage, offset, shape, stride = args[:4]
    dtype = storage.dtype if isinstance(storage, Storage) else UNTYPED
    if name.name == "_rebuild_tensor_v3":
        dtype = args[6].name if len(args) > 6 and isinstance(args[6], Name) else UNTYPED
    if any(arg for arg in args[6:] if isinstance(arg, dict)):
        fix = "save it with .resolve_conj().resolve_neg()"
        raise RefusedError("a view of a tensor's conjugate or negative", "a tensor of the elements themselves", fix)
    if not isinstance(storage, Storage) or dtype not in DTYPES:
        raise RefusedError(
            f"a tensor of the type {dtype}", f"one of {', '.join(DTYPES)}", "convert it with the library that wrote it"
        )
    for counts in ((offset,), shape, stride):
        if isinstance(counts, tuple | list) and len(counts) > MAX_DIMS:
            raise RefusedError(
                f"a tensor of {len(counts)} dims", f"at most {MAX_DIMS}", "reshape it, and save it again"
            )
        if not isinstance(counts, tuple | list):
            raise _bad(f"a tensor with the shape {str(shape)[:80]} and the stride {str(stride)[:80]}")
        if any(type(count) is not int or not 0 <= count <= MAX_ELEMENTS for count in counts):
            raise _bad(f"a tensor with the shape {str(shape)[:80]} and the stride {str(stride)[:80]}")
    numel = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if numel else 0
    held = storage.numel * item_size(storage.dtype) // item_size(dtype)
    if numel > MAX_ELEMENTS or (numel and last >= held):
        raise _bad(f"a tensor of shape {tuple(shape)} that ends at element {last} of a storage of {held}")
    return Tensor(storage, dtype, offset, tuple(shape), tuple(stride))


def _bad(what: str) -> RefusedError:
    return RefusedError(what, "tensors that lie inside their storages", "copy the file again")


def _inner(_: Name, args: tuple[Any, ...]) -> Any:
    """A parameter is its tensor."""
    return args[0]


def _typed(_: Name, args: tuple[Any, ...]) -> Any:
    """_rebuild_from_type_v2(function, type, args, state): the tensor without what hangs on it."""
    function = args[0]
    if not isinstance(function, Name) or not function.name.startswith("_rebuild_tensor"):
        raise _bad(f"a tensor made by {str(function)[:80]}")
    return _tensor(function, args[2])


def _dict(_: Name, args: tuple[Any, ...]) -> Any:
    pairs = args[0] if args and isinstance(args[0], list | dict) else []
    return {key_of(key): value for key, value in (pairs.items() if isinstance(pairs, dict) else pairs)}


def _list(_: Name, args: tuple[Any, ...]) -> Any:
    return list(args[0]) if args else []


def _set(_: Name, args: tuple[Any, ...]) -> Any:
    return {key_of(value) for value in args[0]} if args else set()


def _tuple(_: Name, args: tuple[Any, ...]) -> Any:
    return tuple(args[0]) if args else ()


def _encoded(_: Name, args: tuple[Any, ...]) -> Any:
    """_codecs.encode(text, "latin1"): bytes, as protocol 2 spells them."""
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        raise _bad("bytes in an encoding that is not latin1")
    return args[0].encode("latin-1")


def _reconstructed(_: Name, args: tuple[Any, ...]) -> Any:
    """copyreg._reconstructor(class, object, None)."""
    if not args or not isinstance(args[0], Name):
        raise _bad("an object without a class")
    return Record(args[0])


def _record(name: Name, args: tuple[Any, ...]) -> Any:
    return Record(name, args)


def _number(name: Name, args: tuple[Any, ...]) -> Any:
    """A scalar of numpy, (dtype, bytes): a Python number where it is one."""
    dtype, data = args if len(args) == 2 else (None, None)
    code = dtype.args[0] if isinstance(dtype, Record) and dtype.args else None
    form = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "i2": "<h", "i1": "<b", "b1": "<?"}.get(
        str(code)
    )
    if form is None or not isinstance(data, bytes) or len(data) != struct.calcsize(form):
        return Record(name, ())
    return struct.unpack(form, data)[0]


def _text(_: Name, args: tuple[Any, ...]) -> Any:
    return ":".join(str(arg)[:80] for arg in args)


_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "pathlib": ("PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "Path"),
    "argparse": ("Namespace",),
    "datetime": ("datetime", "timedelta", "date", "timezone"),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler", "LossScalerBase"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "deepspeed.utils.mixed_precision_linkage": ("fragment_address",),
    "lightning_fabric.utilities.data": ("AttributeDict",),
    "lightning.fabric.utilities.data": ("AttributeDict",),
    "pytorch_lightning.utilities.parsing": ("AttributeDict",),
    "lightning.pytorch.utilities.parsing": ("AttributeDict",),
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.base": ("ContainerMetadata", "Metadata"),
    "omegaconf.nodes": (
        "AnyNode", "BooleanNode", "FloatNode", "IntegerNode", "StringNode", "PathNode", "BytesNode", "EnumNode",
    ),
    "typing": ("Any",),
    "builtins": ("object", "complex", "int", "float", "str", "bool", "bytes"),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("_reconstruct",),
    "numpy._core.multiarray": ("_reconstruct",),
}  # fmt: skip


def _table() -> dict[Name, _Call]:
    table: dict[Name, _Call] = {Name(module, n): _record for module, names in _RECORDS.items() for n in names}
    table |= {Name("torch", name): _record for name in (*TORCH_DTYPES, *STORAGES)}
    table |= {Name("torch.storage", name): _record for name in ("UntypedStorage", "TypedStorage")}
    table |= {Name("torch._utils", f"_rebuild_tensor{version}"): _tensor for version in ("", "_v2", "_v3")}
    table |= {Name("torch._utils", f"_rebuild_parameter{kind}"): _inner for kind in ("", "_with_state")}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        table[Name(module, "scalar")] = _number
    return table | {
        Name("torch._tensor", "_rebuild_from_type_v2"): _typed,
        Name("torch", "Tensor"): _record,
        Name("torch.nn.parameter", "Parameter"): _record,
        Name("torch.nn.parameter", "Buffer"): _record,
        Name("torch", "Size"): _tuple,
        Name("torch", "device"): _text,
        Name("torch.serialization", "_get_layout"): _text,
        Name("collections", "OrderedDict"): _dict,
        Name("collections", "Counter"): _dict,
        Name("collections", "defaultdict"): lambda name, args: _dict(name, args[1:]),
        Name("collections", "deque"): _list,
        Name("builtins", "set"): _set,
        Name("builtins", "frozenset"): _set,
        Name("builtins", "list"): _list,
        Name("builtins", "dict"): _dict,
        Name("builtins", "tuple"): _tuple,
        Name("builtins", "bytearray"): lambda _, args: bytes(args[0]) if args and isinstance(args[0], bytes) else b"",
        Name("_codecs", "encode"): _encoded,
        Name("copyreg", "_reconstructor"): _reconstructed,
    }


CALLS: Calls = _table()
"""Every global that is allowed."""
