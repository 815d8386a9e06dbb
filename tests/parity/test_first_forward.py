"""What a forward does that parts of a batch, or ranks, each do in their own way: said at the first step."""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.parallel.refused.first_forward import _Look
from shardwise.testing import World, fake_world

ROWS, TOKENS, DIM = 8, 6, 4


class Over(nn.Module):
    """A recurrent layer or attention of torch, over what `turn` makes of the rows."""

    def __init__(self, kind: str, turn: str = "") -> None:
        super().__init__()
        first, self.turn, self.first = turn == "batch_first", turn, nn.Linear(DIM, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, batch_first=first)
        kinds: dict[str, Any] = {
            "lstm": lambda: nn.LSTM(DIM, DIM, batch_first=first),
            "gru": lambda: nn.GRU(DIM, DIM, batch_first=first),
            "attention": lambda: nn.MultiheadAttention(DIM, 2, batch_first=first),
            "encoder": lambda: nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        }
        self.layer, self.takes = kinds[kind](), 3 if kind == "attention" else 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = {"transposed": x.transpose(0, 1), "packed": x}.get(self.turn, x)
        if self.turn == "packed":
            lengths = [TOKENS] * len(x)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
        y = self.layer(*[x] * self.takes)
        y = y[0] if isinstance(y, tuple) else y
        return y.transpose(0, 1) if self.turn == "transposed" else y


