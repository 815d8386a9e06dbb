"""What a step of a module holds, phase by phase: run on tensors of a CPU that have shapes and no values.

Of a CPU and not of meta: which kernel an operation becomes, and so what is kept for the backward pass, is chosen by the
device (an LSTM is one kernel per layer there, and on meta several for each token).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.errors import ModelError
from shardwise.model.alike import enough, shorten
from shardwise.model.arguments import is_loss_key, required_by
from shardwise.model.copies import cpu_copy, tensors_in
from shardwise.model.course import Course, Seen
from shardwise.model.experts import stacks_by_group
from shardwise.model.hf_plan import caches_keys
from shardwise.model.known import Known
from shardwise.model.lifetimes import Lifetimes, courses_of, is_plain
from shardwise.model.nested import put
from shardwise.model.profile import Profile
from shardwise.model.recording import AFTER, BEFORE, key_of
from shardwise.model.standin import LossOf, drop_by_key
from shardwise.model.torch_private import fake_tensors, keeps_costly

DTYPES: Mapping[float, torch.dtype] = {2.0: torch.bfloat16, 4.0: torch.float32}
"""What steps are seen to compute with, by the bytes of an element."""
WIDTHS = tuple(DTYPES)


def courses_seen(
    module: nn.Module, names: tuple[str, ...], profile: Profile, sample: Any, how: Seen
) -> dict[int, Course]:
    """What each phase of a step holds.

    Args:
        module: on meta.
        names: of its blocks.
        profile: says which of them are alike: only as many of these are run as show what the others hold.
        sample: see `describe`.
        how: what is computed with, and whether blocks are recomputed operator by operator.

    Raises:
        Exception: whatever the module's own code raises where the step does not run without data.

    Cost: two to six steps of a few blocks on shapes.
    """
    chosen = enough(module, names, profile.blocks)
    if chosen != names:
        try:
            return _of_blocks(module, names, chosen, sample, how, profile.tied)
        except Exception:  # the module's own: it misses a block
            pass
    return _of_blocks(module, names, names, sample, how, profile.tied)


def why_not(module: nn.Module, error: Exception) -> str:
    """What kept a step from running without values."""
    sparse = next((name for name, inner in module.named_modules() if getattr(inner, "sparse", False) is True), None)
    if sparse is not None:
        return f"{sparse} gives sparse gradients (sparse=True), which no plan is estimated with: make them dense"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _of_blocks(
    module: nn.Module,
    names: tuple[str, ...],
    chosen: tuple[str, ...],
    sample: Any,
    how: Seen,
    tied: bool,
) -> dict[int, Course]:
    """Of steps with twice and three times the rows of a sample, and with six times where these leave something open."""
    runs: list[Lifetimes] = []
    rows: list[int] = []
    tokens, out = 1.0, -1
    quiet = without_tracebacks()
    dtype = DTYPES[how.width]
    with _shortened(module, names, chosen), quiet, fake_tensors(), as_with_values(), torch.device("cpu"):
        copied = cpu_copy(module, dtype)
        by_group = frozenset(map(key_of, stacks_by_group(copied)))
        for block in map(copied.get_submodule, chosen if how.recomputed else ()):
            object.__setattr__(block, "forward", partial(_recomputed, by_group, block.forward))
        for times in (2, 3, 6):
            if len(runs) == 2 and is_plain(runs, rows):
                break
            batch = batch_of(sample, times, "cpu")
            rows.append(tokens_of(batch)[0])
            tokens = tokens_of(batch)[1] / rows[-1]
            lifetimes, out = _step(copied, chosen, batch, dtype)
            runs.append(lifetimes)
        blocks = enumerate(map(copied.get_submodule, chosen))
        trained = {i: sum(p.nbytes for p in block.parameters() if p.requires_grad) for i, block in blocks}
    found = courses_of(runs, rows, tokens, out, trained, tied)
    return {phase if phase in (BEFORE, AFTER) else names.index(chosen[phase]): found[phase] for phase in found}


@contextmanager
def _shortened(module: nn.Module, names: tuple[str, ...], chosen: tuple[str, ...]) -> Iterator[None]:
    """Within it lists of blocks hold the chosen ones alone."""
    before = shorten(module, names, chosen)
    try:
        yield
    finally:
        for parent, children in before.items():
            module.get_submodule(parent)._modules.update(children)


def _recomputed(by_group: frozenset[int], forward: Any, *args: Any, **kwargs: Any) -> Any:
    """As `shardwise.parallel.blocks` recomputes a block operator by operator."""

    def keeps(context: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
        if any(key_of(tensor) in by_group for _, tensor in tensors_in(given)):  # in a real step it is a grouped product
            return CheckpointPolicy.PREFER_RECOMPUTE
        return keeps_costly(context, operation, *given, **named)

    context = partial(create_selective_checkpoint_contexts, keeps)
    options: dict[str, Any] = {"preserve_rng_state": False, "determinism_check": "none", "context_fn": context}
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def batch_of(sample: Any, times: int, device: str) -> Any:
    """A sample with so many times its rows."""
    given = [(path, torch.empty_like(tensor, device=device)) for path, tensor in tensors_in(sample)]
    first = given[0][1].shape[0]
    return put(sample, {p: torch.cat([t] * times) if t.dim() and t.shape[0] == first else t for p, t in given})


def _step(module: nn.Module, names: tuple[str, ...], batch: Any, dtype: torch.dtype) -> tuple[Lifetimes, int]:
    """A forward and a backward pass, and the place of what a loss takes."""
    lifetimes = Lifetimes(module, [tensor for _, tensor in tensors_in(batch)])
    try:
        with ExitStack() as stack:
            for hook in _hooks(module, names, lifetimes, dtype):
                stack.callback(hook.remove)
            keep = saved_tensors_hooks(lifetimes.keep, lambda kept: kept)
            for context in (torch.enable_grad(), keep, Draws(), lifetimes):
                stack.enter_context(context)
            args, kwargs = inputs_of(module, batch, dtype)  # what is cast here is the step's
            output = module(*args, **kwargs)
            del args, kwargs
            out = -1 if (values := taken_by_loss(output)) is None else lifetimes.place_of(values)
            lifetimes.turn()
            if values is not None and values.requires_grad:
                loss_of: Any = LossOf.apply  # torch does not annotate it
                torch.autograd.backward([loss_of(values), *added_to_loss(output)])
    finally:
        for parameter in module.parameters():
            parameter.grad = None
    return lifetimes, out


def _hooks(module: nn.Module, names: tuple[str, ...], lifetimes: Lifetimes, dtype: torch.dtype) -> Iterator[Any]:
    def enter(index: int, block: nn.Module, *given: object) -> None:
        taken = [tensor for _, tensor in tensors_in(given)]
        if not lifetimes.calls:
            lifetimes.watch(BEFORE, taken)
        lifetimes.call(index, taken)

    def leave(index: int, block: nn.Module, given: object, output: object) -> None:
        lifetimes.leave(index == len(names) - 1, [tensor for _, tensor in tensors_in(output)])

    for index, name in enumerate(names):
        block = module.get_submodule(name)
        yield block.register_forward_pre_hook(partial(enter, index), with_kwargs=True)
        yield block.register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)
        yield block.register_forward_hook(partial(leave, index))
    for parameter in module.parameters():
        if parameter.requires_grad:
            add: Any = parameter.register_post_accumulate_grad_hook  # torch does not annotate it
            yield add(lifetimes.add)


class Draws(TorchFunctionMode):
    """Above autograd: dropout as Shardwise draws it, and values that are known without data."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Known()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if read := self.known.read(func, args, kwargs):
            return read[0]
        result = (drop_by_key if func is F.dropout else func)(*args, **kwargs)
        self.known.follow(func, args, kwargs, result)
        return result


