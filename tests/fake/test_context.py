"""What context parallelism refuses: before training starts, naming the module, what was found and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import ModelError, UsageError
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.parallel.placed import Placed
from shardwise.testing import fake_world

IDS = torch.zeros(2, 12, dtype=torch.int64)


class Block(nn.Module):
    """Attention of one head by torch's function; tests replace `mix`."""

    mix: Callable[..., torch.Tensor] = staticmethod(
        lambda x, mask=None: F.scaled_dot_product_attention(x, x, x, is_causal=True)
    )

    def __init__(self, mix: Callable[..., torch.Tensor] | None = None, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.proj, self.extra = nn.Linear(8, 8), extra
        if mix is not None:
            self.mix = mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.mix(x))


class Model(nn.Module):
    def __init__(
        self, mix: Callable[..., torch.Tensor] | None = None, extra: nn.Module | None = None, pooled: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(mix, extra) for _ in range(2))
        self.pooled = pooled

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1) if self.pooled else x


@contextmanager
def placed_on(text: str, model: Callable[[], nn.Module], rank: int = 0) -> Iterator[Placed]:
    plan = sw.Plan.parse(text)
    with fake_world(plan.world, rank), sw.open_mesh(plan, device="cpu") as mesh:
        yield sw.apply(model, plan, mesh)


def run(text: str, model: Callable[[], nn.Module], batch: Any = None) -> torch.Tensor:
    with placed_on(text, model) as placed:
        part = placed.share({"ids": IDS} if batch is None else batch)
        return placed.parts[0].run(**part) if isinstance(part, dict) else placed.parts[0].run(part)


def by_hand(x: torch.Tensor) -> torch.Tensor:
    scores = x[:, None] @ x[:, None].transpose(-1, -2)
    return (torch.softmax(scores, dim=-1) @ x[:, None])[:, 0]


def both(x: torch.Tensor) -> torch.Tensor:
    return by_hand(x) + F.scaled_dot_product_attention(x, x, x)


def attends(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, x, x, **changes)


def with_keys(keys: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, keys(x), keys(x))


