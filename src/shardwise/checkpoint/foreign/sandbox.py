"""`read_values`: what pickles hold, from a process of its own that may do next to nothing; its answer is checked.

The answer is JSON: values, and for each tensor the place of its bytes in the file. This process then reads those bytes
itself, so no object ever crosses, and a tensor's bytes are where a file of that size can have them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.checkpoint.foreign.opened import MAX_OPEN, OpenFiles
from shardwise.checkpoint.foreign.views import View
from shardwise.checkpoint.format import DTYPES, MAX_DIMS, MAX_ELEMENTS
from shardwise.errors import CheckpointError

WALL_S = 900
MAX_ANSWER = 2**30
TENSOR = "tensor of "
"""How the name begins of what stands for a tensor that no checkpoint holds."""
_ROOT = str(Path(__file__).parents[3])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from shardwise.checkpoint.foreign.{} import main; main()"


@dataclass(frozen=True)
class Job:
    """A file, or a part of one, to read a value from."""

    path: Path
    kind: Literal["torch", "pickle"] = "torch"
    start: int = 0
    count: int = MAX_ELEMENTS


@dataclass(frozen=True, eq=False)
class Instance:
    """An object that is known to be data: its class's name, and what it holds."""

    name: str
    args: list[Any]
    state: Any
    items: list[Any]

    def get(self, key: str) -> Any:
        """A field of its state; None: it has none of the name."""
        return self.state.get(key) if isinstance(self.state, dict) else None


@dataclass(frozen=True)
class Left:
    """A value that is no data, or a name: told, never used."""

    name: str

    @property
    def tensor(self) -> str:
        """Of a tensor that no checkpoint holds, what it is; empty: it is none."""
        return self.name.removeprefix(TENSOR) if self.name.startswith(TENSOR) else ""


