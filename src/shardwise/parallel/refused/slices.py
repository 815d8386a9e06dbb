"""Code between column and row layers that takes this rank's slice for the whole.

`self.up(x).chunk(2, -1)` of a fused projection, `view(batch, seq, 8, -1)`, slopes made for a number of heads, a norm
over all features: on slices they run, and make something else than on the whole. A gate that is made of the whole input
gets on each rank a part of its gradient. So at the first forward of training each module that holds column layers is
called apart, on weights drawn at random: whole, and as each rank has it. What goes into row layers must be slices of
one another, and what leaves the module, and the gradients of what is whole in it, the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from shardwise.errors import ModelError
from shardwise.model.adapters import has_adapters, home
from shardwise.model.nested import leaves
from shardwise.model.rules import generalise
from shardwise.parallel.declared import is_transposed, localise_heads
from shardwise.parallel.layers.tensor_hooks import First, wrap_forward
from shardwise.parallel.module_torch_private import drop_hooks
from shardwise.parallel.placed import Part, Placed
from shardwise.parallel.randomness.generators import restore, states
from shardwise.parallel.stages.stage import StageDone

LARGEST = 2**28
"""Weights of a module that is still looked at: they are drawn, in fp32 or fp64, while a step holds most."""
CLOSE = 1e-2
"""What two sums of the same numbers differ by at most, in any type; another number of heads makes more of it."""
MOVED = 1e-4
"""By how much of itself each weight is moved, for what the numbers of the whole differ by then: some, as the gradient
of the bias of a norm of keys, are nothing but roundings."""


class _DiffersError(Exception):
    """Says what is not the same."""


class _RecomputesError(Exception):
    """A split layer is called again in the backward pass, in an order of its own: gradients are not compared."""


def watch_slices(placed: Placed) -> None:
    """Refuse such code at the first forward of training; nothing is looked at after it.

    What cannot be called apart (it draws, holds experts, meets other ranks, takes objects) is not judged; what
    recomputes its split layers is judged by its forward pass alone. Hooks of a script's own are left out: they may
    keep what they see.

    Cost: a few forward and backward passes of one module of each kind, with one row; nothing is communicated.
    """
    if placed.plain is None or has_adapters(placed.original_names):
        return
    for part in placed.parts:
        if looks := list(_looks(part, placed.plain, placed)):
            _watch(part.root, looks)


def _looks(part: Part, plain: nn.Module, placed: Placed) -> Iterator[_Look]:
    kinds: set[str] = set()
    live = dict(part.root.named_modules())
    for name in dict.fromkeys(home(name) for name, style in placed.styles.items() if style == "column"):
        module = live.get(name)
        if module is None or generalise(name) in kinds or next(module.parameters(), None) is None:
            continue
        kinds.add(generalise(name))
        inner = {m: placed.styles.get(f"{name}.{m}" if name else m, "") for m, _ in module.named_modules()}
        styles = {**inner, "": placed.styles.get(name, "")}
        whole = plain.get_submodule(name)
        if _can_be_called(whole, styles):
            repeats = placed.mesh.size("tp") if placed.plan.tensor.sequence else 1
            yield _Look(name, module, whole, styles, placed.mesh.size("tp"), repeats)


def _can_be_called(whole: nn.Module, styles: Mapping[str, str]) -> bool:
    split = [whole.get_submodule(name) for name, style in styles.items() if style in ("column", "row")]
    plain = all(type(m).forward is nn.Linear.forward or is_transposed(m) for m in split)
    known = plain and "experts" not in styles.values()
    return known and sum(p.numel() for p in whole.parameters()) <= LARGEST


def _watch(root: nn.Module, looks: list[_Look]) -> None:
    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            output = forward(*args, **kwargs)
        except StageDone:
            _judge(looks)
            raise
        _judge(looks)
        return output

    wrap_forward(root, run)


def _judge(looks: list[_Look]) -> None:
    for look in [look for look in looks if look.given is not None]:
        looks.remove(look)
        look.judge()


class _Look:
    """At one module that holds column layers."""

    def __init__(
        self, name: str, live: nn.Module, whole: nn.Module, styles: Mapping[str, str], tp: int, repeats: int
    ) -> None:
        """`whole`: the module as it was, on meta. `repeats`: how often its tokens make the whole sequence."""
        self.name, self.live, self.whole, self.styles, self.tp, self.repeats = name, live, whole, styles, tp, repeats
        self.given: Any = None
        self.handle = live.register_forward_pre_hook(self.take, with_kwargs=True)

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep one row of what the module is called with first."""
        first = First.of(module, args, kwargs)
        found = [leaf for _, leaf in leaves((args, kwargs))]
        tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        usual = all(type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta for t in tensors)
        if not (module.training and torch.is_grad_enabled() and first and usual and all(map(_is_plain, found))):
            return
        self.handle.remove()
        rows = first.tensor.shape[:1]
        one = {id(t): (t.detach()[:1] if t.shape[:1] == rows else t.detach()).clone() for t in tensors}
        if first.tensor.dim() > 2:
            one[id(first.tensor)] = torch.cat([one[id(first.tensor)]] * self.repeats, 1)
        for tensor in tensors:
            is_learned = tensor is first.tensor or tensor.requires_grad
            one[id(tensor)].requires_grad_(is_learned and tensor.is_floating_point())
        self.given = deepcopy((args, kwargs), one)

    def judge(self) -> None:
        """Compare.

        Raises:
            ModelError: it makes something else of slices.
        """
        given, self.given = self.given, None
        device = next(t for _, t in leaves(given) if isinstance(t, torch.Tensor)).device
        drawn = states(device)
        try:
            with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                _Twins(self, given, device).compare()
        except _DiffersError as differs:
            columns = [name for name, style in self.styles.items() if style == "column"]
            what = f"{self.name or 'the model'} ({type(self.whole).__name__})"
            raise ModelError(
                f"tp={self.tp}: {what} makes of slices of {', '.join(columns)} something else than of the whole: found "
                f"{differs}; needed: code that works on each head or feature alone, and counts heads from the tensors, "
                "as view(batch, seq, -1, head_dim); change it, or give these layers the rule 'column-gather', or the "
                "rules that `shardwise rules` finds"
            ) from None
        except Exception:  # its own, or of what it needs around it: nobody can judge it
            return
        finally:
            restore(drawn, device)


