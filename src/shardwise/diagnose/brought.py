"""A user's module as it is brought: imported, called as seldom as can be, and what it says that its forward takes.

What the user's own code prints goes to stderr: stdout is the answer's, which programs read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial, wraps
from importlib import import_module
from inspect import Signature, signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from shardwise.errors import ConfigError, ModelError, ShardwiseError
from shardwise.findings import nearest
from shardwise.model.arguments import required_by
from shardwise.model.tracer import tensors_in
from shardwise.parallel.initial.blueprint import Blueprint, record

P = ParamSpec("P")
T = TypeVar("T")

EXAMPLE = "example_input_array"
"""The attribute of a module that says what its forward takes, as Lightning's modules have it."""


def aside(function: Callable[P, T]) -> Callable[P, T]:
    """What is printed within the function goes to stderr."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with redirect_stdout(sys.stderr):
            return function(*args, **kwargs)

    return run


# ---------------------------------------------------------------- a factory


class Factory:
    """What a user calls a factory, so that what it raises is told as its own. Goes wherever the user's own can."""

    def __init__(self, model: str, call: Callable[[], Any]) -> None:
        """Args: what it is called; the user's function."""
        self.model, self.call, self.__name__ = model, call, model
        self.kept: nn.Module | None = None
        """The module on meta: see `on_meta`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what is kept."""
        return Factory, (self.model, self.call)

    @aside
    def __call__(self) -> nn.Module:
        """A new module.

        Raises:
            ConfigError: the function needs arguments.
            ModelError: it fails, or returns no module to train.
        """
        try:
            made = self.call()
        except ShardwiseError:
            raise
        except (Exception, SystemExit) as error:  # the user's own code
            missing = _needed_arguments(self.call)
            called = f"; it needs arguments ({', '.join(missing)}), and is called without" if missing else ""
            raise (ConfigError if missing else ModelError)(
                f"model {self.model!r}: the factory failed: {said_of_error(error)}{called}; needed a function that "
                "needs no argument and returns a torch.nn.Module; call it yourself, and correct it"
            ) from error
        return self.checked(made)

    def checked(self, made: Any) -> nn.Module:
        """What the function returned.

        Raises:
            ModelError: no module to train, or one whose parameters have no sizes yet.
        """
        if not isinstance(made, nn.Module) or not any(True for _ in made.parameters()):
            found = type(made).__name__ + (" without parameters" if isinstance(made, nn.Module) else "")
            raise ModelError(
                f"model {self.model!r}: the factory returned {found}, needed a torch.nn.Module to train; return the "
                "model"
            )
        if lazy := [name for name, p in made.named_parameters() if isinstance(p, UninitializedParameter)]:
            raise ModelError(
                f"model {self.model!r}: {lazy[0]} has no size yet: its module is a lazy one, which takes it from its "
                "first input; needed sizes before anything runs: say them (nn.Linear in place of nn.LazyLinear)"
            )
        return made


def said_of_error(error: BaseException) -> str:
    """The type of an error and the first line of what it says.

    >>> said_of_error(RuntimeError("boom and more"))
    'RuntimeError: boom and more'
    """
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def module_factory(model: str) -> Factory:
    """The function of `package.module:function`.

    Raises:
        ConfigError: nothing of this name, or the path of a file.
        ModelError: no function. Its call raises the same, and ConfigError where it needs arguments.
    """
    place, _, name = model.partition(":")
    _refuse_path(model, place, name)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a module in this directory, as `python -m` finds it
    try:
        module = aside(import_module)(place)
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it is imported
        raise ConfigError(
            f"model {model!r}: {place!r} cannot be imported: {said_of_error(error)}; needed package.module:function, "
            "of a module that is installed or in this directory; correct the name, or the module"
        ) from error
    known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if name not in vars(module):
        raise ConfigError(
            f"model {model!r}: {place!r} has no {name!r}; needed a function without arguments that returns a module; "
            f"{nearest(name, known)}"
        )
    found = getattr(module, name)
    if isinstance(found, nn.Module):
        return Factory(model, partial(_given, found))
    if not callable(found):
        raise ModelError(
            f"model {model!r}: found {type(found).__name__} {found!r}, needed a function without arguments that "
            "returns a module; write one"
        )
    return Factory(model, found)


