"""Degrees of parallelism and sizes of the batch, from their cells or, where those are empty, from the notes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from published.cells import Cells, Skip

MICRO = "micro-batch"
"""Begins what is assumed where a row does not print it."""
ZERO = r"zero[ -]?(?:stage[ -]?)?"
"""Begins a stage in words: ZeRO-3, zero3, ZeRO stage 3."""
_SHARED = (
    (3, rf"{ZERO}3|hsdp|fsdp|(?<!no[ _-])(full|hybrid)[ _-]?shard"),
    (2, rf"{ZERO}2|shard[ _-]grad"),
    (1, rf"{ZERO}1\b|distributed (fused |adam|optimizer)"),
    (0, r"\bddp\b|no[ _-]?shard|none|replicate"),
)
"""Words for what data ranks share."""


def _words(short: str, long: str) -> str:
    """How notes say the degree of an axis: TP=4, tensor_model_parallel_size: 4, 4-way tensor."""
    named = rf"{long}[ _-](?:model[ _-])?parallel\w*(?: (?:size|degree))?(?: of)?[ =:]+(\d+)"
    return rf"\b{short} ?[=:]? ?(\d+)|{named}|(\d+)-way {long}"


_AXES = {
    "tp": _words("tp", "tensor"),
    "pp": _words("pp", "pipeline") + r"|(\d+) pipeline stages",
    "cp": _words("cp", "context"),
}
_EXPERTS = _words("ep", "expert")
_DATA = rf"\bddp\b|\bhsdp\b|{ZERO}[12]\b|\bdata[ -]parallel"
_MODEL = r"tensor|pipeline|model[ -]parallel|3d[ -]parallel"
"""Words for the data axes and for others."""
_GLOBAL = r"\bgbs ?[=:]? ?(\d+)|global batch(?: size)?(?: of)?[ =:]+(\d+)(?![\d.,]* ?[mk]?[ -]?tok)"
_MICRO = r"(?:\bmbs ?[=:]? ?|micro[ -]?batch(?: size)?(?: of)?[ =:]+)(\d+)\b(?! ?(?:\w+ )?(?:oom|out of memory|fail))"
_FITS = r"micro[ -]?batch (?:size )?that fits[^:;(]*: ?(\d+)"
_TOKENS = r"(\d+(?:\.\d+)?)[ -]?([mk])[ -]?tok\w*[ -](?:global )?batch|batch(?: size)? of (\d+(?:\.\d+)?) ?([mk]) tok"
MOST_TOKENS = 5e8
"""Of a step: where sequences would make more, their number is one of tokens."""


@dataclass(frozen=True)
class Sizes:
    """Degrees as the row states them; `data` ranks see different samples."""

    replicate: int
    shard: int
    tp: int
    pp: int
    cp: int

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.replicate * self.shard


def sizes_of(cells: Cells) -> Sizes:
    """The degrees of a row; those it leaves out follow from the number of devices where that decides them.

    Raises:
        Skip: degrees that nothing decides, or whose product is not the number of devices.
    """
    count = cells.devices or 1
    known = {name: cells.count(name) for name in _AXES}
    replicate, shard = cells.count("dp_replicate"), cells.count("dp_shard")
    if not (replicate or shard):
        known = _said(cells, known, count)
    missing = [name for name, value in known.items() if value is None]
    data = (replicate or 1) * (shard or 1)
    model = (known["tp"] or 1) * (known["pp"] or 1) * (known["cp"] or 1)
    sharded = cells["dp_shard"] and not shard  # `auto`, `-1`: all that are left
    by_data = (replicate or shard or stage_of(cells)) and data * model == count
    if missing and count > 1 and not by_data and missing != ["cp"]:
        alone = stage_of(cells) or sharded or cells.has(rf"torchtune|distributed recipe|\bfsdp|{ZERO}3")
        alone = alone or (cells.has(_DATA) and not cells.has(_MODEL))
        if not alone and len(missing) == len(known):
            raise Skip("layout: not stated")
        cells.assume(f"no {', '.join(missing)}: the row names other axes only")
    if not replicate and not shard:
        if count % model:
            raise Skip("layout: product is not the number of devices")
        if stage_of(cells) == 3 or sharded:
            shard = count // model
        else:
            replicate = count // model
    sizes = Sizes(replicate or 1, shard or 1, known["tp"] or 1, known["pp"] or 1, known["cp"] or 1)
    if sizes.data * model != count:
        raise Skip("layout: product is not the number of devices")
    return sizes


def _said(cells: Cells, known: dict[str, int | None], count: int) -> dict[str, int | None]:
    """Degrees that stand beside another one's (`TP=4, PP=4` in one cell), or, where no cell has one, in the notes."""
    text = " ; ".join(cells[name].lower() for name in known)
    if not any(known.values()):
        text += f" ; {cells.notes}"
    found = dict(known)
    for name, pattern in _AXES.items():
        match = re.search(pattern, text)
        if match and found[name] is None:
            found[name] = int(next(group for group in match.groups() if group))
    product = (found["tp"] or 1) * (found["pp"] or 1) * (found["cp"] or 1)
    return known if count % product else found


