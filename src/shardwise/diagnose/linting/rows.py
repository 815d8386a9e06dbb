"""A rule on where the rows of a batch are."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.diagnose.linting.names import last
from shardwise.diagnose.linting.table import Facts, Hit, rules, source

ROWS, _rule = rules()

_LAYERS = re.compile(
    r"^torch\.nn\.(RNN|LSTM|GRU|MultiheadAttention|Transformer|Transformer(En|De)coderLayer|"
    r"(modules\.)?rnn\.(RNN|LSTM|GRU))$"
)
_TURNS = {
    *("transpose", "transpose_", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "rearrange", "t", "einsum"),
    *("pad_sequence", "pad_packed_sequence", "pack_padded_sequence", "pack_sequence"),
}
"""Calls after which rows may be anywhere."""
_TURNED = re.compile(r"\.m?[TH]\b")


@_rule(
    "rows.batch-first",
    "A recurrent layer or attention of torch without `batch_first=True`, in a script that turns no tensor: it takes "
    "rows along dim 1, and computes those of (rows, tokens, features) from each other, so that training depends on how "
    "they are divided.",
)
def _batch_first(facts: Facts) -> Iterator[Hit]:
    sites = facts.script.sites
    turned = any(last(site.name) in _TURNS or _TURNED.search(source(site.node)) for site in sites)
    if turned or not facts.script.is_distributed:
        return
    for site in sites:
        words = {keyword.arg for keyword in site.node.keywords}
        if _LAYERS.match(site.name) and not words & {"batch_first", None}:
            yield Hit(
                node=site.node,
                what=f"`{source(site.node)}` takes its rows along dim 1",
                found="no batch_first=True, and no transpose, permute or packed sequence in this script",
                fix="give batch_first=True, or (tokens, rows, features); the first step of Shardwise compares the two",
                severity="note",
            )
