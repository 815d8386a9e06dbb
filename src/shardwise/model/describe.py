"""`describe`: the `Profile` of any module, from one forward without data.

What `profile_of` writes from the sizes of a decoder, read off the operations that a module's own forward issues: matrix
products by parameter, attention, everything else as chains of element-wise operators, and what autograd keeps of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from shardwise.errors import ModelError
from shardwise.model.copies import refuse_parameters
from shardwise.model.course import Course, Seen
from shardwise.model.experts import keep_rows
from shardwise.model.known import Known
from shardwise.model.lifetimes import with_courses
from shardwise.model.nested import put
from shardwise.model.operators import chain_of
from shardwise.model.ops import Attention
from shardwise.model.profile import Profile
from shardwise.model.recording import AFTER, BEFORE, Call, Recording, key_of
from shardwise.model.seen import (
    WIDTHS,
    added_to_loss,
    cast_inputs,
    courses_seen,
    inputs_of,
    taken_by_loss,
    tokens_of,
    why_not,
)
from shardwise.model.stacks import find_blocks
from shardwise.model.standin import Attended, drop
from shardwise.model.torch_private import TorchDispatchMode
from shardwise.model.tracer import meta_copy, tensors_in

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FUSED = F.scaled_dot_product_attention


def describe(
    model: nn.Module | Callable[[], nn.Module],
    sample: Any,
    *,
    blocks: str = "auto",
    device: str = "meta",
    name: str = "",
    widths: Collection[float] = WIDTHS,
) -> Profile:
    """The profile of a module: what the planner's closed form needs of it.

    Args:
        model: a factory, or a module on any device; it is left as it is.
        sample: what forward takes: a tensor, a tuple of positional arguments, or a dict of keyword arguments (of which
            `labels` and `weight` are left out, if forward does without them). The first tensor is (rows, tokens, ...),
            and sizes are per token.
        blocks: which modules repeat, see `find_blocks`.
        device: `meta`, without memory or arithmetic; `cpu` runs the forward for real, for a module whose course depends
            on the values of tensors.
        name: of the profile; empty: the class.
        widths: bytes of an element of what those steps compute with that are looked at, which takes most of the time:
            4 for plans in fp32, 2 for all others; none: what a step holds is not looked at.

    Returns:
        Operators of each block in the order of the forward. How `tp` divides them is read off their order: a product of
        the residual stream is divided by columns, the next one by rows. Elements that autograd keeps are given as they
        are (`saves_apart`) and as one kernel per chain would keep them (`saves`).
        What a step of it holds is seen in one without values (`courses`). Where none runs, `unseen` says why: what it
        holds is then put together from its operators, which may be far off for other modules than chains of blocks.

    Raises:
        ModelError: forward needs values that `meta` does not have (which operation, in which module), or the module
            shows no repeated blocks.

    Cost: one forward on meta, milliseconds per block.

    >>> from shardwise.models.decoder import Decoder, DecoderConfig
    >>> profile = describe(lambda: Decoder(DecoderConfig()), torch.zeros(1, 64, dtype=torch.long))
    >>> profile.num_params == sum(p.numel() for p in Decoder(DecoderConfig()).parameters())
    True
    """
    try:
        found = _described(_module_on(model, device), sample, (blocks, device, name), torch.bfloat16, widths)
    except ModelError:  # whether it is due to the 16 bits is told by a forward without them
        found = _described(_module_on(model, device), sample, (blocks, device, name), torch.float32, widths)
    return found


def _described(
    module: nn.Module, sample: Any, how: tuple[str, str, str], dtype: torch.dtype, widths: Collection[float]
) -> Profile:
    """The profile of a module that is computed with in a type, as mixed precision does: its parameters are cast."""
    blocks, device, name = how
    refuse_parameters(module)
    _cast(module, dtype)
    names = find_blocks(module, blocks)
    args, kwargs = _inputs(module, sample, device, dtype)
    recording = Recording.of(module, tokens_of((args, kwargs)))
    recording.inputs = {key_of(tensor): tensor for _, tensor in tensors_in((args, kwargs))}
    with ExitStack() as stack:
        for hook in _phase_hooks(module, names, watch := _Watch(recording), dtype):
            stack.callback(hook.remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.device(device))
        stack.enter_context(saved_tensors_hooks(watch.keep, _same))
        stack.enter_context(_Calls(watch))
        stack.enter_context(_Operations(watch))
        try:
            values = taken_by_loss(output := module(*args, **kwargs))
            recording.given_out = 0 if values is None else values.numel()
            added = len(added_to_loss(output))
            others = sum(tensor.requires_grad for _, tensor in tensors_in(output))
            _refuse_output(module, output, values)
        except ModelError:
            raise
        except (Exception, SystemExit) as error:
            raise _untraceable(module, watch, error, device) from error
    recording.unused = frozenset(recording.shapes.keys() - recording.used.keys() - recording.frozen)
    recording.frozen |= recording.unused
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    tensors = [tensor for _, tensor in tensors_in(sample)]
    given = sum(tensor.nbytes for tensor in tensors) // tokens_of(sample)[1]
    labels = 0 if tensors[0].is_floating_point() else 8
    profile = chain_of(recording, module, names, name or type(module).__name__)
    one_number = values is not None and not values.dim() and others > 1
    profile = replace(profile, buffers=buffers, given=given, labels=labels, wide=dtype is torch.float32)
    profile = replace(profile, one_number=one_number, added=added)
    possible = dict.fromkeys((float(dtype.itemsize), 4.0))
    seen, why = _courses(module, names, profile, sample, [width for width in possible if width in widths])
    profile = replace(with_courses(profile, seen), unseen=why)
    if watch.asked or profile.blocks[0].frozen < profile.blocks[0].params:
        return profile
    hook = module.get_submodule(names[0]).register_forward_pre_hook(_ask, with_kwargs=True)
    try:
        return _with_through(profile, _described(module, sample, how, dtype, widths))
    finally:
        hook.remove()


def _courses(
    module: nn.Module, names: tuple[str, ...], profile: Profile, sample: Any, widths: Sequence[float]
) -> tuple[dict[Seen, Mapping[int, Course]], str]:
    """What steps of each type were seen to hold, and why none was."""
    found: dict[Seen, Mapping[int, Course]] = {}
    try:
        for width in widths:
            found[Seen(width)] = courses_seen(module, names, profile, sample, Seen(width))
    except Exception as error:  # the module's own: its backward pass needs values
        return found, why_not(module, error)
    with suppress(Exception):  # the module's own: its blocks do not run twice
        recomputed = {Seen(w, True): courses_seen(module, names, profile, sample, Seen(w, True)) for w in widths}
        found = {**recomputed, **found}
    return found, ""


def _refuse_output(module: nn.Module, output: Any, values: torch.Tensor | None) -> None:
    """Of what no step could go backward from; a frozen module has another refusal."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    kind = type(module).__name__
    if values is None:
        raise ModelError(
            f"describe: the forward of {kind} returned {type(output).__name__}, in which no floating tensor was found; "
            "needed what a loss takes: return a tensor, or a tuple, a dict or a dataclass of tensors"
        )
    if not values.requires_grad:
        raise ModelError(
            f"describe: what the forward of {kind} returned has no gradient, though its parameters are trained; needed "
            "an output that depends on them: leave out no_grad, detach and the like"
        )


