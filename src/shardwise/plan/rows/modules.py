"""What no module of a kind can do, by id: the table for `ModelError(..., row=...)`. Pure, no torch.

A plan's own rows (`rows_*.py`) are predicates on a plan and a model's sizes. These need the module itself: the pass
that meets one raises it, in `apply` and so in `shardwise verify`; for models of `transformers` also `check` says it.
Where a module was read (`plan`, `estimate`, `explain`), the row `module.left-out` says it of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.plan.plan import Offload, Plan, Recompute, Schedule
from shardwise.plan.repair import Case, Hit, change, resize, table

MODULES: Mapping[str, str] = {
    "module.no-blocks": "pipelines, sequence shards, recompute, offload of activations and compilation of blocks: a "
    "model without repeated blocks, or whose blocks are not found; `blocks=PATTERN` names them.",
    "module.chain": "pp: a forward that is not a chain of blocks; stages hand on only what a block returns.",
    "module.needs-values": "pp: a forward whose course depends on the values of tensors, so it cannot be traced.",
    "module.gradients-off": "pp: blocks that forward calls with gradients off (`torch.utils.checkpoint` with "
    "`use_reentrant=True`); what another stage sent would get no gradient.",
    "module.gradient-hook": "every plan: a hook on a parameter's gradient (`register_hook`); it would see parts of it.",
    "module.sparse-gradient": "every plan: an embedding with `sparse=True`; its gradient is not summed over ranks.",
    "module.rows-together": "several data ranks, or micro-batches: embeddings with `max_norm` or "
    "`scale_grad_by_freq`, instance norms with running statistics; rows that are looked at together change the result.",
    "module.second-derivatives": "sharded parameters, 16-bit types, pp, tp, cp: derivatives of derivatives "
    "(`torch.autograd.grad(..., create_graph=True)` in forward or in the loss); ranks work for one backward pass.",
    "module.weights-in-loss": "sharded parameters, pp: weights that the loss function takes itself, beside the model's "
    "output (a penalty on them); a rank has parts of them.",
    "module.copied": "sharded parameters, 16-bit types, pp, cp, tp, recompute, batch norm over ranks: a copy of the "
    "module after `apply` (`copy.deepcopy`, `AveragedModel`).",
    "module.loaded": "every plan: `load_state_dict(..., assign=True)` after `apply`; sharded parameters, pp: whole "
    "tensors that it is given.",
    "module.called-by-parts": "sharded parameters, pp: parts of the module that a script calls by themselves, as a "
    "method other than forward does.",
    "module.unused": "dp without `find-unused`: parameters that forward does not use in a step; DDP waits for all.",
    "module.parameter-layout": "sharded parameters, 16-bit types: parameters that are empty, or not contiguous.",
    "module.writes-weights": "sharded parameters, 16-bit types: a forward that writes its weights; it writes a copy.",
    "module.writes-input": "sharded parameters, tp: a forward that writes in place into what a sharded block, or a "
    "layer that tp places, is given, or into a weight of that.",
    "module.other-weights": "sharded parameters, recompute: a call with other weights in the place of the module's "
    "(`torch.func.functional_call`).",
    "module.moves-at-forward": "several micro-batches, recompute of compiled blocks: spectral norms; their vectors "
    "move at every forward.",
    "module.declared-plan": "a model of `transformers` whose own plan names a module or a style that is not there.",
    "module.two-chains": "pp, cp, seq: an encoder and a decoder; each block of the second takes the first's output.",
    "module.statistics-twice": "recompute of compiled blocks: one with running statistics, which a second forward "
    "would update twice.",
    "module.written-late": "recompute: a buffer that forward writes in some steps, and not in the first; of what it "
    "was nobody has a copy.",
    "module.transformed": "tp, recompute: transforms of `torch.func` (grad, jvp, vmap) in or around a block.",
    "module.weight-elsewhere": "tp: a weight that is used outside of the forward of the module that holds it (the old "
    "`weight_norm`, `spectral_norm` and `prune`; the code of another module), where a layer beside it is split.",
    "module.tp-divides": "tp: a dim, or a number of heads, that the degree does not divide.",
    "module.rule-kind": "tp: a rule on a module of another kind than the rule is for.",
    "module.mixed-rules": "tp: split and whole outputs side by side in one module; split heads would meet wrong ones.",
    "module.tied-layouts": "tp: two ends of a tied weight whose rules place it in two ways.",
    "module.adapter-on-row": "seq: an adapter (LoRA) on a row layer; its second half would see a part of the sequence.",
    "module.no-row-layer": "seq: a module that gathers the sequence and holds no layer that splits it again.",
    "module.tokens-in-rows": "seq: column layers in a module that is called with tokens in rows (shared experts).",
    "module.column-in-block": "seq: a column layer of the block itself, whose own code sees a part of the sequence.",
    "module.nested-columns": "seq: column layers in a module and in one around it; one of them must gather.",
    "module.replicate-in-block": "seq: a `replicate` layer in a block, which would see a part of the sequence.",
    "module.pictures": "seq: patches and a class token, an odd number of tokens.",
    "module.mixes-tokens": "cp, seq: what mixes tokens and is not attention: convolutions, means over the sequence; "
    "cp: labels that the loss function shifts.",
    "module.no-positions": "cp: a forward that takes no positions; a rank holds tokens from the middle.",
    "module.attention-by-hand": "cp: attention in the model's own code (eager, capped logits), which sees a "
    "rank's tokens only.",
    "module.attention-call": "cp: a call of attention that cannot be made on parts: to other tokens (cross attention, "
    "caches), with dropout, a mask of a part or a learned one, or with heads that `context=ulysses` does not divide.",
    "module.attention-direct": "cp: attention that is not called through the interface of `transformers`.",
    "module.attention-kind": "cp: a kind of layer (chunked, ...) whose mask is made for the tokens at hand.",
    "module.window-in-mask": "cp: a sliding window that the mask alone knows.",
    "module.window-ahead": "cp: a sliding window that looks ahead.",
    "module.flex-ring": "cp with context=ring: FlexAttention; gather and ulysses work.",
    "module.no-experts": "ep: a model without expert modules.",
    "module.experts-stacked": "ep, and tp of experts: experts whose parameters are not stacked along one first dim.",
    "module.experts-forward": "ep: experts whose forward takes anything but tokens, chosen experts and weights.",
    "module.experts-divide": "ep: a number of experts that the degree does not divide.",
    "module.capacity": "ep with cp or seq: experts with a capacity, filled row by row, where a rank has parts of rows.",
    "module.float8": "fp8: no layer that can be converted, or a rule that takes in one which cannot.",
    "module.float8-shard": "fp8 with tp: a layer whose part on a rank is no multiple of 16.",
}
"""id -> the sentence of docs/constraints.md."""

READ, _row = table()

COMPILED_RECOMPUTE = "recompute of compiled blocks"
"""What a module may lack that can have each of the two."""
_AXES = ("pp", "cp", "tp", "ep", "dp_replicate", "dp_shard")


def used(plan: Plan, left_out: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """What a plan has of what is left out, and why that is."""
    return {word: why for word, why in left_out if _has(plan, word)}


def _has(plan: Plan, word: str) -> bool:
    if word in _AXES:
        return bool(getattr(plan.axes, word) > 1)
    if word in ("recompute", COMPILED_RECOMPUTE):
        return plan.recompute.mode != "none" and (plan.compile or word == "recompute")
    if word == "accumulation":
        return plan.batch.micro_batches > 1
    return (word == "compile" and plan.compile) or (word == "offload-activations" and plan.offload.activations)


@_row(
    "module.left-out",
    "What a module that was read cannot have: `pp`, `cp`, data ranks, recompute and others for a reason of the table "
    "Modules, `tp` and `ep` where `apply` refuses them of it.",
)
def _left_out(case: Case) -> Hit | None:
    found = used(case.plan, case.read.left_out) if case.read else {}
    if not found:
        return None
    is_one, words = set(found.values()) == {"module.no-blocks"}, ", ".join(found)
    by_reason = {why: [word for word in found if found[word] == why] for why in found.values()}
    return Hit(
        what=f"{case.name} {'is one block, and so cannot' if is_one else 'cannot'} have {words}",
        found="; ".join(f"{', '.join(part)}: {_reason(why)}" for why, part in by_reason.items()),
        fix=f"use a plan without {words}" + (", or name its blocks with --blocks PATTERN" if is_one else ""),
        plans=[_without(case.plan, found)],
    )


def _reason(why: str) -> str:
    """An id with what it says."""
    return f"{why}, {MODULES[why].partition(': ')[2].rstrip('.')}" if why in MODULES else why


def _without(plan: Plan, words: Mapping[str, str]) -> Plan:
    for axis in (word for word in _AXES if word in words):
        plan = change(plan, **{f"axes__{axis}": 1}) if axis.startswith("dp_") else resize(plan, axis, 1)
    if "pp" in words:
        plan = plan.with_(schedule=Schedule())
    if "accumulation" in words:
        plan = change(plan, batch__micro_batches=1)
    if "tp" in words:
        plan = change(plan, tensor__sequence=False, tensor__loss=False)
    recompute = Recompute() if "recompute" in words else plan.recompute
    offload = Offload(state=plan.offload.state) if "offload-activations" in words else plan.offload
    compiles = plan.compile and not {"compile", COMPILED_RECOMPUTE} & words.keys()
    return plan.with_(recompute=recompute, offload=offload, compile=compiles)
