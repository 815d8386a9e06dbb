"""`pkg.mod:factory` as the planner's MODEL: imported, checked, and read as a profile."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from shardwise.diagnose.brought import as_batch, aside, on_meta
from shardwise.diagnose.brought import example_length as example_length
from shardwise.diagnose.brought import example_of as example_of
from shardwise.diagnose.brought import module_factory as module_factory
from shardwise.errors import ModelError, ShardwiseError
from shardwise.model.alike import shorter
from shardwise.model.arguments import required_by
from shardwise.model.describe import describe
from shardwise.model.profile import Block, Profile, block_flops
from shardwise.model.seen import WIDTHS
from shardwise.model.spec import ModelSpec
from shardwise.model.stacks import WHOLE, blocks_of, find_blocks
from shardwise.model.tracer import copy_module, tensors_in
from shardwise.parallel.blocks import own_blocks, refuse_running_statistics
from shardwise.parallel.compose import place
from shardwise.parallel.initial.blueprint import Blueprint, record
from shardwise.parallel.mesh import open_mesh
from shardwise.parallel.refused.limits import refuse_limits
from shardwise.plan.plan import Plan
from shardwise.plan.rows.modules import COMPILED_RECOMPUTE
from shardwise.testing.fake import fake_world

LONGEST = 512
"""Tokens of a sample that is computed; on meta it is as long as asked for: what attention keeps may grow faster."""
LENGTHS = ((32, 96), (256, 512))
"""Tokens that a forward is read with in place of one that takes too long; two tell whether all of it is per token. A
scan in chunks fills up its last one, of 64 to 256."""
PATIENCE_S = 8.0
"""Seconds of a forward on meta after which it is asked whether its length is why."""
LOOP = 0.5
"""Calls by one module itself for each token of a sample: so many are a loop over tokens."""
MANY = 1000
"""Calls by one module of which fewer are read at once, whatever they are."""
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


@aside
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
    found = blocks_of(partial(on_meta, factory), blocks)
    unknown = dict.fromkeys(("tp", "ep"), "the sizes that it must divide are not known for a module")
    length = None if example is None else example_length(example)
    fixed = example is not None and next(tensor for _, tensor in tensors_in(example)).is_floating_point()
    return Planned(
        made=lambda _: factory,
        longest=length,
        usual=length if fixed and length else 4096,
        is_fixed=fixed,  # what the second size of such a sample is nobody knows
        refused=lambda seq: unknown | refused_axes(factory, seq, found),
        notes=(*said_of(found), *_said_of_rows(as_batch(factory, example)), *_said_of_ties(on_meta(factory), found)),
        blocks=found,
    )


def _said_of_rows(batch: Any) -> tuple[str, ...]:
    """What is assumed of tensors of an example that have not its rows: positions, masks, a graph's edges."""
    found = [(".".join(map(str, path)), tensor) for path, tensor in tensors_in(batch) if tensor.dim()]
    once = [name for name, tensor in found if len(tensor) != len(found[0][1])]
    if not once:
        return ()
    return (
        f"a sample is one of the {len(found[0][1])} rows of {found[0][0]}; {', '.join(once)} of its example, which "
        "another number of rows have, are taken as they are, once per micro-batch",
    )