def also(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(F.scaled_dot_product_attention(x, x, x))


def heads(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def mix(x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (number, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    return mix


REFUSED_AT_FIRST_FORWARD = [
    (lambda x: x, "layers.0: found no call of torch's attention function"),
    (by_hand, "layers.0: found softmax over scores (2, 1, 6, 6), attention written by hand"),
    (both, "layers.0: found softmax over scores"),
    (with_keys(lambda x: x.narrow(1, 0, 4)), "attention of 6 queries to 4 keys, needed self-attention"),
    (attends(dropout_p=0.1), "dropout 0.1 inside attention"),
    (attends(attn_mask=torch.ones(6, 6)), "a mask of shape (6, 6), needed one of the whole sequence, (..., 12, 12)"),
    (attends(attn_mask=torch.ones(12, 12), is_causal=True), "a mask together with is_causal=True"),
    (attends(attn_mask=torch.ones(12, 12, requires_grad=True)), "a mask that requires a gradient"),
    (also(lambda x: x.cumsum(1)), "cumsum along the sequence"),
    (also(lambda x: torch.roll(x, 1, dims=-2)), "roll along the sequence"),
    (also(lambda x: x + x.mean(1, keepdim=True)), "mean along the sequence"),
    (also(lambda x: x - torch.amax(x, dim=-2, keepdim=True)), "amax along the sequence"),
    (also(lambda x: x * x.softmax(dim=1)), "softmax along the sequence"),
    (also(lambda x: F.normalize(x, dim=1)), "normalize along the sequence"),
    (also(lambda x: x.std((1, 2), keepdim=True) * x), "std along the sequence"),
    (also(lambda x: x + F.adaptive_avg_pool1d(x.mT, 1).mT), "adaptive_avg_pool1d along the sequence"),
    (also(lambda x: torch.fft.fft(x, dim=1).real), "fft_fft along the sequence"),
    (also(lambda x: torch.sort(x, 1).values), "sort along the sequence"),
    (also(lambda x: x - x[:, -1:]), "found a part of the sequence"),
    (also(lambda x: x + x[:, 0][:, None]), "found a part of the sequence"),
    (also(lambda x: x + F.pad(x, (0, 0, 1, -1))), "pad along the sequence"),
    (also(lambda x: x + x.diff(dim=1, prepend=x.new_zeros(2, 1, 8))), "diff along the sequence"),
    (also(lambda x: torch.ones(6, 6) @ x), "matmul over the tokens"),
    (also(lambda x: F.conv1d(x.mT, torch.ones(8, 8, 3), padding=1).mT), "conv1d with a kernel (3,)"),
]


@pytest.mark.parametrize(("mix", "message"), REFUSED_AT_FIRST_FORWARD)
def test_what_mixes_tokens_in_another_way_is_refused_by_name(mix: Callable[..., torch.Tensor], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        run("cp2", lambda: Model(mix))
    assert "plan with cp1" in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [nn.Conv1d(8, 8, 3), nn.LSTM(8, 8), nn.MultiheadAttention(8, 2), nn.GroupNorm(2, 8), nn.LayerNorm((12, 8))],
)
def test_modules_that_cannot_be_split_are_refused_at_apply(extra: nn.Module) -> None:
    with pytest.raises(ModelError, match=rf"layers.0.extra is a {type(extra).__name__}, which mixes tokens"):
        run("cp2", lambda: Model(extra=extra))


def test_what_works_on_each_token_alone_passes() -> None:
    fine = also(
        lambda x: torch.softmax(F.conv1d(x.mT, torch.ones(8, 8, 1)).mT, dim=-1).cumsum(-1) * x.mean((0, 2)).std()
    )
    assert run("cp2", lambda: Model(fine, extra=nn.Conv1d(8, 8, 1))).shape == (2, 6, 8)


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_learned_masks_are_for_ulysses_which_divides_heads(kind: str) -> None:
    bias = torch.zeros(12, 12, requires_grad=True)

    def mix(x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, bias).transpose(1, 2).flatten(2)

    if kind == "ulysses":
        assert run(f"cp2 context={kind}", lambda: Model(mix)).shape == (2, 6, 8)
    else:
        with pytest.raises(ModelError, match="or context=ulysses"):
            run(f"cp2 context={kind}", lambda: Model(mix))


def test_heads_that_cp_does_not_divide_are_refused_under_ulysses_only() -> None:
    assert run("cp4 context=gather", lambda: Model(heads(2))).shape == (2, 3, 8)
    with pytest.raises(ModelError, match="found 2 heads, needed a multiple of cp=4"):
        run("cp4 context=ulysses", lambda: Model(heads(2)))


def test_a_model_that_takes_no_positions_is_refused() -> None:
    class Blind(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids)

    with pytest.raises(ModelError, match="Blind.forward takes ids, needed one of position_ids, positions, input_pos"):
        run("cp2", Blind)


class First(Model):
    """Its output is that of the first token, as an encoder's class token is."""

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, position_ids).select(1, 0)


def test_an_output_pooled_over_the_sequence_is_refused() -> None:
    with pytest.raises(ModelError, match="found mean along the sequence, needed operations on each token alone"):
        run("cp2", lambda: Model(pooled=True))
    with pytest.raises(ModelError, match=r"output of shape \(2, 8\), needed one value per token"):
        run("cp2", lambda: First())


def test_a_scalar_mean_as_the_loss_is_refused() -> None:
    with placed_on("cp2", Model) as placed:
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda output, batch: output.mean())
        with pytest.raises(UsageError, match=r"scalar mean under context parallelism .* return Loss\(sum, weight\)"):
            step({"ids": IDS})


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ModelError, match="sequences of 3 tokens for Model, needed at least 4"):
        run("cp2", Model, IDS[:, :3])
    assert run("cp2 balance=contiguous", Model, IDS[:, :3]).shape == (2, 2, 8)
    with pytest.raises(ModelError, match=r"found one of shape \(2,\), needed \(batch, sequence, ...\)"):
        run("cp2", Model, IDS[:, 0])


def test_training_on_a_batch_that_was_not_shared_is_refused_and_drawing_from_it_is_not() -> None:
    with placed_on("cp2", Model) as placed:
        with pytest.raises(ModelError, match=r"did not come through placed\.share"):
            placed.module(IDS)
        part = placed.share({"ids": IDS})
        placed.train(False)
        with torch.no_grad():
            assert placed.module(IDS).shape == (2, 12, 8)
            with pytest.raises(ModelError, match="or was copied after it"):
                placed.module(part["ids"].clone())


@pytest.mark.parametrize(("rank", "positions"), [(0, [0, 1, 2, 9, 10, 11]), (1, [3, 4, 5, 6, 7, 8])])
def test_a_micro_batch_is_divided_with_everything_that_goes_along_the_sequence(rank: int, positions: list[int]) -> None:
    length, rows = 12, 3
    batch = {
        "input_ids": torch.arange(rows * length).view(rows, length),
        "labels": torch.arange(rows * length).view(rows, length),
        "weight": torch.rand(rows, length),
        "document_ids": torch.zeros(rows, length, dtype=torch.int64),
        "features": torch.rand(rows, length, 2),
        "mask": torch.ones(rows, 1, length, length),
        "row": torch.arange(rows),
        "name": "text",
    }
    config = DecoderConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=16)
    with placed_on("cp2", lambda: Decoder(config), rank) as placed:
        part = placed.share(batch)
    assert part["position_ids"].tolist() == [positions] * rows
    for key in ("input_ids", "labels", "weight", "features"):
        assert torch.equal(part[key], batch[key][:, positions])
    for key in ("document_ids", "mask", "row", "name"):
        assert part[key] is batch[key]


def test_positions_of_the_batch_are_kept_and_divided() -> None:
    own = torch.arange(24).view(2, 12)
    with placed_on("cp2", Model, rank=1) as placed:
        assert placed.share({"ids": IDS, "position_ids": own})["position_ids"].tolist() == own[:, 3:9].tolist()
        x, y = placed.share((IDS, own))
        assert x.shape == (2, 6) and torch.equal(y, own[:, 3:9])
