"""A checkpoint into a state: what is checked before anything changes, and the proof that it arrived."""

from __future__ import annotations

import math
import platform
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.arrival import Arrivals
from shardwise.checkpoint.checksum import MASK, contribution, word_box, words_of
from shardwise.checkpoint.directory import Skipped
from shardwise.checkpoint.format import Box
from shardwise.checkpoint.layout import held_by, numpy_bytes
from shardwise.checkpoint.manifest import Manifest, ProbeResult
from shardwise.checkpoint.partial_state import FITS, check_trains_the_same, hint_of
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.shardfile import Part
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.launch.variables import variables
from shardwise.plan.plan import Plan

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5, "tf32": 0.005, "bf16": 0.02, "bf16-pure": 0.02, "fp16": 0.005, "fp8": 0.1}
"""Relative, for a probe on another mesh or device than that of the save, by the types that either plan computes in."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Tensors that are kept in another type than they were stored in."""

    what: str
    """`weights`, `moments` of Adam, or other `averages`, of an optimizer or of the weights."""
    count: int
    """How many, over all ranks."""
    before: str
    """`float32`, `bfloat16`, `bfloat16-stochastic`, `8bit`, `4bit`, or with `... with float32 masters` behind it."""
    now: str
    rounding: float
    """The largest, over all numbers; 0: each has the stored value."""
    unit: str
    """`relative` to the number, or `of its block's largest`."""

    def __str__(self) -> str:
        cost = f"relative rounding {self.rounding:.2g}" if self.unit == "relative" else ""
        cost = f"largest {cost or f'rounding {self.rounding:.2g} {self.unit}'}" if self.rounding else "exact"
        return f"{self.count} {self.what} from {self.before} to {self.now} ({cost})"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Evidence that a state is the stored one."""

    matched: int
    """Stored tensors that are exactly one live tensor of equal checksum, or that arrived so and were then converted."""
    stored: int
    converted: tuple[Converted, ...] = ()
    """What was changed, with leave, after its checksum was compared; everything else is as it was stored."""
    tolerance: float = 0.0
    """Relative, of the probe's numbers; 0: they had to be equal."""
    stored_probe: ProbeResult | None = None
    probe: ProbeResult | None = None
    """The probe's numbers now; None: it was not stored, not given, or not compared."""
    other_rows: bool = False
    """The probe's rows are not those of the save: the data is another one, and nothing was compared on it."""
    draws: bool = False
    """The probe's loss draws at random, and not as at the save, as under another plan: nothing was compared."""

    @property
    def line(self) -> str:
        """`resume proof: 412/412 tensors, checksums ok, probe loss 2.13071 = 2.13071`."""
        text = ", ".join(
            [f"resume proof: {self.matched}/{self.stored} tensors, checksums ok", *map(str, self.converted)]
        )
        if self.other_rows:
            return f"{text}, probe not compared: its rows are not those of the save"
        if self.draws:
            return f"{text}, probe not compared: its loss draws at random, under this plan not as at the save"
        if self.probe is None or self.stored_probe is None:
            return text
        for name in ("loss", "grad_norm"):
            was, now = getattr(self.stored_probe, name), getattr(self.probe, name)
            sign, bound = ("=", "") if was == now else ("~", f" (within {self.tolerance:g})")
            text += f", probe {name.replace('grad_', 'gradient ')} {was:.6g} {sign} {now:.6g}{bound}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """For the run's record."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded, which newer checkpoints could not be, and the evidence that it arrived."""

    path: Path
    step: int
    manifest: Manifest
    skipped: tuple[Skipped, ...]
    seconds: float
    proof: Proof
    changes: tuple[str, ...] = ()
    """What of the maths is not as it was saved, one line each, as far as state and plan tell."""


