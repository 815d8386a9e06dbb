"""What `apply` says of the `tp` and `ep` of one plan, where reading the module did not tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.parallel.compose import place
from shardwise.parallel.initial.blueprint import record
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.fake import fake_world


def refusal(factory: Callable[[], Any], plan: Plan) -> str:
    """Why a module cannot have the `tp` and `ep` of a plan; empty: it can.

    Cost: the passes on one rank of a pretended world; shapes only.
    """
    shards = plan.axes.dp_shard if plan.axes.ep > 1 else 1
    axes = replace(plan.axes, pp=1, dp_replicate=1, cp=1, dp_shard=shards)
    small = Plan(axes=axes, zero=plan.zero if shards > 1 else 0, tensor=plan.tensor, blocks=plan.blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that stay whole
        try:
            with fake_world(small.world), open_mesh(small, device="cpu") as mesh:
                place(record(factory), small, mesh)
        except (ShardwiseError, SystemExit) as error:
            return getattr(error, "row", "") or str(error).partition(";")[0]
    return ""
