"""How long each tensor of a module's step lives, and so what each phase of it holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.model.course import Course, Courses, Held, Seen
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
        self.events: list[tuple[str, int, int, bool, bool]] = []
        """`made`, `ended` or `added` (to its parameter, as a gradient), the storage's place, the phase, whether it is
        one of the backward pass, and whether a block runs."""
        self.calls: list[int] = []
        """Blocks in the order in which forward calls them: the number of a call is its phase."""
        self.inside = False
        self.taken: set[int] = set()
        """Places of what blocks are given, which is kept if they are recomputed."""
        self.shared: set[int] = set()
        """Those of them that blocks after the first are given, without a gradient."""
        self.apart: set[int] = set()
        """Places of what is kept outside of blocks."""
        self._outside = [*module.parameters(), *module.buffers(), *given]
        self._known = {key_of(tensor): -1 for tensor in self._outside}
        self._refs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and see what it gives. Values are made up as in `estimate --trace`.

        A number that is read is one, and tokens that are counted by expert are spread evenly.
        """
        kwargs = kwargs or {}
        if func is READ_NUMBER and is_fake(args[0]):
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten.bincount.default:
            bins = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            with with_values():
                return torch.tensor(spread_evenly(args[0].numel(), bins))
        if (given := list(_tensors((*args, *kwargs.values())))) and not any(map(is_fake, given)):
            with with_values():  # those counts
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
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
            self._note("made", place)

    def _note(self, kind: str, place: int) -> None:
        self.events.append((kind, place, self.phase, self.backward, self.inside))

    def _end(self, key: int, ref: object) -> None:
        self._note("ended", self._known.pop(key))

    def add(self, parameter: torch.Tensor) -> None:
        """A parameter has its gradient."""
        if parameter.grad is not None and (place := self.place_of(parameter.grad)) >= 0:
            self._note("added", place)

    def place_of(self, tensor: torch.Tensor) -> int:
        """That of a tensor's storage; -1: it was not made here."""
        return self._known.get(key_of(tensor), -1)

    def enter(self, phase: int, *args: object) -> None:
        """Forward or backward comes to a phase."""
        self.phase = phase

    def call(self, block: int, given: Iterable[torch.Tensor]) -> None:
        """A block is called with some tensors; in a backward pass again, by a checkpoint around it."""
        if self.backward:
            self.phase = max(place for place, each in enumerate(self.calls) if each == block)
            return
        if self.phase == AFTER:  # again: what was behind all calls is behind the last one
            last = len(self.calls) - 1
            self.events = [(*event[:2], last, *event[3:]) if event[2] == AFTER else event for event in self.events]
        self.calls.append(block)
        self.phase, self.inside = len(self.calls) - 1, True
        given = list(given)
        self.taken.update(map(self.place_of, given))
        if self.phase:
            self.shared.update(self.place_of(tensor) for tensor in given if not tensor.requires_grad)

    def leave(self, is_last: bool, gave: Iterable[torch.Tensor]) -> None:
        """A block has run; `is_last`: in the order of blocks."""
        if self.backward:
            return
        call, self.inside = self.phase, False
        self.phase = AFTER if is_last else call
        self.watch(call, gave)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd keeps a tensor."""
        if not self.inside:
            self.apart.add(self.place_of(tensor))
        return tensor.detach()  # itself would be a cycle

    def watch(self, phase: int, tensors: Iterable[torch.Tensor]) -> None:
        """A phase of the backward pass begins where one of these has its gradient."""
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self.enter, phase))  # type: ignore[no-untyped-call]  # torch does not annotate it

    def turn(self) -> None:
        """The forward pass is over."""
        self.phase, self.backward = AFTER, True


def _tensors(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those that an operator takes or gives, in lists or not. (`tensors_in` looks into all, which takes longer)."""
    for value in given:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def is_plain(runs: Sequence[Lifetimes], rows: Sequence[int]) -> bool:
    """Whether each storage is of one size in two runs, or grows as their rows do: a third one would tell no more."""
    one, other = (run.sizes for run in runs)
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a == b or a * rows[1] == b * rows[0] for a, b in pairs)


