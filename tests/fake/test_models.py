"""The reference models: names, counts, and what forward does, against independent computations."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardwise.errors import ConfigError, ModelError, UsageError
from shardwise.model.spec import ModelSpec, preset, presets
from shardwise.models.decoder import Decoder, DecoderConfig, flops_per_token
from shardwise.models.gpt import GPT, GPTConfig, gpt_flops_per_token
from shardwise.models.presets import build
from shardwise.models.sample import generate

SMALL = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16)
SMALL_GPT = GPTConfig(dim=32, num_layers=2, num_heads=4, max_seq_len=16)


def ids(batch: int = 2, seq: int = 8) -> torch.Tensor:
    return torch.randint(0, 256, (batch, seq), generator=torch.Generator().manual_seed(0))


def test_parameter_names_are_those_that_rules_refer_to() -> None:
    layer = {n.removeprefix("layers.0.") for n, _ in Decoder(SMALL).named_parameters() if n.startswith("layers.0.")}
    attention = {f"attn.{w}.weight" for w in ("wq", "wk", "wv", "wo")}
    assert layer == attention | {f"ffn.{w}.weight" for w in ("w1", "w2", "w3")} | {
        "attn_norm.weight",
        "ffn_norm.weight",
    }
    tops = {n.split(".")[0] for n, _ in GPT(SMALL_GPT).named_parameters()}
    assert tops == {"wte", "wpe", "h", "ln_f", "lm_head"}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {"num_kv_heads": 2},
        {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True},
        {"kind": "gpt"},
        {"kind": "moe", "num_experts": 4, "experts_per_token": 2},
        {"kind": "moe", "num_experts": 4, "experts_per_token": 2, "qkv_bias": True, "qk_norm": True},
    ],
    ids=lambda more: "-".join(more),
)
def test_the_number_of_parameters_of_sizes_is_that_of_their_model(more: dict[str, Any], tie: bool) -> None:
    spec = ModelSpec(
        dim=32, num_layers=2, num_heads=4, ffn_dim=40, vocab_size=64, max_seq_len=16, tie_embeddings=tie, **more
    )
    with torch.device("meta"):
        model = build(spec)()
    assert sum(p.numel() for p in model.parameters()) == spec.num_params


@pytest.mark.parametrize("name", presets(built=True))
def test_presets_build_with_the_number_of_parameters_of_their_sizes(name: str) -> None:
    """Of two layers: they are equal. That of all layers is the published one: tests/pure/test_spec.py."""
    spec = replace(preset(name), num_layers=2)
    with torch.device("meta"):
        model = build(spec)()
    assert sum(p.numel() for p in model.parameters()) == spec.num_params


def test_presets_that_no_reference_model_has_are_refused_and_transformers_has_them() -> None:
    for name in set(presets()) - set(presets(built=True)):
        assert preset(name).hf in CONFIG_MAPPING or name == "grok-1", name  # whose code no release has
        with pytest.raises(ModelError, match=f"`hf:{preset(name).hf}`"):
            build(preset(name))


@pytest.mark.parametrize(("model", "flops"), [(Decoder(SMALL), flops_per_token), (GPT(SMALL_GPT), gpt_flops_per_token)])
def test_flops_equal_those_that_torch_counts(model: nn.Module, flops) -> None:  # type: ignore[no-untyped-def]
    with torch.device("meta"):
        ghost = type(model)(model.config)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            ghost(tokens)
    assert 3 * counter.get_total_flops() == flops(model.config, 8) * tokens.numel()


@pytest.mark.parametrize("model", [Decoder(SMALL).double(), GPT(SMALL_GPT).double()])
def test_causal_and_differentiable_in_fp64(model: nn.Module) -> None:
    x = ids()
    changed = x.clone()
    changed[:, 5] += 1
    changed %= 256
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])
    before.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float64 for p in model.parameters())


def test_attention_equals_an_explicit_one() -> None:
    attention = Decoder(SMALL).double().layers[0].attn
    x = torch.randn(1, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    split = lambda y: y.view(6, -1, 8)  # noqa: E731
    q, k, v = split(attention.wq(x)), split(attention.wk(x)), split(attention.wv(x))
    out = torch.zeros(6, 4, 8, dtype=torch.float64)
    frequency = [10_000 ** -(i / 4) for i in range(4)]

    def turned(row: torch.Tensor, position: int) -> torch.Tensor:
        z = torch.complex(row[:4], row[4:])
        z = z * torch.tensor([complex(math.cos(position * f), math.sin(position * f)) for f in frequency])
        return torch.cat((z.real, z.imag))

    for head in range(4):
        for i in range(6):
            scores = torch.stack(
                [turned(q[i, head], i) @ turned(k[j, head // 2], j) for j in range(i + 1)]
            ) / math.sqrt(8)
            out[i, head] = torch.softmax(scores, 0) @ v[: i + 1, head // 2]
    expected = attention.wo(out.reshape(1, 6, 32))
    assert torch.allclose(attention(x), expected, atol=1e-7)


def test_residual_projections_start_smaller() -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(dim=128, num_layers=8, ffn_dim=256))
    assert float(model.layers[3].attn.wo.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert float(model.layers[3].ffn.w1.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        DecoderConfig(dim=32, num_heads=4, num_kv_heads=3)
    with pytest.raises(ConfigError, match="not a multiple of num_heads=5"):
        GPTConfig(dim=32, num_heads=5)


def test_generate_is_reproducible_and_keeps_the_mode() -> None:
    model = Decoder(SMALL).train()
    start = ids(1, 3)
    first, second = generate(model, start, 20, seed=1), generate(model, start, 20, seed=1)
    assert first.shape == (1, 23) and torch.equal(first, second) and model.training
    assert not torch.equal(first, generate(model, start, 20, seed=2))
    greedy = generate(model, start, 1, temperature=0)
    assert greedy[0, -1] == model(start)[0, -1].argmax()
    with pytest.raises(UsageError, match="start from at least one token"):
        generate(model, start[:, :0], 1)
