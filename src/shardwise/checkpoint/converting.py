"""Tensors that are stored in another type than a run keeps: checked as they are stored, and then changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.arrival import as_stored
from shardwise.checkpoint.format import OPTIM, DamagedError
from shardwise.checkpoint.loading import Converted, Proof, checksums, found
from shardwise.checkpoint.manifest import Manifest, TensorEntry
from shardwise.checkpoint.partial_state import check_imported, weights
from shardwise.checkpoint.saveable import Kind
from shardwise.checkpoint.scalars import FORMS
from shardwise.errors import CheckpointError


class Conversion(Protocol):
    """What a state would change; `shardwise.train.kept.conversion.Conversion` is one."""

    @property
    def what(self) -> str:
        """What differs, for an error's text."""
        ...

    @property
    def settings(self) -> Sequence[str]:
        """Which settings say the types, as `optimizer.state_dtype`."""
        ...

    @property
    def targets(self) -> Collection[str]:
        """Names of the state's tensors that are made of stored ones, and not read."""
        ...

    def sources(self) -> dict[str, Tensor]:
        """Fresh tensors to read what is stored into."""
        ...

    def run(self, filled: dict[str, Tensor]) -> Sequence[tuple[str, str, str, str, float, str]]:
        """Replace sources by targets; of each: what it is, name, how it was and is kept, what that cost, its unit."""
        ...


@runtime_checkable
class Converting(Protocol):
    """A state that can take tensors of another type; `TrainState` is one."""

    def conversion(self, stored: Mapping[str, Kind], template: dict[str, Tensor]) -> Conversion | None:
        """What would be changed of a checkpoint with these tensors; None: nothing."""
        ...


@dataclass(frozen=True)
class Reading:
    """What is read from a checkpoint, and what becomes of it.

    Attributes:
        template: fresh tensors of what is stored, by name.
        conversion: of this rank; None: the state takes everything as it is stored.
        sources: names in `template` of what is changed.
    """

    template: dict[str, Tensor]
    conversion: Conversion | None = None
    sources: frozenset[str] = frozenset()

    @classmethod
    def of(cls, state: Any, manifest: Manifest, template: dict[str, Tensor]) -> Reading:
        """Of a state whose own tensors are like `template`."""
        if not isinstance(state, Converting):
            return cls(template)
        kinds = {name: (entry.shape, entry.dtype) for name, entry in manifest.tensors.items()}
        conversion = state.conversion(kinds, template)
        if conversion is None:
            return cls(template)
        kept = {name: tensor for name, tensor in template.items() if name not in conversion.targets}
        sources = conversion.sources()
        return cls(kept | sources, conversion, frozenset(sources))

    def check_leave(self, *, convert_state: bool) -> None:
        """Nothing is changed that nobody asked for.

        Raises:
            CheckpointError: naming what differs, and the way to load it all the same.
        """
        if self.conversion is not None and not convert_state:
            flags = " ".join(f"--allow {setting}" for setting in self.conversion.settings)
            raise CheckpointError(
                f"{self.conversion.what}; needed the same type, or leave to change it: give "
                f"{' and '.join(self.conversion.settings)} as it was saved with, or convert: store.load(..., "
                f"convert_state=True), in `shardwise train` {flags}"
            )


def convert(
    peers: Peers, doing: str, manifest: Manifest, reading: Reading, sources: Collection[str]
) -> tuple[Manifest, tuple[Converted, ...]]:
    """Change what was read in place; the manifest of the result, by which the state is proven, and what was done.

    Before anything is changed, the checksum of what was read must be the stored one. Every rank calls it.

    Args:
        peers: the ranks.
        doing: for the text of errors.
        manifest: of the checkpoint, as it is read.
        reading: of this rank.
        sources: names of what any rank changes.

    Cost: one more pass over what is changed, before and after, and two gathers of a number for each part.

    Raises:
        DamagedError: what was read is not what was saved: an older checkpoint may be whole.
        CheckpointError: a number cannot be kept in the run's type.
    """
    conversion, filled = reading.conversion, reading.template
    if not sources:
        return manifest, ()
    read = found(manifest, {name: filled[name] for name in reading.sources}, {})
    _check_sources(doing, manifest, checksums(manifest, peers.gather(read)))
    moved = peers.together(doing, lambda: list(conversion.run(filled)) if conversion is not None else [])
    made = {name: filled[name] for name in conversion.targets} if conversion is not None else {}
    sums = checksums(manifest, peers.gather(found(manifest, made, {})))
    entries = {name: entry for name, entry in manifest.tensors.items() if name not in sources}
    for kinds in peers.gather({name: (tuple(t.shape), str(t.dtype)) for name, t in made.items()}):
        for name, (shape, dtype) in kinds.items():
            entries[name] = TensorEntry(shape, dtype.removeprefix("torch."), sums[name], ())
    return replace(manifest, tensors=entries), _summed(item for theirs in peers.gather(moved) for item in theirs)


