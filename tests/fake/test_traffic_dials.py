"""Messages under dials that change what is gathered together and in which type: float8, `wrap`, `reshard`, rules."""

from __future__ import annotations

import pytest

from shardwise.diagnose.tracing.estimate import training_of
from shardwise.diagnose.tracing.step import trace_step
from shardwise.plan.plan import Plan
from shardwise.plan.traffic import collectives_of
from shardwise.plan.workload import Workload
from tests.fake.references import references

# multiples of 16, as float8 needs them
MODELS = references(vocab_size=384, dim=64, num_heads=4, ffn_dim=96, max_seq_len=48, num_layers=2)
WORK = Workload(seq_len=46, global_batch=24)
FAST = [
    ("tp2 / fp8=tensorwise+emulate / recompute=blocks", "llama"),
    ("tp2 / seq / fp8=rowwise+emulate", "gpt"),
    ("fsdp2 / fp8=tensorwise+gather+emulate / mb2", "llama"),
    ("fsdp4 / reshard=2 / mb3", "llama"),
    ("dp2 fsdp2 tp2 / bf16 / wrap=3000 / seq", "llama"),
    ("pp2 fsdp2 / wrap=9000 / mb2", "tied"),
    ("fsdp2 tp2 ep2 / seq / bf16 / precision=layers.*.moe:fp32", "moe"),
    ("pp2 tp2 / mb2 / bf16 / precision=layers.1:fp32,layers.*.attn.wq:fp32", "llama"),
]
SOAK = [
    ("tp2 / fp8=rowwise-hp+emulate / mb2", "llama"),
    ("tp2 / fp8=rowwise-hp+emulate / recompute=blocks", "gpt"),
    ("tp2 / recompute=ops / fp8=rowwise+emulate", "llama"),
    ("tp2 / recompute=50% / fp8=rowwise+emulate", "llama"),
    ("tp2 / fp32 / fp8=tensorwise+emulate", "llama"),
    ("tp2 / loss-parallel / precision=head:fp8 / fp8=rowwise+emulate", "llama"),
    ("tp2 / precision=layers.*.ffn:bf16 / fp8=tensorwise+emulate", "llama"),
    ("pp2 fsdp2 tp2 / fp8=rowwise+emulate / mb2 / seq", "gpt"),
    ("tp2 / seq / fp8=tensorwise+emulate", "moe"),
    ("fsdp2 / zero1 / mb2 / fp8=tensorwise+gather+emulate", "llama"),
    ("fsdp2 / precision=head:fp8 / mb2 / fp8=tensorwise+gather+emulate", "llama"),
    ("pp2 fsdp2 / 1f1b mb4 / fp8=tensorwise+gather+emulate", "llama"),
    ("fsdp4 / reshard=2", "gpt"),
    ("dp2 fsdp4 / reshard=2 / mb3", "llama"),
    ("fsdp2 / wrap=100000", "llama"),
    ("fsdp2 / wrap=5000", "tied"),
    ("fsdp4 / zero1 / wrap=5000 / mb3", "gpt"),
    ("fsdp2 / wrap=9000 / mb2", "moe"),
    ("fsdp2 tp2 / wrap=3000 / seq / mb2", "gpt"),
    ("pp2 fsdp2 tp2 / wrap=9000 / mb4 / bf16", "tied"),
    ("fsdp2 / bf16 / precision=layers.*.attn_norm:fp32,head:fp32", "llama"),
    ("fsdp2 / fp16 / precision=wte:fp32,h.1:fp32", "gpt"),
    ("fsdp2 cp2 / bf16 / precision=layers.*.attn.wq:fp32 / mb2", "llama"),
    ("fsdp2 tp2 / bf16 / reduce=bf16 / precision=layers.*.ffn_norm:fp32 / seq / mb2", "llama"),
    ("cp2 / context=ulysses / bf16 / precision=layers.*.attn:fp32", "llama"),
    ("tp2 / seq / bf16 / precision=layers.*.ffn.w2:fp32,embed:fp32,norm:fp32", "llama"),
    ("tp2 / seq / bf16 / precision=layers.0:fp32", "llama"),
    ("tp2 / precision=layers.0:bf16", "llama"),
    ("tp2 / bf16 / precision=layers.*.attn.wq:fp32,layers.*.attn.wk:fp32,layers.*.attn.wv:fp32", "llama"),
    ("tp2 / seq / bf16 / precision=layers.*.attn.q_norm:fp32", "tied"),
    ("tp2 / seq / bf16 / precision=h.*.mlp:fp32,h.*.ln_1:fp32", "gpt"),
    ("fsdp2 tp2 ep2 / bf16 / precision=layers.*.moe.experts:fp32", "moe"),
    ("tp2 / seq / bf16 / precision=layers.0.moe.router:fp32", "moe"),
    ("tp2 / seq / bf16 / precision=layers.1:fp32", "moe"),
    ("pp2 / bf16 / precision=layers.*.moe.router:fp32 / mb2", "moe"),
    ("pp2 / bf16 / precision=layers.0:fp32 / mb2", "moe"),
    ("pp2 / precision=layers.1:bf16 / mb2", "moe"),
    ("pp2 tp2 / seq / bf16 / precision=layers.*.moe:fp32 / mb2", "moe"),
]


@pytest.mark.share(8)
@pytest.mark.parametrize(
    ("text", "model"), [*FAST, *(pytest.param(*cell, id=" | ".join(cell), marks=pytest.mark.soak) for cell in SOAK)]
)
def test_closed_form_equals_the_trace(text: str, model: str) -> None:
    plan = Plan.parse(text)
    for rank in sorted({0, plan.world - 1}):
        mine = collectives_of(MODELS[model], plan, WORK, rank=rank, is_cpu=True)
        theirs = dict(trace_step(training_of(MODELS[model], WORK), plan, rank=rank).later.collectives)
        differing = sorted({key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)}, key=str)
        assert mine == theirs, [(tuple(key), mine.get(key), theirs.get(key)) for key in differing]


def test_negative_control_a_dial_changes_what_is_sent() -> None:
    plain = collectives_of(MODELS["llama"], Plan.parse("tp2 / bf16"), WORK, is_cpu=True)
    for dial in ("fp8=tensorwise+emulate", "fp8=rowwise+emulate", "precision=layers.*.ffn:fp32"):
        assert collectives_of(MODELS["llama"], Plan.parse(f"tp2 / bf16 / {dial}"), WORK, is_cpu=True) != plain
