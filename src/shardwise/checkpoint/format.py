"""What the files of a checkpoint are made of: names, types, boxes of tensors, and JSON that is checked before use.

No torch: checkpoints are inspected, verified and compared without it.
"""

from __future__ import annotations

import gc
import json
import math
import re
import reprlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.errors import CheckpointError

MODEL, OPTIM = "model.", "optim."
"""How the names of tensors begin: of parameters and buffers, and of the state of the optimizer."""
MAX_NAME = 512
MAX_DIMS = 16
MAX_ELEMENTS = 2**56
"""Of one tensor: far above any, and safe in 64 bits with any element size."""
MAX_DEPTH = 64
"""Of free content, as a configuration: what is deeper cannot be shown or written again."""
_FLOAT = "__float__"
_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.:+\-][A-Za-z0-9_]+)*")
_HEX = re.compile(r"[0-9a-f]+")
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


class DamagedError(CheckpointError):
    """A checkpoint whose files are missing, truncated or changed: an older one may still be whole."""


class DType(NamedTuple):
    """Bytes of an element, and what the safetensors format calls the type."""

    size: int
    code: str


DTYPES: dict[str, DType] = {
    "float64": DType(8, "F64"), "float32": DType(4, "F32"), "float16": DType(2, "F16"), "bfloat16": DType(2, "BF16"),
    "int64": DType(8, "I64"), "int32": DType(4, "I32"), "int16": DType(2, "I16"), "int8": DType(1, "I8"),
    "uint64": DType(8, "U64"), "uint32": DType(4, "U32"), "uint16": DType(2, "U16"), "uint8": DType(1, "U8"),
    "bool": DType(1, "BOOL"), "complex64": DType(8, "C64"),
    "float8_e4m3fn": DType(1, "F8_E4M3"), "float8_e5m2": DType(1, "F8_E5M2"), "float8_e8m0fnu": DType(1, "F8_E8M0"),
}  # fmt: skip
"""torch's name of each type that can be stored."""
CODES = {dtype.code: name for name, dtype in DTYPES.items()}


