"""`Workload`: what a step computes, whatever the layout: length, global batch, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from shardwise.errors import ConfigError
from shardwise.findings import nearest

STATE_BYTES = {
    "adamw": 8.0,
    "adamw-bf16": 4.0,
    "adamw-8bit": 2.06,
    "lamb": 8.0,
    "lion": 4.0,
    "muon": 4.0,
    "sgd-momentum": 4.0,
    "adafactor": 0.05,
    "sgd": 0.0,
}
"""Bytes of optimizer state per parameter, without a master copy. adamw: two moments in fp32; 8-bit: with one fp32 scale
per block of 256; lamb: as adamw; adafactor: a row and a column per matrix."""
OWN_TYPE = ("adamw-bf16", "adamw-8bit")
"""Those whose states have a type of their own; all others are in that of fp32 or fp64 parameters."""


class Packed(NamedTuple):
    """Frozen weights in few bits: what one takes, and what making it whole for each of its products does."""

    width: float
    """Bytes per weight, with its scales."""
    moved: float
    """Bytes per weight that its kernels read and write, but for the whole one that they give."""
    kernels: int
    stays: bool = False
    """Autograd keeps the whole weight for the backward pass; else it is made again."""
    inputs: float = 0.0
    """Bytes per element in which a product keeps its input for itself, beside the input; 0: it keeps none."""


PACKED = {
    "nf4": Packed(0.5 + 4 / 64, 0.5 + 4 / 64, 1),
    "nf4-double": Packed(0.5 + 1 / 64 + 4 / (64 * 256), 0.5 + 10 / 64, 3),
    "int4": Packed(0.5 + 2.5 / 128, 0.5 + 2.5 / 128, 1),
    "gptq": Packed(0.5 + 2.5 / 128, 14.5, 5, stays=True),
    "gptq-int8": Packed(1.0 + 3 / 128, 19.0, 5, stays=True),
    "int8": Packed(1.0, 1.0, 2, inputs=1.0),
}
"""nf4: 4 bits, and a scale in fp32 per 64; double: that in 8 bits, and one per 256 of them (arXiv:2305.14314, section
3); int4: integers with a scale in fp16 and a zero per 128 (arXiv:2210.17323), by one kernel; gptq: the same by
PyTorch's own operators (auto-gptq): shifts in 32 bits, cast to 8 or 16, masked, less their zeros, times their scales;
int8: a scale per row, and a copy of the input in 8 bits (arXiv:2208.07339)."""

COMPUTE = ("", "fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank products beside frozen ones (arXiv:2106.09685): beside which, and what each keeps for its weights.

    Nothing else of a frozen product's input is kept.
    """

    on: tuple[str, ...]
    """Parameters that have one: q, k, v, o, gate, up, down; `qkv` where one does for all three."""
    copies: float = 0.0
    """Bytes per element of its input that each keeps for itself: what dropout makes of it, and the mask; 0: it keeps
    the input as it is, as others do that read it."""
    wide: bool = False
    """They are in fp32 beside weights of 16 bits: they cast what they are fed and what they give, and what each moves
    has twice the bytes (PEFT since its version 0.12, of July 2024)."""
    base: str = ""
    """What the frozen products' weights are packed as, a key of `PACKED`; empty: they are as the plan has them."""
    keeps: bool = False
    """A packed product keeps its input, which it has no need of (bitsandbytes before 0.43.2, of July 2024)."""
    lasts: bool = False
    """And the loop refers to its last loss while the next is computed, whose graph holds all those inputs beside what
    autograd frees (litgpt's, in micro-batches of one length)."""
    stays: bool = False
    """Inputs of recomputed blocks, and their gradients, stay until the backward pass ends: FSDP1 hooks what goes into
    frozen units, and where a reentrant checkpoint has made that a leaf, the hook keeps it alive."""
    rest: float = 0.0
    """Bytes of a frozen weight that is not packed, and so of the residual stream: tables, norms, the head; 0: as the
    plan has them. PEFT's `prepare_model_for_kbit_training` casts them to fp32."""

    def __post_init__(self) -> None:
        if self.base and self.base not in PACKED:
            raise ConfigError(f"adapters: base: found {self.base!r}; {nearest(self.base, list(PACKED))}")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step: `global_batch` sequences of `seq_len` tokens."""

    seq_len: int
    global_batch: int
    optimizer: str = "adamw"
    compute: str = ""
    """Dtype of the matrix products; empty: what the plan's precision says. fp8 and fp4 may be priced ahead of a plan
    that can run them."""
    trained: float = 1.0
    """Share of the parameters that get gradients and state (adapters: a few per thousand)."""
    adapters: Adapters | None = None
    """Which those are, where all others are frozen; None: products keep their inputs as where all are trained."""
    imbalance: float = 1.0
    """Tokens that the busiest rank of `ep` has for its experts, over the mean of the ranks; 1: all have as many."""
    sample_bytes: float = 0.0
    """Bytes of a decoded sample (a picture, a sound) as the model is given it; 0: what the forward of the profile takes
    per token, which is 8 for rows of token ids."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "global_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"workload: {name}: found {value!r}, needed an integer of at least 1")
        if self.optimizer not in STATE_BYTES:
            hint = nearest(self.optimizer, list(STATE_BYTES))
            raise ConfigError(f"workload: optimizer: found {self.optimizer!r}; {hint}")
        if self.compute not in COMPUTE:
            raise ConfigError(f"workload: compute: found {self.compute!r}; {nearest(self.compute, COMPUTE[1:])}")
        if not 0 < self.trained <= 1:
            raise ConfigError(f"workload: trained: found {self.trained}, needed a share above 0 and at most 1")
        for name, number in (("imbalance", 1), ("sample_bytes", 0)):
            if not number <= getattr(self, name) < inf:
                found = getattr(self, name)
                raise ConfigError(f"workload: {name}: found {found}, needed at least {number}, and a finite number")

    @property
    def packed(self) -> Packed | None:
        """How frozen weights are packed; None: they are not."""
        return PACKED[self.adapters.base] if self.adapters and self.adapters.base else None

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.seq_len * self.global_batch