def _check_sources(doing: str, manifest: Manifest, sums: Mapping[str, int]) -> None:
    """The same answer on every rank."""
    wrong = [name for name, total in sums.items() if total != manifest.tensors[name].checksum]
    if wrong:
        raise DamagedError(
            f"{doing}: {wrong[0]}: checksum {sums[wrong[0]]:016x} of what was read, the manifest says "
            f"{manifest.tensors[wrong[0]].checksum:016x} ({len(wrong)} tensors): it changed before it was written, or "
            "while it was read; choose another checkpoint"
        )


def _summed(moved: Iterable[tuple[str, str, str, str, float, str]]) -> tuple[Converted, ...]:
    """By what they are, and how they were and are kept; a tensor that several ranks hold counts once."""
    names = dict[tuple[str, str, str, str], set[str]]()
    worst = dict[tuple[str, str, str, str], float]()
    for what, name, before, now, rounding, unit in moved:
        key = (what, before, now, unit)
        names.setdefault(key, set()).add(name)
        worst[key] = max(worst.get(key, 0.0), rounding)
    return tuple(
        Converted(what=key[0], count=len(names[key]), before=key[1], now=key[2], rounding=worst[key], unit=key[3])
        for key in sorted(names)
    )


def with_converted(proof: Proof, manifest: Manifest, converted: tuple[Converted, ...]) -> Proof:
    """A proof that counts what is stored, and says what was changed of it."""
    if not converted:
        return proof
    return replace(proof, matched=len(manifest.tensors), stored=len(manifest.tensors), converted=converted)


class Templated(Protocol):
    """A state that says what it would read; `shardwise.checkpoint.saveable.Saveable` is one."""

    def template(
        self, names: Collection[str], *, late: Mapping[str, Kind] | None = None, forms: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """Fresh tensors of what a checkpoint holding `names` would load."""
        ...

    def scalars(self) -> dict[str, Any]:
        """Everything that is not a tensor, as JSON."""
        ...


def _late(manifest: Manifest, scalars: Mapping[str, Any]) -> dict[str, Kind]:
    """State of an optimizer of the kind that is here: some of it may have been made in a later step than the first."""
    own, saved = (each.get("optimizer") or {} for each in (scalars, manifest.scalars))
    if not own or own.get("name") != saved.get("name"):
        return {}
    return {name: (e.shape, e.dtype) for name, e in manifest.tensors.items() if name.startswith(OPTIM)}


def wanted(state: Templated, manifest: Manifest, masters: Collection[str] | None) -> tuple[Manifest, Reading, set[str]]:
    """What is read of a checkpoint, into what, and which tensors are here as they are stored.

    Args:
        state: it is left as it is.
        manifest: of the checkpoint.
        masters: see `partial_state.weights`, where the weights alone are wanted; None: everything is.
    """
    if masters is not None:
        known, template = weights(manifest, state.template(()), masters)
    else:
        check_imported(manifest)
        late = _late(manifest, state.scalars())
        how: dict[str, Any] = {"late": late, "forms": manifest.scalars.get(FORMS)} if late else {}
        known, template = manifest, state.template(manifest.tensors.keys(), **how)
    reading = Reading.of(state, known, template)
    return known, reading, as_stored(known, reading.template) - reading.sources
