"""Randomness keyed by location: a mask depends on where it is used, not on which rank draws it, or how often.

    bits = f(seed, step, module name, call, draw, logical index of the element)

The logical index is that of the tensor that one process would have, which ran the whole batch of the step at once: rows
by their place in the data, tokens, heads and features by this rank's share of them, whatever the padding. So the
micro-batch is in the row, a recomputed block draws the same mask, and nothing is saved but the seed and the step.

    meta copy --find_sites--> Sites;  a module that draws: forward -> `_Draws` -> counter.Numbers
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.model.nested import leaves
from shardwise.model.tracer import meta_copy, tensors_in
from shardwise.parallel.inputs import Signature, model_inputs, num_rows
from shardwise.parallel.layout import Rows, Shares, elements_of, samples_of
from shardwise.parallel.mesh import DATA_AXES, Mesh
from shardwise.parallel.placed import Moment, Placed
from shardwise.parallel.randomness.counter import Numbers, Stream
from shardwise.parallel.randomness.draws import DRAWS, SKIP, UNKEYED, draws_by_itself
from shardwise.parallel.randomness.sites import Key, Site, Sites, find_sites, name_of, unkeyed
from shardwise.plan.plan import Plan

Forward = Callable[..., Any]


def key_randomness(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Keep what tells where a random call of the whole model is: a copy of it without data.

    Cost: a copy of the module's Python objects, under a millisecond per block.
    """
    try:
        reference, why_not = meta_copy(placed.parts[0].root), ""
    except ModelError as error:
        reference, why_not = None, str(error)
    return placed.with_(randomness=Randomness(reference, why_not, placed.blocks, plan, mesh))


@dataclass(kw_only=True)
class Frame:
    """One forward of one micro-batch: what its draws are keyed by, and how often each module was called in it."""

    seed: int
    step: int
    rows: Rows
    calls: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Frame:
        """The same, to be gone on with a second time."""
        return replace(self, calls=dict(self.calls))


