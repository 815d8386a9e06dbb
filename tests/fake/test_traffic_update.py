"""What every optimizer of the library sends in its update: the closed form against the traced step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwise.diagnose.tracing.estimate import OPTIMIZERS, training_of
from shardwise.diagnose.tracing.step import trace_step
from shardwise.plan.messages.scene import Collective
from shardwise.plan.plan import Plan
from shardwise.plan.traffic import collectives_of
from shardwise.plan.workload import STATE_BYTES, Workload
from tests.fake.references import references

# nothing divides evenly that need not; rows are longer than a block of 8-bit averages
MODELS = references(vocab_size=390, dim=36, num_heads=6, ffn_dim=300, max_seq_len=48, num_layers=2)
MODELS |= {
    "deep": replace(MODELS["llama"], num_layers=4, tie_embeddings=True),
    "pair": replace(MODELS["moe"], num_experts=2, experts_per_token=1),
}
WORK = Workload(seq_len=46, global_batch=24)
SENDING = ("adafactor", "adamw-8bit", "lamb", "muon")
FAST = [
    ("fsdp4 / zero1 / mb2", "llama"),
    ("fsdp2 tp2", "llama"),
    ("dp2 fsdp2 tp2 / seq", "llama"),
    ("fsdp12 tp2 ep2", "moe"),
    ("pp2 fsdp2 / zero2 / zero-bubble-v mb4", "deep"),  # its ranks have both ends of the model: one copy of the table
]
DENSE = [
    "dp2",
    "dp2 / fp64",
    "tp2 / seq",
    "tp2 / bf16-pure",
    "dp2 tp2",
    "dp2 cp3",
    "dp2 cp2 tp2",
    "fsdp4",
    "fsdp4 / zero2 / mb2",
    "fsdp4 / reshard=2",
    "fsdp2 / bf16-pure",
    "fsdp2 / fp64",
    "fsdp2 / offload=state",
    "dp2 fsdp4 / bf16",
    "fsdp2 cp2 tp2 / seq",
    "fsdp12",
    "fsdp12 tp2",
    "pp2 / 1f1b mb4",
    "pp2 tp2 / 1f1b mb4",
    "pp2 fsdp2 tp2 / 1f1b mb4",
    "pp2 dp2 / 1f1b mb4",
]
EXPERTS = [
    ("fsdp12", "moe"),
    ("fsdp12", "pair"),
    ("fsdp12 / reshard=2", "pair"),
    ("fsdp4 tp2", "pair"),
    ("fsdp3 ep3", "moe"),
    ("fsdp12 ep2", "pair"),
    ("fsdp6 tp2 ep2 / seq", "pair"),
    ("dp2 fsdp4 ep2 / fp64", "pair"),
    ("fsdp2 cp3 ep6", "moe"),
    ("fsdp2 tp2 ep2", "moe"),
    ("fsdp6 tp2 ep6", "moe"),
    ("pp2 fsdp2 ep2 / 1f1b mb4", "moe"),
]


def check(text: str, model: str, optimizer: str) -> None:
    plan, spec, work = Plan.parse(text), MODELS[model], replace(WORK, optimizer=optimizer)
    for rank in sorted({0, plan.world // 2, plan.world - 1}):
        mine = collectives_of(spec, plan, work, rank=rank, is_cpu=True)
        traced = trace_step(training_of(spec, work), plan, rank=rank).later.collectives
        theirs = {each: times for each, times in traced.items() if each.num_bytes}  # a rank may have nothing to send
        differing = sorted({key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)}, key=str)
        assert mine == theirs, [(rank, tuple(key), mine.get(key), theirs.get(key)) for key in differing]


@pytest.mark.share(14)
@pytest.mark.parametrize("optimizer", SENDING)
@pytest.mark.parametrize(("plan", "model"), FAST)
def test_messages_equal_the_trace(plan: str, model: str, optimizer: str) -> None:
    check(plan, model, optimizer)


@pytest.mark.share(8)
@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS}.difference(SENDING)))
def test_the_others_send_nothing(optimizer: str) -> None:
    check("fsdp2 tp2", "llama", optimizer)
    assert update_of("fsdp2 tp2", "llama", optimizer) == {}


def test_every_optimizer_that_is_planned_is_traced() -> None:
    assert {*STATE_BYTES} == {*OPTIMIZERS}


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", SENDING)
@pytest.mark.parametrize(("plan", "model"), [*((plan, model) for plan in DENSE for model in ("tied", "gpt")), *EXPERTS])
def test_every_composition(plan: str, model: str, optimizer: str) -> None:
    check(plan, model, optimizer)


def update_of(text: str, model: str, optimizer: str) -> Counter[Collective]:
    """What an optimizer sends beyond SGD."""
    found = (
        collectives_of(MODELS[model], Plan.parse(text), replace(WORK, optimizer=name)) for name in (optimizer, "sgd")
    )
    mine, sgd = map(Counter, found)
    return mine - sgd


def test_what_each_rule_sends() -> None:
    axes = {"dp_shard", "tp"}
    lamb = update_of("fsdp2 tp2", "llama", "lamb")
    assert {each.axis for each in lamb} == axes and sum(lamb.values()) == 3, "whole over tp: norms; split by it: twice"
    adafactor = update_of("fsdp2 tp2", "llama", "adafactor")
    tensors, split = 2 * 9 + 3, 2 * 7 + 2
    for kind in ("all-gather", "all-reduce"):
        assert sum(n for each, n in adafactor.items() if each.kind == kind) == tensors + split
    low = update_of("fsdp2 tp2", "llama", "adamw-8bit")
    assert low == {Collective("all-reduce", "tp", 36 // 2 * 2 * 4): 4}, "down projections: 300 columns are two blocks"
