"""What a row recomputes in the backward pass."""

from __future__ import annotations

import re

from published.adapters import base_of
from published.cells import Cells
from published.offload import of_unsloth
from published.stacks import CORE, TPU, TRAINIUM
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Recompute
from shardwise.plan.stack import Stack

_FULL = re.compile(
    r"((y|yes|true|on|1|enabled)\b.*|[✓✔].*|full\b.*|blocks?\b.*|all\b.*|uniform\b.*|every (layer|block)s?"
    r"|remat(_blocks?| full)?|(gradient|activation)[ _-]checkpointing|ac ?[=:] ?(1|true|on|full)|unsloth\b.*)"
)
_NONE = re.compile(
    r"((n|no|none|false|off|0|disabled|no (recompute|checkpointing|ac))\b.*|ac ?[=:] ?(0|false|off|none)"
    r"|(activations? )?(cpu )?offload(ing|ed)?)"  # activations that wait on the host are not recomputed
)
_DONE = r"(activations?[ _-])?(recomput(e|ation)|check ?pointing|checkpoints?|ckpt)\b"
_NOT = (
    r"\b(no|without|w/o|not using) ((full|gradient|unsloth)[ _-])*(activations? )?"
    r"(recomput(e|ation)|check ?pointing|ac\b)"
    r"|\bac[ =:]+(none|off)\b"
    r"|(activation|gradient)[ _-]check ?pointing( is| was)?[ =:]*(off|no\b|none|false|disabled|not (used|en))"
)
_ALL = (
    r"((^|[;,(+]|with|and) ?)(full|activation) (activation )?recomput(e|ation)\b"
    r"|(gradient|activations?)[ _-](check ?pointing|checkpoints?|ckpt)\b(?! (is |was |state )?(not|un))"
    r"|recompute all (layers|blocks)|full remat|remat[ =:]+full|\bfull ac\b|checkpoint(ed|ing)? activations"
)
_SECOND = r"(\bac\b|check ?point\w*|recomput\w*) (on |of |in )?every[ -](2nd|other|second)"
"""How notes say that nothing, every block, or every second is recomputed."""
_PREPARES = r"\bpeft\b|\btrl\b|(hugging ?face|hf|transformers) trainer|axolotl|llama-?factory"
"""Words for what calls PEFT's `prepare_model_for_kbit_training`, which turns checkpoints on."""
_CHECKPOINTS = ((r"llama[- ]?factory|\b(ms-)?swift\b|xtuner", 0.0), (r"\btrl\b|\bverl\b", 2025.6))
"""Trainers that recompute every block unless told otherwise, and the year from which they do: LLaMA-Factory, with a
switch that turns it off, ms-swift (`gradient_checkpointing`), XTuner (`use_activation_checkpointing`); TRL since its
version 0.21 (pull request 3510, August 2025), and verl's models of Hugging Face."""
_BLOCK = r"\bblock\b[ ,:=(]*(\d+) ?(?:layers?\b|\)|$)"
"""Megatron's method `block`: the first so many layers of a stage, all of each."""
NO_RECOMPUTE = "no recompute"
EVERY_SECOND = "selective recompute is of every second block"
TWO_OF_THREE = "recomputed modules counted as two blocks of three"
PER_OPERATOR = "recompute per operator, torchtitan's default"
OF_DENSE = "recompute of `mlp` counted as none: a mixture has it in its few dense layers, and `moe` in the others"
_MODULES = ("core_attn", "mla_up_proj", "layernorm", "moe_act", "shared_experts", "moe", "mlp")
"""Megatron's `recompute_modules`."""
_LARGE = {"mlp", "moe", "shared_expert", "shared_experts"}


