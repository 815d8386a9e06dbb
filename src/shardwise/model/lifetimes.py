"""How long each tensor of a module's step lives, and so what each phase of it holds."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.model.copies import tensors_in
from shardwise.model.course import Course, Courses, Held
from shardwise.model.profile import Block, Profile
from shardwise.model.recording import AFTER, BEFORE, key_of
from shardwise.model.standin import BITS, spread_evenly
from shardwise.model.torch_private import READ_NUMBER, TorchDispatchMode, is_fake, with_values

SAME = 0.05
"""How much more than in proportion to its rows a storage may have, as by rounding up, and still be taken as per row."""


class Lifetimes(TorchDispatchMode):
    """While it is entered: which storages a step makes, in which phase, and when they end.

    A storage goes by its place in the order in which they are made, which is the same whatever the batch.
    """

    def __init__(self, module: nn.Module, given: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.phase, self.backward = BEFORE, False
        self.width = max((p.element_size() for p in module.parameters() if p.is_floating_point()), default=4)
        self.sizes: list[int] = []
        """Bytes of each storage."""
        self.drawn: set[int] = set()
        """Places of those that hold random bits."""
        self.events: list[tuple[str, int, int, bool]] = []
        """`made`, `ended` or `added` (to its parameter, as a gradient), the storage's place, and the phase."""
        self._outside = [*module.parameters(), *module.buffers(), *given]
        self._known = {key_of(tensor): -1 for tensor in self._outside}
        self._refs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and see what it gives. Values are made up as in `estimate --trace`.

        A number that is read is one, and tokens that are counted by expert are spread evenly.
        """
        if func is READ_NUMBER and is_fake(args[0]):
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten.bincount.default:
            bins = (kwargs or {}).get("minlength", args[2] if len(args) > 2 else 0)
            with with_values():
                return torch.tensor(spread_evenly(args[0].numel(), bins))
        if (given := tensors_in((args, kwargs))) and not any(is_fake(tensor) for _, tensor in given):
            with with_values():  # those counts
                return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for _, tensor in tensors_in(result):
            self._see(tensor)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        key = key_of(tensor)
        if key not in self._known:
            self._known[key] = place = len(self.sizes)
            storage = tensor.untyped_storage()
            self.sizes.append(storage.nbytes())
            if tensor.dtype is BITS:
                self.drawn.add(place)
            self._refs.append(weakref.ref(storage, partial(self._end, key)))
            self.events.append(("made", place, self.phase, self.backward))

    def _end(self, key: int, ref: object) -> None:
        self.events.append(("ended", self._known.pop(key), self.phase, self.backward))

    def add(self, parameter: torch.Tensor) -> None:
        """A parameter has its gradient."""
        if parameter.grad is not None and (place := self.place_of(parameter.grad)) >= 0:
            self.events.append(("added", place, self.phase, self.backward))

    def place_of(self, tensor: torch.Tensor) -> int:
        """That of a tensor's storage; -1: it was not made here."""
        return self._known.get(key_of(tensor), -1)

    def enter(self, phase: int, *args: object) -> None:
        """Forward or backward comes to a phase."""
        self.phase = phase

    def watch(self, phase: int, tensors: Iterable[torch.Tensor]) -> None:
        """A phase of the backward pass begins where one of these has its gradient."""
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self.enter, phase))  # type: ignore[no-untyped-call]  # torch does not annotate it

    def turn(self) -> None:
        """The forward pass is over."""
        self.phase, self.backward = AFTER, True


def courses_of(runs: Sequence[Lifetimes], rows: Sequence[int], tokens: float, out: int) -> dict[int, Course]:
    """Phase -> what it holds, from three runs of a step.

    Args:
        runs: of few rows, and of more; what grows between them is per row, or per pair of rows.
        rows: their numbers.
        tokens: of a row.
        out: place of what a loss takes, which is counted with the loss.
    """
    first = runs[0]
    sizes = _sizes(runs, rows, tokens)
    added = {place for kind, place, *_ in first.events if kind == "added"}
    kept = _kept(first, sizes, out)
    found: dict[tuple[int, bool], list[Held]] = {}
    before, total = {}, Held()
    for phase in sorted(kept):
        before[phase], total = total, _sum(total, kept[phase])
    live, gradients, fresh = Held(), dict.fromkeys(kept, 0.0), set[int]()
    made: dict[int, int] = {}
    """Place of each storage that the backward pass has made -> phase."""
    for kind, place, phase, backward in first.events:
        if kind == "added":
            fresh.discard(place)
        elif kind == "made" and place in added and backward:
            gradients[phase] += first.sizes[place] / first.width
            fresh.add(place)
        elif place not in added and (place != out or not backward):
            live = _sum(live, sizes[place], 1 if kind == "made" else -1)
            if kind == "made" and backward:
                made[place] = phase
            elif kind == "ended":
                made.pop(place, None)
        if kind == "made":
            held = _sum(live, before[phase], -1)
            waits = sum(first.sizes[each] for each in fresh) / first.width
            if backward and out >= 0:
                held = _sum(held, sizes[out], -1)
            given = sum(sizes[each].per_token for each, maker in made.items() if maker != phase)
            held = held._replace(gradients=gradients[phase] * backward, fresh=waits, drawn=live.drawn, given=given)
            found.setdefault((phase, backward), []).append(held)
    return {
        phase: Course(kept[phase], largest(found.get((phase, False), [])), largest(found.get((phase, True), [])))
        for phase in kept
    }


