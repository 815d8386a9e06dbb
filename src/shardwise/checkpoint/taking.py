"""`take_over`: what a checkpoint holds becomes the state, when no rank has anything against it."""

from __future__ import annotations

from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.arrival import Arrivals, fill
from shardwise.checkpoint.changed import changed, of_stage
from shardwise.checkpoint.converting import convert, wanted, with_converted
from shardwise.checkpoint.drawn import go_on, stored
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.loading import Found, Proof, bits, check_damage, check_names, found, prove
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.partial_state import followers, masters_for, scalars_for, weights
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.saveable import Saveable


class Taken(NamedTuple):
    """What became of a state."""

    proof: Proof
    changes: tuple[str, ...]
    """What of the maths is not as it was saved, one line each."""


def take_over(
    state: Saveable, path: Path, manifest: Manifest, files: Files, *, weights_only: bool, convert_state: bool
) -> Taken:
    """Read into fresh tensors, and then, when no rank has anything against it, into the state; prove that it arrived.

    The ranks meet four times: when each has looked at files, names and its generators, when each has read its part,
    when scalars are taken over, and when tensors are. The ones that convert meet more often.

    Raises:
        CheckpointError: on all ranks; unless it is the proof that says so, the state is as it was.
    """
    peers, doing = Peers.of(state.mesh), f"loading {path}"
    masters = None
    if weights_only:
        masters = {name for names in peers.gather(masters_for(manifest, state.tensors())) for name in names}
    with Reader(path, manifest, files) as reader:

        def look() -> tuple[Any, Any]:
            check_damage(peers, reader)
            drawn = stored(manifest.scalars, peers.rank, path)
            known, reading, own = wanted(state, manifest, masters)
            stage = {} if weights_only else of_stage(state)
            return (drawn, known, reading), (bits(known, reading.template), bits(known, own), reading.sources, stage)

        (drawn, known, reading), told = peers.meeting(doing, look)
        template = reading.template
        divided = reduce(or_, (seen & ~here for seen, here, *_ in told))
        whole = {name for i, name in enumerate(known.tensors) if not divided >> i & 1}

        def read() -> tuple[tuple[str, ...], Arrivals]:
            stages = [each[3] for each in told]
            changes = () if weights_only else changed(manifest, state, stages, converts=convert_state)
            check_names(known, template, [each[0] for each in told])
            reading.check_leave(convert_state=convert_state)
            return changes, fill(reader, template, whole)

        changes, arrived = peers.together(doing, read)
    kept, converted = convert(peers, doing, known, reading, {name for each in told for name in each[2]})
    if weights_only:
        template |= followers(template, state.tensors())
    else:
        peers.together(doing, lambda: state.load_scalars(scalars_for(manifest, state.scalars())))

    def take() -> Found:
        state.load_tensors(template)
        live = state.tensors()
        here = found(kept, weights(kept, live, kept.tensors)[1] if weights_only else live, arrived)
        if not weights_only:
            go_on(drawn, path, state.mesh.device)
        return here

    proof = prove(kept, peers.from_all(doing, take))
    return Taken(with_converted(proof, manifest, converted), changes)
