"""`take_over`: what a checkpoint holds becomes the state, when no rank has anything against it."""

from __future__ import annotations

from functools import reduce
from operator import or_
from pathlib import Path

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.arrival import fill
from shardwise.checkpoint.converting import convert, wanted
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.loading import Converted, Found, bits, check_names, found
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.partial_state import followers, masters_for, scalars_for, weights
from shardwise.checkpoint.saveable import Saveable


def take_over(
    state: Saveable, path: Path, manifest: Manifest, files: Files, *, weights_only: bool, convert_state: bool
) -> tuple[Manifest, tuple[Converted, ...], list[Found]]:
    """Read into fresh tensors, and then, when no rank has anything against it, into the state.

    What the state must be now: the manifest, with what was changed on the way in place of what is stored; and what each
    rank then found it to be.

    Raises:
        CheckpointError: on all ranks; the state is as it was.
    """
    peers, doing = Peers.of(state.mesh), f"loading {path}"
    masters = None
    if weights_only:
        masters = {name for names in peers.gather(masters_for(manifest, state.tensors())) for name in names}
    known, reading, own = peers.together(doing, lambda: wanted(state, manifest, masters))
    template = reading.template
    told = peers.gather((bits(known, template), bits(known, own), sorted(reading.sources)))

    def check() -> None:
        check_names(known, template, [seen for seen, *_ in told])
        reading.check_leave(convert_state=convert_state)

    peers.together(doing, check)
    divided = reduce(or_, (seen & ~here for seen, here, _ in told))
    whole = {name for i, name in enumerate(known.tensors) if not divided >> i & 1}
    arrived = peers.together(doing, lambda: fill(path, manifest, files, template, whole))
    kept, converted = convert(peers, doing, known, reading, {name for *_, names in told for name in names})
    if weights_only:
        template |= followers(template, state.tensors())
    else:
        peers.together(doing, lambda: state.load_scalars(scalars_for(manifest, state.scalars())))

    def take() -> Found:
        state.load_tensors(template)
        live = state.tensors()
        return found(kept, weights(kept, live, kept.tensors)[1] if weights_only else live, arrived)

    return kept, converted, peers.from_all(doing, take)
