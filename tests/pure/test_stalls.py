"""Stalls of pipelines whose replicas step together, and of an allocator whose device is nearly full."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware.cluster import load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.stack import load_stack
from shardwise.plan.timing import CROWDED, estimate_time
from shardwise.plan.workload import Workload

EIGHT = profile_of(preset("llama-8b"))
NANOTRON = load_stack("nanotron")


def stall(plan: str, cluster: str, batch: int = 256) -> float:
    """Seconds."""
    work = Workload(seq_len=4096, global_batch=batch)
    return estimate_time(EIGHT, load_cluster(cluster), Plan.parse(plan), work, stack=NANOTRON).terms.get("stall", 0.0)


@pytest.mark.parametrize(
    ("plan", "cluster", "stalls"),
    [
        ("pp2 dp8 tp2 / 1f1b mb32 / bf16 / seq", "h100:8x4", True),
        ("pp2 dp2 tp2 / 1f1b mb128 / bf16 / seq", "h100:8", False),  # on one node
        ("pp4 dp2 tp2 / 1f1b mb128 / bf16 / seq", "h100:8x2", False),  # two replicas on two nodes
        ("pp4 dp2 tp8 / 1f1b mb128 / bf16 / seq", "h100:8x8", True),
        ("pp2 dp32 tp2 / 1f1b mb8 / bf16 / seq", "h100:8x16", False),  # few micro-batches
        ("pp2 fsdp8 tp2 zero1 / 1f1b mb32 / bf16 / seq", "h100:8x4", False),  # states are shared, gradients late
    ],
)
def test_replicas_of_long_pipelines_stall(plan: str, cluster: str, stalls: bool) -> None:
    assert (stall(plan, cluster) > 0) == stalls


def test_an_allocator_whose_device_is_full_takes_its_time() -> None:
    work, plan = Workload(seq_len=4096, global_batch=256), Plan.parse("pp4 fsdp4 tp2 zero1 / 1f1b mb16 / bf16 / seq")
    cluster = load_cluster("h100:8x4")
    memory = estimate_memory(EIGHT, plan, work, stack=NANOTRON, device=cluster.device)
    used = memory.stages[0].allocated
    times = {}
    for name, share in (("full", CROWDED + 0.02), ("roomy", CROWDED - 0.02)):
        device = replace(cluster.device, memory=used / share)
        times[name] = estimate_time(EIGHT, cluster.with_(device=device), plan, work, stack=NANOTRON)
    assert times["full"].terms["stall"] == pytest.approx(16 * NANOTRON.retry)
    assert "stall" not in times["roomy"].terms
