"""What a recomputed block runs again: not its last product where nothing needs that, nor attention that it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from published.recompute import OF_DENSE
from shardwise.hardware.cluster import load_cluster
from shardwise.model.ops import Attention, Matmul
from shardwise.model.profile import Block, profile_of
from shardwise.model.spec import preset
from shardwise.plan.plan import Axes, Plan
from shardwise.plan.ranks.activations import kept_bytes, saving_of
from shardwise.plan.stack import load_stack
from shardwise.plan.time_terms.blocktime import BlockTime, _matmul, _op_time, block_time
from shardwise.plan.time_terms.setting import Setting
from tests.pure.test_published import variant

JAX = load_stack("jax")
SHAPE = (4.0, 4096)
DENSE = profile_of(preset("llama-8b")).blocks[0]
BARE = {"source": "a blog", "date": "2025-10", "interconnect": "", "optimizer": "", "peak_mem_gib": ""}


def _setting(**other: Any) -> Setting:
    return Setting(load_cluster("h100:8"), replace(JAX, **other), Axes(), "bf16")


def _time(block: Block, **other: object) -> BlockTime:
    return block_time(block, SHAPE, _setting(**other))


def test_a_blocks_last_product_is_dead_code_where_the_compiler_sees_it() -> None:
    whole = _time(DENSE, stops_early=False)
    down = _matmul(DENSE.matmuls[-1], SHAPE[0] * SHAPE[1], _setting())[0]
    assert JAX.stops_early and _time(DENSE).whole == pytest.approx(whole.whole - down)
    assert 0.15 < down / whole.forward < 0.25, "a fifth of a forward pass"
    assert _time(DENSE).backward == whole.backward and _time(DENSE).light == whole.light
    assert not load_stack("megatron-core").stops_early, "its checkpoints run the whole forward pass"


def test_a_router_needs_what_its_experts_give() -> None:
    mixture = profile_of(preset("mixtral-8x7b")).blocks[-1]
    assert mixture.matmuls[-1].experts
    assert _time(mixture).whole == _time(mixture, stops_early=False).whole


def test_a_block_without_products_is_timed() -> None:
    """A head that is a norm alone, of a model without an output layer."""
    bare = replace(DENSE, ops=tuple(op for op in DENSE.ops if not isinstance(op, Matmul)))
    assert not bare.matmuls
    assert _time(bare).whole == _time(bare, stops_early=False).whole > 0


def test_attention_that_is_kept_does_not_run_again_and_takes_memory() -> None:
    op = next(op for op in DENSE.ops if isinstance(op, Attention))
    saved = _time(DENSE).whole - _time(DENSE, keeps_attention=True).whole
    assert saved == pytest.approx(_op_time(op, SHAPE, _setting())[0])
    plan = Plan.parse("bf16 / recompute=blocks")
    less, more = (
        kept_bytes(DENSE, 0, plan, saving_of(plan, replace(JAX, keeps_attention=kept), 4096)) for kept in (False, True)
    )
    assert more - less == 2 * 32 * 128 + 4 * 32


@pytest.mark.parametrize(
    ("notes", "kept"),
    [
        ("MaxText; remat of all but the attention's output", True),
        ("MaxText; remat_policy custom, context=offload", True),
        ("MaxText; checkpoints wait on the host: the blocks' inputs, q, k, v and the attention's output", True),
        ("MaxText; checkpoints wait on the host: outputs of attention and of the feed-forward layers", True),
        ("MaxText; every block recomputed", False),
        ("MaxText; checkpoints wait on the host: the blocks' inputs and q, k, v; all else is recomputed", False),
    ],
)
def test_rows_say_that_attention_is_kept(notes: str, kept: bool) -> None:
    row = variant("fsdp-1", **BARE | {"notes": notes, "gpu": "tpu-v5p", "activation_checkpoint": "full"})
    assert row.stack.name == "jax" and row.stack.keeps_attention is kept and row.plan.recompute.mode == "blocks"


@pytest.mark.parametrize(
    ("modules", "mode"), [("mlp", "none"), ("mlp, mla_up_proj", "ops"), ("moe, mlp", "ratio"), ("moe", "ratio")]
)
def test_mlp_of_a_mixture_is_that_of_its_dense_layers(modules: str, mode: str) -> None:
    """Megatron's `recompute_modules`: three layers of DeepSeek-V3's 61 have `mlp`, the others `moe`."""
    sizes = {"model": "DeepSeek-V3 671B", "n_params": "", "n_layers": "61", "d_model": "7168", "n_heads": "128"}
    shape = {"d_ff": "2048", "vocab": "129280", "n_kv_heads": "128", "activation_checkpoint": "selective"}
    notes = {"notes": f"Megatron-Core; recompute modules [{modules}]", "gpu": "gb200"}
    row = variant("fsdp-1", **BARE | sizes | shape | notes)
    assert row.plan.recompute.mode == mode and (OF_DENSE in row.assumed) is ("mlp" in modules)


@pytest.mark.parametrize(("model", "window", "every"), [("Gemma 3 12B", 1024, 6), ("Gemma-3-1B", 512, 6)])
def test_five_of_six_layers_of_gemma_look_back_on_a_window(model: str, window: int, every: int) -> None:
    bare = {"n_params": "", "n_layers": "", "d_model": "", "n_heads": "", "d_ff": "", "vocab": "", "n_kv_heads": ""}
    spec = variant("fsdp-1", **BARE | bare | {"model": model, "notes": "torchtitan"}).spec
    assert [spec.window_of(layer) for layer in range(6)] == [window] * (every - 1) + [0]


@pytest.mark.parametrize(
    ("date", "notes", "kernel"),
    [("2026-07", "MaxText", "flash3"), ("2026-07", "MaxText, JAX 0.7.0", "flash2"), ("2025-06", "MaxText", "flash2")],
)
def test_kernels_of_jax_before_tokamax(date: str, notes: str, kernel: str) -> None:
    cells = {"date": date, "notes": notes, "gpu": "tpu-v5p", "activation_checkpoint": "full"}
    assert variant("fsdp-1", **BARE | cells).stack.attention == kernel
