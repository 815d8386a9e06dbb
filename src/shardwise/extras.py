"""Libraries that only some inputs need: the extras of pyproject.toml, imported when such an input comes."""

from __future__ import annotations

import logging
from importlib import import_module
from types import ModuleType

from shardwise.errors import ConfigError

LOUD = ("torchao", "torch.utils._pytree")
"""Loggers that warn of kernels for other machines whenever `transformers` is imported: no user can do anything."""


def optional_module(name: str, *, extra: str, need: str) -> ModuleType:
    """A library that only some inputs need.

    Args:
        name: of the module; a constant of the code, never part of an input.
        extra: the extra of Shardwise that installs it.
        need: what needs it, for the error.

    Raises:
        ConfigError: it is not installed; says how to.

    >>> optional_module("json", extra="data", need="a test").__name__
    'json'
    """
    for loud in LOUD:
        logging.getLogger(loud).setLevel(logging.ERROR)
    try:
        return import_module(name)
    except ImportError as error:
        library = name.split(".")[0]
        raise ConfigError(
            f"{need}: the library {library} is not installed ({error}), needed for this kind of input; "
            f"run: pip install 'shardwise[{extra}]'"
        ) from error
