"""Frozen dataclasses as nested dicts and as TOML or JSON files, strictly: no unknown key, no wrong type.

Errors name the key, what was found, what is needed, the nearest key and, from a file, the line.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardwise.errors import ConfigError, PlanError, ShardwiseError
from shardwise.findings import nearest

T = TypeVar("T")
MAX_BYTES = 2**20
"""Of a file that a person writes."""
_MAX_DOTS = 256
"""In one line of TOML: the parser's work and memory grow with the square of the parts of a dotted key."""


class RecordError(ConfigError):
    """A `ConfigError` that knows the path of the key it is about, so that a line can be found for it."""

    def __init__(self, keys: tuple[str, ...], message: str):
        self.keys = keys
        self.reason = message
        super().__init__(f"{'.'.join(keys)}: {message}" if keys else message)


def as_dict(record: Any, *, drop_none: bool = True) -> dict[str, Any]:
    """Nested plain data of a dataclass: dicts, lists, numbers, strings, booleans.

    >>> from shardwise.plan.plan import Batch
    >>> as_dict(Batch(micro_batches=2))
    {'micro_batches': 2}
    """
    plain: dict[str, Any] = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if is_dataclass(value):
            plain[f.name] = as_dict(value, drop_none=drop_none)
        elif value is not None or not drop_none:
            plain[f.name] = list(value) if isinstance(value, tuple) else value
    return plain


def hash_of(record: Any) -> int:
    """The hash that a frozen dataclass would compute, kept on the instance: for records that are keys of caches."""
    kept = record.__dict__.get("_hash")
    if kept is None:
        kept = hash(tuple(getattr(record, f.name) for f in fields(record)))
        object.__setattr__(record, "_hash", kept)
    return int(kept)


def from_dict(record_type: type[T], data: object, keys: tuple[str, ...] = ()) -> T:
    """The dataclass that nested plain data describes; missing keys take their defaults.

    Raises:
        RecordError: (a `ConfigError`) an unknown key with the nearest one, a missing key, or a value of a wrong type.
    """
    if not isinstance(data, Mapping):
        raise RecordError(keys, f"found {_shown(data)}, needed a table of keys")
    hints = get_type_hints(record_type)
    names = [f.name for f in fields(record_type)]  # type: ignore[arg-type]
    for key in data:
        if key not in names:
            raise RecordError((*keys, str(key)), f"unknown key; {nearest(str(key), names)}")
    values = {name: _value(hints[name], data[name], (*keys, name)) for name in names if name in data}
    try:
        return record_type(**values)
    except TypeError as error:
        raise RecordError(keys, str(error).split("__init__() ")[-1]) from None


def _value(hint: Any, value: object, keys: tuple[str, ...]) -> Any:
    if is_dataclass(hint):
        return from_dict(hint, value, keys)  # type: ignore[arg-type]
    if not _fits(hint, value):
        raise RecordError(keys, f"found {_shown(value)}, needed {_named(hint)}")
    if get_origin(hint) is tuple:
        assert isinstance(value, list | tuple)
        return tuple(value)
    return float(value) if hint is float and isinstance(value, int) else value


