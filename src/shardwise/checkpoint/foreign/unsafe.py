"""`--unsafe-pickle`: the one place of the package that loads a file which may run code, in a process of its own.

The process has the user's rights: limits on memory, time and size keep accidents small, they stop no attacker. Its
answer is that of `child.py`, with the tensors' bytes written to a file that the parent has opened and checks.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.foreign.sandbox import TENSOR
from shardwise.checkpoint.format import DTYPES

CPU_S = 3600
SPARE_BYTES = 32 * 2**30
MAX_DEPTH = 64


def main() -> None:
    """Load each file as torch does without `weights_only`, and hand over names, numbers and the tensors' bytes."""
    request = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # what a file prints is no answer
    sizes = sum(os.fstat(job["file"]).st_size for job in request["jobs"])
    for kind, most in (
        (resource.RLIMIT_AS, SPARE_BYTES + 4 * sizes),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_FSIZE, 4 * sizes + 2**20),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    answer = answer_to(request["jobs"], request["scratch"])
    with os.fdopen(out, "w", encoding="utf-8") as file:
        json.dump(answer, file, separators=(",", ":"))


def answer_to(jobs: list[dict[str, Any]], scratch: int) -> dict[str, Any]:
    """The values of all jobs, or the first refusal; the tensors' bytes are in the file `scratch` then."""
    writer = _Writer(scratch)
    values = []
    for number, job in enumerate(jobs):
        try:
            writer.begin()
            values.append(writer.json(_load(job["file"]), 0))
        except Exception as error:  # whatever a file's own code raises
            text = f"what torch.load cannot load ({type(error).__name__}: {str(error)[:200]})"
            return {"refused": [text, "a file of torch.save", "load it where it was written"], "job": number}
    return {"values": values, "storages": writer.storages}


def _load(descriptor: int) -> Any:
    path = f"/proc/self/fd/{descriptor}"
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except RuntimeError:  # a file of before torch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=False)


class _Writer:
    """Values as JSON, as `child.py` writes them; each tensor's bytes go to a file."""

    def __init__(self, descriptor: int) -> None:
        self.storages: list[tuple[int, int, int, None, str]] = []
        self._descriptor, self._at = descriptor, 0
        self._seen: dict[tuple[Any, ...], tuple[int, Tensor]] = {}
        """The tensors are held: an address is one tensor's for as long as that lives."""

    def begin(self) -> None:
        """Before each file: the last one's tensors go, and their addresses are others' then."""
        self._seen.clear()

    def json(self, value: Any, depth: int) -> Any:
        """A value, with what is neither data nor tensor by the name of its type."""
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} values inside each other")
        if value is None or isinstance(value, bool):
            return value
        if type(value) is int and abs(value) < 2**63:
            return value
        if type(value) is float:
            return value if value - value == 0 else {"f": str(value)}
        if type(value) is str:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            pairs = [[self.json(k, depth + 1), self.json(v, depth + 1)] for k, v in value.items()]
            return {"d": pairs}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.json(item, depth + 1) for item in value]
        name = f"{type(value).__module__}.{type(value).__name__}"
        if name.endswith(".fragment_address"):  # of DeepSpeed: a slice
            return {"r": name, "a": [], "s": self.json(vars(value), depth + 1), "i": []}
        return {"o": name}

    def _tensor(self, tensor: Tensor) -> Any:
        dtype = str(tensor.dtype).removeprefix("torch.")
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if dtype not in DTYPES or not plain:
            layout = str(tensor.layout).removeprefix("torch.")
            return {"o": f"{TENSOR}{dtype}, {layout}, {type(tensor).__name__}"}
        tensor = tensor.detach().resolve_conj().resolve_neg()
        shape = tuple(tensor.shape)
        key = (tensor.data_ptr(), dtype, shape, tensor.stride()) if tensor.numel() else (len(self.storages),)
        index, _ = self._seen.setdefault(key, (len(self.storages), tensor))
        if index == len(self.storages):
            array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            data = memoryview(array)
            self.storages.append((self._descriptor, self._at, len(data), None, "cpu"))  # where it was loaded to
            self._at += len(data)
            while data:
                data = data[os.write(self._descriptor, data) :]
        return {"t": [index, dtype, 0, shape, torch.empty(shape, device="meta").stride()]}


if __name__ == "__main__":
    main()