class Draws(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.drop = kind, nn.Linear(DIM, DIM), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        draws: dict[str, Any] = {"python": random.random, "numpy": np.random.rand}
        return self.first(x) * draws[self.kind]() if self.kind in draws else self.drop(self.first(x))


class Made(nn.Module):
    """Makes a number of its rows itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(())) if kind in ("scale", "compared") else None
        self.calls, self.modes = 0, list[bool]()

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.modes.append(self.training)
        y = self.first(x)[:, 0, 0]
        if self.kind == "gathered":
            dist.all_reduce(y.detach().square().mean())
        made: dict[str, Any] = {
            "masked": lambda: (y.square() * (x[:, 0, :1] > 0)).sum() / (x[:, 0, :1] > 0).sum(),
            "mean": lambda: y.square().mean(),
            "gathered": lambda: y.square().sum() / x[:, 0, 0].abs().sum(),
            "beside": lambda: (y, y.std()),
            "mean beside": lambda: (y, y.square().mean()),
            "scale": lambda: (y, self.scale * 2),
            "compared": lambda: (self.first(x)[:, 0], self.scale * 2),
        }
        return made[self.kind]()


def loss_fn(output: Any, batch: Tensor) -> Tensor:
    if isinstance(output, tuple):
        return output[0].square().mean() * (output[1] if output[1].requires_grad else 1.0)
    return output.square().mean()


def itself(output: Tensor, batch: Tensor) -> Tensor:
    return output


def added(output: Any, batch: Tensor) -> Tensor:
    return output[0].square().mean() + output[1]


def compared(output: Any, batch: Tensor) -> Tensor:
    rows, scale = output
    return F.cross_entropy(scale * rows @ rows.T, torch.arange(len(rows)))


def scaled(output: Any, batch: Tensor) -> sw.Loss:
    return sw.Loss(output[0].square().sum() * output[1], output[0].numel())


def said(text: str, model: Any, loss: Any = loss_fn, tokens: int = TOKENS, rows: Tensor | None = None) -> list[str]:
    """Warnings of two steps."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(model, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.01)), loss)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, tokens, DIM, generator=generator).double() if rows is None else rows
        for _ in range(2):
            step(x.tensor_split(mesh.batch.size)[mesh.batch.rank])
        if isinstance(placed.module, Made):
            assert placed.module.calls == 2 * plan.batch.micro_batches  # a look leaves what it counts
        hooks = [*placed.module._forward_hooks.values(), *placed.module._forward_pre_hooks.values()]
        assert not any(hook.__module__ == _Look.__module__ for hook in hooks if hasattr(hook, "__module__"))
    return [str(each.message) for each in caught if str(each.message).startswith(STARTS)]


STARTS = ("layer", "forward draws", "forward makes", "what the loss function", "the loss function", "the model (")


@pytest.mark.parametrize("kind", ["lstm", "gru", "attention", "encoder"])
def test_rows_taken_for_tokens_are_said(world: World, kind: str) -> None:
    """Torch's default is rows along dim 1: each row was computed from the others of its part, without a word."""
    (text,) = world(1, said, "dp1 / mb2", partial(Over, kind))[0]
    assert "takes its rows along dim 1 (batch_first=False), and was given (4, 6, 4), whose dim 0 has the 4 rows" in text
    assert "`dp1 / mb2 / fp64` divides a batch into 2 parts" in text
    assert (", and 1 more are as it" in text) == (kind == "encoder")
    for turn in ("batch_first", "transposed"):
        assert world(1, said, "dp1 / mb2", partial(Over, kind, turn)) == [[]]
    assert world(1, said, "dp1", partial(Over, kind)) == [[]]


def test_rows_that_are_one_sequence_are_said_and_packed_ones_are_not(world: World) -> None:
    two_dims = torch.ones(ROWS, DIM, dtype=torch.float64)
    (text,) = world(1, said, "dp1 / mb2", partial(Over, "lstm", "batch_first"), loss_fn, TOKENS, two_dims)[0]
    assert text.startswith("layer (LSTM) takes one sequence, without rows, and was given (4, 4)")
    assert world(1, said, "dp1 / mb2", partial(Over, "lstm", "packed")) == [[]]
    assert world(1, said, "dp1 / mb2", partial(Over, "lstm"), loss_fn, ROWS // 2) == [[]]  # nobody can tell


def test_one_rank_says_it(world: World) -> None:
    assert sorted(map(len, world(2, said, "fsdp2", partial(Over, "lstm")))) == [0, 1]


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_draws_of_a_process_are_said(world: World, kind: str) -> None:
    (text,) = world(1, said, "dp1 / mb2", partial(Draws, kind))[0]
    assert text.startswith(f"forward draws from {'Python' if kind == 'python' else 'NumPy'}'s")
    assert world(1, said, "dp1", partial(Draws, kind)) == [[]]
    assert world(1, said, "dp1 / mb2", partial(Draws, "keyed")) == [[]]


@pytest.mark.parametrize("kind", ["masked", "beside"])
def test_a_number_that_the_model_makes_of_its_rows_is_looked_at(world: World, kind: str) -> None:
    """A loss in the model, a statistic beside the output: of parts another than of the whole, without a word."""
    (text,) = world(1, said, "dp1 / mb2", partial(Made, kind), added if kind == "beside" else loss_fn)[0]
    assert text.startswith("what the loss function makes of a number that the model returns is no mean over rows")
    assert "of 4 rows it gives" in text


@pytest.mark.parametrize(
    ("kind", "loss"), [("mean", itself), ("mean beside", added), ("scale", loss_fn), ("scale", scaled)]
)
def test_a_number_that_adds_up_is_not_said(world: World, kind: str, loss: Any) -> None:
    assert world(1, said, "dp1 / mb2", partial(Made, kind), loss) == [[]]


@pytest.mark.parametrize("text", ["dp2", "fsdp2"])
def test_rows_compared_beside_a_scale_are_said(world: World, text: str) -> None:
    """The scale of CLIP is a number, and its negatives are a part's."""
    found = world(2, said, text, partial(Made, "compared"), compared)
    assert sorted(map(len, found)) == [0, 1] and "no mean over rows" in sum(found, [])[0]


class Together(nn.Module):
    """Rows that are made of each other, or seem so, behind two blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        if kind in ("looked up", "batch norm"):
            self.after = nn.Embedding(4, DIM) if kind == "looked up" else nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Any:
        kind = self.kind
        chosen = (x[:, 0, 0] > 0).long()
        x = x.mean(1)
        for block in self.blocks:
            x = block(x)
        made: dict[str, Any] = {
            "normed": lambda: (x - x.mean(0)) / x.std(0),
            "scaled": lambda: x / x.abs().max().detach(),
            "capacity": lambda: x * (chosen.cumsum(0) <= len(x) // 2)[:, None],
            "attended": lambda: (x @ x.T).softmax(-1) @ x,
            "negatives": lambda: (x, F.cross_entropy(x @ x.T, torch.arange(len(x)))),
            "balanced": lambda: (x, x.mean(0).square().sum()),
            "divided": lambda: (x, (x[:, 0] * chosen).sum() / (chosen.sum() + 1)),
            "mean": lambda: (x, 3.0 * x.square().mean() + x.mean(0).sum() / 2),
            "written down": lambda: (x, F.one_hot(chosen, 4).double().mean(0).square().sum()),
            "looked up": lambda: x + self.after(chosen) * x.softmax(-1) + F.one_hot(chosen, DIM),
            "normalized": lambda: F.normalize(x, dim=-1) + x.norm(dim=1, keepdim=True),
            "norm of all": lambda: x / x.norm(),
            "batch norm": lambda: self.after(x) + x.mean(-1, keepdim=True),
            "kept": lambda: self.keep(x, x.mean(0).square().sum()),
            "mean kept": lambda: self.keep(x, x.square().mean()),
            "counted": lambda: x + torch.zeros(DIM).double().index_add(0, chosen, x[:, 0]).shape[0],
        }
        return made[kind]()

    def keep(self, x: Tensor, number: Tensor) -> Tensor:
        """As the balancing losses of routers, which the loss function takes from there."""
        self.number = number
        return x


@pytest.mark.parametrize(
    "kind", ["normed", "scaled", "capacity", "attended", "negatives", "balanced", "divided", "norm of all", "kept"]
)
def test_rows_of_other_rows_are_said_where_no_rank_can_call_the_model_alone(world: World, kind: str) -> None:
    """Each part had its own norm, capacity or balance, without a word under sharded parameters and pipelines."""
    loss = added if kind in ("negatives", "balanced", "divided") else loss_fn
    for text in ("fsdp2 / blocks=blocks.*", "pp2 / gpipe mb2"):
        (told,) = sum(world(2, said, text, partial(Together, kind), loss), [])
        assert told.startswith("forward makes something of all rows that it is given: `") and "2 parts" in told


@pytest.mark.parametrize(
    "kind", ["mean", "written down", "looked up", "normalized", "batch norm", "counted", "mean kept"]
)
def test_rows_that_are_their_own_are_not_said(world: World, kind: str) -> None:
    loss = added if kind in ("mean", "written down") else loss_fn
    assert world(2, said, "fsdp2 / blocks=blocks.*", partial(Together, kind), loss) == [[], []]


def test_a_forward_that_meets_other_ranks_is_not_called_again(world: World) -> None:
    assert world(2, said, "dp2", partial(Made, "gathered")) == [[], []]


class Follows(nn.Module):
    """A teacher that follows in each forward, and a number that warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.teacher, self.calls, self.width = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), 0, 0
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.width = self.calls + 1, x.shape[-1]
        with torch.no_grad():
            self.teacher.weight.lerp_(self.first.weight, 0.1)
        return self.first(x) - self.teacher(x) / self.calls


def written(text: str) -> list[str]:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(Follows, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.01)), loss_fn)
        for _ in range(2):
            step(torch.ones(ROWS, DIM))
    return [str(each.message).partition(", and")[0] for each in caught if "forward writes" in str(each.message)]


