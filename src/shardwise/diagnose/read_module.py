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

LONGEST = 512
"""Tokens of the sample: sizes per token do not depend on it."""


def read_module(model: str, factory: Callable[[], nn.Module], seq_len: int, device: str) -> Profile:
    """The profile of a module, from its own forward of `seq_len` token ids.

    Args:
        model: what it is called.
        factory: makes it.
        seq_len: tokens of the sample, at most `LONGEST`.
        device: `meta`, or `cpu`, which runs the forward for real.

    Raises:
        ModelError: a factory that fails, a module that does not take token ids, or one that cannot be read there.

    Cost: see `describe`.
    """
    tokens = torch.zeros(1, min(seq_len, LONGEST), dtype=torch.long, device=device)
    try:
        return describe(factory, tokens, device=device, name=model)
    except ModelError as error:
        if not str(error).startswith("describe:"):
            raise
        said = str(error).replace("describe(..., device='cpu')", "--trace-on cpu")
        raise ModelError(f"model {model}: {said}. It was given token ids of shape {list(tokens.shape)}") from error


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
