"""What of the maths is not as it was when a checkpoint was saved: for a script, whose settings nobody else compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shardwise.checkpoint.format import same
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.saveable import Grouping, Saveable
from shardwise.checkpoint.scalars import MEMBERS, OF_STAGE, members_of, united
from shardwise.errors import ShardwiseError
from shardwise.plan.plan import MATHS, Plan

_KEYS = ("seed", "base_lr", "optimizer", "ema_decay", "ema_warmup", "data.global_size", "batch_norm")
"""Of the scalars: what is said when it differs. What lies in the data is compared by the loader, which refuses."""


def of_stage(state: Saveable) -> dict[str, Any]:
    """What of a state's settings other ranks need: stages of a pipeline have their own groups of the optimizer."""
    own = state.scalars() | members_of(state)
    return {key: own[key] for key in OF_STAGE if key in own}


def changed(
    manifest: Manifest, state: Saveable, everyones: list[dict[str, Any]], *, converts: bool = False
) -> tuple[str, ...]:
    """One line per difference, `base_lr: 0.01 -> 0.5`; what one of the two does not say is not compared.

    Args:
        manifest: of the checkpoint.
        state: before it takes over the checkpoint.
        everyones: what `of_stage` gave on each rank.
        converts: its averages may be of another type, so that its class is, too.
    """
    if "imported" in manifest.scalars:  # another program's
        return ()
    now = state.scalars() | united(everyones)
    return tuple(
        line.replace(_PAIRS, "")
        for line in _changed(manifest, now, state)
        if not (converts and line.startswith("optimizer.name"))
    )


def _changed(manifest: Manifest, now: Mapping[str, Any], state: Saveable) -> Iterator[str]:
    then, plan = manifest.scalars, state.placed.plan
    for key, (before, here) in _plans(manifest, plan):
        yield f"plan.{key}: {before} -> {here}"
    is_cut = plan.axes.pp > 1 or manifest.mesh.get("pp", 1) > 1
    for key in _KEYS:
        before, here = _at(then, key), _at(now, key)
        goes_on = _GOES_ON if key == "seed" or (key == "base_lr" and _is_set_since(then, state)) else ""
        if not (is_cut and _holds_the_same(key, before, here)):
            yield from (line + goes_on for line in _differing(key, before, here))
    if "data" in then and (then["data"] is None) != (now.get("data") is None):
        yield f"data: {_POSITIONS[then['data'] is None]} -> {_POSITIONS[now.get('data') is None]}"
    yield from _members(manifest, then.get(MEMBERS) or [], now.get(MEMBERS) or [])
    yield from _schedules(then, state)
    yield from _functions(then, state)
    stored, live = (each.get("stateful") or {} for each in (then, now))
    yield from (f"stateful.{name}: kept -> not there" for name in stored if name not in live)
    yield from (f"stateful.{name}: not there -> begins anew" for name in live if name not in stored)
    yield from _objects(*(each.get("stateful_made") or {} for each in (then, now)))


_POSITIONS = ("a loader, at its position", "batches of the script's own, at no position")
_PAIRS = ".shardwise.pairs"
"""Of a dict whose keys are no texts, as it is stored."""
_GOES_ON = " (the first goes on: it is part of the state)"


