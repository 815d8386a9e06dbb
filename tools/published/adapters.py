"""Adapters of a row (arXiv:2106.09685): whether there are any, beside which products, and what they keep."""

from __future__ import annotations

import re

from published.cells import Cells, unsourced
from published.offload import of_unsloth
from published.stacks import CORE
from shardwise.model.spec import ModelSpec
from shardwise.plan.frozen import adapted_share
from shardwise.plan.workload import Adapters

ADAPTERS = r"(?<![a-z])(q|rs|long|v)?lora(?![a-z])|\bdora\b|\bpeft\b"
_LOW_BASE = r"(?<![a-z])q-?lora(?![a-z])|\bnf4\b|load[_-]in[_-]4[ _-]?bit|bnb[ _-]?4[ _-]?bit|bitsandbytes 4"
_FOUR = r"\b(4|four)[ -]?bits?\b(?! (adam|optim))|\bint4\b"
_EIGHT = r"load[_-]in[_-]8[ _-]?bit|llm\.int8|\bq8?_?lora[ -]8|gptq[ -]?(int)?8|int8 by gptq|(bnb|bitsandbytes)[ .]int8"
"""Words for adapters, and for frozen weights of 4 and of 8 bits below them."""
INT8 = r"\bint8\b(?! (optim|adam|states?|moments|weight[- ]only))|\b(a8w8|w8a8)\b"
"""Products of 8-bit integers, and no states in them."""
_ATTENTION = r"(attention|q_proj|qkv|query_key_value|q, ?v|query)[^;]* only|only (on )?(the )?(attention|q|query)"
_TWO = r"q_proj ?(,|and|\+) ?v_proj|\bq ?(,|and|\+) ?v\b|query ?(,|and|\+) ?value"
"""How notes name products: all of attention, or queries and values."""
_PLAIN = r"torchtune|llama[- ]?factory|(no|without) (lora )?dropout|dropout[ =:]*(of )?0(\.0*)?(?![.\d])"
"""Recipes without dropout in front of adapters."""


def adapts(cells: Cells) -> bool:
    """Whether adapters are trained: not where notes say that all is, and what names them is the source's own name."""
    said = " ; ".join(cells[name].lower() for name in ("model", "optimizer", "precision"))
    named = re.search(ADAPTERS, f"{said} ; {unsourced(cells.notes)}")
    plain = not cells.noted(r"full[ -](parameter|fine-?tun)")
    return base_of(cells) != "" or (cells.has(ADAPTERS) and (named is not None or plain))


def base_of(cells: Cells) -> str:
    """What the frozen weights are packed as, a key of `PACKED`; empty: they are not.

    QLoRA (arXiv:2305.14314) packs scales too, and so do torchtune and unsloth; bitsandbytes alone does not.
    """
    named = cells.has(ADAPTERS)
    if cells.has(_EIGHT) or (named and re.search(INT8, cells["precision"].lower())):
        return "gptq-int8" if cells.has("gptq") else "int8"
    if not cells.has(_LOW_BASE) and not (named and cells.has(_FOUR)):
        return ""
    if cells.has("gptq"):
        return "int4" if cells.has("triton|marlin") else "gptq"
    both = cells.has(r"double[ -]?quant|nf4-(dq|double)|torchtune|axolotl") or of_unsloth(cells)
    both = both or not cells.has(_PLAINLY)
    return "nf4-double" if both else "nf4"


_PLAINLY = r"\bnf4\b|load[_-]in[_-]4|\bbnb\b|bitsandbytes"
"""Words for the library alone, which packs no scales unless it is told to."""


def trained_share(cells: Cells, spec: ModelSpec) -> float:
    """Adapters on the projections of every block, over the model; 1 without adapters.

    Of rank 16, and where their library has them, where the notes say nothing else.
    """
    if not adapts(cells):
        return 1.0
    stated = cells.noted(r"rank[ =:]+(\d+)|\br ?[=:] ?(\d+)|lora[_ -]?r(?:ank)?[ =:]+(\d+)")
    rank, on = int(next(n for n in stated.groups() if n)) if stated else 16, _beside(cells, spec)
    if not stated or not _said(cells):
        cells.assume(f"adapters of rank {rank} on {', '.join(on)}")
    return adapted_share(spec, rank, on)


