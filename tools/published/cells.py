"""The cells of one row: numbers and text as they are, and the list of what was assumed in their place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isinf

COLUMNS: tuple[str, ...] = (
    "id", "source", "date", "model", "n_params", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab",
    "seq_len", "gpu", "n_gpus", "gpus_per_node", "interconnect", "dp_replicate", "dp_shard", "tp", "pp", "pp_schedule",
    "vp", "cp", "ep", "zero_stage", "micro_batch", "global_batch", "precision", "activation_checkpoint", "compile",
    "optimizer", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "step_time_s", "peak_mem_gib", "notes",
)  # fmt: skip


_CODES = r"(deepspeed|megatron|fsdp|hsdp|ddp|zero[ -]?\d|(the )?distributed optimizer|nemo|torchtitan|(q?lora|peft)\b)"
_OTHERS = (
    r"\b(than|vs\.?|versus|compared (to|with)|against|unlike|converted (from|to)|instead of|beats|outperforms)"
    r"\b[^;,.()]*",
    rf"\b(no|not|without)( using| with)? {_CODES}[\w-]*( zero[ -]?\d)?",
    rf"{_CODES} (is |was )?(not (used|enabled)|disabled|off)\b",
    r"megatron(-lm|-core)?('s)?[ -](flops?|formula|style|like|tokeni[sz])",
    r"deepspeed('s)?[ -](flops|profil|activation)",
    r"hugging ?face ((model|data) ?)?(hub|checkpoint|weights?|tokenizer|datasets?|config)\w*",
    r"mistral[ -]nemo",
)
"""What names another framework than the one that ran: comparisons, where weights and data came from, a model's name."""
_UNKNOWN = re.compile(r"(n/?a|unknown|\?+|-+|not (stated|given|known)|unstated)?")
_SINCE = (
    (r"b300|mi355|mi350", 2026.0),
    (r"b200|mi325|h200", 2025.25),
    (r"h[12]00|h800|mi300", 2024.0),
    (r"v100", 2020.5),
)
"""Device -> the year of a row without a date."""
_DECIMAL = ("n_params", "tokens_per_s_per_gpu", "tflops_per_gpu")
MEASURED = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "step_time_s", "peak_mem_gib")
_VALUE = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_NUMBER = re.compile(
    r"(?:(?:tp|pp|cp|ep|dp|vp|fsdp|hsdp|mbs|gbs|bs)\s*[-=:]?\s*)?"
    rf"({_VALUE})(?:\s*(?:-|–|to)\s*({_VALUE}))?\s*([a-zµ%]*)(?![\d.])"
)
"""A number, its name before it (`TP=4`), the other end of a span (`38-41 %`), and its unit."""
_COMMA = re.compile(r"^(0(?=,)|\d+(?=,\d{1,2}(?![\d,.])|,\d{4,}(?![\d,.]))),(\d+)")
"""A comma before decimals, `3,25` or `0,385`: groups of thousands have three digits."""
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12, "%": 0.01, "ms": 1e-3, "mib": 1 / 1024, "mb": 1e6 / 2**30, "pflops": 1e3}
_MOST = {"n_layers": 10_000, "n_gpus": 1e7, "pp": 10_000, "vp": 1_000}
"""Beyond it a slip of the keyboard would be drawn up block by block."""


_NOT_COMPILED = (
    r"\b(no|without|w/o|not) (torch[._ ])?compiled?\b"
    r"|\bcompile( is| was)?[ =:]*(off|disabled|false|no\b|not\b(?! (stated|printed|said|given|known)))"
)
_COMPILED = (
    r"torch[._ ]compiled?\b|\+ ?compile\b|\bcompile[ =:]+(on|true|yes|enabled)|\bcompiled (model|blocks|layers)"
    r"|\bnv-?fuser"
)
_AXIS = r"(?:tp|pp|dp|cp|ep|vpp?|fsdp)"
_LISTED = (
    rf"(?:\(?\b({_AXIS}(?: ?[/,x×-] ?{_AXIS})+)\)?|\(?\b([tpdc](?: ?[/,x×] ?[tpdc])+)\)? ?=)"
    r"[ =:]*\(?(\d+(?: ?[/,x×-] ?\d+)+)"
)
"""Degrees one after the other, `TP/PP/DP = 8/4/2` or `(t, p, d) = (8, 4, 2)`."""
_LETTERS = {"t": "tp", "p": "pp", "d": "dp", "c": "cp"}


def _each(listed: re.Match[str]) -> str:
    """The same with a name before each number; as it is where there are more of the ones than of the others."""
    names, numbers = (re.findall(r"\w+", text) for text in (listed[1] or listed[2], listed[3].replace("x", " ")))
    if len(names) != len(numbers):
        return listed[0]
    return ", ".join(f"{_LETTERS.get(name, name)}={number}" for name, number in zip(names, numbers, strict=True))


_SOURCED = r"[\w.-]{2,}/\S*\.(md|rst|py|sh|csv|ya?ml|json|toml|txt|ipynb|html)\b|@[0-9a-f]{7}"
_PATH = r"\b(https?://)?[a-z][\w.-]{2,}/[\w./-]{3,}"
"""A clause that says which file a row is from, and a repository or an address in any."""


