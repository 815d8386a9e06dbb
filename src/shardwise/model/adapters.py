"""Rules for layers that a low-rank adapter wraps (LoRA, as `peft` builds it). Pure, no torch.

`y = W x + B A x`: the wrapper holds `base_layer` (W), `lora_A.<adapter>` (A, to few features) and `lora_B.<adapter>`
(B). Where W is split by outputs, B is too, and A is whole. Where W is split by inputs, A is too (its few outputs are
summed), and B is whole. Formula: Hu et al., arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

BASE, DOWN, UP = "base_layer", "lora_A", "lora_B"
STYLES: Mapping[str, tuple[str, str]] = {
    "column": ("replicate", "column"),
    "row": ("row", "replicate"),
    "column-gather": ("replicate", "column-gather"),
    "replicate": ("replicate", "replicate"),
}
"""Style of the wrapped layer -> styles of A and of B."""


def has_adapters(names: Iterable[str]) -> bool:
    """Whether any of the modules is a half of an adapter."""
    return any({DOWN, UP} & set(name.split(".")) for name in names)


def without_adapters(names: Iterable[str]) -> list[str]:
    """The names that the modules would have without adapters.

    >>> without_adapters(["a.q", "a.q.base_layer", "a.q.lora_A", "a.q.lora_A.default"])
    ['a.q']
    """
    kept = (n.removesuffix(f".{BASE}") for n in names if not {DOWN, UP} & set(n.split(".")))
    return list(dict.fromkeys(kept))


def with_adapters(rules: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The rules of a model without adapters, for the names that it has with them.

    A style that has no form for adapters stays on the wrapper, where the strict check refuses it by name.

    >>> with_adapters({"a.q": "column"}, ["a.q", "a.q.base_layer", "a.q.lora_A.default", "a.q.lora_B.default"])
    {'a.q.base_layer': 'column', 'a.q.lora_A.default': 'replicate', 'a.q.lora_B.default': 'column'}
    """
    names = list(names)
    known = set(names)
    found: dict[str, str] = {}
    for pattern, style in rules.items():
        if f"{pattern}.{BASE}" not in known or style not in STYLES:
            found[pattern] = style
            continue
        down, up = STYLES[style]
        found[f"{pattern}.{BASE}"] = style
        found |= {n: down for n in names if n.startswith(f"{pattern}.{DOWN}.")}
        found |= {n: up for n in names if n.startswith(f"{pattern}.{UP}.")}
    return found


def home(name: str) -> str:
    """The module whose forward calls a layer with its own input, past the wrapper of an adapter.

    >>> home("attn.q"), home("attn.q.base_layer"), home("attn.q.lora_B.default"), home("attn.q.lora_A.default")
    ('attn', 'attn', 'attn', 'attn.q.lora_A')
    """
    parts = name.split(".")
    if parts[-1] == BASE:
        parts = parts[:-1]
    elif len(parts) > 2 and parts[-2] == UP:
        parts = parts[:-2]
    return ".".join(parts[:-1])