def _refuse_path(model: str, place: str, name: str) -> None:
    if not place.endswith(".py") and "/" not in place:
        return
    path = Path(place)
    dotted = ".".join(path.with_suffix("").parts) if not path.is_absolute() else path.stem
    where = f", in the directory {path.parent}" if path.is_absolute() else ""
    raise ConfigError(
        f"model {model!r}: found the path of a file, needed package.module:function, as Python imports it; write "
        f"{dotted}:{name}{where}"
    )


def _given(module: nn.Module) -> nn.Module:
    return module


def _needed_arguments(factory: Callable[..., Any]) -> list[str]:
    """Names of the parameters without a default."""
    try:
        needed = required_by(factory)
    except (TypeError, ValueError):  # a builtin, which says nothing of them
        return []
    return [name for name in signature(factory).parameters if name in needed]


# ---------------------------------------------------------------- its module without values


@aside
def on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    """The module without values; of a `Factory` it is made once, and not to be changed.

    On torch's meta device, which is quick; where that lacks values that the function asks for, as `apply` builds it.

    Raises:
        ModelError: see `Factory`, and `record`.
    """
    if not isinstance(factory, Factory):
        with torch.device("meta"):
            return factory()
    if factory.kept is None:
        factory.kept = _without_values(factory)
    return factory.kept


def _without_values(factory: Factory) -> nn.Module:
    try:
        with torch.device("meta"):
            return factory()
    except ModelError as error:
        if "meta" not in str(error.__cause__).lower():
            raise
        return factory.checked(_recorded(factory).module)


def _recorded(factory: Factory) -> Blueprint:
    raw = wraps(factory.call, assigned=())(lambda: factory.call())
    raw.__name__ = factory.model
    try:
        return record(raw)
    except ModelError as error:
        raise ModelError(f"model {factory.model!r}: {error}") from error


# ---------------------------------------------------------------- what its forward takes


@aside
def example_of(factory: Callable[[], nn.Module], device: str = "meta") -> Any:
    """What a module says its forward takes, as Lightning's modules do; None: it says nothing.

    Raises:
        ModelError: it says what no forward takes, or what this one does not.
    """
    if device == "meta":
        module = on_meta(factory)
    else:
        with torch.device(device):
            module = factory()
    example = getattr(module, EXAMPLE, None)
    if example is not None:
        _check_example(getattr(factory, "model", type(module).__name__), signature(module.forward), example)
    return example


def _check_example(model: str, takes: Signature, example: Any) -> None:
    if not tensors_in(example):
        raise ModelError(
            f"model {model!r}: its {EXAMPLE} holds no tensor, found {type(example).__name__} {example!r:.60}; needed a "
            "tensor, a tuple or a dict of them, as its forward takes a batch; correct it, or leave it out for token ids"
        )
    if not isinstance(example, tuple | list):
        return
    try:
        takes.bind(*example)
    except TypeError as error:
        kind = type(example).__name__
        raise ModelError(
            f"model {model!r}: its {EXAMPLE} is a {kind}, which is as many arguments as it is long, found "
            f"{len(example)}, and forward takes ({', '.join(takes.parameters)}): {error}; needed one for each "
            "argument: one that is a list itself is written as ([...],)"
        ) from error


def example_length(example: Any) -> int:
    """What counts as the tokens of a sample: the second size of its first tensor, as `describe` counts."""
    first = next(tensor for _, tensor in tensors_in(example))
    return int(first.shape[1]) if first.dim() > 1 else 1


def as_batch(factory: Callable[[], nn.Module], example: Any) -> Any:
    """An example as a batch of a step: several arguments by their names, for of a pair a step gives the first alone."""
    if isinstance(example, tuple | list) and len(example) > 1:
        return dict(zip(signature(on_meta(factory).forward).parameters, example, strict=False))
    return example if isinstance(example, Mapping | tuple | list) else (example,)