def check_names(manifest: Manifest, template: Mapping[str, Tensor], seen: list[int]) -> None:
    """Names, shapes and types of a state against those stored.

    Args:
        manifest: of the checkpoint.
        template: this rank's tensors.
        seen: for each rank, bit i says that it has the manifest's i-th tensor.

    Raises:
        CheckpointError: naming what is missing, left over, or of another shape or type.
    """
    known = list(manifest.tensors)
    missing = [name for name in template if name not in manifest.tensors]
    extra = [name for i, name in enumerate(known) if not any(mask >> i & 1 for mask in seen)]
    if (missing or extra) and all(name.startswith("ema.") for name in (*missing, *extra)):
        here, stored = ("with", "without") if missing else ("without", "with")
        raise CheckpointError(
            f"the checkpoint was saved {stored} a moving average of the weights, and this run is {here} one: "
            f"{(missing or extra)[:3]}; give TrainState {'no' if missing else 'the'} ema= to load it, or load its "
            "weights only and begin an average (weights_only=True)"
        )
    if extra and not missing:
        check_trains_the_same(manifest, template, extra)
    if missing or extra:
        hint = hint_of(manifest, template, missing, extra)
        raise CheckpointError(
            f"the checkpoint is of another model or optimizer: {len(missing)} tensors of this run are not in it "
            f"{missing[:5]}, {len(extra)} of its tensors are not in this run {extra[:5]}; {hint}; "
            "load it with the model, optimizer and precision that it was saved with"
        )
    for name, tensor in template.items():
        entry = manifest.tensors[name]
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if (shape, dtype) != (entry.shape, entry.dtype):
            other = (
                ""
                if shape != entry.shape
                else f"; `shardwise ckpt export --dtype {dtype}`, then `convert`, cast weights"
            )
            raise CheckpointError(
                f"{name}: shape {entry.shape} {entry.dtype} in the checkpoint, {shape} {dtype} in this run; "
                f"load it with the model sizes and precision that it was saved with{other or FITS}"
            )


def _contribution(part: Part, tensor: Tensor) -> int:
    return contribution(words_of(numpy_bytes(tensor), part.box.sizes, part.dtype), word_box(part.box, part.dtype))


Found = tuple[list[str], list[list[int]], list[tuple[str, Box, int]]]
"""What a rank holds: names of tensors; for each of the manifest the stored parts that are as they are stored; sums."""


def found(manifest: Manifest, tensors: Mapping[str, Tensor], arrived: Arrivals) -> Found:
    """What this rank holds of a checkpoint, by what is in memory now.

    Args:
        manifest: of what was read.
        tensors: of this rank.
        arrived: from `fill`.

    Cost: as `Arrival.is_in` over parts that arrived, a pass of sums, which take several times as long as digests, over
    all others.
    """
    here: dict[str, list[int]] = {name: [] for name in manifest.tensors}
    sums: list[tuple[str, Box, int]] = []
    for held in held_by(tensors):
        part, tensor = held.part, held.of(tensors[held.part.name])
        read = arrived.get((part.name, part.box))
        if read is not None and read.is_in(tensors[part.name], tensor):
            here[part.name].append(read.piece)
        else:
            sums.append((part.name, part.box, _contribution(part, tensor)))
    return list(tensors), list(here.values()), sums


def prove(manifest: Manifest, told: Sequence[Found]) -> Proof:
    """Compare live tensors with what was stored: names both ways, and checksums; copies with each other.

    Args:
        manifest: of what was read.
        told: what each rank `found`.

    Raises:
        CheckpointError: naming the tensor, and the rank whose copy differs.
    """
    live, stored = checksums(manifest, told), manifest.tensors
    odd = sorted(live.keys() ^ stored.keys())
    wrong = [name for name in stored if name in live and live[name] != stored[name].checksum]
    if odd or wrong:
        what = f"{odd[:5]} are on one side only" if odd else f"checksums differ: {wrong[:5]} ({len(wrong)} in all)"
        raise CheckpointError(
            f"resume proof: {len(live)} live and {len(stored)} stored tensors: {what}; the state is not the "
            "stored one: do not train it on; load another checkpoint, and report this"
        )
    return Proof(matched=len(live), stored=len(stored))


def checksums(manifest: Manifest, told: Sequence[Found]) -> dict[str, int]:
    """The checksum of every tensor that any rank holds.

    It is the stored one where all stored parts of a tensor arrived and are in the state, byte by byte.

    Args:
        manifest: of what was read.
        told: what each rank `found`.

    Raises:
        CheckpointError: naming the tensor, and the rank whose copy differs.
    """
    totals = {name: 0 for names, _, _ in told for name in names}
    doubted = {name for *_, sums in told for name, _, _ in sums}
    first: dict[tuple[str, Box], tuple[int, int | None]] = {}  # None: as it is stored
    for (name, entry), *seen in zip(manifest.tensors.items(), *(pieces for _, pieces, _ in told), strict=True):
        if entry.pieces and len({piece for each in seen for piece in each}) == len(entry.pieces):
            totals[name] = entry.checksum
        if name in doubted:
            first |= {(name, entry.pieces[i].box): (rank, None) for rank, each in enumerate(seen) for i in each}
    for rank, (*_, sums) in enumerate(told):
        for name, box, value in sums:
            known_rank, known_value = first.setdefault((name, box), (rank, value))
            if known_value != value:
                one, other = sorted((known_rank, rank))
                raise CheckpointError(
                    f"{name}{box}: the copies on ranks {one} and {other} differ after loading; one of them is not what "
                    "was stored: check the memory of these machines"
                )
            if known_rank == rank:
                totals[name] = (totals[name] + value) & MASK
    return totals