def courses_of(
    runs: Sequence[Lifetimes],
    rows: Sequence[int],
    tokens: float,
    out: int,
    trained: Mapping[int, int],
    tied: bool = False,
) -> dict[int, Course]:
    """Block, or what is before or behind all of them -> what it holds, from three runs of a step, or two plain ones.

    Of a block that is called several times: in one call.

    Args:
        runs: of few rows, and of more; what grows between them is per row, or per pair of rows.
        rows: their numbers.
        tokens: of a row.
        out: place of what a loss takes, which is counted with the loss.
        trained: bytes of each block's trained parameters. Gradients of one that is called several times wait until all
            calls have gone backward, and are left out.
        tied: the head is the table that is read before: of its gradients the head's own moments have the head's, and
            the rest is left out.
    """
    first = runs[0]
    sizes = _sizes(runs, rows, tokens)
    added = {place for kind, place, *_ in first.events if kind == "added"}
    of_table = _of_tied(first, sizes, added) if tied else frozenset[int]()
    kept, left = _kept(first, sizes, out)
    found: dict[tuple[int, bool, bool], list[Held]] = {}
    before, total = {}, Held()
    for phase in sorted(kept):
        before[phase], total = total, _sum(total, kept[phase])
    waiting = {phase: _waiting(first.calls, phase, trained) for phase in kept}
    live, gradients, fresh, apart = Held(), dict.fromkeys(kept, 0.0), set[int](), 0.0
    made: dict[int, int] = {}
    """Place of each storage that the backward pass has made -> phase."""
    for kind, place, phase, backward, inside in first.events:
        if kind == "added":
            fresh.discard(place)
        elif place in of_table:
            apart += first.sizes[place] if kind == "made" else -first.sizes[place]
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
            held = held._replace(once=held.once - waiting[phase] * backward + apart * (phase == AFTER))
            waits = sum(first.sizes[each] for each in fresh) / first.width
            if backward and out >= 0:
                held = _sum(held, sizes[out], -1)
            given = sum(sizes[each].per_token for each, maker in made.items() if maker != phase)
            held = held._replace(gradients=gradients[phase] * backward, fresh=waits, drawn=live.drawn, given=given)
            found.setdefault((phase, backward, inside), []).append(held)
    courses = {at: _course(kept[at], left[at], *(found.get((at, *way), []) for way in WAYS)) for at in kept}
    return _by_block(first.calls, courses, _shared(first, sizes, out))


WAYS = ((False, True), (False, False), (True, False))
"""Of the moments of a phase: whether they are in the backward pass, and within the block."""


def _course(kept: Held, left: Held, within: list[Held], behind: list[Held], backward: list[Held]) -> Course:
    return Course(kept, largest([*within, *behind]), largest(backward), left, largest(within[:-1]))


def _of_tied(run: Lifetimes, sizes: Sequence[Held], added: set[int]) -> frozenset[int]:
    """Places of the gradients of a tied table: the head's, which waits through all blocks, the table's, their sum."""
    made = {place: phase for kind, place, phase, backward, _ in run.events if kind == "made" and backward}
    ended = {place: phase for kind, place, phase, backward, _ in run.events if kind == "ended" and backward}
    whole = [place for place in made if sizes[place] == Held(once=run.sizes[place])]  # whatever the rows
    heads = {p for p in whole if p not in added and (made[p], ended.get(p)) == (AFTER, BEFORE)}
    alike = {run.sizes[place] for place in heads}
    return frozenset(heads | {p for p in whole if made[p] == BEFORE and run.sizes[p] in alike})


def _by_block(calls: Sequence[int], courses: Mapping[int, Course], shared: tuple[Held, Held]) -> dict[int, Course]:
    found: dict[int, list[Course]] = {}
    for phase, course in courses.items():
        found.setdefault(calls[phase] if 0 <= phase < AFTER else phase, []).append(course)
    averages = {block: _average(each) for block, each in found.items()}
    return {block: course._replace(shared=shared) if block == BEFORE else course for block, course in averages.items()}


def _waiting(calls: Sequence[int], phase: int, trained: Mapping[int, int]) -> int:
    """Bytes of gradients of blocks that have gone backward in some calls, and not in all, when a call does."""
    return sum(trained[block] for block in set(calls[phase + 1 :]) & set(calls[: phase + 1])) if phase >= 0 else 0


def _average(courses: Sequence[Course]) -> Course:
    """What is kept on average, and the moments of all."""
    kept, left = (
        Held(*(sum(sizes) / len(courses) for sizes in zip(*each, strict=True)))
        for each in ([course.kept for course in courses], [course.left for course in courses])
    )
    forward, backward, again = (
        largest(held for moments in each for held in moments)
        for each in ([c.forward for c in courses], [c.backward for c in courses], [c.again for c in courses])
    )
    return courses[0]._replace(kept=kept, forward=forward, backward=backward, left=left, again=again)


def _sum(one: Held, other: Held, times: int = 1) -> Held:
    return Held(*(a + times * b for a, b in zip(one, other, strict=True)))


