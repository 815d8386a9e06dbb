"""Degrees of parallelism and sizes of the batch, from their cells or, where those are empty, from the notes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd, prod

from published.cells import Cells, Skip

MICRO = "micro-batch"
"""Begins what is assumed where a row does not print it."""
ZERO = r"(?:zero(?:-os|-dp)?(?:[ _]optimi[sz]ation)?[ _-]*\(?(?:stage)?|(?:deepspeed|ds)[ _-](?:stage|z))[ _=:-]*"
"""Begins a stage in words: ZeRO-3, zero3, ZeRO stage 3, zero_stage=3, deepspeed_stage_3."""
HYBRID = r"\bhsdp|hybrid[ _-]?(?:fsdp|shard)|\bmics\b"
"""Shards in a group of data ranks, and replicas of it."""
_SHARED = (
    (3, rf"{ZERO}3|zero(\+\+|[ -]infinity)|hsdp|fsdp|(?<!no[ _-])(full|hybrid)[ _-]?shard|gemini|optim_grads_params"),
    (2, rf"{ZERO}2|shard[ _-]grad|optim_grads|\bp?_?os ?\+ ?g\b"),
    (1, rf"{ZERO}1\b|distributed (fused |adam|optimizer)|\boptim\b|\bp?_?os\b"),
    (0, r"\bddp\b|no[ _-]?shard|none|replicate"),
)
"""Words for what data ranks share, in the cell."""
_NOTED = (
    (2, r"shard[ _-]grad"),
    (0, r"\bno[ _-]shard"),
    (3, rf"{HYBRID}|full[ _-]shard|zero[ -]infinity|zero ?\+\+|gemini ?(ddp|plugin)"),
    (1, r"distributed (fused|adam|optimizer)"),
    (3, r"\bfsdp|fully[ _]shard"),
    (0, r"\bddp\b|distributed[ _]?data[ _]?parallel|pure (dp|data[ -]parallel)"),
)
"""The same in notes, which may say several: the most special first. A stage with its number goes before them all."""


def _words(short: str, long: str) -> str:
    """How notes say the degree of an axis: TP=4, tensor_model_parallel_size: 4, 4-way tensor."""
    named = rf"{long}[ _-](?:model[ _-])?parallel\w*(?: (?:size|degree))?(?: of)?[ =:]+(\d+)"
    brief = rf"(?<![a-z]){short}(?:[ _](?:size|degree|of))?\s?[=:-]?\s?(\d+)(?!\d|/\d)"
    return rf"{brief}|{named}|(\d+)-way (?:{long}|{short}\b)"


_AXES = {
    "tp": _words("tp", "tensor") + r"|(\d+)-way model[ -]parallel|(?<![a-z])mp(?:_size)?[ =:]+(\d+)"
    r"|\bt ?= ?(\d+)[,;] ?p ?=|\bp ?= ?\d+[,;] ?t ?= ?(\d+)",
    "pp": _words("pp", "pipeline") + r"|(\d+) pipeline stages|(\d+)[ -]stage pipeline"
    r"|\bt ?= ?\d+[,;] ?p ?= ?(\d+)|\bp ?= ?(\d+)[,;] ?t ?=",
    "cp": _words("cp", "context") + r"|ulysses\D{0,30}?[ =:-](\d+)|sequence[ _-]parallel\w* (?:size|degree)[ =:]+(\d+)",
}
_EXPERTS = _words("ep", "expert")
_DATA = rf"\bddp\b|no[ _-]shard|{HYBRID}|{ZERO}[12]\b|\bdata[ -]parallel"
_OF_DATA = _words("dp", "data")
_LINK = r"(?:[ _-](?:size|degree|groups?|factor|dim|over|across|within|in|of))*[ =:(]+"
_REPLICAS = rf"replica\w*{_LINK}(\d+)|(\d+)[ -](?:way )?replica"
_SHARDS = rf"shard\w*{_LINK}(\d+)|(\d+)[ -](?:way )?shard|partition(?:[ _-]group)?{_LINK}(\d+)"
_BOTH = r"(?:hsdp\d?|hybrid[ _-]?(?:fsdp|shard)\w*)[ =:(]*(\d+) ?[x×*,/] ?(\d+)"
"""Ranks of the two data axes, in notes."""
_DATA_ONLY = r"torchtune|distributed recipe|llm-foundry|\bcomposer\b|lit-?gpt"
"""Codes without other axes."""
LIBRARIES = (
    r"axolotl|unsloth|\blightning\b|\baccelerate\b|(hf|transformers) trainer|\btrl\b|\bpeft\b"
    r"|llama[- ]?factory|\b(ms-)?swift\b|xtuner|openrlhf|open-instruct|fastchat|alignment[- ]handbook"
)
"""Launchers and trainers, which leave the layout to another code, or to plain PyTorch."""
_MODEL = r"tensor|pipeline|model[ -]parallel|3d[ -]parallel"
"""Words for the data axes and for others."""
_GLOBAL = (
    r"\bgbs ?[=:]? ?(\d+)|(?:global|total|effective)[ _]batch(?:[ _]size)?(?: of)?[ =:]+(\d+)(?![\d.,]* ?[mk]?[ -]?tok)"
)
_UNLIKE = r"(\d+)\b(?! ?(?:\w+ )?(?:oom|out of memory|fail))"
"""A number, and not of another run."""
_MICRO = rf"(?:\bmbs ?[=:]? ?|micro[ _-]?batch(?:[ _]size)?(?: of)?[ =:]+){_UNLIKE}"
_LOCAL = (
    r"(?:(?:local|per[ _-](?:gpu|device)(?:[ _]train)?)[ _-]batch(?:[ _]size)?|batch(?: size)? per (?:gpu|device))"
    rf"(?: of)?[ =:]+{_UNLIKE}"
)
_ACCUMULATE = (
    r"(?:grad(?:ient)?[ _-]accum(?:ulation)?(?:[ _-]steps)?|\bgas?)(?: of)?[ =:]+(?:taken as )?(\d+)"
    r"|(\d+)[ -](?:steps of )?grad(?:ient)?[ -]accum"
)
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


def sizes_of(cells: Cells, per_node: int = 8) -> Sizes:
    """The degrees of a row; those it leaves out follow from the number of devices where that decides them.

    Raises:
        Skip: degrees that nothing decides, or whose product is not the number of devices.
    """
    count = cells.devices or 1
    known = degrees_of(cells)
    replicate, shard = cells.count("dp_replicate"), cells.count("dp_shard")
    missing = [name for name, value in known.items() if value is None]
    data = (replicate or 1) * (shard or 1)
    model = (known["tp"] or 1) * (known["pp"] or 1) * (known["cp"] or 1)
    experts = expert_degree(cells)
    if (replicate or shard) and data * model * experts == count:  # an axis beside those of data (MaxText's mesh)
        replicate, shard = (replicate, shard * experts) if shard else ((replicate or 1) * experts, None)
        data *= experts
    sharded = cells["dp_shard"] and not shard  # `auto`, `-1`: all that are left
    by_data = (replicate or shard or stage_of(cells)) and data * model == count
    by_data = by_data or (_noted(cells, _OF_DATA) or 0) * model == count
    if missing and count > 1 and not by_data and missing != ["cp"]:
        alone = stage_of(cells) or sharded or stage_said(cells) == 3 or cells.has(_DATA_ONLY) or _is_hybrid(cells)
        data_only = re.search(rf"{_DATA}|{LIBRARIES}", _of_data(cells)) or expert_degree(cells) > 1
        alone = alone or (data_only and not cells.has(_MODEL))
        if not alone and len(missing) == len(known):
            raise Skip("layout: not stated")
        cells.assume(f"no {', '.join(missing)}: the row names other axes only")
    left = data * model != count and not (replicate and shard) and count % (data * model) == 0
    if left and (_is_hybrid(cells) or (shard and missing in ([], ["cp"]) and not cells["ep"])):
        replicate, shard = _hybrid(cells, count // model, per_node)
    elif not replicate and not shard:
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


def degrees_of(cells: Cells) -> dict[str, int | None]:
    """Ranks of the axes of the model by their cells or, where no cell says how many data ranks there are, by words."""
    known = {name: cells.count(name) for name in _AXES}
    count = cells.devices or 1
    ranks = prod(cells.count(name) or 1 for name in (*_AXES, "dp_replicate", "dp_shard"))
    data = cells.count("dp_replicate") or cells.count("dp_shard")
    return known if data and ranks == count else _said(cells, known, count)


def _is_hybrid(cells: Cells) -> bool:
    return re.search(HYBRID, _of_data(cells)) is not None


def _of_data(cells: Cells) -> str:
    return f"{cells['zero_stage']} ; {cells['dp_replicate']} ; {cells['dp_shard']} ; {cells.text}".lower()


def _hybrid(cells: Cells, data: int, per_node: int) -> tuple[int, int]:
    """(replicas, shards) of so many data ranks: the cells, the notes, or shards inside a node, as PyTorch has them."""
    text = _of_data(cells)
    both = re.search(_BOTH, text)
    if both and int(both.group(1)) * int(both.group(2)) == data:
        return int(both.group(1)), int(both.group(2))
    replicas = cells.count("dp_replicate") or _first(_REPLICAS, text)
    shards = cells.count("dp_shard") or _first(_SHARDS, text)
    if shards and not replicas and data % shards == 0 and shards < data:
        replicas = data // shards
    if replicas and data % replicas == 0 and shards in (None, data // replicas):
        return replicas, data // replicas
    model = (cells.devices or 1) // data
    shards = gcd(data, max(per_node // model, 1)) if model < per_node else 1
    if shards in (1, data):
        return 1, data
    cells.assume(f"hybrid sharding: over the {shards} data ranks of a node, replicated over {data // shards}")
    return data // shards, shards


def _said(cells: Cells, known: dict[str, int | None], count: int) -> dict[str, int | None]:
    """Degrees that stand beside another one's (`TP=4, PP=4` in one cell), or, where no cell has one, in the notes."""
    text = " ; ".join(cells[name].lower() for name in known)
    if not any(known.values()):
        text += f" ; {cells.notes}"
    found = dict(known)
    for name, pattern in _AXES.items():
        found[name] = found[name] or _first(pattern, text)
    product = (found["tp"] or 1) * (found["pp"] or 1) * (found["cp"] or 1)
    return known if count % product else found


