"""What of the maths is not as it was when a checkpoint was saved: for a script, whose settings nobody else compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from shardwise.checkpoint.format import same
from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import ShardwiseError
from shardwise.plan.plan import MATHS, Plan

_KEYS = ("seed", "base_lr", "optimizer", "ema_decay", "data.global_size", "batch_norm")
"""Of the scalars: what is said when it differs. What lies in the data is compared by the loader, which refuses."""


def changed(manifest: Manifest, plan: Plan, scalars: Mapping[str, Any], *, converts: bool = False) -> tuple[str, ...]:
    """One line per difference, `base_lr: 0.01 -> 0.5`; what one of the two does not say is not compared.

    Args:
        manifest: of the checkpoint.
        plan: under which it is loaded.
        scalars: of the state, before it takes over those of the checkpoint.
        converts: its averages may be of another type, so that its class is, too.
    """
    if "imported" in manifest.scalars:  # another program's
        return ()
    found = [f"plan.{key}: {then} -> {now}" for key, (then, now) in _plans(manifest, plan)]
    for key in _KEYS:
        found += _differing(key, _at(manifest.scalars, key), _at(scalars, key))
    stored, live = (each.get("stateful") or {} for each in (manifest.scalars, scalars))
    found += [f"stateful.{name}: kept -> not there" for name in stored if name not in live]
    found += [f"stateful.{name}: not there -> begins anew" for name in live if name not in stored]
    return tuple(line for line in found if not (converts and line.startswith("optimizer.name")))


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
    if then is None or now is None or same(then, now) or _holds(key, then, now):
        return
    then, now = (list(value) if isinstance(value, tuple) else value for value in (then, now))
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for inner in sorted(then.keys() & now.keys()):
            yield from _differing(f"{key}.{inner}", then[inner], now[inner])
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for place, pair in enumerate(zip(then, now, strict=True)):
            yield from _differing(f"{key}[{place}]" if len(then) > 1 else key, *pair)
    else:
        yield f"{key}: {then!r} -> {now!r}"


def _holds(key: str, then: Any, now: Any) -> bool:
    """Whether a save of all stages of a pipeline holds what the stages of this rank have: in any order, each once."""
    if key == "optimizer.name":
        then, now = then.split("+"), now.split("+")
    if not (isinstance(then, list) and isinstance(now, list)):
        return False
    return _among(now, then) and (len(then) != len(now) or _among(then, now))


def _among(few: list[Any], many: list[Any]) -> bool:
    return all(any(same(item, other) for other in many) for item in few)