def test_what_each_micro_batch_writes_is_said(world: World) -> None:
    """Of buffers alone it was."""
    expected = ["forward writes the weights teacher.weight", "forward writes the numbers calls"]
    assert world(1, written, "dp1 / mb2") == [expected] and world(1, written, "dp1") == [[]]


class Hooked(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers, self.where, self.found = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2)), where, []
        if where == "collected":
            for layer in self.layers:
                layer.register_forward_hook(lambda _, __, output: self.found.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.found.clear()
        for layer in self.layers:
            x = layer(x)
            if self.where == "between" and x.requires_grad:
                x.register_hook(lambda grad: grad * 0.5)
        return torch.cat(self.found) if self.where == "collected" else x


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("between", r"\[module.chain\] .*`register_hook`, between two blocks, hooks the gradient of what layers.0"),
        ("collected", r"it takes what forward hooks \(of layers.0, layers.1\) collect"),
    ],
)
def test_hooks_that_stages_would_each_call_are_refused(where: str, text: str) -> None:
    """The gradient at a stage's end was halved on both sides of it."""
    plan = sw.Plan.parse("pp2 / 1f1b mb2")
    with fake_world(2), sw.open_mesh(plan, device="cpu") as mesh, pytest.raises(ModelError, match=text):
        sw.apply(lambda: Hooked(where), plan, mesh, sample=torch.ones(2, DIM))


class Listed(nn.Module):
    """Hooks that were given the list, which a loss function empties."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.found = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2)), list[Tensor]()
        for layer in self.layers:
            layer.register_forward_hook(lambda _, __, output, found=self.found: found.append(output.square().mean()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def listed() -> int:
    """How many values a loss function finds."""
    plan, sizes = sw.Plan.parse("dp1"), []
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Listed, plan, mesh, seed=1)

        def loss_fn(output: Tensor, batch: Tensor) -> Tensor:
            sizes.append(len(placed.module.found))
            loss: Tensor = output.square().mean() + sum(placed.module.found)
            placed.module.found.clear()
            return loss

        sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.01)), loss_fn)(torch.ones(ROWS, DIM))
    return sizes[0]


def test_what_hooks_collect_is_of_training_alone(world: World) -> None:
    """A list that is a hook's default had tensors without values from a trace, and ended in torch's words."""
    assert world(1, listed) == [2]


def test_hooks_that_collect_are_said_under_a_pipeline() -> None:
    plan = sw.Plan.parse("pp2 / 1f1b mb2")
    with fake_world(2), sw.open_mesh(plan, device="cpu") as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.apply(Listed, plan, mesh, sample=torch.ones(2, DIM))
    assert any("forward hooks collect what modules return (list" in str(each.message) for each in caught)