class Box(NamedTuple):
    """A rectangular part of a tensor: where it starts and how far it goes, for each dim.

    >>> Box((2, 0), (3, 4)).overlap(Box((4, 1), (9, 9)))
    Box(offsets=(4, 1), sizes=(1, 3))
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Product of the sizes; 1 for a tensor without dims."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements in both; None: there are none."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def slices(self, inside: Box) -> tuple[slice, ...]:
        """Index of this box in an array that holds `inside`."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.offsets, self.sizes, inside.offsets, strict=True))

    def __str__(self) -> str:
        """`[4:7,0:6]`."""
        return "[" + ",".join(f"{a}:{a + n}" for a, n in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor whose elements lie in order.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def cut(box: Box, max_elements: int) -> Iterator[Box]:
    """A box in slabs of at most `max_elements`, in row-major order.

    >>> [str(part) for part in cut(Box((0, 0), (5, 2)), 4)]
    ['[0:2,0:2]', '[2:4,0:2]', '[4:5,0:2]']
    """
    if box.num_elements <= max_elements:
        yield box
        return
    dim = next(d for d, n in enumerate(box.sizes) if n > 1)
    step = max(1, max_elements // math.prod(box.sizes[dim + 1 :]))
    for start in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
        yield from cut(Box(tuple(offsets), tuple(sizes)), max_elements)


def check_name(name: object, what: str) -> str:
    """A tensor's name: words of letters, digits and `_`, joined by single `.`, `-`, `+` or `:`.

    Raises:
        CheckpointError: it is not one.
    """
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{what}: found the name {str(name)[:80]!r}; needed at most {MAX_NAME} characters: letters, digits and _, "
            "joined by single . - + or :; rename the parameter"
        )
    return name


def parameter_of(name: str, tensors: Container[str]) -> str:
    """The parameter of a tensor of the optimizer, by the names of all tensors; empty: none has it.

    A key of state may hold dots, as `history.0` of a list does.
    """
    parts = name.removeprefix(OPTIM).split(".")
    held = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((parameter for parameter in held if MODEL + parameter in tensors), "")


def piece_key(name: str, box: Box, shape: Sequence[int]) -> str:
    """What a part of a tensor is called in a file: the tensor's name, and its place unless it is the whole.

    >>> piece_key("w", Box((2, 0), (3, 4)), (9, 4))
    'w[2:5,0:4]'
    """
    return name if box == whole(shape) else f"{name}{box}"


def json_of(value: Any) -> str:
    """Strict JSON, which has no words for infinities and NaN: they are `{"__float__": "nan"}`. `parse_json` reads it.

    >>> json_of({"clip": float("inf"), "betas": (0.9, 0.95)})
    '{"clip":{"__float__":"inf"},"betas":[0.9,0.95]}'
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_spelled(value), allow_nan=False, separators=(",", ":"))


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(float(value))}
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, list | tuple) else value


def same(one: Any, other: Any) -> bool:
    """Whether two values are one as JSON: NaN is itself there, and a tuple its list.

    >>> same({"d": float("nan"), "betas": (1, 2)}, {"betas": [1, 2], "d": float("nan")})
    True
    """
    return bool(one == other) or _text(one) == _text(other)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it the garbage collector rests, while many objects are made that all stay.

    It would look at all that there are again and again, those of torch too: half of the time of reading a manifest of
    thousands of tensors.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; duplicate keys, other top levels, bad UTF-8 and deep nesting are damage.

    Raises:
        DamagedError: naming the place and the reason.
    """
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise DamagedError(f"{where}: no readable JSON ({reason}); choose another checkpoint") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{where}: found a JSON {type(found).__name__}, needed an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | float:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return float(found[_FLOAT]) if len(found) == 1 and found.get(_FLOAT) in ("nan", "inf", "-inf") else found


class Fields:
    """Reads the fields of a JSON object, each checked; what does not fit is damage.

    >>> Fields({"step": 3}, "manifest.json").count("step")
    3
    """

    def __init__(self, data: object, where: str) -> None:
        """`where` begins the text of every error."""
        self.where = where
        if not isinstance(data, dict):
            raise self.wrong("its content", data, "an object")
        self.data: Mapping[str, Any] = data

    def wrong(self, key: str, found: object, needed: str) -> DamagedError:
        """The error for a field."""
        return DamagedError(
            f"{self.where}: {key}: found {_SHOWN.repr(found)[:80]}, needed {needed}; choose another checkpoint"
        )

    def only(self, keys: Sequence[str]) -> None:
        """Exactly these keys."""
        if set(self.data) != set(keys):
            differ = sorted(set(self.data) ^ set(keys))
            raise self.wrong("fields", differ[:5], f"exactly {', '.join(keys)}")

    def text(self, key: str, *, most: int = 4096) -> str:
        """A string, of characters that can be shown: no control codes, no halves of surrogate pairs."""
        value = self.data.get(key)
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise self.wrong(key, value, f"printable text of at most {most} characters")
        return value

    def hex(self, key: str, length: int) -> str:
        """Lower-case hexadecimal digits, exactly so many."""
        value = self.data.get(key)
        if not isinstance(value, str) or len(value) != length or not _HEX.fullmatch(value):
            raise self.wrong(key, value, f"{length} hexadecimal digits")
        return value

    def count(self, key: str, *, most: int = 2**62) -> int:
        """An integer from 0."""
        return self._count(key, self.data.get(key), most)

    def _count(self, key: str, value: object, most: int) -> int:
        if type(value) is not int or not 0 <= value <= most:
            raise self.wrong(key, value, f"an integer from 0 to {most}")
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of integers from 0: a shape, offsets."""
        return self.as_counts(key, self.data.get(key))

    def as_counts(self, key: str, value: object) -> tuple[int, ...]:
        """The same of a value that was taken out already."""
        if not isinstance(value, list) or len(value) > MAX_DIMS:
            raise self.wrong(key, value, f"a list of at most {MAX_DIMS} integers")
        return tuple(self._count(key, item, MAX_ELEMENTS) for item in value)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object."""
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return value

    def free(self, key: str) -> dict[str, Any]:
        """An object of any content that is nested at most `MAX_DEPTH` deep."""
        value = self.mapping(key)
        level: list[Any] = [value]
        for _ in range(MAX_DEPTH):
            level = [x for v in level for x in (v.values() if isinstance(v, dict) else v) if isinstance(x, dict | list)]
            if not level:
                return value
        raise self.wrong(key, value, f"content that is nested at most {MAX_DEPTH} deep")

    def sequence(self, key: str) -> list[Any]:
        """A list."""
        value = self.data.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list")
        return value

    def number(self, key: str) -> float | None:
        """A number that a float holds, or null."""
        value = self.data.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.wrong(key, value, "a number or null")
        if isinstance(value, int) and abs(value) > MAX_ELEMENTS:
            raise self.wrong(key, value, "an integer of at most 2^56, or a decimal number")
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor in a file: which file, which elements, and where its bytes start in the file's data."""

    file: int
    box: Box
    start: int