def stage_of(cells: Cells) -> int | None:
    """What the row's cell says that data ranks share: `3`, `ZeRO-2`, `FSDP`; None where it is empty."""
    text = cells["zero_stage"].lower()
    found = re.search(r"\d", re.sub(r"fsdp\d", "fsdp", text))
    if found:
        return int(found.group())
    return next((stage for stage, words in _SHARED if re.search(words, text)), None)


def stage_said(cells: Cells) -> int | None:
    """What the row says that data ranks share, in its cell or else in words; None where it says nothing."""
    stated = stage_of(cells)
    if stated is not None:
        return stated
    stage = _first(rf"{ZERO}([123])(?!\.?\d)", cells.text)
    return stage or next((stage for stage, words in _NOTED if cells.has(words)), None)


def expert_degree(cells: Cells) -> int:
    """Ranks that share the experts: the cell, else the notes, else 1."""
    return cells.count("ep") or _noted(cells, _EXPERTS) or 1


def is_sharded(cells: Cells) -> bool:
    """Whether parameters are sharded over data ranks (zero 3), by the cells or, without them, by the words."""
    if stage_of(cells) is None and cells["dp_shard"] and cells.count("dp_shard") != 1:
        return True
    return stage_said(cells) == 3


_WHOLE = r"max(text|diffusion)|axlearn|\bpax\b|\bjax\b"
"""Trainers that accumulate no gradients unless told to."""