def _sizes(runs: Sequence[Lifetimes], rows: Sequence[int], tokens: float) -> list[Held]:
    """Of each storage: what of its bytes is there once, per token, and per pair of tokens."""
    first = runs[0]
    if any(len(run.sizes) != len(first.sizes) for run in runs):  # its course depends on the rows: all is per row
        return [Held(size / rows[0] / tokens) for size in first.sizes]
    few, more, *most = rows
    found = []
    for place, (low, high, *top) in enumerate(zip(*(run.sizes for run in runs), strict=True)):
        squared, slope = 0.0, max(0.0, (high - low) / (more - few))
        if top and top[0] > (low + slope * (most[0] - few)) * (1 + SAME):
            squared = ((top[0] - high) / (most[0] - more) - slope) / (most[0] - few)
            slope -= squared * (few + more)
        once = low - slope * few - squared * few**2
        drawn = place in first.drawn
        found.append(Held(0.0 if drawn else slope / tokens, once, drawn=slope / tokens / 8 * drawn))
        found[-1] = found[-1]._replace(squared=squared / tokens**2)
    return found


def _kept(run: Lifetimes, sizes: list[Held], out: int) -> tuple[dict[int, Held], dict[int, Held]]:
    """Phase -> what it made and what lives when forward ends; and what of it does if blocks are recomputed."""
    made = {place: phase for kind, place, phase, backward, _ in run.events if kind == "made" and not backward}
    ended = {place for kind, place, _, backward, _ in run.events if kind == "ended" and not backward}
    kept = {phase: Held() for _, _, phase, *_ in run.events}
    left = dict(kept)
    for place, phase in made.items():
        size, lives = sizes[place]._replace(drawn=0.0), place not in ended and place != out
        if lives:
            kept[phase] = _sum(kept[phase], size)
        if place in run.taken or (lives and (phase == BEFORE or place in run.apart)):
            left[phase] = _sum(left[phase], size)
    return kept, left


def _shared(run: Lifetimes, sizes: Sequence[Held], out: int) -> tuple[Held, Held]:
    """Of both that runs before the blocks, what blocks after the first are given."""
    kept, left = _kept(run, [size if place in run.shared else Held() for place, size in enumerate(sizes)], out)
    return kept.get(BEFORE, Held()), left.get(BEFORE, Held())


def largest(moments: Iterable[Held]) -> tuple[Held, ...]:
    """Those that no other exceeds in everything."""
    best: list[Held] = []
    for one in dict.fromkeys(moments):
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in best):
            best = [other for other in best if not all(a >= b for a, b in zip(one, other, strict=True))]
            best.append(one)
    return tuple(best)


def with_courses(profile: Profile, courses: Mapping[Seen, Mapping[int, Course]]) -> Profile:
    """The profile with what steps were seen to hold: which step -> phase -> its course.

    Blocks that are alike have one course: what they keep on average, and the moments of all that were seen. But the
    last of them has its own where it keeps something else (nobody keeps the output of a convolution behind which the
    mean is taken, and the block behind it keeps that of all others), or needs something else (gradients of what all
    blocks are given, as of a text that latents look at, are added up from the last but one on).
    """
    alike: dict[Block, list[int]] = {}
    for index, block in enumerate(profile.blocks):
        alike.setdefault(block, []).append(index)
    new = list(profile.blocks)
    for block, indices in alike.items():
        *rest, last = [n for n in indices if any(n in seen for seen in courses.values())] or [indices[-1]]
        apart = bool(rest) and not _hold_as_much(courses, rest[-1], last)
        joint = replace(block, courses=_joint(courses, rest if apart else [*rest, last]))
        for index in indices:
            new[index] = joint
        if apart:
            new[indices[-1]] = replace(block, courses=_joint(courses, [last]))
    ahead = _joint(courses, [BEFORE])
    new = [replace(each, courses_ahead=ahead) if each == new[0] else each for each in new]
    head = replace(profile.head, courses=_joint(courses, [AFTER]))
    return replace(profile, blocks=tuple(new), head=head)


def _hold_as_much(courses: Mapping[Seen, Mapping[int, Course]], one: int, other: int) -> bool:
    pairs = [(seen[one], seen[other]) for seen in courses.values() if one in seen and other in seen]
    sizes = [(a.kept.per_token, b.kept.per_token) for a, b in pairs]
    sizes += [(_most(a), _most(b)) for a, b in pairs]
    return all(abs(a - b) <= 0.01 * a for a, b in sizes)


def _most(course: Course) -> float:
    """Bytes per token at the largest moment of a backward pass."""
    return max((held.per_token for held in course.backward), default=0.0)


def _joint(courses: Mapping[Seen, Mapping[int, Course]], phases: Sequence[int]) -> Courses:
    joint = []
    for seen, by_phase in courses.items():
        found = [by_phase[phase] for phase in phases if phase in by_phase]
        if found:
            joint.append((seen, _average(found)))
    return tuple(joint)
