"""The cells of one row: numbers and text as they are, and the list of what was assumed in their place."""

from __future__ import annotations

import re
from collections.abc import Mapping

COLUMNS: tuple[str, ...] = (
    "id", "source", "date", "model", "n_params", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab",
    "seq_len", "gpu", "n_gpus", "gpus_per_node", "interconnect", "dp_replicate", "dp_shard", "tp", "pp", "pp_schedule",
    "vp", "cp", "ep", "zero_stage", "micro_batch", "global_batch", "precision", "activation_checkpoint", "compile",
    "optimizer", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "step_time_s", "peak_mem_gib", "notes",
)  # fmt: skip


_DECIMAL = ("n_params", "tokens_per_s_per_gpu", "tflops_per_gpu")
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12, "%": 0.01, "ms": 1e-3, "mib": 1 / 1024, "mb": 1e6 / 2**30, "pflops": 1e3}


class Skip(Exception):
    """A row that cannot be predicted: the reason, one of a few."""


class Cells:
    """One row. `text` is source, model, optimizer and notes in lower case, where keywords are looked for."""

    def __init__(self, raw: Mapping[str, str]) -> None:
        self.raw = {name: (raw.get(name) or "").strip() for name in COLUMNS}
        self.notes = self.raw["notes"].lower()
        self.clauses = tuple(part.strip() for part in self.notes.split(";") if part.strip())
        fields = ("source", "model", "optimizer", "precision")
        self.text = " ; ".join([*(self.raw[name].lower() for name in fields), self.notes])
        self.assumed: list[str] = []

    def __getitem__(self, name: str) -> str:
        return self.raw[name]

    def number(self, name: str) -> float | None:
        """The number in a cell; None where it is empty or says no number.

        Units that people write are read: `7B`, `8k` (1,024 each but for parameters and rates), `45%`, `850 ms`, `~3`.
        """
        text = self.raw[name].replace(",", "").replace("_", "").strip().lower().lstrip("~≈<>= ")
        match = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-zµ%]*)(?: ?[a-z]*/.*)?", text)
        if match is None:
            return None
        value, unit = float(match.group(1)), match.group(2)
        if name == "mfu" and unit != "%" and value > 1.5:
            return value / 100  # in percent
        if unit in ("k", "ki"):
            return value * (1000 if name in _DECIMAL else 1024)
        return value * _UNITS.get(unit, 1.0)

    def count(self, name: str) -> int | None:
        """The whole number in a cell, at least 1; None where it is empty."""
        value = self.number(name)
        return int(value) if value and value >= 1 else None

    def has(self, pattern: str) -> bool:
        """True where the pattern is found in source, model, optimizer or notes."""
        return re.search(pattern, self.text) is not None

    def noted(self, pattern: str) -> re.Match[str] | None:
        """The first place in the notes where the pattern is found."""
        return re.search(pattern, self.notes)

    @property
    def year(self) -> float:
        """Year with months as a fraction; 2024 where the date says none."""
        match = re.match(r"(\d{4})(?:-(\d\d))?", self.raw["date"])
        return int(match.group(1)) + (int(match.group(2) or 6) - 1) / 12 if match else 2024.0

    def assume(self, sentence: str) -> None:
        """Remember what the row does not say."""
        if sentence not in self.assumed:
            self.assumed.append(sentence)
