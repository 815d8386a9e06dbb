"""The process that reads pickles: it gives up memory, time, files and sockets first, and answers in JSON.

    stdin    {"jobs": [{"file": 3, "kind": "torch" | "pickle", "start": 0, "count": 4096}, ...]}
    stdout   {"values": [...], "storages": [[file, start, bytes, crc or null, device], ...]}
         or  {"refused": [found, needed, fix], "job": 0}

No bytes of tensors pass through it: it says where they lie, and the parent, which checks that, reads them.
"""

from __future__ import annotations

import codecs
import json
import math
import resource
import sys
from typing import Any

from shardwise.checkpoint.foreign.archives import Opened, Place, open_pickle, open_torch
from shardwise.checkpoint.foreign.machine import Name, Record, RefusedError, Tensor

MAX_DEPTH = 64
MAX_NODES = 4_000_000
MAX_TEXT = 1 << 16
MEMORY_BYTES = 3 * 2**30
CPU_S = 600
_ENCODINGS = ("ascii", "cp437", "latin-1", "raw-unicode-escape", "unicode-escape", "utf-8")


def main() -> None:
    """Read the jobs, limit this process for good, do them, answer."""
    request = json.load(sys.stdin)
    for encoding in _ENCODINGS:  # their modules cannot be opened later
        codecs.lookup(encoding)
    limit(max((job["file"] for job in request["jobs"]), default=2))
    try:
        answer = answer_to(request["jobs"])
    except MemoryError:
        answer = {"refused": [f"more than {MEMORY_BYTES} bytes of memory to read it", "less", "save tensors only"]}
    json.dump(answer, sys.stdout, separators=(",", ":"))
    sys.stdout.flush()


def limit(last_file: int) -> None:
    """No more memory, time, files, sockets or cores than reading needs; needs no privilege and cannot be undone."""
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, last_file + 1),
    ):
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


def answer_to(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of all jobs, or the first refusal."""
    writer = _Writer()
    for number, job in enumerate(jobs):
        reader = open_torch if job["kind"] == "torch" else open_pickle
        try:
            opened = reader(job["file"], job["start"], job["count"])
            writer.values.append(writer.document(opened, job["file"]))
        except RefusedError as error:
            return {"refused": [error.found, error.needed, error.fix], "job": number}
        except RecursionError:
            return {
                "refused": ["values inside each other without end", "a flat state_dict", "save that"],
                "job": number,
            }
        except (ValueError, TypeError, LookupError, OverflowError, OSError) as error:
            text = f"{type(error).__name__}: {str(error)[:160]}"
            return {"refused": [f"what cannot be read ({text})", "a whole file", "copy it again"], "job": number}
    return {"values": writer.values, "storages": writer.storages}


def _check_budget(count: int, depth: int = 0) -> None:
    if depth > MAX_DEPTH or count > MAX_NODES:
        raise RefusedError(
            f"more than {MAX_DEPTH} values inside each other, or {MAX_NODES} in all", "a flat state_dict",
            "save only the state_dict",
        )  # fmt: skip


def _count(value: Any, depth: int, known: dict[int, int]) -> int:
    """How many values there are once those that are shared are written out: without writing any."""
    if isinstance(value, Record):
        inner: list[Any] = [*value.args, value.state, *value.items]
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | set) or (isinstance(value, tuple) and not isinstance(value, Name)):
        inner = list(value)
    else:
        return 1
    if id(value) not in known:
        count = 1
        for item in inner:
            count += _count(item, depth + 1, known)
            _check_budget(count, depth)
        known[id(value)] = count
    return known[id(value)]


class _Writer:
    """Values as JSON, shared ones written out, within a budget."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.storages: list[tuple[int, int, int, int | None, str]] = []
        self._seen: dict[tuple[int, Place], int] = {}
        self._nodes = 0

    def document(self, opened: Opened, file: int) -> Any:
        """One job's value."""
        self._nodes += _count(opened.value, 0, {})
        _check_budget(self._nodes)
        return self._json(opened.value, (opened, file))

    def _json(self, value: Any, within: tuple[Opened, int]) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return value if abs(value) < 2**63 else {"o": "int"}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"f": str(value)}
        if isinstance(value, str):
            return value if len(value) <= MAX_TEXT else {"o": "str"}
        if isinstance(value, Name):
            return {"n": str(value)[:512]}
        if isinstance(value, Tensor):
            return {"t": self._tensor(value, within)}
        return self._container(value, within)

    def _container(self, value: Any, within: tuple[Opened, int]) -> Any:
        if isinstance(value, dict):
            if long := [len(key) for key in value if isinstance(key, str) and len(key) > MAX_TEXT]:
                what = f"a name of {long[0]} characters in a dict"
                raise RefusedError(what, f"at most {MAX_TEXT}", "save the tensors under shorter names")
            pairs = [[self._json(k, within), self._json(v, within)] for k, v in value.items()]  # keys may be records
            return {"d": pairs}
        if isinstance(value, list | tuple | set):
            return [self._json(item, within) for item in value]
        if isinstance(value, Record):
            return {
                "r": str(value.name)[:512],
                "a": self._json(list(value.args), within),
                "s": self._json(value.state, within),
                "i": self._json(value.items, within),
            }
        return {"o": type(value).__name__}

    def _tensor(self, tensor: Tensor, within: tuple[Opened, int]) -> list[Any]:
        opened, file = within
        place = opened.places[id(tensor.storage)]
        index = self._seen.setdefault((file, place), len(self.storages))
        if index == len(self.storages):
            self.storages.append((file, *place, tensor.storage.device))
        return [index, tensor.dtype, tensor.offset, tensor.shape, tensor.stride]


if __name__ == "__main__":
    main()