class Randomness:
    """Keys the random calls of a placed model; `placed.randomness`. Made by `key_randomness`.

    The training step calls `begin` once per step, and runs each forward within `at(micro-batch)`.
    """

    def __init__(
        self, reference: nn.Module | None, why_not: str, blocks: tuple[str, ...], plan: Plan, mesh: Mesh
    ) -> None:
        """`reference`: the whole model on meta; None where it cannot be copied, for the reason `why_not`."""
        self._reference, self._why_not, self._blocks, self._plan, self._mesh = reference, why_not, blocks, plan, mesh
        self._signature = Signature.of(reference) if reference is not None else None
        self._shares = Shares.of(plan, mesh)
        self._sites = Sites(found={})
        self._known: set[tuple[Any, ...]] = set()
        self._last: list[tuple[Any, torch.Size]] | None = None
        """Shapes of a first micro-batch whose kind is known: that of the step before, as a rule."""
        self._wrapped: set[tuple[str, int]] = set()
        self._drawing: frozenset[str] = frozenset()
        self._modes: list[tuple[nn.Module, nn.Module]] | None = None
        """Modules that are here, and in the copy."""
        self._idle: list[tuple[nn.Module, nn.Module]] = []
        """Modules that were traced with a dropout of 0: here, and in the copy."""
        self._frames: list[Frame] = []
        self._now: Frame | None = None
        self._drawn = self._whole = self._watching = False

    def begin(self, roots: Sequence[nn.Module], moment: Moment, micro: Sequence[Any], zero: Sequence[bool]) -> None:
        """Start a step.

        Args:
            roots: the model's parts on this rank.
            moment: the seed, the step, and which rows this rank has.
            micro: this rank's micro-batches, their sequences whole.
            zero: which of them are padding.

        Raises:
            ModelError: a random call that cannot be keyed, named.

        Cost: some microseconds, to see whether the inputs have the shapes of the step before; in the first step the
        trace of `find_sites`; where the rows are not known, one all-reduce of a number per data rank.
        """
        self._look(roots, micro)
        if not self._drawing:
            return
        self._whole = self._shares.whole and self._mesh.batch.size == 1 and len(micro) == 1
        counts = samples_of([0 if z else num_rows(m) for m, z in zip(micro, zero, strict=True)], moment.samples)
        rows = moment.rows if moment.rows is not None else self._rows(sum(counts))
        self._frames = []
        for i, (count, batch) in enumerate(zip(counts, micro, strict=True)):
            start = sum(counts[:i])
            own = Rows(numbers=rows[start : start + count] if count else range(num_rows(batch)), tokens=_tokens(batch))
            self._frames.append(Frame(seed=moment.seed, step=moment.step, rows=own))

    def at(self, index: int) -> AbstractContextManager[None]:
        """Within it, the forward of micro-batch `index` of the step draws keyed numbers."""
        return self._within(self._frames[index].copy()) if self._drawing else nullcontext()

    def renumber(self, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        """The step's micro-batches were divided again: do the same with the numbers of their rows.

        Args:
            change: from one int64 tensor per micro-batch, its rows, to those of the new micro-batches.
        """
        if self._frames:
            first = self._frames[0]
            numbers = change([torch.tensor(list(frame.rows.numbers)) for frame in self._frames])
            self._whole = self._whole and len(numbers) == 1
            self._frames = [replace(first, rows=replace(first.rows, numbers=tuple(own.tolist()))) for own in numbers]

    @contextmanager
    def _within(self, frame: Frame) -> Iterator[None]:
        before, self._now = self._now, frame
        try:
            yield
        finally:
            self._now = before

    def replayed(self, forward: Forward) -> Forward | None:
        """A forward that draws the same numbers when it is called again, in the backward pass; None: nothing is keyed.

        The first call belongs to the micro-batch that runs; later ones start from the same counts of calls.
        """
        frame = self._now
        if frame is None:
            return None
        snapshot, first = frame.copy(), iter((True,))

        def run(*args: Any, **kwargs: Any) -> Any:
            if next(first, False):
                return forward(*args, **kwargs)
            with self._within(snapshot.copy()):
                return forward(*args, **kwargs)

        return run

    def inside(self, name: str, module: nn.Module) -> None:
        """Key the random calls of a module's own forward; what is put around it later (recompute) stays around it."""
        if (name, id(module)) in self._wrapped:
            return
        self._wrapped.add((name, id(module)))
        forward = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name not in self._drawing:
                return forward(*args, **kwargs)
            frame = self._now
            if frame is None:
                _check_outside(name, module)
                return forward(*args, **kwargs)
            call = frame.calls.get(name, 0)
            frame.calls[name] = call + 1
            with _Draws(self, frame, name, call):
                return forward(*args, **kwargs)

        # a compiler, the plan's or the script's, fails on keyed draws; what is around this module it still compiles
        uncompiled = not self._plan.compile or name not in self._blocks
        # an attribute of the instance: the class, the names and the state dict stay the user's
        wrapped = torch.compiler.disable(run) if uncompiled else run  # type: ignore[no-untyped-call]
        object.__setattr__(module, "forward", wrapped)

    def numbers(self, key: Key, frame: Frame, shape: tuple[int, ...], device: torch.device) -> Numbers:
        """The numbers of one draw on this rank.

        Raises:
            ModelError: the plan splits the tensor in a way that is not understood.
        """
        self._drawn = True
        site = self._sites.found.get(key)
        where = f"random call {site.function if site else ''} in {_spell(key.module)}".replace("  ", " ")
        if site is None and not self._whole:
            why = self._why_not or f"there was no draw {key.draw} of call {key.call} when it ran without data"
            raise ModelError(
                f"{where}: found a plan that divides rows or tensors, needed the shape drawn in one process, and {why};"
                " make the forward run on the meta device (no .item(), no `if` on a value: torch.where(torch.rand(())"
                " < p, x, layer(x)) drops a layer), use dropout 0, or one process and one micro-batch"
            )
        stream = Stream.of(frame.seed, frame.step, key.module, key.call, key.draw)
        try:
            elements = elements_of(site, shape, frame.rows, None if self._whole else self._shares, device)
        except ModelError as error:
            raise ModelError(f"{where}: {error}, or use dropout 0") from None
        return Numbers(stream, elements, device)

    def _rows(self, own: int) -> range:
        """Numbers of rows that the user divided: those of data rank 0 first."""
        batch = self._mesh.batch
        counts = torch.zeros(batch.size, dtype=torch.int64, device=self._mesh.device)
        counts[batch.rank] = own
        self._mesh.all_reduce_sum(counts, *DATA_AXES)
        start = int(counts[: batch.rank].sum())
        return range(start, start + own)

    def _look(self, roots: Sequence[nn.Module], micro: Sequence[Any]) -> None:
        """Learn the random calls of a forward on such inputs, and wrap the modules that make them."""
        if self._reference is None or self._signature is None:
            self._look_while_running(roots)
            return
        if not micro:
            return
        shapes, awake = _shapes(micro[0]), self._awake() | self._set_modes(roots)
        if shapes is not None and shapes == self._last and not awake:
            return
        inputs, rows = model_inputs(micro[0], self._signature), num_rows(micro[0])
        kind = tuple((path, self._kind(leaf, rows)) for path, leaf in leaves(inputs))
        if kind in self._known and not awake:
            self._last = shapes
            return
        self._known.add(kind)
        try:
            sites = find_sites(self._reference, inputs, rows)
        except ModelError as error:
            self._reference, self._why_not = None, str(error)
            self._look_while_running(roots)
            return
        self._learn(sites)
        self._wrap(roots)
        traced = {name: self._reference.get_submodule(name) for name in sites.idle}
        self._idle = [(live, module) for name, module in traced.items() for live in _modules(roots, name)]

    def _kind(self, leaf: Any, rows: int) -> Any:
        """What a trace holds for: on whole tensors their dims, else all sizes but the rows."""
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        return leaf.dim() if self._shares.whole else tuple("rows" if n == rows else n for n in leaf.shape)

    def _learn(self, sites: Sites) -> None:
        if sites.findings:
            raise ModelError("; ".join(map(str, sites.findings)))
        for key, site in sites.found.items():
            self._check_place(key, site)
        self._sites = replace(sites, found={**self._sites.found, **sites.found})
        self._drawing = self._sites.modules

    def _check_place(self, key: Key, site: Site) -> None:
        """Each stage of a pipeline counts the calls that it makes itself, so they must be all there are."""
        block = next((name for name in self._blocks if name in site.path), None)
        inside = block is None or f"{key.module}.".startswith(f"{block}.")
        if self._plan.axes.pp > 1 and not inside:
            raise ModelError(
                f"random call {site.function} in {_spell(key.module)}: it is called by the block {block}, which it is "
                "not a part of, and the blocks are on several pipeline stages; needed: a random module in each block; "
                "give each block an nn.Dropout of its own, or use a plan with pp1"
            )
        own = not key.module or any(f"{name}.".startswith(f"{key.module}.") for name in self._blocks)
        if self._plan.compile and own:
            raise ModelError(
                f"random call {site.function} in {_spell(key.module)}: found it in the code of a block, or of what "
                "holds the blocks, and the plan compiles blocks; a module that draws is not compiled; needed: draws in "
                "modules of their own inside the block, which stay out of its compiled code; use nn.Dropout in place "
                "of F.dropout, or drop `compile` from the plan"
            )

    def _awake(self) -> bool:
        """Whether a module whose dropout was 0 when it was traced has been given other numbers since."""
        awake = False
        for live, traced in self._idle:
            now = _rates(live)
            if now != _rates(traced):
                vars(traced).update(now)
                awake = True
        return awake

    def _set_modes(self, roots: Sequence[nn.Module]) -> bool:
        """Let the copy be in the modes of what trains, which a script may set one by one; whether they have changed."""
        if self._modes is None:
            assert self._reference is not None
            self._reference.train()  # on other stages of a pipeline, too
            copies = dict(self._reference.named_modules())
            live = [(name, module) for root in roots for name, module in root.named_modules() if name in copies]
            self._modes = [(module, copies[name]) for name, module in live]
            for module, traced in self._modes:
                traced.training = module.training
            return False
        changed = [(module, traced) for module, traced in self._modes if module.training is not traced.training]
        for module, traced in changed:
            traced.training = module.training
        return bool(changed)

    def _look_while_running(self, roots: Sequence[nn.Module]) -> None:
        """Without a trace: every module is watched in the first step, and no longer if nothing was drawn."""
        if not self._watching:
            self._watching = True
            self._drawing = frozenset(name for root in roots for name, _ in root.named_modules())
            self._wrap(roots)
        elif not self._drawn:
            self._drawing = frozenset()

    def _wrap(self, roots: Sequence[nn.Module]) -> None:
        for name in self._drawing:
            for module in _modules(roots, name):
                self.inside(name, module)


def _modules(roots: Sequence[nn.Module], name: str) -> list[nn.Module]:
    """The modules of this name on this rank: none where it is on another stage of a pipeline."""
    found = []
    for root in roots:
        try:
            found.append(root.get_submodule(name))
        except AttributeError:
            continue
    return found


def _rates(module: nn.Module) -> dict[str, float]:
    """The plain numbers of a module, among them how much it drops."""
    return {name: value for name, value in vars(module).items() if isinstance(value, float)}


def _shapes(batch: Any) -> list[tuple[Any, torch.Size]] | None:
    """The shapes of a micro-batch of tensors by key or place; None where it holds other things, whose values count."""
    items = list(
        batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, tuple | list) else ()
    )
    shapes = [(key, value.shape) for key, value in items if isinstance(value, torch.Tensor)]
    return shapes if shapes and len(shapes) == len(items) else None


