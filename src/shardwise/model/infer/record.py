"""What is written down of a forward while it runs without data."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.model.infer.flow import Shape, Split


@dataclass(frozen=True)
class Mark:
    """A tensor that is split where all `sources`, names of linear layers, give split outputs."""

    split: Split
    sources: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Use:
    """One operation that a parameter takes part in."""

    frame: str
    operation: str
    sources: frozenset[str]
    """What the other operand is split by; empty: it is whole."""
    per_token: bool


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Where sequence shards begin, are gathered, are split again and end; see `parallel/tensor.py`."""

    first: str
    last: str
    holders: frozenset[str]
    """Modules in blocks that hold column layers: they are given the whole sequence."""
    rows: frozenset[str]
    """Row layers in blocks: they give sequence shards."""


TOKENS = "the sequence"
"""The source of the marks of sequence shards."""


@dataclass(frozen=True)
class Step:
    """One operation as it ran: its name, numbers and results with their marks."""

    name: str
    numbers: tuple[float, ...]
    shapes: tuple[Shape, ...]
    marks: tuple[Mark | None, ...]


@dataclass(kw_only=True)
class Flow:
    """What a forward did."""

    steps: list[Step] = field(default_factory=list)
    dead: dict[str, str] = field(default_factory=dict)
    """Linear layer -> why its output must be whole."""
    fused: set[str] = field(default_factory=set)
    """Those whose output is cut into pieces."""
    softmax: set[str] = field(default_factory=set)
    """Those that reach a softmax: they project queries or keys."""
    calls: dict[str, list[Mark | None]] = field(default_factory=dict)
    """Linear layer -> the mark of its input, a call each."""
    uses: dict[str, list[Use]] = field(default_factory=dict)
    """Parameter -> the operations outside of linear layers that use it."""
    joined: dict[str, set[str]] = field(default_factory=dict)
    """Sources that some operation needs split together."""
    results: dict[str, str] = field(default_factory=dict)
    """Module -> the linear layer whose output it returns."""
    from_ids: set[str] = field(default_factory=set)
    """Embeddings of integers that the model was given."""
    outputs: set[str] = field(default_factory=set)
    """Linear layers whose output is the model's."""
    order: list[str] = field(default_factory=list)
    """Modules in the order of their first call."""
    output_shapes: tuple[Shape, ...] = ()