def bits(manifest: Manifest, names: Container[str]) -> int:
    """Bit i: the manifest's i-th tensor is among the names."""
    return sum(1 << i for i, name in enumerate(manifest.tensors) if name in names)


def check_damage(peers: Peers, reader: Reader) -> None:
    """What can be told without reading data: files missing or too many, and the headers of this rank's share of them.

    Raises:
        DamagedError: naming the file.
    """
    if peers.rank == 0:
        reader.check_directory()
    for index in range(peers.rank, len(reader.manifest.files), peers.world):
        reader.file(index)


def check_probe(proof: Proof, manifest: Manifest, probe: Any, state: Any, processors: str) -> Proof:
    """The proof with the probe's numbers: equal on the mesh and processors of the save, else within a tolerance.

    On another set of rows than the stored one, or with other draws, nothing is compared, and the proof says so.

    Args:
        proof: of the tensors.
        manifest: of the checkpoint.
        probe: what measures the loaded state; every rank takes part.
        state: as it was loaded.
        processors: what all ranks compute on, as `processors` names it.

    Raises:
        CheckpointError: loss or gradient norm is not that of the save.
    """
    stored, now, placed = manifest.probe, _probed(probe, state, manifest), state.placed
    if stored is None:
        return proof
    if stored.rows != now.rows:
        draws = stored.rows[:32] == now.rows[:32]  # the rows', and then the plan's, by which such a loss draws
        return replace(proof, other_rows=not draws, draws=draws)
    here = (str(placed.plan), placed.mesh.device.type, torch.__version__)
    same = here == (manifest.plan, manifest.device, manifest.versions.get("torch")) and placed.mesh.device.type == "cpu"
    same = same and manifest.versions.get("cpu", processors) == processors  # manifests of older versions do not say it
    tolerance = 0.0 if same else max(_tolerance(placed.plan), _tolerance(_plan_of(manifest, placed.plan)))
    for name in ("loss", "grad_norm"):
        was, found = getattr(stored, name), getattr(now, name)
        if not (was == found or (math.isnan(was) and math.isnan(found))) and not abs(was - found) <= tolerance * abs(
            was
        ):
            raise CheckpointError(
                f"resume proof: the probe's {name} was {was!r} when step {manifest.step} was saved under "
                f"`{manifest.plan}`, and is {found!r} now under `{placed.plan}`, needed the same within {tolerance:g}; "
                "the model, its code, its loss or its precision changed since the save: load the checkpoint with those "
                "it was saved with, or give the store no probe"
            )
    return replace(proof, stored_probe=stored, probe=now, tolerance=tolerance)


def _probed(probe: Any, state: Any, manifest: Manifest) -> ProbeResult:
    """The probe's numbers with the draws of the save: a run that loads weights alone has its own step and seed."""
    own = {name: getattr(state, name) for name in ("step", "seed") if hasattr(state, name)}
    try:
        for name in own:
            setattr(state, name, manifest.scalars.get(name, own[name]))
        return ProbeResult(*probe.measure(state))
    finally:
        for name, value in own.items():
            setattr(state, name, value)


def _tolerance(plan: Plan) -> float:
    """That of the least exact type in which a plan computes."""
    types = [plan.precision, *plan.module_types.values(), plan.communication.reduce_dtype or plan.precision]
    types += ["tf32"] * plan.tf32 + ["fp8"] * (plan.float8.recipe != "none")
    return max(TOLERANCES[kind] for kind in types)


def _plan_of(manifest: Manifest, otherwise: Plan) -> Plan:
    """The plan of the save; another one where this version does not know its fields."""
    with suppress(ShardwiseError):
        return Plan.from_dict(manifest.plan_fields)
    return otherwise


def processor() -> str:
    """What the bits of a sum depend on beside plan and torch: processor, instruction set, threads."""
    limits = [f"{name}={variables()[name]}" for name in _LIMITS if name in variables()]
    return ", ".join([_model(), torch.backends.cpu.get_cpu_capability(), f"threads={torch.get_num_threads()}", *limits])


def processors(everyones: Collection[str]) -> str:
    """What all ranks compute on: each kind of `processor` once."""
    return "; ".join(sorted(set(everyones)))


_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Variables by which the libraries below torch leave instructions out; torch does not tell which they use."""


@cache
def _model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
