"""Families of transformers by axis: under which plan each is trained, and by which limit it is refused. No torch.

`test_hf` runs it; docs/compatibility.md is written from it.
"""

from __future__ import annotations

from collections.abc import Mapping

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "falcon"),
    *("olmo2", "mixtral", "qwen3_moe", "deepseek_v3", "bert", "t5", "vit"),
)
SPARSE = ("mixtral", "qwen3_moe", "deepseek_v3")
TWO_CHAINS = ("module.two-chains", "an encoder and a decoder, two chains of blocks")
REFUSED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "tp2 / seq": {
        "opt": ("module.column-in-block", "fc1 is a column layer of the block itself"),
        "bert": ("module.no-row-layer", "attention.self holds column layers and no row layer"),
        "t5": TWO_CHAINS,
        "vit": ("module.pictures", "pictures"),
    },
    "pp2 / 1f1b mb2": {"t5": TWO_CHAINS},
    "cp2": {
        "gemma2": ("module.attention-by-hand", "attention that caps its logits"),
        "falcon": ("module.attention-direct", "calls its attention directly"),
        "t5": TWO_CHAINS,
        "vit": ("module.mixes-tokens", "projection is a Conv2d"),
    },
    "ep2 fsdp2": {name: ("module.no-experts", "no expert modules") for name in FAMILIES if name not in SPARSE},
}
"""Plan -> family -> the limit of docs/constraints.md, and a part of what is said."""
AXES: Mapping[str, str] = {
    "sharded data": "fsdp2",
    "`tp`": "tp2",
    "`tp` + `seq`": "tp2 / seq",
    "`pp`": "pp2 / 1f1b mb2",
    "`cp`": "cp2",
    "`ep`": "ep2 fsdp2",
}
"""One axis, and the plan that stands for it: every family is trained under it, or refused."""
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "cp2 pp2 / 1f1b mb2": ("llama", "gpt2", "mixtral"),
    "cp2 ep2": ("mixtral", "deepseek_v3"),
    "pp2 ep2 fsdp2 / 1f1b mb2": ("mixtral", "qwen3_moe"),
    "ep2 fsdp2 tp2": SPARSE,
    "cp2 tp2 / loss-parallel": ("llama", "mistral"),
    "fsdp2 / recompute=blocks / mb2": ("gpt2", "falcon"),
    "pp2 fsdp2 tp2 / 1f1b mb2 / seq": ("llama", "gemma3_text", "gpt2", "mixtral"),
    "pp2 cp2 tp2 / 1f1b mb2": ("llama", "mixtral"),
    "pp2 ep2 fsdp2 tp2 / 1f1b mb2 / seq": ("mixtral", "qwen3_moe"),
    "pp2 cp2 tp2 ep2 zero1 / 1f1b mb2": ("mixtral",),
}
"""Several axes at once."""
SOAK = {*list(TOGETHER)[6:], "ep2 fsdp2 tp2"}
PLANS = {plan: tuple(f for f in FAMILIES if f not in REFUSED.get(plan, {})) for plan in AXES.values()} | dict(TOGETHER)
"""Plan -> the families that are trained under it."""