def _fits(hint: Any, value: object) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(option, value) for option in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in get_args(hint))
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(get_args(hint)[0], item) for item in value)
    if hint is NoneType:
        return value is None
    if hint is float:
        return isinstance(value, float) or (type(value) is int and abs(value) < 2**1023)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def check_types(row: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Refuse plain data of other types than those that are read of it; what is not there is None.

    Raises:
        RecordError: naming the key, what was found and what is needed.
    """
    for key, hint in types.items():
        value = row.get(key)
        if not _fits(hint, value):
            raise RecordError((key,), f"found {_shown(value)}, needed {_named(hint)}")
        for item in value if isinstance(value, list) else [value]:
            most = _MOST_FLOAT if isinstance(item, float) else _MOST_INT
            if isinstance(item, int | float) and not abs(item) < most:
                raise RecordError((key,), f"found {_shown(item)}, needed a number below {most:.3g}")


_MOST_INT, _MOST_FLOAT = 2**62, 1e100
"""What arrays of 64 bits hold, and of what sums are finite."""


_MANY = {int: "integers", float: "numbers", str: "strings"}


def _named(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(_named(option) for option in get_args(hint) if option is not NoneType)
    if origin is Literal:
        return "one of " + ", ".join(repr(option) for option in get_args(hint))
    if origin is tuple:
        item = get_args(hint)[0]
        return f"a list, each {_named(item)}" if item not in _MANY else f"a list of {_MANY[item]}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}.get(hint, str(hint))


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """The data of a .toml or .json file, and its text.

    Raises:
        ConfigError: the file is missing, a directory, unreadable, empty, binary, malformed (with line), or of another
            kind.
    """
    file = Path(path)
    if file.suffix not in (".toml", ".json"):
        raise ConfigError(f"{file}: found the ending '{file.suffix}', needed .toml or .json; rename the file")
    try:
        text = read_small(file).decode("utf-8-sig")  # some editors begin a file with a mark of its bytes' order
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; check the path (working directory: {Path.cwd()})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not a text file (byte {error.start} is not UTF-8); give a TOML or JSON text"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); check the path and its permissions") from None
    if not text.strip():
        raise ConfigError(f"{file}: the file is empty; was writing it interrupted?")
    try:
        data = parse_toml(text) if file.suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
    except tomllib.TOMLDecodeError as error:
        line = len(text.splitlines()) if "end of document" in str(error) else None
        where = f", line {line}" if line else ""
        raise ConfigError(f"{file}{where}: malformed or truncated TOML: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}, line {error.lineno}: malformed or truncated JSON: {error.msg}") from None
    except RecordError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting without end
        raise ConfigError(f"{file}: no JSON that can be read: {str(error)[:100]}; write it again") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}, line 1: found a {type(data).__name__}, needed a table of keys")
    return data, text


KINDS: Mapping[str, tuple[str, frozenset[str], str]] = {
    kind: (what, frozenset(keys.split()), do)
    for kind, what, keys, do in (
        ("plan", "a plan", "axes batch zero precision recompute communication offload made_for", "give it as PLAN"),
        ("cluster", "a cluster", "device nodes per_node local network domain", "give it as CLUSTER"),
        ("sizes", "sizes of a model", "num_layers dim num_heads ffn_dim vocab_size max_seq_len", "give it as MODEL"),
        ("run", "a run's configuration", "model data train optimizer", "give it to `shardwise train`"),
        ("rules", "tensor-parallel rules", "rules tp_divides verified_hash", "`apply(..., rules=FILE)` reads it"),
        ("hf", "a config.json of transformers", "model_type architectures hidden_size", "give it as hf:FILE"),
        ("deepspeed", "a configuration of DeepSpeed", "zero_optimization train_batch_size gradient_accumulation_steps "
         "train_micro_batch_size_per_gpu", "docs/migrate.md says how it is read"),
        ("manifest", "a checkpoint's manifest", "tensors plan_fields scalars", "`shardwise ckpt` reads its folder"),
        ("answer", "what --json printed", "decisions runners_up pruned", "its key `plan` is the plan"),
    )
}  # fmt: skip
"""Files that people have beside each other: what each is, keys that others have not, what to do with one."""


def read_kind(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], str]:
    """`read_file`, for a file of one of `KINDS`.

    Raises:
        ConfigError: as `read_file`; or its keys are another one's.
    """
    data, text = read_file(path)
    shared = {name: sorted(keys & data.keys()) for name, (_, keys, _) in KINDS.items()}
    likest = max(shared, key=lambda name: len(shared[name]))
    if len(shared[likest]) > len(shared[kind]):
        what, _, do = KINDS[likest]
        raise ConfigError(
            f"{path}: found {what} ({', '.join(shared[likest])}), needed {KINDS[kind][0]}; "
            f"{do.replace('FILE', os.fspath(path))}"
        )
    return data, text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON, which would take the last of equal keys without a word; TOML refuses them itself."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise RecordError(
            (twice,), "the same key more than once in one table, needed it once; keep the line that holds"
        )
    return found


def read_small(path: Path) -> bytes:
    """The content of a regular file of at most 1 MiB; a pipe or a device would never end.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, at most {MAX_BYTES} are read", str(path))
        return file.read(MAX_BYTES)


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as plain data.

    Raises:
        tomllib.TOMLDecodeError: also for numbers of thousands of digits, keys of hundreds of parts, and nesting
            without end.
    """
    if any(line.count(".") > _MAX_DOTS for line in text.splitlines()):
        raise tomllib.TOMLDecodeError(f"a line with more than {_MAX_DOTS} dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise tomllib.TOMLDecodeError(str(error)[:100]) from None


def located(error: ConfigError | PlanError, path: str | os.PathLike[str], text: str) -> ConfigError:
    """The same error with the file's name and, where the key is known, its line."""
    line = _line_of(text, error.keys) if isinstance(error, RecordError) else None
    return ConfigError(f"{path}{f', line {line}' if line else ''}: {error}")


def _line_of(text: str, keys: tuple[str, ...]) -> int | None:
    """The line of a key: each part is looked for behind the one before, or with all before it (`[device.rates]`)."""
    found: re.Match[str] | None = None
    for number, key in enumerate(keys):
        bare = rf"(?<![\w.-]){re.escape(key)}(?![\w-])"
        whole = r"\s*\.\s*".join(map(re.escape, keys[: number + 1]))
        places = [re.compile(bare).search(text, found.end() if found else 0)]
        if found:
            places.append(re.compile(rf"(?<![\w.-]){whole}(?![\w-])").search(text, found.start()))
        found = min(filter(None, places), key=lambda place: place.end(), default=None)
        if not found:
            return None
    return text.count("\n", 0, found.end()) + 1 if found else None


def write_file(path: str | os.PathLike[str], data: Mapping[str, Any], comment: str = "") -> None:
    """Write nested plain data as .toml or .json; the file appears whole or not at all.

    Raises:
        ConfigError: another file ending, or a place that cannot be written.
    """
    file = Path(path)
    if file.suffix not in (".toml", ".json"):
        raise ConfigError(f"{file}: found the ending '{file.suffix}', needed .toml or .json; rename the file")
    write_text(file, json.dumps(data, indent=2) + "\n" if file.suffix == ".json" else _toml(data, comment))


def write_text(file: Path, text: str) -> None:
    """Write a text; the file appears whole or not at all. What a link names is written, and the link stays.

    Raises:
        ConfigError: a place that cannot be written.
    """
    file = Path(os.path.realpath(file))
    scratch = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be removed either
            scratch.unlink(missing_ok=True)
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror}); check the folder, its permissions and its free space"
        ) from None