def batch_of(cells: Cells, sizes: Sizes, seq_len: int) -> tuple[int, int]:
    """Global batch and micro-batches per rank; the global batch is their product with the micro-batch.

    Raises:
        Skip: neither the global nor the micro-batch is stated.
    """
    total, micro = sequences_of(cells, seq_len), cells.count("micro_batch")
    accumulate = _noted(cells, _ACCUMULATE)
    if micro is None:
        micro = _noted(cells, _MICRO if sizes.pp > 1 else f"{_MICRO}|{_LOCAL}") or (
            _noted(cells, _FITS) if total is None else None
        )
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
        whole = accumulate is None and sizes.pp == 1 and cells.has(_WHOLE)
        micro = max(per_rank // accumulate, 1) if accumulate else per_rank if whole else 1
        told = ", from the notes" if accumulate else ", all of a rank's batch" if whole else ""
        cells.assume(f"{MICRO} {micro}{told}")
    count = max(round(total / (sizes.data * micro)), 1)
    if count * micro * sizes.data != total:
        cells.assume(f"global batch {count * micro * sizes.data}, which the layout divides, not {total}")
    return count * micro * sizes.data, count


def _noted(cells: Cells, pattern: str) -> int | None:
    return _first(pattern, cells.notes)


def _first(pattern: str, text: str) -> int | None:
    """The number where the pattern is first found."""
    found = re.search(pattern, text)
    return int(next(group for group in found.groups() if group)) if found else None


def sequences_of(cells: Cells, seq_len: int) -> int | None:
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