def stage_of(cells: Cells) -> int | None:
    """What the row's cell says that data ranks share: `3`, `ZeRO-2`, `FSDP`; None where it is empty."""
    text = cells["zero_stage"].lower()
    found = re.search(r"\d", re.sub(r"fsdp\d", "fsdp", text))
    if found:
        return int(found.group())
    return next((stage for stage, words in _SHARED if re.search(words, text)), None)


def expert_degree(cells: Cells) -> int:
    """Ranks that share the experts: the cell, else the notes, else 1."""
    return cells.count("ep") or _noted(cells, _EXPERTS) or 1


def is_sharded(cells: Cells) -> bool:
    """Whether parameters are sharded over data ranks (zero 3), by the cells or, without them, by the words."""
    stage = stage_of(cells)
    if stage is not None:
        return stage == 3
    return bool(cells["dp_shard"]) and cells.count("dp_shard") != 1 or cells.has(rf"\b[hf]sdp\d?\b|{ZERO}3")


def batch_of(cells: Cells, sizes: Sizes, seq_len: int) -> tuple[int, int]:
    """Global batch and micro-batches per rank; the global batch is their product with the micro-batch.

    Raises:
        Skip: neither the global nor the micro-batch is stated.
    """
    total, micro = _total(cells, seq_len), cells.count("micro_batch")
    accumulate = _noted(cells, r"(?:grad(?:ient)? accum(?:ulation)?(?: steps)?|\bga)[ =:]+(?:taken as )?(\d+)")
    if micro is None:
        micro = _noted(cells, _MICRO) or (_noted(cells, _FITS) if total is None else None)
        if micro:
            cells.assume(f"{MICRO} {micro}, from the notes")
        elif total is None:
            raise Skip("batch: not stated")
    if total is None:
        count = accumulate or (4 * sizes.pp if sizes.pp > 1 else 1)
        if accumulate is None:
            cells.assume(f"{count} micro-batches per step")
        return (micro or 1) * count * sizes.data, count
    if micro is None:
        per_rank = max(total // sizes.data, 1)
        micro = max(per_rank // accumulate, 1) if accumulate else 1
        cells.assume(f"{MICRO} {micro}{', from the notes' if accumulate else ''}")
    count = max(round(total / (sizes.data * micro)), 1)
    if count * micro * sizes.data != total:
        cells.assume(f"global batch {count * micro * sizes.data}, which the layout divides, not {total}")
    return count * micro * sizes.data, count


def _noted(cells: Cells, pattern: str) -> int | None:
    found = cells.noted(pattern)
    return int(next(group for group in found.groups() if group)) if found else None


def _total(cells: Cells, seq_len: int) -> int | None:
    """Sequences of a step: the cell, also where it says tokens, or the notes."""
    text, stated = cells["global_batch"].lower(), cells.count("global_batch")
    if stated is None:
        found = cells.noted(_TOKENS)
        if not found:
            return _noted(cells, _GLOBAL)
        value, unit = next((value, unit) for value, unit in (found.group(1, 2), found.group(3, 4)) if value)
        return _sequences(float(value), unit, seq_len)
    if "tok" in text or re.search(r"\d ?m\b", text) or stated * seq_len > MOST_TOKENS:
        unit = re.search(r"\d ?([mk])\b", text)
        scale = {"m": 1e6, "k": 1024.0}[unit.group(1)] if unit else 1.0
        return _sequences(stated / scale, unit.group(1) if unit else "", seq_len)
    return stated


def _sequences(value: float, unit: str, seq_len: int) -> int:
    """Of so many tokens; a million of them is 2^20 where sequences divide that."""
    scale = {"": 1.0, "k": 1024.0, "m": 1e6 if value * 2**20 % seq_len else 2.0**20}[unit]
    return max(round(value * scale / seq_len), 1)