def _ask(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """The first block's input with a gradient, as a later stage of a pipeline has what it receives."""
    given = [(path, tensor) for path, tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    return put((args, kwargs), {path: tensor.detach().requires_grad_() for path, tensor in given[:1]})


def _with_through(profile: Profile, through: Profile) -> Profile:
    """The profile whose blocks up to the first trained one are known with a gradient of their input, too."""
    blocks = profile.blocks
    last = next((i for i, block in enumerate(blocks) if block.frozen < block.params), len(blocks) - 1)
    pairs = list(zip(blocks, through.blocks, strict=True))[: last + 1]
    made = {pair: replace(pair[0], through=pair[1]) for pair in dict.fromkeys(pairs)}
    return replace(profile, blocks=(*(made[pair] for pair in pairs), *blocks[last + 1 :]))


def _untraceable(module: nn.Module, watch: _Watch, error: BaseException, device: str) -> ModelError:
    said = str(error).partition("\n")[0]
    where = f"{watch.where or 'forward'} ({type(module).__name__})"
    # what shapes alone cannot do torch says of "meta", or has no kernel for; any other failure has another cause
    remedy = (
        "its forward must not ask for values of tensors (.item(), nonzero, if tensor:); describe(..., device='cpu') "
        "runs it for real, which takes its memory and time"
        if device == "meta" and (isinstance(error, NotImplementedError) or "meta" in str(error))
        else "give a sample that the model takes, and sizes that go together"
        + ("" if device == "meta" else " (a module with values, not on meta)")
    )
    return ModelError(
        f"describe: {watch.operation or 'an operation'} in {where} failed on {device}: {type(error).__name__}: {said}; "
        f"needed a forward that runs there; {remedy}"
    )


def _module_on(model: nn.Module | Callable[[], nn.Module], device: str) -> nn.Module:
    with torch.device(device):
        made = model if isinstance(model, nn.Module) else model()
    scripted = [path for path, inner in made.named_modules() if isinstance(inner, torch.jit.ScriptModule)]
    if scripted:
        raise ModelError(
            f"describe: {scripted[0] or 'the module'} ({type(made).__name__}) was made by torch.jit, whose modules "
            "take no hooks and cannot be placed; needed modules in Python: leave out torch.jit.script and trace (a "
            "plan compiles blocks itself)"
        )
    if device == "meta":
        with torch.device("meta"):
            module = meta_copy(made)
        keep_rows(module)
    else:
        module = copy.deepcopy(made) if made is model else made
    return module.to(device).train()


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in a type; buffers keep theirs."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _inputs(module: nn.Module, sample: Any, device: str, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = [(path, tensor.to(device)) for path, tensor in tensors_in(sample)]
    if device == "meta" and given and given[0][1].dim() and given[0][1].shape[0] == 1:
        # of one row, tensors that a batch has once look like those that each row has
        given = [(path, torch.cat([t, t]) if t.dim() and t.shape[0] == 1 else t) for path, t in given]
    return inputs_of(module, put(sample, dict(given)), dtype)


def _phase_hooks(module: nn.Module, names: tuple[str, ...], watch: _Watch, dtype: torch.dtype) -> Iterator[Any]:
    for index, name in enumerate(names):
        block = module.get_submodule(name)
        yield block.register_forward_pre_hook(partial(watch.enter, index), with_kwargs=True)
        yield block.register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)
        yield block.register_forward_hook(partial(watch.leave, index, index == len(names) - 1))
    for path, inner in module.named_modules():
        yield inner.register_forward_pre_hook(partial(watch.inside, path))
        yield inner.register_forward_hook(watch.outside)


@dataclass
class _Watch:
    """What all the hooks of one forward share."""

    recording: Recording
    phase: int = BEFORE
    operation: str = ""
    paused: bool = False
    asked: bool = True
    """The input of the first block has a gradient."""
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)

    @property
    def where(self) -> str:
        return self.modules[-1][0] if self.modules else ""

    def enter(self, index: int, block: nn.Module, *given: object) -> None:
        self.phase = index
        self.recording.calls.append(index)
        floating = [(path, tensor) for path, tensor in tensors_in(given) if tensor.is_floating_point()]
        if not any(tensor.requires_grad for _, tensor in floating) and any(p.requires_grad for p in block.parameters()):
            self.recording.fed_apart.add(index)
        if floating:
            first = floating[0][1]
            self.recording.entered.setdefault(index, first.numel())
            self.recording.streams.setdefault(index, dict(floating[1:]))
            self.asked &= index > 0 or first.requires_grad

    def leave(self, index: int, last: bool, *args: object) -> None:
        self.phase = AFTER if last else index

    def inside(self, path: str, module: nn.Module, *args: object) -> None:
        self.modules.append((path, module))

    def outside(self, *args: object) -> None:
        self.modules.pop()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.paused:
            self.recording.keep(tensor, self.phase)
        return tensor

    def is_causal(self) -> bool:
        return any(getattr(module, "is_causal", False) is True for _, module in self.modules)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Calls(TorchFunctionMode):
    """Above autograd: attention, and values that are known without data."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch, self.known = watch, Known()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self.watch.operation = f"`{getattr(func, '__name__', func)}`"
        if read := self.known.read(func, args, kwargs):
            return read[0]
        if func is F.dropout:
            result = drop(*args, **kwargs)
        elif func is _FUSED:
            result = self._attend(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            result = self._multi_head(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self.known.follow(func, args, kwargs, result)
        return result

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """That of `nn.MultiheadAttention`: torch does not tell a mode of what is called within."""
        with patch.object(F, "scaled_dot_product_attention", self._attend):
            return F.multi_head_attention_forward(*args, **kwargs)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **options: Any
    ) -> torch.Tensor:
        given = dict(zip(("attn_mask", "dropout_p", "is_causal"), others, strict=False)) | options
        if key.shape[-3] != query.shape[-3] and not given.get("enable_gqa"):  # no fused kernel repeats heads unasked
            return _FUSED(query, key, value, *others, **options)
        causal = bool(given.get("is_causal")) or (given.get("attn_mask") is not None and self.watch.is_causal())
        meta = query.is_meta
        self.watch.paused = True
        if meta:
            out: torch.Tensor = Attended.apply(query, key, value)  # type: ignore[no-untyped-call]  # torch annotates no Function.apply
        else:
            out = _FUSED(query, key, value, *others, **options)
        self.watch.paused = False
        recording = self.watch.recording
        op = Attention(
            heads=query.shape[-3],
            kv_heads=recording.kv_heads(query, key),
            qk_dim=query.shape[-1],
            v_dim=value.shape[-1],
            causal=causal,
            dropout=float(given.get("dropout_p") or 0.0) > 0,
        )
        recording.attention(op, (query, key, value), out, self.watch.phase)
        return out


class _Operations(TorchDispatchMode):
    """Below autograd: every operation on memory."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.watch.paused:
            given = [tensor for _, tensor in tensors_in((args, kwargs or {}))]
            gave = [tensor for _, tensor in tensors_in(result)]
            count = flop_registry.get(func.overloadpacket)
            flops = int(count(*args, **(kwargs or {}), out_val=result)) if count is not None else 0
            name = func.overloadpacket.__name__
            if "batch_norm" in name and not isinstance(self.watch.modules[-1][1], BATCH_NORMS):
                name = "instance_norm"  # over the places of each sample: data ranks share no statistics
            self.watch.recording.operation(Call(name, given, gave, self.watch.phase, flops))
        return result
