"""The attention kernel of a row: the one that it names, or its stack's, as far as date and device have it."""

from __future__ import annotations

import re

from published.cells import Cells
from shardwise.plan.stack import AttentionKernel

OLD = r"v100|\bt4\b|p100|2080|titan|mi100|quadro|rtx-?8000|\b10[78]0\b|\bp40\b|\bm[46]0\b"
"""Devices that neither Transformer Engine nor FlashAttention 2 runs on: without matrix units for bf16."""
_NO_FLASH = (
    r"(no|without|not|un-?used) (\w+ )?(flash|fused)[ _-]?attention"
    r"|flash[ _-]?attention:? (is )?(off|no\b|not|disabled)"
)
_TRITON = r"triton (flash|attention)|attn_impl[ =:]+triton"
_FLASH = r"flash[ _-]?attention[ _-]?"
_ONLY = r"(?![\d%]| ?x\b| (nodes|gpus|devices|layers|heads)\b)"
"""Behind a version's number: it is none of something else."""
_KERNELS: tuple[tuple[str, AttentionKernel], ...] = (
    (_NO_FLASH, "unfused"),
    (rf"{_FLASH}(v?[34]{_ONLY}|v[34]\.)|\bfa-?[34]\b|cudnn (fused )?attention", "flash3"),
    (rf"{_FLASH}v?1{_ONLY}|flash_attentionv1|\bfa-?1\b", "flash1"),
    (r"\bsdpa[ _-]math\b|\bmath[ _-]sdpa\b", "unfused"),
    (rf"{_FLASH}v?2|\bfa-?2\b|\bsdpa\b", "flash2"),
    (_TRITON, "triton"),
    (_FLASH, "flash2"),
    (r"memory[ -]efficient attention|\bxformers\b", "flash1"),
    (r"kernel: fused|fused softmax", "fused-softmax"),
    (r"kernel: torch|unfused|(eager|naive|vanilla|math) attention|attn: eager|math (backend|kernel)", "unfused"),
    (r"attention in primitives|materiali[sz]e[ds]? (the )?(attention|scores)", "unfused"),
)


FLASH = 2022.75
"""Year from which flash attention (arXiv:2205.14135) is in stacks."""
FUSED = 2023.2
"""Year from which PyTorch has fused attention of its own (2.0): loops that bring no kernels have primitives before."""
PLAIN = ("eager", "fsdp1", "torchtitan", "deepspeed")
"""Stacks whose attention is that of a model in PyTorch."""
_KERNELED = r"megatron|bmtrain|apex|mosaic|llm-foundry|composer|flash|turing-?nlg"
"""Words for codes that had kernels for the softmax before."""
EFFICIENT = 2023.25
"""Year from which torch's own attention keeps no scores on old devices either (CUTLASS's kernels, torch 2.0)."""
TRITON = 2024.5
"""Year from which FSDP1's jobs run FlashAttention 2, and no kernels in Triton, by what is seen."""
SDPA = 2023.9
"""Year from which the models of transformers run torch's fused attention (version 4.36)."""
LAYERS = r"hugging ?face|(hf|transformers) trainer|\bpeft\b|\btrl\b|llama-?(recipes|cookbook)|transformers \d"
"""Words for those models."""
_OWN_SCORES = r"bloom|\bmpt\b|codegen|gpt-?neo(?!x)|gpt-?j\b|deberta"
"""Those among them that it never reached."""
HOPPER = 2024.5
"""Year from which stacks on Transformer Engine have kernels made for Hopper (FlashAttention 3: arXiv:2407.08608)."""
CUDNN = 2026.0
"""Year from which torch's attention runs cuDNN's kernels."""
SINKS = 2026.4
"""Year from which cuDNN's attention is seen to be as fast with learned sinks as without."""


def attention_of(cells: Cells, stack: str, usual: AttentionKernel, *, core: bool) -> AttentionKernel:
    """The kernel of a row. `usual`: its stack's; `core`: a stack on Transformer Engine."""
    kernel = usual
    own = stack in PLAIN and not cells.has(_KERNELED)
    if kernel.startswith("flash") and cells.year < (FUSED if own else FLASH):
        kernel = "unfused" if own else "fused-softmax"
    if kernel == "flash2" and cells.year >= CUDNN:
        kernel = "flash3"
    if stack == "jax" and cells.noted(r"\bjax 0\.[0-7]\b"):
        kernel = usual
    if core and cells.year < HOPPER:
        kernel = "flash2" if kernel == "flash3" else kernel
    if core and cells.year < SINKS and re.search(r"gpt-?oss", cells["model"].lower()):
        kernel = "flash2"
        cells.assume("attention with sinks runs at the rate of FlashAttention 2 before cuDNN's kernels take them")
    if stack == "fsdp1" and kernel == "flash2" and cells.year < TRITON:
        kernel = "triton"
    plain = cells.year < SDPA or re.search(_OWN_SCORES, cells["model"].lower()) is not None
    if stack in ("eager", "deepspeed", "fsdp1", "jax") and plain and cells.has(LAYERS):
        kernel = "unfused"
    named = _named(cells)
    if named == "triton" and cells.year >= TRITON:
        named = "flash2"
    kernel = named or kernel
    if kernel not in ("flash2", "flash3", "triton") or not is_old(cells):
        return kernel
    kept: AttentionKernel = "flash1" if cells.year >= EFFICIENT else "unfused" if own else "fused-softmax"
    words = "memory-efficient" if kept == "flash1" else kept
    cells.assume(f"{words} attention, as FlashAttention 2 does not run on the device")
    return kept


def is_old(cells: Cells) -> bool:
    """Whether the row's device is older than FlashAttention 2 and Transformer Engine can do with."""
    name = re.sub(r"[\s_]+", "-", cells["gpu"].lower())
    return re.search(OLD, name) is not None and not re.search(r"\bada\b|blackwell|rtx-?pro", name)


def names_flash(cells: Cells) -> bool:
    """Whether the notes say that flash attention ran."""
    return cells.noted(r"flash[ _-]?attention|\bfa[1234]\b") is not None and not cells.noted(_NO_FLASH)


def _named(cells: Cells) -> AttentionKernel | None:
    stated = cells.noted(r"kernel: ([^;]+)")
    where = f"kernel: {stated.group(1)}" if stated else cells.notes
    return next((kernel for pattern, kernel in _KERNELS if re.search(pattern, where)), None)
