"""What a `.ckpt` of Lightning holds, as a tree for `write_torch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.checkpoint.foreign.views import Source

PREFIX = "model."
"""Of a LightningModule that keeps the model as `self.model`; `convert` takes it off again."""
_VERSION = "2.0.0"
"""Newer ones take its layout as it is; for what is older they have migrations."""


def lightning_tree(
    weights: Mapping[str, Source], optimizer: Mapping[str, Mapping[str, Source]], step: int
) -> dict[str, Any]:
    """The keys that `load_from_checkpoint` needs, and with an optimizer's state those that a Trainer looks for too.

    State is by the parameters' names, as a checkpoint of ours knows no order of them: Lightning's FSDP and
    model-parallel strategies take names; a plain one, which goes by position, stops at the dials that are not there
    (`KeyError: 'betas'`), so no state can come to another parameter. There are no `loops`: a Trainer's begin anew.
    """
    tree: dict[str, Any] = {
        "epoch": 0, "global_step": step, "pytorch-lightning_version": _VERSION,
        "state_dict": {PREFIX + name: source for name, source in weights.items()}, "callbacks": {},
    }  # fmt: skip
    if optimizer:
        state = {PREFIX + name: entries for name, entries in optimizer.items()}
        groups = [{"params": list(state)}]
        tree |= {"optimizer_states": [{"state": state, "param_groups": groups}], "lr_schedulers": []}
    return tree