def _said_of_ties(module: nn.Module, blocks: str) -> tuple[str, ...]:
    """What is not counted of a module whose blocks share parameters with what is outside of them."""
    names = () if blocks == WHOLE else find_blocks(module, blocks)
    held: dict[nn.Parameter, dict[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        block = next((block for block in names if name.startswith(f"{block}.")), "")
        held.setdefault(parameter, {}).setdefault(block, name)
    shared = next((list(places.values()) for places in held.values() if len(places) > 1), None)
    if shared is None:
        return ()
    return (
        f"{shared[0]} is {shared[1]} too: blocks that share parameters are gathered with the rest of the model, for a "
        "whole step, which the estimate of memory leaves out (under fsdp it is up to a third more; --trace counts it)",
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
        self.inner_required = required_by(module.forward)
        if hasattr(module, "config"):  # of transformers: `describe` asks it whether keys would be kept
            self.config = module.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives."""
        return self.whole(*args, **kwargs)


@aside
def read_module(
    model: str,
    factory: Callable[[], nn.Module],
    seq_len: int,
    device: str,
    blocks: str = "auto",
    **options: Any,
) -> Profile:
    """The profile of a module, from its own forward: of its `example_input_array`, else of `seq_len` token ids.

    Args:
        model: what it is called.
        factory: makes it.
        seq_len: tokens of the sample, on a CPU at most `LONGEST`.
        device: `meta`, or `cpu`, which runs the forward for real.
        blocks: the pattern of its repeated blocks, or `WHOLE`.
        **options: `how`, what to do about inputs that it does not take; `widths`, see `describe`.

    Raises:
        ModelError: a factory that fails, a module that does not take its sample, or one that cannot be read there.

    Cost: see `describe`.
    """
    how, widths = options.get("how", SAID_BY_EXAMPLE), options.get("widths", WIDTHS)
    sample = example_of(factory, device)
    if sample is None:
        length = seq_len if device == "meta" else min(seq_len, LONGEST)
        sample = torch.zeros(1, length, dtype=torch.long, device=device)
    try:
        return _described(factory, sample, blocks, device=device, name=model, widths=widths)
    except ModelError as error:
        if not str(error).startswith("describe:"):
            raise
        said = str(error).replace("describe(..., device='cpu')", "--trace-on cpu")
        shapes = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')} of shape {list(t.shape)}" for _, t in tensors_in(sample)
        )
        raise ModelError(f"model {model}: {said}. It was given {shapes}; {how}") from error


def _described(factory: Callable[[], nn.Module], sample: Any, blocks: str, **options: Any) -> Profile:
    made = factory if options.get("device", "meta") != "meta" else partial(on_meta, factory)
    if blocks == WHOLE:
        return describe(lambda: Whole(made()), sample, blocks="whole", **options)
    return describe(made, sample, blocks=blocks, **options)


@aside
def read_planned(
    model: str,
    planned: Planned,
    seq_len: int,
    device: str,
    blocks: str = "auto",
    widths: Collection[float] = WIDTHS,
) -> tuple[Profile, tuple[str, ...]]:
    """`read_module`, at fewer tokens where a forward on meta takes long and is per token; and what is to be said of it.

    A forward in a loop of its own over tokens (scans of state spaces without their kernels) has thousands of operators.

    Args:
        model: what it is called.
        planned: the module.
        seq_len: tokens of a sample.
        device: `meta` or `cpu`.
        blocks: a pattern in place of `planned.blocks`; auto: that.
        widths: see `describe`.

    Raises:
        ModelError: see `read_module`.
    """
    factory = planned.made(seq_len)
    blocks = planned.blocks if blocks == "auto" else blocks
    read = partial(read_module, model, factory, device=device, blocks=blocks, how=planned.how, widths=widths)
    long = device == "meta" and seq_len > LENGTHS[0][0] and example_of(factory) is None
    is_recurrent = long and _is_recurrent(factory)  # made before the clock runs: what it imports takes seconds once
    try:
        with _Patience(PATIENCE_S, max(MANY, LOOP * seq_len)).kept() if long else nullcontext():
            if not is_recurrent:
                return read(seq_len=seq_len), ()
    except _TooLong:
        pass
    for short, longer in LENGTHS:
        if longer < seq_len and _alike(*(_of_few(factory, n, blocks) for n in (short, longer))):
            note = (
                f"its forward takes long to read at {seq_len} tokens here, and is the same per token at {short} and "
                f"{longer}: it was read at {short}; if it is a scan in a loop, without the memory and the kernels of a "
                "fused one"
            )
            return read(seq_len=short), (note,)
    warnings.warn(
        f"the forward of {model} is read at {seq_len} tokens, which takes long: what it keeps is not the same per "
        "token at fewer; a shorter --seq takes less",
        stacklevel=2,
    )
    return read(seq_len=seq_len), ()


def _is_recurrent(factory: Callable[[], nn.Module]) -> bool:
    """Whether it has modules that are one call, and thousands of operators within it."""
    return any(isinstance(module, nn.RNNBase) for module in on_meta(factory).modules())


def _ids(tokens: int) -> torch.Tensor:
    return torch.zeros(1, tokens, dtype=torch.long, device="meta")


def _of_few(factory: Callable[[], nn.Module], tokens: int, blocks: str) -> Profile:
    """The profile of so many tokens, by the first blocks of each kind, where the model runs with these alone."""
    if blocks != WHOLE:
        with suppress(ModelError):
            return _described(shorter(factory, blocks, times=1), _ids(tokens), blocks, widths=())
    return _described(factory, _ids(tokens), blocks, widths=())


def _alike(short: Profile, longer: Profile) -> bool:
    """Whether two lengths give the same per token."""
    pairs = zip(_per_token(short), _per_token(longer), strict=True)
    return all(abs(a - b) <= ALIKE * max(a, b) for a, b in pairs)


def _per_token(profile: Profile) -> tuple[float, ...]:
    """What grows with the tokens of a sample, but for fused attention, which the planner scales by itself.

    Of the blocks, beside all: a large output layer hides them where only a few are read.
    """
    parts = (profile.blocks, (*profile.blocks, profile.head))
    return tuple(number for blocks in parts for number in _of_blocks(blocks))


def _of_blocks(blocks: Sequence[Block]) -> tuple[float, float, float]:
    ops = [op for block in blocks for op in block.ops]
    flops = sum(block_flops(block, LENGTHS[0][1]) for block in blocks)
    return flops, sum(op.saves for op in ops), sum(getattr(op, "moved", 0.0) for op in ops)


class _TooLong(BaseException):
    """A forward takes too long. No `Exception`: it is not the module's own."""


class _Patience(TorchFunctionMode):
    """Within it no module is entered after so many seconds of this process, and none makes more calls than `most`."""

    def __init__(self, seconds: float, most: float) -> None:
        super().__init__()
        self.end, self.most = time.process_time() + seconds, most
        self.calls: list[int] = []
        """Those of each module that is entered, the innermost last, by itself."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Watch every module."""
        hooks = (
            register_module_forward_pre_hook(self._in),
            register_module_forward_hook(self._out, always_call=True),
        )
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call, and make it."""
        if self.calls:
            self.calls[-1] += 1
            if self.calls[-1] > self.most:
                raise _TooLong
        return func(*args, **(kwargs or {}))

    def _in(self, *args: object) -> None:
        self.calls.append(0)  # first: `_out` is called whatever is raised
        if time.process_time() > self.end:
            raise _TooLong

    def _out(self, *args: object) -> None:
        self.calls.pop()


@aside
def refused_axes(factory: Callable[[], nn.Module], seq_len: int, blocks: str = "auto") -> dict[str, str]:
    """Words of `space.FEATURES` that a module cannot have -> the id of the limit of `apply` (docs/constraints.md).

    Cost: the passes on one rank of two of a pretended world, for each axis; shapes only.

    Raises:
        ModelError: a module that no plan can have.
    """
    blueprint = record(factory)
    refuse_limits(blueprint.module, Plan())
    refused = {}
    for word, text in (("dp_replicate", "dp2"), ("dp_shard", "fsdp2"), ("accumulation", "dp1 / mb2")):
        try:
            refuse_limits(blueprint.module, Plan.parse(text))
        except ModelError as error:
            refused[word] = error.row
    if blocks == WHOLE:
        return refused | dict.fromkeys(ONE_BLOCK, "module.no-blocks")
    example = example_of(factory)
    sample = torch.zeros(1, seq_len, dtype=torch.long) if example is None else as_batch(factory, example)
    for axis, text in (("cp", "cp2"), ("pp", "pp2 / gpipe mb2"), ("recompute", "dp1 / recompute=blocks")):
        plan = Plan.parse(text).with_(blocks=blocks)
        with fake_world(plan.world), open_mesh(plan, device="cpu") as mesh:
            try:
                placed = place(another(blueprint, factory), plan, mesh, sample=sample)
            except (ShardwiseError, SystemExit) as error:
                refused[axis] = getattr(error, "row", "") or str(error).partition(";")[0]
    if "recompute" not in refused:
        try:
            refuse_limits(blueprint.module, plan.with_(compile=True))
            for name, block in own_blocks(placed):
                refuse_running_statistics(name, block)
        except ModelError as error:
            refused[COMPILED_RECOMPUTE] = error.row
    return refused


def another(blueprint: Blueprint, factory: Callable[[], nn.Module]) -> Blueprint:
    """The same with a module of its own, which the passes change; the factory is called where it cannot be copied."""
    try:
        return replace(blueprint, module=copy_module(blueprint.module, {}))
    except ModelError:
        return record(factory)