@dataclass
class _Record:
    """What the whole did, call by call."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    paths: list[Any] = field(default_factory=list)
    """Of the outputs."""
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    columns: list[torch.Tensor | None] = field(default_factory=list)
    """Gradients of what column layers were given."""
    rows: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Name, input and output of row layers."""
    is_over: bool = False
    """What is called now is computed again, in the backward pass."""
    moves: dict[Any, float] = field(default_factory=dict)
    """By how much each of these numbers differs where weights are moved by `MOVED` of themselves."""

    def numbers(self) -> dict[Any, torch.Tensor]:
        """What is compared."""
        rows = {("row", place): given for place, (_, given, _) in enumerate(self.rows)}
        return {**dict(enumerate(self.outputs)), **self.grads, **rows}

    def is_close(self, found: torch.Tensor, expected: torch.Tensor, key: Any) -> bool:
        """Whether a rank found the same, or the same slice of it, but for rounding."""
        if found.shape != expected.shape:
            return False
        return _far(found, expected) <= CLOSE * _far(expected) + self.moves[key] * CLOSE / MOVED


class _Twins:
    """The module on random weights, whole and as each rank has it."""

    def __init__(self, look: _Look, given: Any, device: torch.device) -> None:
        self.look = look
        self.device, self.dtype = device, torch.float64 if device.type == "cpu" else torch.float32
        generator = torch.Generator(self.device).manual_seed(0)
        self.draw = partial(torch.randn, generator=generator, device=self.device, dtype=self.dtype)
        self.weights = {}
        for name, weight in look.whole.named_parameters():
            drawn = self.draw(weight.shape)
            self.weights[name] = drawn / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 1 + 0.2 * drawn
        self.buffers = {name: self.to(buffer) for name, buffer in look.live.named_buffers()}
        self.learned = {name for name, parameter in look.live.named_parameters() if parameter.requires_grad}
        self.given = given
        self.seeds: list[torch.Tensor] = []
        self.split = {name: style for name, style in look.styles.items() if style in ("column", "row")}

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device, in the type that is computed in."""
        tensor = tensor.detach().to(self.device)
        if tensor.is_complex():
            return tensor.to(torch.complex128 if self.dtype == torch.float64 else torch.complex64)
        return tensor.to(self.dtype).clone() if tensor.is_floating_point() else tensor.clone()

    def compare(self) -> None:
        """Call it whole, twice, and for each rank.

        Raises:
            _DiffersError: something is not the same.
        """
        whole, weights = self.call(None, 0), self.weights
        self.weights = {name: weight * (1 + MOVED * self.draw(weight.shape)) for name, weight in weights.items()}
        moved, self.weights = self.call(None, 0).numbers(), weights
        whole.moves = {key: _far(moved.pop(key), number) for key, number in whole.numbers().items()}
        if moved or not all(whole.moves[i] <= CLOSE * _far(output) for i, output in enumerate(whole.outputs)):
            return  # it draws, or what it computes is not finite
        summed: dict[str, torch.Tensor] = {}
        for rank in range(self.look.tp):
            local = self.call(whole, rank)
            if len(local.rows) != len(whole.rows):
                raise _DiffersError(f"{len(local.rows)} calls of row layers, and {len(whole.rows)} of the whole")
            for name, grad in whole.grads.items():
                if name in self.weights and self.look.styles.get(name.rpartition(".")[0]) == "heads":
                    summed[name] = summed.get(name, 0) + local.grads[name]
                elif not whole.is_close(local.grads[name], grad, name):
                    raise _DiffersError(f"on a rank another gradient of {name}, which is whole there")
        if wrong := [name for name, grad in summed.items() if not whole.is_close(grad, whole.grads[name], name)]:
            raise _DiffersError(f"another sum of the ranks' gradients of {wrong[0]}")

    def call(self, whole: _Record | None, rank: int) -> _Record:
        """Forward and backward; `whole`: what `rank` is compared with."""
        twin, record = deepcopy(self.look.whole).eval(), _Record()
        drop_hooks(twin)
        for name, style in self.split.items():
            layer = twin.get_submodule(name)
            run = self.column if style == "column" else self.row
            object.__setattr__(layer, "forward", partial(run, name, is_transposed(layer), (whole, record, rank)))
        if whole is not None:
            for parent in {home(name) for name, style in self.split.items() if style == "column"}:
                localise_heads(twin.get_submodule(parent), self.look.tp)
        rest = {name: weight for name, weight in self.weights.items() if name.rpartition(".")[0] not in self.split}
        leaf = {name: weight.clone().requires_grad_(name in self.learned) for name, weight in rest.items()}
        given = {path: tensor for path, tensor in leaves(self.given) if isinstance(tensor, torch.Tensor)}
        copies = {id(tensor): self.to(tensor).requires_grad_(tensor.requires_grad) for tensor in given.values()}
        args, kwargs = deepcopy(self.given, {key: tensor.view_as(tensor) for key, tensor in copies.items()})
        inputs = {_spell(path): copies[id(tensor)] for path, tensor in given.items()}
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        output = functional_call(twin, {**self.weights, **leaf, **buffers}, args, kwargs)
        found = {p: t for p, t in leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad}
        record.paths, record.outputs = list(found), list(found.values())
        if whole is None and not self.seeds:
            self.seeds = [self.draw(tensor.shape) for tensor in record.outputs]
        seeds = self.seeds if whole is None else self.seeds_of(record, whole, rank)
        wanted = {name: tensor for name, tensor in {**leaf, **inputs}.items() if tensor.requires_grad}
        record.is_over = True
        try:
            torch.autograd.backward(record.outputs, seeds, inputs=list(wanted.values()))
        except _RecomputesError:
            return record
        record.grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in wanted.items()}
        return record

    def seeds_of(self, local: _Record, whole: _Record, rank: int) -> list[torch.Tensor]:
        """The gradients of a rank's outputs, which are those of the whole, or slices of them."""
        if local.paths != whole.paths:
            raise _DiffersError("other outputs")
        seeds = []
        for i, (mine, all_, seed) in enumerate(zip(local.outputs, whole.outputs, self.seeds, strict=True)):
            dims = [d for d in range(mine.dim()) if mine.shape[d] * self.look.tp == all_.shape[d : d + 1].numel()]
            for dim in dims[:1] if mine.shape != all_.shape else ():
                all_, seed = (each.chunk(self.look.tp, dim)[rank] for each in (all_, seed))
            if not whole.is_close(mine, all_, i):
                raise _DiffersError("another output")
            seeds.append(seed)
        return seeds

    def column(self, name: str, transposed: bool, of: tuple[_Record | None, _Record, int], x: Any) -> torch.Tensor:
        """A column layer: of a rank its slice, and back the gradient of all slices."""
        whole, record, rank = _open(of)
        place = len(record.columns)
        record.columns.append(None)
        x = x.view_as(x)
        if x.requires_grad:
            keep = partial(record.columns.__setitem__, place)
            x.register_hook(keep if whole is None else lambda g: _or_zeros(whole.columns[place : place + 1], g))
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        weight = weight.T if transposed else weight
        if whole is not None:
            weight, bias = (None if w is None else w.chunk(self.look.tp)[rank] for w in (weight, bias))
        return nn.functional.linear(x, cast(torch.Tensor, weight), bias)

    def row(self, name: str, transposed: bool, of: tuple[_Record | None, _Record, int], x: Any) -> torch.Tensor:
        """A row layer: what each rank is given must be its slice, or the whole; then its output is the whole's."""
        whole, record, rank = _open(of)
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        weight = weight.T if transposed else weight
        if whole is None:
            record.rows.append((name, x.detach(), (y := nn.functional.linear(x, weight, bias)).detach()))
            return y
        called, given, output = whole.rows[len(record.rows)] if len(record.rows) < len(whole.rows) else (None, x, x)
        if called != name:
            raise _DiffersError(f"a call of {name} where the whole calls {called or 'none'}")
        if x.shape != given.shape:
            given, weight = (each.chunk(self.look.tp, -1)[rank] for each in (given, weight))
        if not whole.is_close(x, given, ("row", len(record.rows))):
            raise _DiffersError(f"what {name} takes is no slice of what it takes of the whole")
        y = nn.functional.linear(x, weight)
        record.rows.append((name, given, output))
        return y + (output - y).detach()


def _or_zeros(kept: list[torch.Tensor | None], gradient: torch.Tensor) -> torch.Tensor:
    return kept[0] if kept and kept[0] is not None else torch.zeros_like(gradient)


def _far(found: torch.Tensor, expected: torch.Tensor | float = 0.0) -> float:
    """The largest difference of two tensors."""
    return float((found - expected).detach().abs().amax()) if found.numel() else 0.0


def _open(of: tuple[_Record | None, _Record, int]) -> tuple[_Record | None, _Record, int]:
    if of[1].is_over:
        raise _RecomputesError
    return of


def _is_plain(leaf: Any) -> bool:
    """Whether a call can be given a copy of it: an object of a script's own may keep what is done to it."""
    return isinstance(leaf, (torch.Tensor, str, bytes, int, float, complex, torch.dtype, torch.device, type(None)))


def _spell(path: Any) -> str:
    return f"what it is given ({'.'.join(map(str, path[1:]))})"
