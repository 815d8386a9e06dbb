"""What a row moves to the host: states of the optimizer, or saved activations."""

from __future__ import annotations

import re

from published.cells import Cells, unsourced
from published.degrees import ZERO
from shardwise.plan.plan import Offload

OF_LAYERS = (
    r"activations? (?:cpu )?offload(?:ing|ed)?(?: of|:)? (\d+) layers"
    r"|cpu[ _-]offload(?:ing)?(?:[ _-]num)?[ _-]layers[ =:]+(\d+)"
    r"|(\d+) layers?(?:'? activations)? (?:are |is )?(?:cpu[ -]offloaded|offloaded to (?:the )?(?:cpu|host))"
    r"|offload(?:s|ing)? (?:the )?activations (?:of|in) (\d+) layers"
)
"""Megatron's `cpu_offloading_num_layers` in words: whose activations move, and no states."""
_KINDS = r"((cpu|optimizer|state|parameter|param|activation)s?[ _-])*offload(ing|ed)?"
_OFF = rf"\b{_KINDS}( is| was)?[ =:]*(off|disabled|false|no(t|ne)?)\b|\b(no|not|without|w/o)( any)? {_KINDS}\b"
"""Says that nothing moves."""

_SAVED = (
    r"activations? (check ?point\w* )?(cpu )?offload|check ?point\w* whose inputs (are )?offload"
    r"|check ?points (wait |are )?(on|offloaded to) the (host|cpu)"
)
"""Says that what is kept between both passes moves."""
_ADDED = r"cumulative ablation step: (\+8-bit|q?lora)"
"""Steps of torchtune's ablation behind the one that moves saved activations, which they have too."""


UNSLOTH = 2024.25
"""Year from which unsloth's checkpoints wait on the host (its release of April 2024)."""


def of_unsloth(cells: Cells) -> bool:
    """Whether unsloth ran, and is not only the repository that a row is from."""
    return re.search(r"\bunsloth\b(?!-?ai)", unsourced(cells.text)) is not None


def offloaded_layers(cells: Cells) -> int | None:
    """Layers whose activations wait on the host; None where the row counts none."""
    found = cells.noted(OF_LAYERS)
    return int(next(number for number in found.groups() if number)) if found else None


def _checkpoints(cells: Cells) -> bool:
    said = cells["activation_checkpoint"].lower()
    return not re.match(r"(n|no|none|false|off|0)\b", said) and not cells.noted(
        r"(no|without) (gradient |activation |unsloth )*check ?pointing"
    )


def offload_of(cells: Cells, zero: int) -> Offload:
    """States that live on the host, by cells and notes, and saved activations that wait there."""
    stated = re.sub(_OFF, "", f"{cells['optimizer']} ; {cells['zero_stage']}".lower())
    state = re.search(r"on cpu|offload", stated) is not None
    of_states = (
        rf"(optimizer|adam\w?)( states?)?|{ZERO}[123][ _+,(]*(with)?|(?<!no )(?<!activation )(?<!activations )cpu"
    )
    layers, notes = offloaded_layers(cells), re.sub(f"{OF_LAYERS}|{_OFF}", "", cells.notes)
    noted = re.search(
        rf"({of_states})[ _-]?((cpu|optimizer) )?offload(ing|ed)?\b(?! (of(?! all)|used? |not|off))"
        r"|(?<!no )(?<!without )(?<!no cpu )(?<!without cpu )offload(ed|ing)?[ _](of )?(the )?"
        r"(optimizer|param(eter)?s|gradients|grads)\b|zero-(offload|infinity)",
        notes,
    )
    saved = re.search(_SAVED, notes) is not None or layers is not None
    saved = saved or cells.noted(_ADDED) is not None
    saved = (
        saved
        or re.fullmatch(r"(activations? )?(cpu )?offload(ing|ed)?", cells["activation_checkpoint"].lower()) is not None
    )
    if of_unsloth(cells) and cells.year >= UNSLOTH and not saved and _checkpoints(cells):
        cells.assume("checkpoints wait on the host, as unsloth's do")
        saved = True
    return Offload(state=(state or noted is not None) and zero > 0, activations=saved)