def inputs_of(module: nn.Module, sample: Any, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and those by name; floating ones in a type.

    Args:
        module: one that stands for another says in `inner_required` what that one's forward requires.
        sample: see `describe`.
        dtype: of floating ones.
    """
    kwargs: dict[str, Any] = {}
    if caches_keys(module):  # of transformers: a step keeps none for later ones
        kwargs["use_cache"] = False
    cast = put(sample, {path: t.to(dtype) for path, t in tensors_in(sample) if t.is_floating_point()})
    if isinstance(cast, Mapping):
        required = getattr(module, "inner_required", None) or required_by(module.forward)
        return (), kwargs | {key: value for key, value in cast.items() if not is_loss_key(key, required)}
    return (tuple(cast) if isinstance(cast, tuple | list) else (cast,)), kwargs


def cast_inputs(dtype: torch.dtype, block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Those of a block, as `fully_shard` casts them; in fp32 nothing does."""
    if dtype is torch.float32:
        return None
    return put((args, kwargs), {p: t.to(dtype) for p, t in tensors_in((args, kwargs)) if t.is_floating_point()})


def taken_by_loss(output: Any) -> torch.Tensor | None:
    """What a step goes backward from: a loss of its own (`loss`, or a number), its logits, or the first numbers.

    A number beside logits is their loss where all has a part in it that has one in them; else see `added_to_loss`.
    """
    named = output if isinstance(output, Mapping) else {key: getattr(output, key, None) for key in ("loss", "logits")}
    numbers = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
    loss, logits = _floating(named.get("loss")), _floating(named.get("logits"))
    if loss is not None:
        return loss
    wide = [tensor for tensor in (logits, *numbers) if tensor is not None and tensor.dim()]
    scalars = _scalars(output)
    if wide and scalars:
        below = _leaves(wide[0])
        scalars = [number for number in scalars if below <= _leaves(number)]
    return next(iter((*scalars, *wide, *numbers)), None)


def added_to_loss(output: Any) -> list[torch.Tensor]:
    """Numbers beside what a loss takes that are no function of it: losses of routers, which a script adds."""
    taken = taken_by_loss(output)
    return _scalars(output) if taken is not None and taken.dim() else []


def _scalars(output: Any) -> list[torch.Tensor]:
    found = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
    return [tensor for tensor in found if not tensor.dim() and tensor.requires_grad]


def _floating(value: Any) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def _leaves(tensor: torch.Tensor) -> set[int]:
    """The parameters that a tensor is made from, by their `id`."""
    found, met, ahead = set(), set(), [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        ahead += [before for before, _ in node.next_functions]
    return found


def tokens_of(inputs: Any) -> tuple[int, int]:
    """Samples, and their tokens.

    Raises:
        ModelError: nothing that has rows.
    """
    first = next((tensor for _, tensor in tensors_in(inputs)), None)
    if first is None or first.dim() < 1:
        raise ModelError(
            "describe: the sample holds no tensor of rows; needed a batch as forward takes it: give a tensor of shape "
            "(rows, tokens, ...), a tuple or a dict with one"
        )
    return first.shape[0], first.shape[0] * (first.shape[1] if first.dim() > 1 else 1)


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Within it torch does not log what a kernel of shapes refuses: it is told as an error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def as_with_values() -> Iterator[None]:
    """Within it models of `transformers` take the course that they take on tensors with values.

    They ask whether a tensor is fake, and then make masks that a real step does without.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_fake_tensor", None)
    if module is None or before is None:
        yield
        return
    with patch.dict(vars(module), {"is_fake_tensor": lambda _: False}):
        yield