def adapters_of(cells: Cells, spec: ModelSpec, stack: str, width: float, *, sharded: bool) -> Adapters | None:
    """Beside which products, and the bytes of their own copies; None: no adapters. `width`: bytes of an activation.

    PEFT's are fp32 beside frozen 16 bits since its version 0.12, and cast what they are fed, each for itself.
    """
    if not adapts(cells):
        return None
    on, fused = _beside(cells, spec), cells.has(r"lit-?gpt|query_key_value|c_attn|lit-?parrot")
    if fused and {"q", "k", "v"} & set(on):
        on = ("qkv", *(part for part in on if part not in "qkv"))
    own = cells.has("torchtune") or of_unsloth(cells)
    plain = stack in CORE or own or cells.has(_PLAIN)
    late = stack not in CORE and cells.year >= FP32 and not own
    wide = late and width < 4 and not cells.has(r"lit-?gpt|automodel")  # which have their own
    cast = plain and late
    base = base_of(cells)
    by_library = base in ("nf4", "nf4-double", "int8") and not own
    until = KEPT + 0.25 * cells.has("lit-?gpt")  # which stays with version 0.42
    upcast = by_library and not sharded and cells.has(_UPCASTS) and not cells.has(_AS_THEY_ARE)
    copies = width if cast else 0.0 if plain else width + 1
    stays = cells.has(_REENTRANT) or (sharded and stack != "deepspeed" and cells.has(_TRAINER))
    keeps = by_library and cells.year < until
    lasts = keeps and cells.has("lit-?gpt") and not cells.noted("longest sample")
    rest = 4.0 * upcast
    return Adapters(on=on, copies=copies, wide=wide, base=base, keeps=keeps, lasts=lasts, stays=stays, rest=rest)


KEPT = 2024.55
"""Year until which bitsandbytes' products keep their inputs (its version 0.43.2)."""
_UPCASTS = r"prepare_model_for_kbit|\bpeft\b|\btrl\b|hugging ?face|(hf|transformers) trainer|axolotl"
"""Words for what casts to fp32 all that is not packed: PEFT's `prepare_model_for_kbit_training`; not under FSDP."""
_AS_THEY_ARE = r"nothing cast|llama-?factory|\bfsdp"
"""Words for codes that leave it: a script for FSDP shards one type."""
_REENTRANT = r"(?<!non[- ])\breentrant"
_TRAINER = r"sfttrainer|\btrl\b|(hugging ?face|hf|transformers) trainer"
"""Words for what recomputes by reentrant checkpoints, below FSDP1 where it shards."""
FP32 = 2024.5
"""Year from which PEFT's adapters are in fp32 beside weights of 16 bits."""


_FUSED = r"(query_key_value|c_attn) only"
_EVERY = r"(every|all) (projection|linear|product|module|layer)|all[ -]linear|(gate|up|c)_proj|\bmlp\b|\bw1\b"
_WIDELY = r"axolotl|llama[- ]?factory|\b(ms-)?swift\b|xtuner"
"""Libraries whose recipes put them on every projection; others on queries and values (as arXiv:2106.09685)."""


def _said(cells: Cells) -> bool:
    return cells.noted(f"{_TWO}|{_FUSED}|{_ATTENTION}|{_EVERY}") is not None


def _beside(cells: Cells, spec: ModelSpec) -> tuple[str, ...]:
    """Parameters that have one."""
    if cells.noted(_FUSED):
        return "q", "k", "v"
    if cells.noted(_TWO) or not (_said(cells) or of_unsloth(cells) or cells.has(_WIDELY)):
        return "q", "v"
    attention = "q", "k", "v", "o"
    if cells.noted(_ATTENTION):
        return attention
    return *attention, *(("gate", "up", "down") if spec.ffn == "gated" else ("up", "down"))
