"""Which rows ranks were given for their first step: the same where they work on the same, others where they do not."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import torch

from shardwise.errors import ReplicaError
from shardwise.model.nested import leaves
from shardwise.parallel.mesh import Mesh
from shardwise.train.batches import Batches
from shardwise.train.data.windows import Window
from shardwise.train.exchange import by_value, digest, gathered, listed
from shardwise.train.guards.agreement import Facts, difference, exchanged
from shardwise.train.guards.replicas import checksum


def check_samples(batches: Any, mesh: Mesh) -> None:
    """Data ranks take different positions of one order: what stands there must be the same sample on each.

    A data set that draws from a generator of its own (its two readings of a sample differ) says nothing.

    Args:
        batches: of the state; only of the loader's is it known.
        mesh: all ranks.

    Cost: an all-gather of three numbers.
    """
    if not isinstance(batches, Batches) or mesh.batch.size == 1:
        return
    position, looks = batches.looks or (0, [])
    own = digest(looks) if looks and looks[::2] == looks[1::2] else 0
    rows = [rank[0] for rank in gathered([(own, position, 0)], mesh)]
    told = [look for look, _, _ in rows]
    is_same_place = len({position for _, position, _ in rows}) == 1  # a process that came later began elsewhere
    if is_same_place and all(told) and len(set(told)) > 1 and mesh.is_first:
        ranks = "; ".join(listed(ranks) for _, ranks in by_value({i: str(one) for i, one in enumerate(told)}))
        with suppress(Warning):  # `-W error` does not end one rank, for which the others would wait
            warnings.warn(_SAMPLES.format(ranks=ranks), stacklevel=5)


def check_rows(batch: Any, mesh: Mesh, where: str = "the first step") -> None:
    """Compare what a script gave its ranks: those along `pp`, `tp` and `cp` work on the same rows, others do not.

    A sampler that divides by all ranks, or a data set in an order of each rank's own, gives each other ones: inputs of
    one sample would meet labels of another. Where nobody divides, each row is trained on as often as there are data
    ranks, which is a warning.

    Args:
        batch: of the first step.
        mesh: all ranks.
        where: it is given, for the messages.

    Raises:
        ReplicaError: on all ranks: they differ where they must not.

    Cost: a pass over the batch, two all-gathers of three numbers.
    """
    is_of_loader = isinstance(batch, Window)
    if mesh.world == (mesh.batch.size if is_of_loader else 1):
        return
    parts = batch.micro_batches if is_of_loader else batch
    tensors = {path: leaf for path, leaf in leaves(parts) if type(leaf) is torch.Tensor and not leaf.is_meta}
    given = {
        f"the batch's {'.'.join(map(str, path)) or 'tensor'}": f"{tuple(tensor.shape)} {checksum(tensor):x}"
        for path, tensor in tensors.items()
        if tensor.layout == torch.strided and tensor.numel()
    }
    if everyones := exchanged(own := Facts(mesh.batch.rank, {}, given), mesh):
        raise ReplicaError(f"{where}: {difference(everyones)}; {_ROWS}")
    rows = {tuple(rank[0][1:]) for rank in gathered([own.digests()], mesh)}
    if mesh.batch.size > 1 and len(rows) == 1 and given and mesh.is_first and not is_of_loader:
        with suppress(Warning):  # `-W error` does not end a run that may be meant so
            warnings.warn(f"{where}: {_SAME_ROWS.format(ranks=mesh.batch.size)}", stacklevel=4)


_ROWS = (
    "these ranks work on the same rows, each on a part of the model or of a sequence; needed: rows by data rank, as "
    "sw.loader gives them of one data set in one order (seed what shuffles or splits it), or "
    "DistributedSampler(dataset, num_replicas=mesh.batch.size, rank=mesh.batch.rank), and what is drawn for a batch "
    "drawn alike"
)
_SAME_ROWS = (
    "all {ranks} data ranks were given the same rows, each of which counts {ranks} times; needed: a part for "
    "each, as sw.loader gives them, or DistributedSampler(dataset, num_replicas=mesh.batch.size, rank=mesh.batch.rank)"
)
_SAMPLES = (
    "the first step: the data sets of ranks {ranks} have other samples in the same places, and each rank trains on the "
    "places that are its own: some samples come several times in an epoch, and others never; needed: one order on "
    "every rank; sort what is listed, and seed what shuffles or splits (random_state=0, random.Random(0).shuffle)"
)