def recompute_of(cells: Cells, spec: ModelSpec, stack: Stack, pp: int) -> Recompute:
    """The policy of the cell and the notes; empty cells take the stack's default."""
    text = cells["activation_checkpoint"].lower()
    part = cells.noted(r"full/block on (\d+) layers") or re.search(_BLOCK, text)
    if part:
        layers = max(spec.num_layers // pp, 1)
        return Recompute(mode="ratio", ratio=min(int(part.group(1)) / layers, 1.0))
    share = (
        re.search(r"\b(\d+) ?(?:/|of|out of) ?(\d+) (?:of (?:the |all )?)?(?:blocks|layers)", text)
        if text
        else cells.noted(r"(\d)/(\d) of (?:the |all )?(?:blocks|layers)")
    )
    if share and 0 < int(share.group(1)) < int(share.group(2)):
        return Recompute(mode="ratio", ratio=int(share.group(1)) / int(share.group(2)))
    half = re.search(
        r"(?:partial|ratio)[ =:(]*(\d+(?:\.\d+)?) ?%|\b(\d+(?:\.\d+)?) ?%(?: of (?:the |all )?(?:blocks|layers)|$)",
        text,
    )
    part_of = float(next(n for n in half.groups() if n)) / 100 if half else 0.5 if re.match(r"half\b", text) else 0.0
    if 0 < part_of < 1:
        return Recompute(mode="ratio", ratio=part_of)
    some = re.search(r"every (\d+)(?:nd|rd|th)?(?: (?:layer|block)|$)", text) or (
        cells.noted(r"(?:\bac\b|check ?point\w*|recomput\w*) every (\d+)(?:nd|rd|th)? (?:layer|block)")
        if not text
        else None
    )
    if some and int(some.group(1)) > 1:
        return Recompute(mode="every", every=int(some.group(1)))
    if re.fullmatch(r"ops?|per[- ]op(eration)?|(remat[ _=:]*)?(minimal(_\w+)?|save_\w+)", text):  # MaxText's policies
        return Recompute(mode="ops")
    if re.search(r"selective|\bsac\b|per-op|op-level", text) or _lists(text):
        return _selective(cells, spec, stack)
    if _FULL.fullmatch(text):
        return Recompute(mode="blocks")
    if _NONE.fullmatch(text):
        return Recompute()
    if cells.noted(_NOT):
        return Recompute()
    if cells.noted(rf"recompute modules|recompute: |selective ({_DONE}|ac\b)|{_SECOND}"):
        return _selective(cells, spec, stack)
    if cells.noted(_ALL):
        return Recompute(mode="blocks")
    if cells.has(r"torchprime"):
        cells.assume("recompute of every block, torchprime's default")
        return Recompute(mode="blocks")
    if of_unsloth(cells):
        cells.assume("recompute of every block, unsloth's default")
        return Recompute(mode="blocks")
    if base_of(cells) in ("nf4", "nf4-double", "int8") and cells.has(_PREPARES) and not cells.has(r"\bfsdp"):
        cells.assume("recompute of every block, PEFT's default beside weights of 4 and of 8 bits")
        return Recompute(mode="blocks")
    if stack.name not in CORE and any(cells.year >= year and cells.has(words) for words, year in _CHECKPOINTS):
        cells.assume("recompute of every block, the trainer's default")
        return Recompute(mode="blocks")
    if cells.has(r"torchtune"):
        cells.assume("recompute of every block, torchtune's default")
        return Recompute(mode="blocks")
    if stack.name == "jax" and pp == 1 and not re.search(rf"{TPU}|{TRAINIUM}", cells["gpu"].lower()):
        cells.assume("recompute of every block, MaxText's default")
        return Recompute(mode="blocks")
    if cells.noted(r"counts recompute|incl\.? recompute"):
        cells.assume("full recompute, as the source's operations count it")
        return Recompute(mode="blocks")
    if stack.name == "torchtitan" and cells.has(r"torchtitan|torchao|pytorch/ao\b"):
        cells.assume(PER_OPERATOR)
        return Recompute(mode="ops")
    cells.assume(NO_RECOMPUTE)
    return Recompute()


def _lists(text: str) -> bool:
    """Whether a cell is a list of Megatron's modules."""
    words = re.findall(r"[a-z_]+", text)
    return bool(words) and all(word in _MODULES for word in words)


def _selective(cells: Cells, spec: ModelSpec, stack: Stack) -> Recompute:
    if cells.noted(r"every[ -](2nd|other|second)|selective layer") and not cells.noted(r"not stated"):
        return Recompute(mode="every", every=2)
    if cells.noted(r"per-op|selective op|\bsac\b") and stack.name not in CORE:
        return Recompute(mode="ops")
    if stack.name in ("torchtitan", "shardwise"):
        cells.assume("selective recompute is per operator")
        return Recompute(mode="ops")
    if stack.name in ("fsdp1", "deepspeed", "eager", "jax"):  # theirs picks blocks, or leaves the choice to the user
        cells.assume(EVERY_SECOND)
        return Recompute(mode="every", every=2)
    modules = set(re.findall(r"[a-z_]+", _modules(cells)))
    if "mlp" in modules and spec.num_experts and 2 * spec.num_dense_layers < spec.num_layers:
        cells.assume(OF_DENSE)
        modules -= {"mlp"}
        if not modules:
            return Recompute()
    if modules & _LARGE:
        cells.assume(TWO_OF_THREE)
        return Recompute(mode="ratio", ratio=2 / 3)
    if modules - {"core_attn", "none", "attn", "core", "attention"}:
        cells.assume("recomputed modules counted as recompute per operator")
        return Recompute(mode="ops")
    if stack.attention.startswith("flash"):
        cells.assume("recompute of attention alone is what its fused kernel does anyway")
        return Recompute()
    cells.assume("recompute of attention alone counted as recompute per operator")
    return Recompute(mode="ops")


def _modules(cells: Cells) -> str:
    """The list of modules in the cell or the notes, as text."""
    if _lists(cells["activation_checkpoint"].lower()):
        return cells["activation_checkpoint"].lower()
    listed = cells.noted(r"recompute modules:? ?\[([^\]]*)\]") or cells.noted(r"recompute modules:? ([^;]*)")
    listed = listed or cells.noted(r"selective recompute ([^;]*)") or cells.noted(r"recompute:? ([^;]*)")
    text = listed.group(1) if listed else ""
    return re.sub(r"\bnorm\b", "layernorm", text)
