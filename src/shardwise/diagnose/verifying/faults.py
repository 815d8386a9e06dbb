"""The known faults of distributed training: what each looks like in the numbers, why, and what to do. No torch.

A fault is a function of `Evidence` that returns the sentence which convicts it, or None. `causes` asks all of them, the
most specific first. Each one is planted in `tests/parity/test_verify.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.diagnose.verifying.clues import Evidence as Evidence
from shardwise.findings import Finding, shown

EXACT = 1e-4
"""A measured factor is a number when it is this near to it."""


@dataclass(frozen=True)
class Fault:
    """A row of the list."""

    id: str
    what: str
    fix: str
    test: Callable[[Evidence], str | None]


FAULTS: list[Fault] = []
"""In the order in which they are asked."""


def _fault(
    name: str, what: str, fix: str
) -> Callable[[Callable[[Evidence], str | None]], Callable[[Evidence], str | None]]:
    def add(test: Callable[[Evidence], str | None]) -> Callable[[Evidence], str | None]:
        FAULTS.append(Fault(f"verify.{name}", what, fix, test))
        return test

    return add


def causes(evidence: Evidence) -> list[Finding]:
    """The faults that the evidence fits, the most specific first; empty: none of the known ones.

    >>> [f.id for f in causes(Evidence(data=2, world=2, rows=8, rows_repeated=4, rows_missing=4))]
    ['verify.same-data']
    """
    found = []
    for fault in FAULTS:
        proof = fault.test(evidence)
        if proof is not None:
            found.append(Finding(id=fault.id, severity="error", what=fault.what, evidence=proof, fix=fault.fix))
    return found


def _is(value: float | None, number: float) -> bool:
    return value is not None and abs(value - number) <= EXACT * abs(number)


@_fault(
    "initial-weights",
    "ranks start from other weights than one process",
    "give apply() a factory and a seed, or a module that is equal on all ranks (the same seed before it is built, no "
    "seed made of the rank)",
)
def _initial(e: Evidence) -> str | None:
    return f"before the first step these differ: {shown(e.initial)}" if e.initial else None


@_fault(
    "untied",
    "tied weights came untied",
    "tie them in the constructor, by assignment of the parameter; under a pipeline leave them untied",
)
def _untied(e: Evidence) -> str | None:
    return f"one parameter on one process, several under the plan: {shown(e.untied)}" if e.untied else None


@_fault(
    "global-batch",
    "the global batch depends on the number of ranks",
    "use shardwise.loader with the batch of the whole step, or divide a fixed global batch by mesh.batch.size",
)
def _global_batch(e: Evidence) -> str | None:
    total = e.rows + e.rows_extra - e.rows_missing
    if e.rows and e.rows_extra and total != e.rows:
        return f"one process trains on {e.rows} rows per step, the ranks together on {total}: {total / e.rows:g} times"
    return None


@_fault(
    "same-data",
    "data ranks read the same rows",
    "give each data rank its share: shardwise.loader does, or rows[mesh.batch.rank :: mesh.batch.size]",
)
def _same_data(e: Evidence) -> str | None:
    if e.rows_repeated and not e.rows_extra:
        none = f", {e.rows_missing} by none" if e.rows_missing else ""
        return f"{e.rows_repeated} of {e.rows} rows were read by several data ranks{none}"
    return None


@_fault(
    "other-data",
    "the ranks' rows are not those of one process",
    "order, shuffling and augmentation must depend on the seed and the step, not on the rank or the world: "
    "shardwise.loader, or one generator with the same seed on every rank and a share by mesh.batch.rank; what collate "
    "draws (masks, noise) depends on who shares its micro-batch: draw in the data set's __getitem__",
)
def _other_data(e: Evidence) -> str | None:
    changed = e.rows_extra and e.rows + e.rows_extra - e.rows_missing == e.rows
    lost = e.rows_missing and not e.rows_extra and not e.rows_repeated
    if changed or lost:
        return f"of {e.rows} rows {e.rows_missing} were read by no rank, and {e.rows_extra} others were"
    return None


def _same_rows(e: Evidence) -> bool:
    return not (e.rows_missing or e.rows_extra or e.rows_repeated or e.initial)


@_fault(
    "stage-boundary",
    "a block is on no pipeline stage, or is not run",
    "look at the stage boundaries (`boundaries=` of the plan) and at blocks that forward leaves out or calls elsewhere",
)
def _stage(e: Evidence) -> str | None:
    if e.pp > 1 and e.missing:
        return f"no stage has {shown(e.missing)}"
    at_boundary = e.first_block is not None and e.first_block in e.block_starts
    if e.pp > 1 and _same_rows(e) and at_boundary and not e.draws:
        return f"outputs differ from {e.first_forward} on, in {e.first_block}, where a stage begins"
    return None


@_fault(
    "batch-norm",
    "batch norm takes its statistics from one rank's rows",
    "use torch.nn.BatchNorm1d/2d/3d, which apply() synchronises, in place of a normalisation over rows of your own",
)
def _batch_norm(e: Evidence) -> str | None:
    norm = "norm" in e.first_class.lower() and "batch" in e.first_class.lower()
    if _same_rows(e) and (norm or (e.buffers and e.first_class and not e.draws and e.batch_norm)):
        statistics = f"; running statistics differ: {shown(e.buffers)}" if e.buffers else ""
        return f"the first output that differs is that of {e.first_forward} ({e.first_class}){statistics}"
    return None


@_fault(
    "sequence-positions",
    "sequence shards are given the wrong positions",
    "take positions from the batch (`positions`) or from the whole sequence; do not count from 0 on each shard, as "
    "torch.arange(x.shape[1]) does inside a sharded region",
)
def _positions(e: Evidence) -> str | None:
    named = f"{e.first_forward} {e.first_class}".lower()
    words = ("attn", "attention", "rope", "rotary", "wpe", "pos")
    if (
        _same_rows(e)
        and (e.sequence or e.cp > 1)
        and e.first_forward
        and not e.draws
        and any(w in named for w in words)
    ):
        return f"the plan shards sequences, and the first output that differs is that of {e.first_forward}"
    return None


@_fault(
    "dropout",
    "random numbers of forward (dropout) are not those of one process",
    "expected with dropout whose draws depend on the rank and the micro-batch: verify with p=0, or draw from a "
    "generator that is keyed by the sample",
)
def _dropout(e: Evidence) -> str | None:
    if not (_same_rows(e) and e.draws and (e.first_forward or e.loss_ratio is not None or e.order_matters)):
        return None
    alone = "; one process with its rows grouped otherwise differs from itself too" if e.order_matters else ""
    where = f"; the first output that differs is that of {e.first_forward} ({e.first_class})" if e.first_forward else ""
    return f"the generator moves during forward{where}{alone}"


@_fault(
    "grouping",
    "the model's result depends on which rows share a micro-batch",
    "a statistic over the rows of a micro-batch (a balancing loss, a normalisation over rows, a mean per micro-batch): "
    "make it a sum over rows, or train with the same micro-batches everywhere",
)
def _grouping(e: Evidence) -> str | None:
    if not (_same_rows(e) and e.order_matters and not e.draws):
        return None
    if e.first_forward:
        return f"one process with its rows grouped otherwise gets another loss; {e.first_forward} differs first"
    if e.loss_ratio is None and e.grads:
        return "one process with its rows grouped otherwise gets other gradients, and the same loss"
    return None


@_fault(
    "mean-of-means",
    "the loss is a mean per rank or micro-batch, and the mean of those is another number; or it compares rows with "
    "each other, and sees those of one rank or micro-batch",
    "return Loss(sum, weight), or (sum, weight), or use shardwise.token_cross_entropy: the step divides once, by the "
    "weight of the whole window; for a loss over pairs of rows (negatives of a batch) see docs/loss.md",
)
def _mean_of_means(e: Evidence) -> str | None:
    parts = e.data * e.micro_batches
    same = _same_rows(e) and e.first_forward is None
    if (
        same
        and e.loss_ratio is not None
        and parts > 1
        and not (_is(e.loss_ratio, 1 / parts) or _is_count(e, e.loss_ratio))
    ):
        weight = f"; the step's weight is {e.weight_ratio:g} times that of one process" if e.weight_ratio != 1 else ""
        is_none = math.isnan(e.loss_ratio)  # as a mean over a micro-batch in which nothing counts
        what = "no number (0/0?), and it is one on" if is_none else f"{e.loss_ratio:.6g} times that of"
        return f"every module's output is equal, the loss is {what} one process{weight}"
    return None


def _is_count(e: Evidence, ratio: float) -> bool:
    counts = {e.data, e.world, e.micro_batches, e.tp, e.pp} - {1}
    return any(_is(ratio, n) or _is(ratio, 1 / n) for n in counts)


@_fault(
    "divided-by-accumulation",
    "the loss is divided by the number of micro-batches by hand",
    "take the division out: the step divides by the weight of the whole window, once",
)
def _by_hand(e: Evidence) -> str | None:
    parts = e.micro_batches
    if parts > 1 and _is(e.loss_ratio, 1 / parts):
        return f"the loss is exactly 1/{parts} of that of one process, and a step has {parts} micro-batches"
    return None


@_fault(
    "loss-counted-twice",
    "the loss is summed over ranks, or scaled by their number, by hand",
    "return this rank's own sum and weight: the step adds them over the world, once",
)
def _loss_count(e: Evidence) -> str | None:
    if e.first_forward is None and e.loss_ratio is not None and not _is(e.loss_ratio, 1 / e.micro_batches):
        for n, name in _counts(e):
            if _is(e.loss_ratio, n) or _is(e.loss_ratio, 1 / n):
                return f"the loss is exactly {e.loss_ratio:.6g} times that of one process; {n} is {name}"
    return None


def _counts(e: Evidence) -> list[tuple[int, str]]:
    named = [(e.data, "the number of data ranks"), (e.tp, "tp"), (e.pp, "pp"), (e.world, "the number of ranks")]
    return [(n, name) for n, name in [*named, (e.micro_batches, "the number of micro-batches")] if n > 1]


@_fault(
    "gradients-divided",
    "gradients are divided once more, as by an average over ranks of what is divided already",
    "reduce with a sum, and leave the division to the step; take out all_reduce(AVG), hooks that divide, and "
    "`grad /= world_size`",
)
def _divided(e: Evidence) -> str | None:
    if e.loss_ratio is None and e.grad_factor is not None and e.grad_factor < 1:
        for n, name in _counts(e):
            if _is(e.grad_factor, 1 / n):
                share = f"{len(e.grads)} of {e.num_grads} gradients"
                return f"{share} are exactly 1/{n} of those of one process; {n} is {name}"
    return None


@_fault(
    "gradients-multiplied",
    "gradients are counted several times",
    "look for a second reduction of the same gradients (an all_reduce beside the step's own), a second backward(), and "
    "for hooks that scale",
)
def _multiplied(e: Evidence) -> str | None:
    if e.loss_ratio is None and e.grad_factor is not None and abs(e.grad_factor) > 1 and not e.copies:
        names = [name for n, name in _counts(e) if _is(e.grad_factor, n)]
        what = f"exactly {e.grad_factor:.6g}" if _is(e.grad_factor, round(e.grad_factor)) else f"{e.grad_factor:.6g}"
        also = f", which is {' and '.join(names)}" if names else ""
        return f"{len(e.grads)} of {e.num_grads} gradients are {what} times those of one process{also}"
    return None


@_fault(
    "unreduced",
    "a parameter's gradient is not summed over all ranks that share it",
    "leave no parameter out of apply() (ignored modules, parameters made after it), and give every one that sees a "
    "part of the tokens a tensor-parallel style that sums its gradient (`sequence`, `heads`)",
)
def _unreduced(e: Evidence) -> str | None:
    if e.copies and e.loss_ratio is None and not e.initial:
        return f"copies of these differ between ranks: {shown(e.copies)}"
    partial_ = e.loss_ratio is None and e.grads and len(e.grads) < e.num_grads and e.grad_factor is None
    if partial_ and not e.first_forward and e.world > 1:
        return f"forward and loss are equal, and {len(e.grads)} of {e.num_grads} gradients are not: {shown(e.grads)}"
    return None


@_fault(
    "clipping-per-shard",
    "the gradient is clipped by the norm of one rank's share",
    "clip with steps(..., clip=) or StepOptions, whose norm counts each element once over the mesh; "
    "torch.nn.utils.clip_grad_norm_ sees local shards only",
)
def _clipping(e: Evidence) -> str | None:
    if e.grads or e.loss_ratio is not None or not e.params:
        return None
    if e.ranks_disagree or e.norm_ratio is not None:
        how = (
            f"{e.norm_ratio:.6g} times that of one process" if e.norm_ratio is not None else "not the same on all ranks"
        )
        return f"every gradient is equal, their norm is {how}, and the update differs"
    return None


@_fault(
    "learning-rate",
    "the learning rate depends on the number of ranks",
    "take the rate from the global batch, which is the same under every plan",
)
def _learning_rate(e: Evidence) -> str | None:
    return f"it is {e.lr_ratio:.6g} times that of one process" if not _is(e.lr_ratio, 1.0) else None


@_fault(
    "optimizer-per-shard",
    "the optimizer, or a hook of it, computes from a shard what it should compute from the whole parameter",
    "use shardwise's lamb, adafactor or muon, whose norms and means are those of the whole parameter; clip with clip=, "
    "or sum the squares of a group over the ranks (docs/optimizers.md)",
)
def _optimizer(e: Evidence) -> str | None:
    equal = not e.grads and e.loss_ratio is None and e.norm_ratio is None and not e.ranks_disagree
    if equal and e.params and _is(e.lr_ratio, 1.0) and not e.initial:
        return f"gradients, their norm and the rate are equal, and after the update these differ: {shown(e.params)}"
    return None


@_fault(
    "names",
    "the plan's model has other parameters",
    "build the same model under every plan: no size or layer may depend on the rank or the world",
)
def _names(e: Evidence) -> str | None:
    if e.pp == 1 and e.missing:
        return f"no rank has {shown(e.missing)}"
    return f"one process does not have {shown(e.added)}" if e.added else None


@_fault(
    "sharded-layer",
    "a module computes something else when it is sharded",
    "look at sizes that forward takes from the configuration in place of the tensors (heads, features), and at the "
    "rules of that module",
)
def _layer(e: Evidence) -> str | None:
    if _same_rows(e) and e.first_forward is not None and not (e.draws or e.order_matters) and e.tp * e.cp > 1:
        return f"the first output that differs is that of {e.first_forward} ({e.first_class})"
    return None