@contextmanager
def looking(what: str, kind: type[ShardwiseError]) -> Iterator[None]:
    """What a user's path cannot be is an error of this kind: no right, too long a name, links in a ring, a NUL in it.

    Args:
        what: the path, with the flag that gave it.
        kind: of the error.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # the second: a NUL or half of a surrogate pair, which no path has
        raise kind(
            f"{what if what.isprintable() else ascii(what)}: cannot be read "
            f"({getattr(error, 'strerror', None) or error}); needed a path that this user may list and read; give "
            "another one, or the right to read it"
        ) from error


def in_words(value: Any) -> Any:
    """The same for JSON, which has no infinities and NaN: such numbers become text.

    >>> in_words({"loss": float("nan"), "betas": (0.9, 1)})
    {'loss': 'nan', 'betas': [0.9, 1]}
    """
    if isinstance(value, Mapping):
        return {key: in_words(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_words(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def say(text: str) -> None:
    """Print a line on stderr. Where nobody reads it, or its disk is full, it is lost: no reason to end what goes on."""
    if sys.stderr is not None:  # closed by whoever started this process
        with suppress(OSError, ValueError):  # the second: closed since
            print(text, file=sys.stderr, flush=True)


def _toml(data: Mapping[str, Any], comment: str) -> str:
    lines = [f"# {comment}"] if comment else []
    return "\n".join([*lines, *_toml_lines(data, "")]) + "\n"


def _toml_lines(table: Mapping[str, Any], prefix: str) -> list[str]:
    """Plain values first, then the tables: TOML reads a key below a header as part of that table."""
    lines = [f"{key} = {_literal(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    for key, inner in table.items():
        if isinstance(inner, Mapping):
            lines += ["", f"[{prefix}{key}]", *_toml_lines(inner, f"{prefix}{key}.")]
    return lines


def _literal(value: object) -> str:
    """A TOML literal; JSON's spelling of strings, numbers, booleans and lists is TOML's too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