def read_values(files: OpenFiles, jobs: Sequence[Job], *, unsafe: bool = False) -> list[Any]:
    """The values of pickles: dicts, lists, numbers, texts, `View`s of tensors, `Instance`s of known classes.

    Args:
        files: they stay open, and views read from them.
        jobs: what to read.
        unsafe: load them as torch does, whatever code that runs; whole files of torch.save only.

    Cost: a process for each 128 files, about 0.2 s, at most 3 GiB of its memory; pickles are read, tensors are not.

    Raises:
        CheckpointError: naming the file, what was found, what is needed, what to do.
    """
    values: list[Any] = []
    for batch in _batches(jobs):
        values += _read_batch(files, batch, unsafe)
    return values


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Jobs in their order, at most so many files at a time that all can be open."""
    batch: list[Job] = []
    paths: set[Path] = set()
    for job in jobs:
        if batch and len(paths | {job.path}) > MAX_OPEN // 2:
            yield batch
            batch, paths = [], set()
        batch.append(job)
        paths.add(job.path)
    if batch:
        yield batch


def _read_batch(files: OpenFiles, jobs: Sequence[Job], unsafe: bool) -> list[Any]:
    numbered = [(job, files.descriptor(job.path)) for job in jobs]
    request: dict[str, Any] = {
        "jobs": [{"file": number, "kind": job.kind, "start": job.start, "count": job.count} for job, number in numbered]
    }
    descriptors = [number for _, number in numbered]
    paths = {number: job.path for job, number in numbered}
    if unsafe:
        path, scratch = files.scratch()
        paths[scratch] = path
        answer = ask("unsafe", request | {"scratch": scratch}, [*descriptors, scratch], str(jobs[0].path))
    else:
        answer = ask("child", request, descriptors, str(jobs[0].path))
    refused = answer.get("refused")
    if refused is not None:
        raise refusal(str(jobs[int(answer.get("job", 0))].path), refused)
    try:
        return _Checked(files, paths, answer["storages"]).values(answer["values"], len(jobs))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        text = f"an answer of the reader that cannot be ({type(error).__name__}: {str(error)[:80]})"
        raise refusal(str(jobs[0].path), (text, "values and places", "copy the file again, or report this")) from None


def refusal(where: str, texts: Sequence[object]) -> CheckpointError:
    """The error for a file that its reader refused."""
    found, needed, fix = [str(text)[:600] for text in (*texts, "", "", "")[:3]]
    return CheckpointError(f"{where}: found {found}; needed {needed}; {fix}")


def ask(module: str, request: Mapping[str, Any], descriptors: Sequence[int], where: str) -> dict[str, Any]:
    """What a reader's process answers; it inherits these open files and nothing else.

    Raises:
        CheckpointError: it died, took too long, or answers something else.
    """
    alone = ["-I"] if module == "child" else []  # a program may need the user's own modules
    command = [sys.executable, *alone, "-c", _START.format(module), _ROOT]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            pass_fds=sorted(set(descriptors)),
        )  # fmt: skip
    except OSError as error:
        text = f"no process to read it in ({error.strerror or error})"
        raise refusal(where, (text, "memory and room for one more", "end others, or try again")) from error
    try:
        out, said = process.communicate(json.dumps(request).encode(), timeout=WALL_S)
    except subprocess.TimeoutExpired:
        out, said = b"", b"it took too long"
    finally:
        process.kill()
        process.wait()
    try:
        if process.returncode == -9 and not out:
            raise ValueError("it was killed: by the kernel, where memory is out")
        if process.returncode not in (0, -9) or len(out) > MAX_ANSWER:
            raise ValueError(f"it ended with {process.returncode}")
        answer = json.loads(out)
        if not isinstance(answer, dict):
            raise ValueError("it gave no object")
    except (ValueError, RecursionError) as error:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        raise refusal(
            where,
            (f"what ends the process that reads it ({last[0][:200]})", "a file that can be read", "copy it again"),
        ) from None
    return answer


class _Checked:
    """The answer of a reader, which is not trusted: types, counts, and places inside the files."""

    def __init__(self, files: OpenFiles, paths: Mapping[int, Path], storages: Any) -> None:
        self._files = files
        self._storages = [self._storage(paths, item) for item in storages]

    def _storage(self, paths: Mapping[int, Path], item: Any) -> tuple[Path, int, int, int | None, str]:
        number, start, count, crc, device = item
        path = paths[number]
        if not (type(start) is int and type(count) is int and min(start, count) >= 0):
            raise refusal(str(path), ("a storage without a place", "one inside the file", "report this"))
        if start + count > self._files.size(path):
            raise refusal(
                str(path), (f"a storage that ends at {start + count}", "one inside the file", "copy it again")
            )
        return path, start, count, crc if type(crc) is int else None, str(device)

    def values(self, items: Any, count: int) -> list[Any]:
        if not isinstance(items, list) or len(items) != count:
            raise refusal("", ("another number of values", str(count), "report this"))
        return [self._value(item) for item in items]

    def _value(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self._value(value) for value in item]
        if not isinstance(item, dict):
            return item
        if "d" in item:
            return {_key(self._value(key)): self._value(value) for key, value in item["d"]}
        if "t" in item:
            return self._view(item["t"])
        if "r" in item:
            parts = [self._value(item[key]) for key in ("a", "s", "i")]
            return Instance(str(item["r"]), *parts)
        return float(item["f"]) if "f" in item else Left(str(item.get("n") or item.get("o")))

    def _view(self, item: Any) -> View:
        index, dtype, offset, shape, stride = item
        path, start, count, crc, device = self._storages[index]
        counts = [offset, *shape, *stride]
        if len(shape) > MAX_DIMS:
            what = f"a tensor of {len(shape)} dims"
            raise refusal(str(path), (what, f"at most {MAX_DIMS}", "reshape it, and save it again"))
        if dtype not in DTYPES or len(shape) != len(stride):
            raise refusal(str(path), (f"a tensor of the type {dtype}", "one that can be stored", "report this"))
        if any(type(n) is not int or not 0 <= n <= MAX_ELEMENTS for n in counts):
            raise refusal(str(path), (f"a tensor of shape {shape}", "one that lies inside its file", "copy it again"))
        size, numel = DTYPES[dtype].size, math.prod(shape)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if numel else -1
        if numel > MAX_ELEMENTS or (last + 1) * size > count:
            raise refusal(str(path), (f"a tensor of shape {shape} in {count} bytes", "one inside", "copy it again"))
        return View(self._files, path, (start, count, crc), dtype, offset, tuple(shape), tuple(stride), device)


def _key(key: Any) -> Any:
    if isinstance(key, list):
        return tuple(key)
    return key if isinstance(key, str | int | float | bool | Instance | None) else str(key)
