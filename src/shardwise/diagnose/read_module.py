"""`pkg.mod:factory` as the planner's MODEL: imported, checked, and read as a profile."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwise.errors import ConfigError, ModelError, ShardwiseError
from shardwise.findings import nearest
from shardwise.model.describe import describe
from shardwise.model.profile import Profile
from shardwise.model.spec import ModelSpec
from shardwise.model.stacks import WHOLE, blocks_of
from shardwise.model.tracer import tensors_in
from shardwise.parallel.blueprint import record
from shardwise.parallel.compose import place
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.fake import fake_world

LONGEST = 512
"""Tokens of a sample that is computed; on meta it is as long as asked for: what attention keeps may grow faster."""
LENGTHS = ((32, 96), (256, 512))
"""Tokens that a forward is read with in place of one that takes too long; two tell whether all of it is per token. A
scan in chunks fills up its last one, of 64 to 256."""
PATIENCE_S = 5.0
"""Seconds of a forward on meta after which it is asked whether its length is why."""
ALIKE = 0.03
"""How far what two lengths give per token may differ."""
ONE_BLOCK = ("pp", "cp", "recompute", "offload-activations", "compile")
"""What a plan of a module without repeated blocks cannot have."""
SAID_BY_EXAMPLE = (
    "a module with other inputs says which in its attribute `example_input_array` (a tensor, a tuple or a dict of "
    "them, as its forward takes a batch)"
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A module as the planner's MODEL, before its forward is read."""

    made: Callable[[int], Callable[[], nn.Module]]
    """Of a number of tokens: its factory. Whose module says in `example_input_array` what it is fed, if not ids."""
    longest: int | None = None
    """Tokens that it has positions for, where it says so."""
    usual: int = 4096
    """Tokens of a sample where nobody says how many."""
    is_fixed: bool = False
    """A sample has `longest` tokens, always."""
    refused: Callable[[int], Mapping[str, str]] = field(default=lambda _: {})
    """Of a number of tokens: axes that it cannot have, and why."""
    limits: ModelSpec | None = None
    """Sizes that axes must divide."""
    notes: tuple[str, ...] = ()
    """What is not counted, or was chosen."""
    blocks: str = "auto"
    """The pattern of its repeated blocks, or `WHOLE`."""
    how: str = SAID_BY_EXAMPLE
    """What to do about inputs that it does not take."""


def planned_module(model: str, blocks: str = "auto") -> Planned:
    """That of `package.module:function`.

    Args:
        model: its place.
        blocks: the pattern of its repeated blocks; of a module that shows none the whole is one.

    Raises:
        ConfigError, ModelError: see `module_factory` and `blocks_of`.
    """
    factory = module_factory(model)
    example = example_of(factory)
    found = blocks_of(factory, blocks)
    unknown = dict.fromkeys(("tp", "ep"), "the sizes that it must divide are not known for a module")
    length = None if example is None else example_length(example)
    fixed = example is not None and next(tensor for _, tensor in tensors_in(example)).is_floating_point()
    return Planned(
        made=lambda _: factory,
        longest=length,
        usual=length if fixed and length else 4096,
        is_fixed=fixed,  # what the second size of such a sample is nobody knows
        refused=lambda seq: unknown | refused_axes(factory, seq, found),
        notes=said_of(found),
        blocks=found,
    )


def said_of(blocks: str) -> tuple[str, ...]:
    """What is assumed of a module that is one block."""
    if blocks != WHOLE:
        return ()
    return (
        "it has no repeated blocks: it is planned as one block, which is sharded as one unit (left out: "
        f"{', '.join(ONE_BLOCK)}); a module within it that is called again and again is named with --blocks PATTERN",
    )


class Whole(nn.Module):
    """A module as the one block of another."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.whole = module
        if hasattr(module, "config"):  # of transformers: `describe` asks it whether keys would be kept
            self.config = module.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives."""
        return self.whole(*args, **kwargs)


def read_module(
    model: str,
    factory: Callable[[], nn.Module],
    seq_len: int,
    device: str,
    blocks: str = "auto",
    how: str = SAID_BY_EXAMPLE,
) -> Profile:
    """The profile of a module, from its own forward: of its `example_input_array`, else of `seq_len` token ids.

    Args:
        model: what it is called.
        factory: makes it.
        seq_len: tokens of the sample, on a CPU at most `LONGEST`.
        device: `meta`, or `cpu`, which runs the forward for real.
        blocks: the pattern of its repeated blocks, or `WHOLE`.
        how: what to do about inputs that it does not take.

    Raises:
        ModelError: a factory that fails, a module that does not take its sample, or one that cannot be read there.

    Cost: see `describe`.
    """
    sample = example_of(factory, device)
    if sample is None:
        length = seq_len if device == "meta" else min(seq_len, LONGEST)
        sample = torch.zeros(1, length, dtype=torch.long, device=device)
    try:
        return _described(factory, sample, blocks, device=device, name=model)
    except ModelError as error:
        if not str(error).startswith("describe:"):
            raise
        said = str(error).replace("describe(..., device='cpu')", "--trace-on cpu")
        shapes = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')} of shape {list(t.shape)}" for _, t in tensors_in(sample)
        )
        raise ModelError(f"model {model}: {said}. It was given {shapes}; {how}") from error


