"""`--elastic` under torchrun on several nodes: torch elastic says who is there, each start plans for that many.

When a node is lost or joins, torch elastic ends all workers (SIGTERM: they finish the step and save) and starts them
again with another WORLD_SIZE. Here is what such a start does: refuse a world that is out of bounds, find the plan, and
agree on it. The state comes from the newest checkpoint, as at any start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from shardwise.errors import LaunchError, LockedError
from shardwise.launch.elastic.plan import plan_for
from shardwise.launch.elastic.slots import Elastic
from shardwise.launch.environment import Launch
from shardwise.launch.rank.runjob import RunJob
from shardwise.launch.rank.worker import Summary, run_session
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Axes, Plan
from shardwise.train.kept.lock import STALE_S, RunLock

_SHARED = "TORCHELASTIC_USE_AGENT_STORE"


def plan_of_world(elastic: Elastic, launch: Launch, env: Mapping[str, str]) -> Plan:
    """The plan for the processes that the launcher has started.

    Args:
        elastic: bounds, and the run's own plan.
        launch: who this process is.
        env: the launcher's variables.

    Raises:
        LaunchError: a world that is out of bounds, as that of a node that cannot reach the others; no legal plan; a
            launcher whose restarts meet addresses of the processes before.
    """
    bounds = f"--elastic {elastic.least}:{elastic.most}"
    if not elastic.least <= launch.world <= elastic.most:
        few = (
            "nobody trains on alone; look whether the nodes reach each other and whether their clocks agree (torch "
            "elastic counts a node whose clock is behind as lost), and give `torchrun --nnodes` the same bounds"
        )
        many = "give `torchrun --nnodes` the same bounds, or --elastic a larger MAX"
        raise LaunchError(
            f"{bounds}: rank {launch.rank}: found a world of {launch.world} processes that {launch.launcher} started, "
            f"needed {elastic.least} to {elastic.most}: {few if launch.world < elastic.least else many}"
        )
    if env.get(_SHARED) == "True" and elastic.least < elastic.most:
        raise LaunchError(
            f"{bounds}: rank {launch.rank}: found workers that meet in the agent's own store, where they find the "
            "addresses of those before them when torch elastic starts them again, and hang or fail (torch 2.13); "
            "needed a store for each start; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node before torchrun"
        )
    plan = plan_for(elastic.own, launch.world, elastic.known)
    if plan is None:
        raise LaunchError(
            f"{bounds}: rank {launch.rank}: found no legal plan of the same maths as `{elastic.own}` that fits "
            f"{launch.world} processes; start another number of them"
        )
    return plan


def run_agreed(job: RunJob) -> Summary:
    """Train as this process's rank, by the plan that rank 0 has found: nodes whose files differ must not disagree."""
    world = job.plan.world
    with open_mesh(Plan(axes=Axes(dp_replicate=world)), device=job.settings.train.device) as first:
        told = [str(job.plan)]
        if world > 1:
            dist.broadcast_object_list(told, src=0)
        if first.is_first:
            _note_change(job)
        return run_session(replace(job, plan=Plan.parse(told[0])))


def _note_change(job: RunJob) -> None:
    """Keep in the run's record that another plan goes on, and for how long nobody trained."""
    before = next((row["plan"] for row in reversed(job.run.read_events("elastic"))), None)
    if before == str(job.plan):
        return
    since = time.time() - job.run.metrics.stat().st_mtime if job.run.metrics.exists() else None
    stopped_s = max(since, 0.0) if since is not None else None  # by this clock, and that of the file system
    job.run.add_event(
        "elastic",
        before=Plan.parse(before).world if before is not None else None,
        after=job.plan.world,
        plan_before=before,
        plan=str(job.plan),
        stopped_s=stopped_s,
    )


def take_when_free(
    folder: Path,
    on_lost: Callable[[str], None],
    wait_s: float = STALE_S + 15,
    *,
    at_exit: Callable[[Callable[[], None]], object] = lambda release: None,
) -> RunLock:
    """Become the owner of a directory by its lock; wait for the one before, whose node may be gone without a word.

    `at_exit`: as for `RunLock.take`.

    Raises:
        LockedError: it is still in use.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            return RunLock.take(folder, on_lost, at_exit=at_exit)
        except LockedError:
            if time.monotonic() > end:
                raise
        time.sleep(1)