def _tokens(batch: Any) -> int | None:
    """Length of the sequences of a micro-batch: dim 1 of its first tensor that has one."""
    return next((t.shape[1] for _, t in tensors_in(batch) if t.dim() > 1), None)


def _spell(module: str) -> str:
    return module or "the model itself"


def _check_outside(name: str, module: nn.Module) -> None:
    if module.training and torch.is_grad_enabled():
        raise ModelError(
            f"random call in {_spell(name)}: found the module in training mode outside of a training step, as when the "
            "model recomputes itself (torch.utils.checkpoint) in the backward pass, where its mask would be another "
            "one; needed: a forward by make_step or steps; use the plan's recompute=blocks in place of the model's "
            "own, or call .eval() first"
        )


class _Draws(TorchFunctionMode):
    """Catches the random calls of one call of one module, and counts them."""

    def __init__(self, randomness: Randomness, frame: Frame, name: str, call: int) -> None:
        super().__init__()
        self.randomness, self.frame, self.name, self.call, self.draws = randomness, frame, name, call, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function of torch, keyed if it is random."""
        kwargs = kwargs or {}
        draw = DRAWS.get(func)
        if draw is None:
            if func in UNKEYED and draws_by_itself(func, args, kwargs):
                raise ModelError(str(unkeyed([self.name], name_of(func), UNKEYED[func])))
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            raise ModelError(
                f"random call {name_of(func)} in {_spell(self.name)}: found a DTensor, needed this "
                "rank's plain tensor; convert it with to_local() before, or draw before the layer that makes it"
            )
        source = _Source(self.randomness, self.frame, Key(self.name, self.call, self.draws))
        self.draws += 1
        result = draw(source, *args, **kwargs)
        return func(*args, **kwargs) if result is SKIP else result


@dataclass(frozen=True)
class _Source:
    randomness: Randomness
    frame: Frame
    key: Key

    def numbers(self, shape: tuple[int, ...], device: torch.device) -> Numbers:
        return self.randomness.numbers(self.key, self.frame, shape, device)
