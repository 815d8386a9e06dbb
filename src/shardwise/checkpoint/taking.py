"""`take_over`: what a checkpoint holds becomes the state, when no rank has anything against it."""

from __future__ import annotations

from functools import reduce
from operator import or_
from pathlib import Path

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.arrival import Arrivals, fill
from shardwise.checkpoint.converting import convert, wanted
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.loading import Converted, bits, check_names
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.partial_state import followers, masters_in, scalars_for
from shardwise.checkpoint.saveable import Saveable


def take_over(
    state: Saveable, path: Path, manifest: Manifest, files: Files, *, weights_only: bool, convert_state: bool
) -> tuple[Manifest, tuple[Converted, ...], Arrivals]:
    """Read into fresh tensors, and then, when no rank has anything against it, into the state.

    What the state must be now: the manifest, with what was changed on the way in place of what is stored; and
    of the parts that were read as they are stored where they lie (`Arrival`).

    Raises:
        CheckpointError: on all ranks; the state is as it was.
    """
    peers, doing = Peers.of(state.mesh), f"loading {path}"
    masters = {name for names in peers.gather(masters_in(state.tensors())) for name in names} if weights_only else None
    known, reading, own = peers.together(doing, lambda: wanted(state, manifest, masters))
    template = reading.template
    told = peers.gather((bits(known, template), bits(known, own)))

    def check() -> None:
        check_names(known, template, [seen for seen, _ in told])
        reading.check_leave(convert_state=convert_state)

    peers.together(doing, check)
    divided = reduce(or_, (seen & ~here for seen, here in told))
    whole = {name for i, name in enumerate(known.tensors) if not divided >> i & 1}
    arrived = peers.together(doing, lambda: fill(path, manifest, files, template, whole))
    kept, converted = convert(peers, doing, known, reading)
    if weights_only:
        template |= followers(template, state.tensors())
    else:
        peers.together(doing, lambda: state.load_scalars(scalars_for(manifest, state.scalars())))
    peers.together(doing, lambda: state.load_tensors(template))
    return kept, converted, arrived
