"""`fully_shard`'s own word for what happens to gathered weights after a forward: `post_forward_mesh_info` of a group.

Torch's `set_reshard_after_forward` sets it too, to freed or kept, and not to a part of the ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


class Gathered:
    """How long what a forward has gathered stays: as it was planned, or (from the start) not beyond the forward."""

    def __init__(self, root: nn.Module) -> None:
        """Look at the groups of `fully_shard` in a module, as they are planned."""
        states: list[Any] = [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]
        groups = [group for state in states for group in _groups(state)]
        self._planned = [(group, group.post_forward_mesh_info) for group in groups]
        self.is_kept = True
        self.keep(False)

    def keep(self, as_planned: bool) -> None:
        """From now on what is gathered stays as it was planned, or else is given back after each forward."""
        self.is_kept = as_planned
        for group, planned in self._planned:
            group.post_forward_mesh_info = planned if as_planned else group.mesh_info


def _groups(state: Any) -> list[Any]:
    """Before torch 2.13 a state has one group, or none."""
    several = getattr(state, "_fsdp_param_groups", None)
    return several if several is not None else [group for group in [state._fsdp_param_group] if group is not None]