def unsourced(text: str) -> str:
    """Without clauses that say where a row is from, and without paths.

    >>> unsourced("a/b docs/x.md @0123abc; HF Trainer, from c-d/efg")
    ' HF Trainer, from '
    """
    return re.sub(_PATH, "", ";".join(part for part in text.split(";") if not re.search(_SOURCED, part)))


class Skip(Exception):
    """A row that cannot be predicted: the reason, one of a few."""


class Cells:
    """One row. `text` is source, model, optimizer and notes in lower case, where keywords are looked for."""

    def __init__(self, raw: Mapping[str, str]) -> None:
        self.raw = {name: (raw.get(name) or "").strip() for name in COLUMNS}
        self.raw |= {name: "" for name, text in self.raw.items() if _UNKNOWN.fullmatch(text.lower())}
        self.notes = re.sub(_LISTED, _each, self.raw["notes"].lower())
        self.clauses = tuple(part.strip() for part in self.notes.split(";") if part.strip())
        model = re.sub(r"^[\w.-]+/(?=[\w.-]+$)", "", self.raw["model"])  # who published weights is no framework
        model = re.sub(r"(?i)gpt-?neox", "", model)
        fields = (self.raw["source"], model, self.raw["optimizer"], self.raw["precision"], self.notes)
        self.text = " ; ".join(fields).lower()
        for pattern in _OTHERS:
            self.text = re.sub(pattern, "", self.text)
        self.assumed: list[str] = []

    def __getitem__(self, name: str) -> str:
        return self.raw[name]

    def number(self, name: str) -> float | None:
        """The number in a cell; None where it is empty or says none that can be.

        Units that people write are read: `7B`, `8k` (1,024 each but for parameters and rates), `45%`, `850 ms`, `~3`;
        words around it are not: `TP=4`, `8 (HSDP)`. What was measured may be a span, whose middle is taken.
        """
        text = self.raw[name].strip().lower().lstrip("~≈<>= ")
        text = re.sub(r"(?<=\d)[,_](?=\d)", "", _COMMA.sub(r"\1.\2", text))
        match = _NUMBER.match(text)
        if match is None or (match.group(2) and name not in MEASURED):
            return None
        ends = [float(end) for end in match.group(1, 2) if end]
        value, unit = sum(ends) / len(ends), match.group(3)
        if isinf(value) or value < 0:
            return None
        if name == "mfu" and unit != "%" and value > 1.5:
            return value / 100  # in percent
        if unit in ("k", "ki"):
            return value * (1000 if name in _DECIMAL else 1024)
        return value * _UNITS.get(unit, 1.0)

    def count(self, name: str) -> int | None:
        """The whole number in a cell, at least 1 and no more than can be; None where it is empty."""
        value = self.number(name)
        return int(value) if value and 1 <= value <= _MOST.get(name, 1e12) else None

    @property
    def devices(self) -> int | None:
        """How many there are: `64`, `8 nodes x 8`, or what stands beside the name (`8xA100`, `H100 x 64`)."""
        stated, name = self.raw["n_gpus"].lower(), self.raw["gpu"].lower()
        for text in (stated, name):
            found = re.match(r"(\d+)(?: ?nodes?| ?hosts?)? ?[x×*] ?(\d+)(?! ?gb?\b|\d)", text)
            if found:
                return int(found.group(1)) * int(found.group(2)) or None
        beside = re.match(r"(\d+) ?[x×] ?[a-z]", name) or re.search(r"[a-z0-9] ?[x×] ?(\d+)$", name)
        return self.count("n_gpus") or (int(beside.group(1)) or None if beside else None)

    @property
    def compiled(self) -> bool | None:
        """Whether the row's blocks were compiled; None where it says nothing."""
        said = self.raw["compile"].lower()
        if re.match(r"(n|no|none|false|0|off|eager|disabled)\b", said) or (not said and self.noted(_NOT_COMPILED)):
            return False
        if re.match(r"(y|yes|true|1|on|enabled|torch[.]compile|inductor|✓|✔)", said):
            return True
        return True if not said and self.noted(_COMPILED) else None

    def has(self, pattern: str) -> bool:
        """True where the pattern is found in source, model, optimizer or notes."""
        return re.search(pattern, self.text) is not None

    def noted(self, pattern: str) -> re.Match[str] | None:
        """The first place in the notes where the pattern is found."""
        return re.search(pattern, self.notes)

    @property
    def year(self) -> float:
        """Year with months as a fraction; where the date says none, 2024, or when the device came to be used."""
        match = re.match(r"(\d{4})(?:-(\d\d))?", self.raw["date"])
        if match:
            return int(match.group(1)) + (int(match.group(2) or 6) - 1) / 12
        gpu = self.raw["gpu"].lower()
        return next((year for pattern, year in _SINCE if re.search(pattern, gpu)), 2024.0)

    def assume(self, sentence: str) -> None:
        """Remember what the row does not say."""
        if sentence not in self.assumed:
            self.assumed.append(sentence)