def _sum(one: Held, other: Held, times: int = 1) -> Held:
    return Held(*(a + times * b for a, b in zip(one, other, strict=True)))


def _sizes(runs: Sequence[Lifetimes], rows: Sequence[int], tokens: float) -> list[Held]:
    """Of each storage: what of its bytes is there once, per token, and per pair of tokens."""
    first = runs[0]
    if any(len(run.sizes) != len(first.sizes) for run in runs):  # its course depends on the rows: all is per row
        return [Held(size / rows[0] / tokens) for size in first.sizes]
    few, more, most = rows
    found = []
    for place, (low, high, top) in enumerate(zip(*(run.sizes for run in runs), strict=True)):
        squared, slope = 0.0, max(0.0, (high - low) / (more - few))
        if top > (low + slope * (most - few)) * (1 + SAME):
            squared = ((top - high) / (most - more) - slope) / (most - few)
            slope -= squared * (few + more)
        once = low - slope * few - squared * few**2
        drawn = place in first.drawn
        found.append(Held(0.0 if drawn else slope / tokens, once, drawn=slope / tokens / 8 * drawn))
        found[-1] = found[-1]._replace(squared=squared / tokens**2)
    return found


def _kept(run: Lifetimes, sizes: list[Held], out: int) -> dict[int, Held]:
    """Phase -> what it made and what lives when forward ends."""
    made: dict[int, int] = {}
    kept = {phase: Held() for *_, phase, _ in run.events}
    for kind, place, phase, backward in run.events:
        if backward:
            break
        if kind == "made":
            made[place] = phase
        else:
            made.pop(place, None)
    for place, phase in made.items():
        if place != out:
            kept[phase] = _sum(kept[phase], sizes[place]._replace(drawn=0.0))
    return kept


def largest(moments: Iterable[Held]) -> tuple[Held, ...]:
    """Those that no other exceeds in everything."""
    best: list[Held] = []
    for one in dict.fromkeys(moments):
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in best):
            best = [other for other in best if not all(a >= b for a, b in zip(one, other, strict=True))]
            best.append(one)
    return tuple(best)


def enough(module: nn.Module, names: tuple[str, ...], profile: Profile) -> tuple[str, ...]:
    """The first blocks of each list, as far as there are two of each kind: a step with those shows what others hold."""
    lists: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        lists.setdefault(name.rpartition(".")[0], []).append(index)
    chosen: list[int] = []
    for parent, members in lists.items():
        met = Counter[Block]()
        first = min(3, len(members))
        for place, index in enumerate(members):
            met[profile.blocks[index]] += 1
            first = max(first, place + 1) if met[profile.blocks[index]] <= 2 else first
        container = module.get_submodule(parent)
        whole = not isinstance(container, nn.ModuleList) or len(container) != len(members)
        chosen += members if whole else members[:first]
    return tuple(names[index] for index in sorted(chosen))


@contextmanager
def shortened(module: nn.Module, names: tuple[str, ...], chosen: tuple[str, ...]) -> Iterator[None]:
    """Within it lists of blocks hold the chosen ones alone."""
    before: dict[str, dict[str, Any]] = {}
    for name in set(names) - set(chosen):
        parent, _, key = name.rpartition(".")
        container = module.get_submodule(parent)
        before.setdefault(parent, dict(container._modules))
        del container._modules[key]
    try:
        yield
    finally:
        for parent, children in before.items():
            module.get_submodule(parent)._modules.update(children)


def with_courses(profile: Profile, courses: Mapping[float, Mapping[int, Course]]) -> Profile:
    """The profile with what a step was seen to hold: bytes of an element -> phase -> its course.

    Blocks that are alike have one course: what they keep on average, and the moments of all that were seen. But the
    last of them has its own where it keeps something else: nobody keeps the output of a convolution behind which the
    mean is taken, and the block behind it keeps that of all others.
    """
    alike: dict[Block, list[int]] = {}
    for index, block in enumerate(profile.blocks):
        alike.setdefault(block, []).append(index)
    new = list(profile.blocks)
    for block, indices in alike.items():
        *rest, last = [n for n in indices if any(n in seen for seen in courses.values())] or [indices[-1]]
        apart = bool(rest) and not _keep_as_much(courses, rest[-1], last)
        joint = replace(block, courses=_joint(courses, rest if apart else [*rest, last]))
        for index in indices:
            new[index] = joint
        if apart:
            new[indices[-1]] = replace(block, courses=_joint(courses, [last]))
    ahead = _joint(courses, [BEFORE])
    new = [replace(each, courses_ahead=ahead) if each == new[0] else each for each in new]
    head = replace(profile.head, courses=_joint(courses, [AFTER]))
    return replace(profile, blocks=tuple(new), head=head)


def _keep_as_much(courses: Mapping[float, Mapping[int, Course]], one: int, other: int) -> bool:
    pairs = [(seen[one].kept, seen[other].kept) for seen in courses.values() if one in seen and other in seen]
    return all(abs(a.per_token - b.per_token) <= 0.01 * a.per_token for a, b in pairs)


def _joint(courses: Mapping[float, Mapping[int, Course]], phases: Sequence[int]) -> Courses:
    joint = []
    for width, by_phase in courses.items():
        found = [by_phase[phase] for phase in phases if phase in by_phase]
        if found:
            kept = Held(*(sum(sizes) / len(found) for sizes in zip(*(each.kept for each in found), strict=True)))
            forward = largest(held for each in found for held in each.forward)
            backward = largest(held for each in found for held in each.backward)
            joint.append((width, Course(kept, forward, backward)))
    return tuple(joint)
