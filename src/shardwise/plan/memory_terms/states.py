"""What a rank holds from step to step: weights, master weights, gradients, optimizer state. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from shardwise.plan.frozen import held_unpacked, held_width
from shardwise.plan.messages.data import reduce_width
from shardwise.plan.plan import ZERO_BUBBLE, Plan
from shardwise.plan.ranks.activations import compute_width
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.engines import uses_fully_shard
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack
from shardwise.plan.updating import OWN, state_bytes

STATES = ("weights", "master", "gradients", "optimizer", "buckets")


def states_of(division: Division, stages: tuple[Stage, ...], stack: Stack) -> dict[str, float]:
    """Weights, master weights, gradients and optimizer state."""
    plan, workload = division.plan, division.workload
    whole, owned = division.whole(stages), division.owned(stages)
    stepped = owned - division.second_table(stages) / division.shards
    shares = plan.zero >= 2 or (plan.zero > 0 and stack.name in OWN)
    summed = owned if shares and not accumulates_whole(plan, stack) else whole
    kept = owned if plan.zero == 3 or (plan.zero and stack.keeps_shards) else whole
    width = compute_width(plan)
    flat = stack.reduce_bucket * width * (0, 2, 2, 1)[plan.zero]
    state = state_bytes(division, stages, stack)
    if workload.trained < 1:  # adapters: frozen weights need no master copy, and fp32 only where they are cast from it
        held = held_width(division, stages, held_unpacked(plan, stack))
        summed, updated = ((owned if plan.zero >= zero else whole) * workload.trained for zero in (2, 1))
        return {"weights": kept * held, "gradients": summed * 4, "optimizer": updated * (state + 4), "buckets": flat}
    share = 1.0 if stack.eager else division.profile.trained  # `eager_rank` knows it of each rank
    sent = stack.copies_grads and not plan.zero and plan.axes.dp_replicate > 1
    summed, updated, low, pure = summed * share, stepped * share, width < 4, plan.precision == "bf16-pure"
    if pure and not stack.pure_master:
        added = 4.0 if plan.communication.reduce_dtype == "fp32" and accumulates_whole(plan, stack) else width
        states = {"weights": kept * width, "gradients": summed * added, "optimizer": updated * state}
        return {**states, "buckets": summed * (4.0 if stack.wide_buckets else width) * sent + flat}
    master = low and (stack.master or pure)
    if pure and stack.name in OWN:  # the masters' are there in the update alone
        shards = uses_fully_shard(plan) and accumulates_whole(plan, stack)  # without an engine they stay in their type
        sums = shards or (plan.batch.micro_batches > 1 and plan.axes.dp_replicate > 1)
        states = {"weights": kept * width, "master": updated * 4.0, "optimizer": updated * state}
        return {**states, "gradients": summed * (reduce_width(plan) if sums else width), "buckets": flat}
    if plan.precision == "fp16" and master:  # scaled gradients stay in fp16, and are unscaled into each rank's share
        gradients = summed * width + updated * 4.0 * (not stack.widens_grads)
        states = {"weights": kept * width, "master": updated * 4.0, "gradients": gradients}
        return {**states, "optimizer": updated * state, "buckets": flat}
    wide = stack.grad_bytes if low else width
    if low and stack.name in OWN and uses_fully_shard(plan) and accumulates_whole(plan, stack):
        wide = reduce_width(plan)  # they are added up in the type in which they are reduced
    return {
        "weights": kept * (width if master else max(width, 4.0)),
        "master": updated * 4.0 if master else 0.0,
        "gradients": summed * wide + (whole * share * width if low and _spares(plan, stack) else 0.0),
        "optimizer": updated * state,
        "buckets": summed * 4.0 * sent + flat,
    }


def accumulates_whole(plan: Plan, stack: Stack) -> bool:
    """Whether `fully_shard` has whole gradients on the device until all micro-batches have gone backward.

    In a pipeline it reduces behind the last one, whatever `zero` is, and so it does under an offload; behind a single
    one too.
    """
    return stack.keeps_shards and (plan.axes.pp > 1 or (plan.zero < 2 and plan.batch.micro_batches > 1))


def passes_once(plan: Plan, stack: Stack) -> bool:
    """Whether a pipeline of ours goes backward once, in one piece: no gradient is added to another."""
    single = plan.batch.micro_batches == 1 and plan.schedule.kind not in ZERO_BUBBLE
    return single and plan.axes.pp > 1 and stack.name in OWN


def _spares(plan: Plan, stack: Stack) -> bool:
    """Whether a gradient in the compute dtype lives beside the accumulated one."""
    return stack.spare_grads and (plan.axes.data > 1 or not stack.bucket_grads)


def offloaded_of(division: Division, stack: Stack) -> tuple[float, ...]:
    """Bytes of the states that each pipeline rank has on its host, where the plan offloads them."""
    states = division.of_ranks(partial(states_of, division, stack=stack))
    return tuple(sum(each.values()) - sum(_without_states(each, stack).values()) for each in states)


def on_device(name: str, terms: Mapping[str, float], plan: Plan, stack: Stack) -> dict[str, float]:
    """Those of a phase's terms that are on the device, with states offloaded or not."""
    if not plan.offload.state:
        return dict(terms)
    rest = _without_states(terms, stack)
    adds_up = terms.get("gradients", 0.0) * (name != "update" and accumulates_whole(plan, stack))
    return {"gradients": adds_up} | rest if stack.offloads_grads else rest


def _without_states(terms: Mapping[str, float], stack: Stack) -> dict[str, float]:
    """States live on the host; the device sees what is gathered, and what the stack leaves there."""
    stays = {"weights": not stack.offloads_weights, "gradients": not stack.offloads_grads, "buckets": True}
    gone = {name for name in STATES if not stays.get(name)}
    return {name: value for name, value in terms.items() if name not in gone}
