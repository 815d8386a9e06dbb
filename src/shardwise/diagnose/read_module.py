"""`pkg.mod:factory` as the planner's MODEL: imported, checked, and read as a profile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError, ShardwiseError
from shardwise.findings import nearest
from shardwise.model.describe import describe
from shardwise.model.profile import Profile
from shardwise.model.tracer import tensors_in
from shardwise.parallel.blueprint import record
from shardwise.parallel.compose import place
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.fake import fake_world

LONGEST = 512
"""Tokens of a sample that is computed; on meta it is as long as asked for: what attention keeps may grow faster."""


def read_module(model: str, factory: Callable[[], nn.Module], seq_len: int, device: str) -> Profile:
    """The profile of a module, from its own forward: of its `example_input_array`, else of `seq_len` token ids.

    Args:
        model: what it is called.
        factory: makes it.
        seq_len: tokens of the sample, on a CPU at most `LONGEST`.
        device: `meta`, or `cpu`, which runs the forward for real.

    Raises:
        ModelError: a factory that fails, a module that does not take token ids, or one that cannot be read there.

    Cost: see `describe`.
    """
    sample = example_of(factory)
    if sample is None:
        length = seq_len if device == "meta" else min(seq_len, LONGEST)
        sample = torch.zeros(1, length, dtype=torch.long, device=device)
    try:
        return describe(factory, sample, device=device, name=model)
    except ModelError as error:
        if not str(error).startswith("describe:"):
            raise
        said = str(error).replace("describe(..., device='cpu')", "--trace-on cpu")
        shapes = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')} of shape {list(t.shape)}" for _, t in tensors_in(sample)
        )
        raise ModelError(
            f"model {model}: {said}. It was given {shapes}; a module with other inputs says which in its attribute "
            "`example_input_array` (a tensor, a tuple or a dict of them, as its forward takes a batch)"
        ) from error


def example_of(factory: Callable[[], nn.Module]) -> Any:
    """What a module says its forward takes, as Lightning's modules do; None: it says nothing."""
    with torch.device("meta"):
        return getattr(factory(), "example_input_array", None)


def example_length(example: Any) -> int:
    """What counts as the tokens of a sample: the second size of its first tensor, as `describe` counts."""
    first = next(tensor for _, tensor in tensors_in(example))
    return int(first.shape[1]) if first.dim() > 1 else 1


def refused_axes(factory: Callable[[], nn.Module], seq_len: int) -> dict[str, str]:
    """Axes that a module cannot have -> the id of the limit (docs/constraints.md), as `apply` would find it.

    Cost: the passes on one rank of two of a pretended world, for each axis; shapes only.
    """
    refused = {}
    for axis, text in (("cp", "cp2"), ("pp", "pp2 / gpipe mb2")):
        plan = Plan.parse(text)
        example = example_of(factory)
        sample = torch.zeros(1, seq_len, dtype=torch.long) if example is None else example
        with fake_world(2), open_mesh(plan, device="cpu") as mesh:
            try:
                place(record(factory), plan, mesh, sample=sample)
            except ShardwiseError as error:
                refused[axis] = getattr(error, "row", "") or str(error).partition(";")[0]
    return refused


def module_factory(model: str) -> Callable[[], nn.Module]:
    """The function of `package.module:function`, so that what it raises is told as its own.

    Raises:
        ConfigError: nothing of this name.
        ModelError: no function. Its call raises the same, and ConfigError where it needs arguments.
    """
    place, _, name = model.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a module in this directory, as `python -m` finds it
    try:
        module = import_module(place)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(
            f"model {model!r}: {place!r} cannot be imported: {type(error).__name__}: {error}; needed "
            "package.module:function, of a module that is installed or in this directory; correct the name, or the "
            "module"
        ) from error
    known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if name not in vars(module):
        raise ConfigError(
            f"model {model!r}: {place!r} has no {name!r}; needed a function without arguments that returns a module; "
            f"{nearest(name, known)}"
        )
    return _checked(model, getattr(module, name))


def _needed_arguments(factory: Callable[..., Any]) -> list[str]:
    """Names of the parameters without a default."""
    try:
        parameters = signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin, which says nothing of them
        return []
    return [each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]


def _checked(model: str, factory: Any) -> Callable[[], nn.Module]:
    """A factory that can be sent to other processes wherever the user's own can."""
    if isinstance(factory, nn.Module):
        return partial(_given, factory)
    if not callable(factory):
        raise ModelError(
            f"model {model!r}: found {type(factory).__name__} {factory!r}, needed a function without arguments that "
            "returns a module; write one"
        )
    return partial(_make, model, factory)


def _given(module: nn.Module) -> nn.Module:
    return module


def _make(model: str, factory: Callable[[], Any]) -> nn.Module:
    try:
        made = factory()
    except ShardwiseError:
        raise
    except Exception as error:  # the user's own code
        missing = _needed_arguments(factory)
        called = f"; it needs arguments ({', '.join(missing)}), and is called without" if missing else ""
        raise (ConfigError if missing else ModelError)(
            f"model {model!r}: the factory failed: {type(error).__name__}: {error}{called}; needed a function that "
            "needs no argument and returns a torch.nn.Module; call it yourself, and correct it"
        ) from error
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"model {model!r}: the factory returned {type(made).__name__}, needed a torch.nn.Module; return the model"
        )
    return made