def _described(factory: Callable[[], nn.Module], sample: Any, blocks: str, **options: Any) -> Profile:
    if blocks == WHOLE:
        return describe(lambda: Whole(factory()), sample, blocks="whole", **options)
    return describe(factory, sample, blocks=blocks, **options)


def read_planned(
    model: str, planned: Planned, seq_len: int, device: str, blocks: str = "auto"
) -> tuple[Profile, tuple[str, ...]]:
    """`read_module`, at fewer tokens where a forward on meta takes long and is per token; and what is to be said of it.

    A forward in a loop of its own over tokens (scans of state spaces without their kernels) has thousands of operators.

    Args:
        model: what it is called.
        planned: the module.
        seq_len: tokens of a sample.
        device: `meta` or `cpu`.
        blocks: a pattern in place of `planned.blocks`; auto: that.

    Raises:
        ModelError: see `read_module`.
    """
    factory = planned.made(seq_len)
    blocks = planned.blocks if blocks == "auto" else blocks
    read = partial(read_module, model, factory, device=device, blocks=blocks, how=planned.how)
    long = device == "meta" and seq_len > LENGTHS[0][0] and example_of(factory) is None
    try:
        with _patience(PATIENCE_S if long else None):
            return read(seq_len=seq_len), ()
    except _TooLong:
        pass
    for short, longer in LENGTHS:
        if longer < seq_len and _alike(*(_described(factory, _ids(n), blocks, steps=False) for n in (short, longer))):
            note = (
                f"its forward takes long to read at {seq_len} tokens, and is the same per token at {short} and "
                f"{longer} (a scan in a loop): it was read at {short}, without the memory and the kernels of a fused "
                "scan"
            )
            return read(seq_len=short), (note,)
    warnings.warn(
        f"the forward of {model} is read at {seq_len} tokens, which takes long: what it keeps is not the same per "
        "token at fewer; a shorter --seq takes less",
        stacklevel=2,
    )
    return read(seq_len=seq_len), ()


def _ids(tokens: int) -> torch.Tensor:
    return torch.zeros(1, tokens, dtype=torch.long, device="meta")


def _alike(short: Profile, longer: Profile) -> bool:
    """Whether two lengths give the same per token."""
    pairs = zip(_per_token(short), _per_token(longer), strict=True)
    return all(abs(a - b) <= ALIKE * max(a, b) for a, b in pairs)


def _per_token(profile: Profile) -> tuple[float, ...]:
    """What grows with the tokens of a sample, but for fused attention, which the planner scales by itself."""
    ops = [op for block in (*profile.blocks, profile.head) for op in block.ops]
    moved = sum(getattr(op, "moved", 0.0) for op in ops)
    return profile.forward_flops(LENGTHS[0][1]), sum(op.saves for op in ops), moved


class _TooLong(BaseException):
    """A forward takes too long. No `Exception`: it is not the module's own."""


@contextmanager
def _patience(seconds: float | None) -> Iterator[None]:
    """Within it a module is not entered after so many seconds of this process."""
    if seconds is None:
        yield
        return
    end = time.process_time() + seconds

    def check(*args: object) -> None:
        if time.process_time() > end:
            raise _TooLong

    hook = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def example_of(factory: Callable[[], nn.Module], device: str = "meta") -> Any:
    """What a module says its forward takes, as Lightning's modules do; None: it says nothing."""
    with torch.device(device):
        return getattr(factory(), "example_input_array", None)


def example_length(example: Any) -> int:
    """What counts as the tokens of a sample: the second size of its first tensor, as `describe` counts."""
    first = next(tensor for _, tensor in tensors_in(example))
    return int(first.shape[1]) if first.dim() > 1 else 1


def refused_axes(factory: Callable[[], nn.Module], seq_len: int, blocks: str = "auto") -> dict[str, str]:
    """Axes that a module cannot have -> the id of the limit (docs/constraints.md), as `apply` would find it.

    Cost: the passes on one rank of two of a pretended world, for each axis; shapes only.
    """
    if blocks == WHOLE:
        return dict.fromkeys(ONE_BLOCK, "module.no-blocks")
    refused = {}
    for axis, text in (("cp", "cp2"), ("pp", "pp2 / gpipe mb2")):
        plan = Plan.parse(text).with_(blocks=blocks)
        example = example_of(factory)
        sample = torch.zeros(1, seq_len, dtype=torch.long) if example is None else example
        with fake_world(2), open_mesh(plan, device="cpu") as mesh:
            try:
                place(record(factory), plan, mesh, sample=sample)
            except (ShardwiseError, SystemExit) as error:
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
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it is imported
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
    except (Exception, SystemExit) as error:  # the user's own code
        missing = _needed_arguments(factory)
        called = f"; it needs arguments ({', '.join(missing)}), and is called without" if missing else ""
        raise (ConfigError if missing else ModelError)(
            f"model {model!r}: the factory failed: {type(error).__name__}: {error}{called}; needed a function that "
            "needs no argument and returns a torch.nn.Module; call it yourself, and correct it"
        ) from error
    if not isinstance(made, nn.Module) or not any(True for _ in made.parameters()):
        found = type(made).__name__ + (" without parameters" if isinstance(made, nn.Module) else "")
        raise ModelError(
            f"model {model!r}: the factory returned {found}, needed a torch.nn.Module to train; return the model"
        )
    return made
