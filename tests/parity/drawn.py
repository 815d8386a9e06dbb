"""What `test_drawn_plans.py` runs in the processes of the world; they import this and not hypothesis."""

from __future__ import annotations

from shardwise.parallel import compose
from tests.parity import grid

MODEL = grid.decoder(8, num_heads=8, num_kv_heads=4)
"""A block for every stage that is drawn, heads for tp4."""


def train(text: str, global_batch: int) -> grid.Trace:
    """Two steps under a plan, or in one process of plain PyTorch for the plan "reference"."""
    grid.MODELS["drawn"] = MODEL
    if text == "reference":
        return grid.reference("drawn", "fp64", global_batch)
    return grid.run_plan(text, "drawn", global_batch)


def static_graph_accumulates(text: str) -> str:
    """What torch says to a plan that the table refuses."""
    compose.refuse = lambda findings: None  # in this process of the world only
    try:
        train(text, 8)
    except RuntimeError as error:
        return str(error)
    return "trained"
