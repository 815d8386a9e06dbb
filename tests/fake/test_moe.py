"""The reference mixture of experts, one process: choice, weights, capacity, losses, counts; and several losses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.errors import ConfigError, UsageError
from shardwise.models.moe import Experts, MoEConfig, MoEDecoder, Router, flops_per_token
from shardwise.parallel.init import init_model
from shardwise.testing import fake_world
from shardwise.train.losses import Losses


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
        "ffn_dim": 12,
        "num_experts": 4,
        "init_std": 0.5,
    }
    return MoEConfig(**sizes | changes)


def router(**changes: Any) -> tuple[Router, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    made = Router(config(**changes)).double()
    torch.nn.init.normal_(made.weight, generator=draw)
    return made, torch.randn(3, 6, 16, generator=draw, dtype=torch.float64, requires_grad=True)


def test_experts_equal_every_expert_on_every_token() -> None:
    experts = Experts(config()).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, chosen, weights = torch.randn(9, 16).double(), torch.randint(0, 5, (9, 2)), torch.rand(9, 2).double()
    expected = torch.zeros_like(x)
    for e in range(4):  # 4, the number of experts, stands for none
        out = F.linear(F.silu(F.linear(x, experts.w1[e])) * F.linear(x, experts.w3[e]), experts.w2[e])
        expected += out * (weights * (chosen == e)).sum(1, keepdim=True)
    assert torch.allclose(experts(x, chosen, weights), expected, rtol=1e-12)


@pytest.mark.parametrize("shared", [0, 2])
def test_number_of_flops(shared: int) -> None:
    sizes = config(num_shared_experts=shared, qk_norm=True, qkv_bias=True, expert_ffn_dim=10)
    with torch.device("meta"):
        model, ids = MoEDecoder(sizes), torch.zeros(2, 8, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    assert counter.get_total_flops() == 16 * flops_per_token(sizes, 8)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_are_the_scores_of_the_chosen(score: str) -> None:
    made, x = router(score=score, route_scale=2.0)
    scores = F.linear(x, made.weight)
    scores = scores.softmax(-1) if score == "softmax" else scores.sigmoid()
    chosen, weights, losses = made(x)
    assert torch.equal(chosen, scores.topk(2).indices)
    top = scores.topk(2).values
    assert torch.allclose(weights, 2 * top / top.sum(-1, keepdim=True))
    shares = scores / scores.sum(-1, keepdim=True)
    for row in range(3):  # sum of fractions times mean probabilities, times experts
        fractions = torch.bincount(chosen[row].flatten(), minlength=4) / 12
        assert torch.allclose(losses[row, :, 0].mean(), 4 * (fractions * shares[row].mean(0)).sum())
    assert torch.allclose(losses[..., 1], F.linear(x, made.weight).logsumexp(-1) ** 2)


def test_capacity_keeps_first_choices_and_early_tokens() -> None:
    made, x = router(capacity_factor=0.5)
    free, _ = router()
    free.load_state_dict(made.state_dict())
    wanted, (chosen, weights, _) = free(x)[0], made(x)
    capacity = math.ceil(0.5 * 6 * 2 / 4)
    for row in range(3):
        room = dict.fromkeys(range(4), capacity)
        for k in range(2):
            for token in range(6):
                expert = int(wanted[row, token, k])
                kept = room[expert] > 0
                room[expert] -= kept
                assert int(chosen[row, token, k]) == (expert if kept else 4)
                assert bool(weights[row, token, k] > 0) == kept
    weights.sum().backward()
    assert int(made.dropped) == int((chosen == 4).sum()) > 0


def test_tokens_are_counted_once_however_often_a_forward_runs() -> None:
    made, x = router()
    with torch.no_grad():
        made(x)
    made.eval()
    made(x)[1].sum().backward()
    assert not made.tokens.any()
    made.train()
    checkpoint(lambda y: made(y)[1], x, use_reentrant=False).sum().backward()
    assert int(made.tokens.sum()) == 3 * 6 * 2
    made.row_counts.is_padding = True
    made(x)[1].sum().backward()
    assert int(made.tokens.sum()) == 3 * 6 * 2


def test_the_bias_moves_against_the_load() -> None:
    made, x = router(bias_rate=0.1, score="sigmoid")
    made.weight.data[0] += 1
    x = (x + 1).detach().requires_grad_()  # all tokens like the first expert
    loads = []
    for _ in range(40):
        made(x)[1].sum().backward()
        made.after_step()
        loads.append(made.load[:4].clone())
    assert int(loads[0][0]) == 18
    assert int(loads[-1][0]) < 14
    before = made.bias_steps.clone()
    made(x)[1].sum().backward()
    tokens = made.tokens.clone()
    made.after_step()
    assert torch.equal(made.bias_steps - before, torch.sign(9 - tokens))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"experts_per_token": 5}, "experts_per_token=5 of num_experts=4"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"score": "relu"}, "'softmax' or 'sigmoid'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**sizes)


@pytest.mark.parametrize(
    ("plan", "rank", "text", "local"),
    [
        ("fsdp8 ep2", 5, "experts: Shard(0) over ep; Shard(0) over expert_shard", (1, 8, 16)),
        ("dp2 fsdp2 tp2 ep4 / zero1", 7, "experts: Shard(0) over ep; Shard(0) over expert_shard", (2, 8, 16)),
        ("tp2 / seq", 1, "experts: Replicate over tp", (8, 8, 16)),
        ("dp4 tp2 ep2", 3, "experts: Shard(0) over ep; replicated over dp_replicate", (4, 8, 16)),
    ],
)
def test_where_experts_lie(plan: str, rank: int, text: str, local: tuple[int, ...]) -> None:
    sizes, parsed = config(num_experts=8, ffn_dim=8), sw.Plan.parse(plan)
    with fake_world(parsed.world, rank), sw.open_mesh(parsed, device="cpu") as mesh:
        placed = sw.apply(partial(MoEDecoder, sizes), parsed, mesh)
        assert placed.placements["layers.1.moe.experts.w1"].text == text
        assert placed.named_parameters()["layers.1.moe.experts.w1"].to_local().shape == local
        whole = init_model(partial(MoEDecoder, sizes)).layers[1].moe.experts.w1
        first = {"fsdp8 ep2": 6, "dp2 fsdp2 tp2 ep4 / zero1": 6, "tp2 / seq": 0, "dp4 tp2 ep2": 4}[plan]
        mine = placed.local_parameters()["layers.1.moe.experts.w1"]
        assert torch.equal(mine, whole[first : first + local[0]])


# ---------------------------------------------------------------- several losses


def pair(output: torch.Tensor, batch: torch.Tensor) -> dict[str, sw.Loss]:
    return {"a": sw.Loss(output.sum(), batch.numel()), "b": sw.Loss(output.square().sum(), (batch > 0).sum())}


WEIGHTS = {"a": lambda batch: batch.numel(), "b": lambda batch: (batch > 0).sum()}


def test_each_loss_is_divided_by_its_own_weight_over_the_window() -> None:
    losses = Losses(pair, weights=WEIGHTS, factors={"b": 0.5})
    micro = [torch.tensor([1.0, -2.0]), torch.tensor([3.0]), torch.tensor([4.0, 5.0])]
    window = losses.begin(micro, [False, False, True])
    parts = [window.loss(2 * m, m, is_zero) for m, is_zero in zip(micro, (False, False, True), strict=True)]
    total = sum(float(part.sum) for part in parts[:2]) / sum(float(part.weight) for part in parts[:2])
    assert total == pytest.approx((2 - 4 + 6) / 3 + 0.5 * (4 + 16 + 36) / 2)
    assert float(losses.total(pair(2 * micro[0], micro[0])).sum) == pytest.approx(2 * (-2 / 2 + 0.5 * 20 / 1))


def test_a_loss_without_weight_adds_nothing() -> None:
    losses = Losses(pair, weights=WEIGHTS)
    micro = torch.tensor([-1.0, -2.0])
    assert float(losses.begin([micro], [False]).loss(micro, micro).sum) == -3.0


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        (pair, {"weights": {}}, "give every loss a weight"),
        (pair, {"weights": WEIGHTS, "factors": {"bb": 1.0}}, "did you mean 'b'"),
        (pair, {"weights": {"a": WEIGHTS["a"]}}, "returned a, b, needed a dict of Loss"),
        (pair, {"weights": WEIGHTS | {"b": len}}, r"b: the loss function returned the weight 1 .* gave 2"),
        (lambda output, batch: output.sum(), {"weights": WEIGHTS}, "returned Tensor, needed a dict"),
    ],
)
def test_losses_that_do_not_fit_their_weights_are_refused(function: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        micro = torch.tensor([1.0, -2.0])
        Losses(function, **options)(micro, micro)
