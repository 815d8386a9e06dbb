"""What the input pipeline needs of a step, and how much of that a step does not hide. No torch."""

from __future__ import annotations

from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import Profile
from shardwise.plan.ranks.division import Division
from shardwise.plan.workload import Workload

IDS = 8
"""Bytes of a token's id, of its place or of its mask, as a model is given them."""
INPUTS = 4
"""Inputs of ids that a text has at most: ids, places, segments, mask."""


def is_decoded(profile: Profile, workload: Workload) -> bool:
    """Whether samples are pictures, sounds or the like, which are decoded, and not rows of token ids."""
    return workload.sample_bytes > 0 or profile.given % IDS > 0 or profile.given > INPUTS * IDS


def sample_bytes(profile: Profile, workload: Workload) -> float:
    """Bytes of a sample as the model is given it."""
    return workload.sample_bytes or float(profile.given * workload.seq_len)


def loading_time(division: Division, cluster: Cluster) -> float:
    """Seconds in which a node's loaders make the samples of a step of its ranks.

    Every rank reads the whole rows of its data rank, those of `tp`, `cp` and `pp` the same ones. With processes that
    read ahead (`loader(workers=...)`) a step waits for what it does not hide, `max(0, loading - step)`. Source: the
    prep stalls of arXiv:2007.06775, section 2.
    """
    profile, workload, plan = division.profile, division.workload, division.plan
    samples = division.micro_batch * plan.batch.micro_batches
    rate = cluster.loading.decoded if is_decoded(profile, workload) else cluster.loading.rows
    return min(plan.world, cluster.per_node) * samples * sample_bytes(profile, workload) / rate


def said(profile: Profile, cluster: Cluster, workload: Workload) -> list[str]:
    """What is assumed of the loaders, where nobody measured or wrote it."""
    kind = "decoded" if is_decoded(profile, workload) else "rows"
    unknown = any(line.startswith(f"loading.{kind}: assumed") for line in cluster.origins)
    if cluster.loading.origin != "assumed" and not unknown:
        return []
    rate, what = getattr(cluster.loading, kind), {"rows": "token rows", "decoded": "decoded samples"}[kind]
    return [f"data loading: {rate / 1e9:g} GB/s of {what} per node, read ahead (`loading.{kind}` of a cluster file)"]