def _objects(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What a script's objects were made as; a scheduler of torch takes its settings from its state."""
    for name in sorted(then.keys() & now.keys()):
        before, here = then[name], now[name]
        if before["class"] != here["class"]:
            yield f"stateful.{name}: {before['class']} -> {here['class']}, which takes over the state of the first"
        else:
            yield from (line + _GOES_ON for line in _differing(f"stateful.{name}", before, here))


def _is_set_since(then: Mapping[str, Any], state: Saveable) -> bool:
    """Whether a scheduler of torch, or the script, had set the learning rate: then that is part of the checkpoint."""
    return getattr(state, "schedule", None) is None and any("lr" in moved for moved in then.get("groups") or ())


def _schedules(then: Mapping[str, Any], state: Saveable) -> Iterator[str]:
    """The last of the steps at which the checkpoint says its schedule's factor where this one gives another."""
    schedule = getattr(state, "schedule", None)
    for step, factor in reversed(then.get("schedule") or ()):
        if (here := 1.0 if schedule is None else float(schedule(step))) != factor:
            yield f"schedule: {factor!r} -> {here!r} at step {step}"
            return


def _functions(then: Mapping[str, Any], state: Saveable) -> Iterator[str]:
    """The same of schedulers of torch that are made of functions, which their state does not hold."""
    stored = then.get("stateful_factors") or {}
    steps = {name: [step for step, _ in rows] for name, rows in stored.items()}
    now = state.factors(steps) if stored and isinstance(state, Grouping) else {}
    for name, rows in now.items():
        for (step, before), (_, here) in zip(reversed(stored.get(name, [])), reversed(rows), strict=False):
            if list(_differing("", before, here)):
                yield from _differing(f"stateful.{name}, its function at step {step}", before, here)
                break


def _members(manifest: Manifest, then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Parameters that are trained now and were not, or no longer, or that another group of the optimizer steps."""
    if not (then and now):
        return
    then, now = _joined(then), _joined(now)
    before, here = ({name: i for i, group in enumerate(of) for name in group["names"]} for of in (then, now))
    new = [name for name in here if name not in before and f"model.{name}" in manifest.tensors]
    if new:
        yield f"{_some(new)}: frozen -> trained, with a state of the optimizer that begins anew"
    if gone := [name for name in before if name not in here]:
        yield f"{_some(gone)}: trained -> frozen"
    moves: dict[tuple[int, int], list[str]] = {}
    for name in before.keys() & here.keys():
        moves.setdefault((before[name], here[name]), []).append(name)
    kept = set[int]()
    for (old, to), names in sorted(moves.items(), key=lambda move: (-len(move[1]), move[0])):
        was, moved = then[old]["settings"], now[to]["settings"]
        lines = [line[1:] for line in _differing("", was, moved)]
        # where most of a group's are now is that group, unless both were groups before and still are
        if lines and (old in kept or (_has(now, was) and _has(then, moved))):
            yield f"{_some(names)}: in another group of the optimizer ({', '.join(lines)})"
        kept.add(old)


def _has(groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> bool:
    return any(same(each["settings"], settings) for each in groups)


def _joined(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of equal settings as one: stages of a pipeline have theirs each."""
    found: list[dict[str, Any]] = []
    for group in groups:
        known = next((each for each in found if same(each["settings"], group["settings"])), None)
        if known is None:
            found.append({"settings": group["settings"], "names": [*group["names"]]})
        else:
            known["names"] += group["names"]
    return found


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(sorted(names)[:3])} ({len(names)} parameter{'s'[: len(names) != 1]})"


def _plans(manifest: Manifest, plan: Plan) -> Iterator[tuple[str, tuple[Any, Any]]]:
    with suppress(ShardwiseError):  # fields that this version does not know
        differences = Plan.from_dict(manifest.plan_fields).diff(plan)
        yield from ((key, pair) for key, pair in differences.items() if key.startswith(MATHS))


def _at(scalars: Mapping[str, Any], key: str) -> Any:
    found: Any = scalars
    for word in key.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return found


def _differing(key: str, then: Any, now: Any) -> Iterator[str]:
    if then is None or now is None or same(then, now):
        return
    then, now = (list(value) if isinstance(value, tuple) else value for value in (then, now))
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for inner in sorted(then.keys() & now.keys()):
            yield from _differing(f"{key}.{inner}", then[inner], now[inner])
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for place, pair in enumerate(zip(then, now, strict=True)):
            yield from _differing(f"{key}[{place}]" if len(then) > 1 else key, *pair)
    elif any(isinstance(item, Mapping) for value in (then, now) if isinstance(value, list) for item in value):
        yield f"{key}: {len(then)} -> {len(now)}"
    else:
        yield f"{key}: {then!r} -> {now!r}"


def _holds_the_same(key: str, then: Any, now: Any) -> bool:
    """Whether both have the same settings, where stages of a pipeline give each of theirs once, in any order."""
    if key == "optimizer" and isinstance(then, Mapping) and isinstance(now, Mapping):
        names = (each.get("name", "").split("+") for each in (then, now))
        return _alike(*names) and _alike(then.get("groups"), now.get("groups"))
    return _alike(then, now)


def _alike(then: Any, now: Any) -> bool:
    if not (isinstance(then, list) and isinstance(now, list)):
        return same(then, now)
    return all(any(same(item, other) for other in others) for one, others in ((then, now), (now, then)) for item in one)
