"""A loss that is no mean over rows trains otherwise in parts than as a whole: it is said at the first step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.testing import World

ROWS = 12
Pair = tuple[Tensor, Tensor]
SEEN: list[float] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Named(dict[str, Any]):
    """An output whose parts are attributes, as those of `transformers` are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Dictionary(Net):
    def forward(self, x: Tensor) -> Named:
        return Named(logits=super().forward(x), note=None)


class Centred(nn.Module):
    """Keeps a mean of what it has seen, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.calls = 0

    def forward(self, output: Tensor, batch: Pair) -> Tensor:
        self.calls += 1
        self.mean.lerp_(output.detach().mean(0), 0.1)
        SEEN.append(float(output.detach().sum()))
        return (output - self.mean).square().mean()


def kept_in_mind() -> Callable[[Tensor, Pair], Tensor]:
    """The same without a module."""
    number, history = 0, list[float]()

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        nonlocal number
        number += 1
        history.append(float(output.detach().sum()))
        return output.square().mean() * (1 + 0.1 * number + 0.01 * len(history))

    return loss_fn


def masked(output: Tensor, batch: Pair) -> Tensor:
    counts = batch[1] > 0
    return (output.square().mean(1) * counts).sum() / counts.sum()


def compared(output: Tensor, batch: Pair) -> Tensor:
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))


def noisy(output: Tensor, batch: Pair) -> Tensor:
    return (output + torch.randn_like(output)).square().mean()


def gathered(output: Tensor, batch: Pair) -> Tensor:
    """Compares rows with those of all ranks."""
    others = [torch.zeros_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(others, output.detach())
    labels = torch.arange(len(output)) + dist.get_rank() * len(output)
    return F.cross_entropy(output @ torch.cat(others).t(), labels)


UNLIKE: dict[str, Callable[..., Any]] = {
    "sum": lambda output, batch: F.cross_entropy(output, batch[1], reduction="sum"),
    "sum of squares": lambda output, batch: output.square().sum(),
    "masked": masked,
    "compared": compared,
    "root": lambda output, batch: F.mse_loss(output, batch[0][:, :3]).sqrt(),
    "spread": lambda output, batch: output.std(0).mean(),
    "dice": lambda output, batch: 1 - (output.sigmoid() * batch[0][:, :3]).sum() / output.sigmoid().sum(),
    "largest": lambda output, batch: output.square().max(),
    "mean as a sum": lambda output, batch: sw.Loss(F.cross_entropy(output, batch[1]), 1),
    "attributes": lambda output, batch: output.logits.square().sum(),
}
ALIKE: dict[str, Callable[..., Any]] = {
    "mean": lambda output, batch: F.cross_entropy(output, batch[1]),
    "batchmean": lambda output, batch: F.kl_div(
        output.log_softmax(-1), batch[0][:, :3].softmax(-1), reduction="batchmean"
    ),
    "sum and weight": lambda output, batch: sw.token_cross_entropy(output, batch[1], ignore_index=2),
    "mean over rows": lambda output, batch: sw.mean_over(output.square().mean(1)),
    "penalty": lambda output, batch: F.mse_loss(output, batch[0][:, :3]) + 3.0,
    "noisy": noisy,
    "attributes": lambda output, batch: output.logits.square().mean(),
    "whole": lambda output, batch: output.square().mean() if len(output) > 5 else 1 / 0,
}


def said(text: str, kind: str, name: str) -> list[str]:
    """What is said of a loss in two steps."""
    plan = sw.Plan.parse(f"{text} / fp64")
    loss_fn = gathered if kind == "gathered" else (UNLIKE if kind == "unlike" else ALIKE)[name]
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(Dictionary if name == "attributes" else Net, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.01)), loss_fn)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
        mine = slice(mesh.batch.rank, None, mesh.batch.size)
        for _ in range(2):
            step((x[mine], torch.arange(ROWS)[mine] // 2 % 3))
    return [str(each.message) for each in caught if "no mean over rows" in str(each.message)]


@pytest.mark.parametrize("name", UNLIKE)
def test_a_loss_that_does_not_add_up_is_remarked_once(world: World, name: str) -> None:
    """Each part had a loss of its own, and training was another than in one process, without a word."""
    assert world(1, said, "dp1", "unlike", name) == [[]]
    (text,) = world(1, said, "dp1 / mb2", "unlike", name)[0]
    assert "of 6 rows it gives" in text and "`dp1 / mb2 / fp64` divides a batch into 2 parts" in text


@pytest.mark.parametrize("text", ["dp2", "fsdp2", "pp2 / mb2"])
def test_one_rank_says_it(world: World, text: str) -> None:
    found = world(2, said, text, "unlike", "sum")
    assert sorted(map(len, found)) == [0, 1]


@pytest.mark.parametrize("name", ALIKE)
def test_what_adds_up_or_cannot_be_told_is_not(world: World, name: str) -> None:
    assert world(1, said, "dp1 / mb2", "alike", name) == [[]]


def test_a_loss_that_meets_other_ranks_is_not_called_again(world: World) -> None:
    assert world(2, said, "dp2", "gathered", "") == [[], []]


class Kept(Net):
    """It leaves what a loss adds for each row."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.layers[0](x).square().mean(1)
        return super().forward(x)


def said_of_kept(text: str) -> list[str]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(Kept, plan, mesh, seed=1)
        module: Any = placed.module
        step = sw.make_step(
            sw.TrainState(placed, sw.sgd(placed, lr=0.01)),
            lambda output, batch: sw.mean_over(output.square().mean(1) + module.kept),
        )
        step(torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    return [str(each.message) for each in caught if "no mean over rows" in str(each.message)]


@pytest.mark.parametrize("text", ["dp1 / mb3", "dp1 / mb4", "dp1 / mb2"])
def test_what_a_model_has_left_for_each_row_is_no_part_of_a_part(world: World, text: str) -> None:
    """Four rows, or three, are looked at one by one: what is left for all of them goes with one, and was remarked."""
    assert world(1, said_of_kept, text) == [[]]


def followed(text: str, kind: str) -> list[float]:
    """Losses of a function that remembers, which a look leaves as it is; and how often it was called."""
    plan = sw.Plan.parse(f"{text} / fp64")
    SEEN.clear()
    loss_fn: Any = Centred() if kind == "module" else kept_in_mind()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Net, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.01)), loss_fn)
        x = torch.arange(48.0, dtype=torch.float64).view(12, 4).cos()
        # the same rows twice: parts of a batch that have equal losses
        found = [step([(half, half), (half, half)] if plan.batch.micro_batches > 1 else (x, x)).loss for half in (x, x)]
        return [*found, loss_fn.calls if kind == "module" else 0, len(SEEN)]


@pytest.mark.parametrize("kind", ["module", "function"])
def test_what_a_loss_remembers_is_as_without_the_look(world: World, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    looked = world(1, followed, "dp1 / mb2", kind)[0]
    monkeypatch.setattr("shardwise.train.guards.means.unlike_parts", lambda *_: "")
    with_none = followed("dp1 / mb2", kind)
    assert looked == with_none and (kind == "function" or looked[2:] == [4, 4])


class Remembering(nn.Module):
    """Its state is an attribute, or that of an object, a name around a function, or in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, output: Tensor, batch: Pair) -> Tensor:
        before = torch.zeros_like(output) if self.before is None else self.before
        self.before = output.detach()
        if len(before) != len(output):
            raise ValueError(f"{len(before)} rows before, {len(output)} now")
        return (output - 0.5 * before).square().mean()


class Called:
    def __init__(self) -> None:
        self.before: Tensor | None = None

    __call__ = Remembering.forward


def remembering() -> Callable[[Tensor, Pair], Tensor]:
    before: Tensor | None = None

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        nonlocal before
        kept = torch.zeros_like(output) if before is None or len(before) != len(output) else before
        before = output.detach()
        return (output - 0.5 * kept).square().mean()

    return loss_fn


def remembering_in_a_dict() -> Callable[[Tensor, Pair], Tensor]:
    kept: dict[str, Tensor] = {}

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        before = kept.get("before", torch.zeros_like(output))
        kept["before"] = output.detach()
        return (output - 0.5 * before.mean(0)).square().mean()

    return loss_fn


def writing_down() -> Callable[[Tensor, Pair], Tensor]:
    """Keeps what it does not read."""
    kept: list[Tensor] = []

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        kept.append(output.detach())
        return (output + 0.1 * torch.randn_like(output)).square().mean()

    return loss_fn


REMEMBERING: dict[str, Callable[[], Any]] = {
    "module": Remembering,
    "object": Called,
    "function": remembering,
    "dict": remembering_in_a_dict,
    "nothing": writing_down,
}


def said_of_memory(text: str, name: str) -> list[str]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(Net, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.01)), REMEMBERING[name]())
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        mine = slice(mesh.batch.rank, None, mesh.batch.size)
        for _ in range(2):
            step((x[mine], torch.arange(ROWS)[mine] % 3))
    return [str(each.message) for each in caught if "the loss function keeps something of" in str(each.message)]


@pytest.mark.parametrize("name", ["module", "object", "function", "dict"])
def test_a_loss_that_keeps_something_of_a_micro_batch_is_remarked(world: World, name: str) -> None:
    """It had the micro-batch before in place of the batch before, without a word; one that is an object, or a module
    with a tensor, was left with what the look had put there, and failed in its next call."""
    assert world(1, said_of_memory, "dp1", name) == [[]]
    (text,) = world(1, said_of_memory, "dp1 / mb2", name)[0]
    assert "for 6 rows, and for the same ones" in text and "2 times in a step of `dp1 / mb2 / fp64`" in text
    told = sum(world(2, said_of_memory, "dp2", name), [])  # rows of a rank follow those of the same rank; no mean does
    assert len(told) == (name == "dict") and all("something of all rows of one call" in text for text in told)


def test_a_loss_that_writes_down_what_it_does_not_read_is_not(world: World) -> None:
    assert world(1, said_of_memory, "dp1 / mb2", "nothing") == [[]]


def scaled(text: str, enabled: bool) -> Any:
    plan = sw.Plan.parse(f"{text} / fp64")
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)

    def helper(loss: Tensor) -> Any:
        return scaler.scale(loss)

    def loss_fn(output: Tensor, batch: Pair) -> Any:
        return helper(output.square().mean())

    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Net, plan, mesh, seed=1)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.01))
        losses = sw.Losses(lambda o, b: {"one": sw.Loss(loss_fn(o, b), 1)}, weights={"one": lambda b: 1})
        for function in (loss_fn, losses):
            try:
                sw.make_step(state, function)
            except UsageError as error:
                assert enabled and "found the GradScaler scaler" in str(error)
            else:
                assert not enabled


@pytest.mark.parametrize("text", ["dp1", "dp1 / mb2"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_left_in_a_loss_function_is_refused(world: World, text: str, enabled: bool) -> None:
    """The loss was reported 65,536 times too large."""
    world(1, scaled, text, enabled)


class Normed(Net):
    """A norm over rows by hand, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - x.mean(0)) / x.std(0) if self.training else x)


class Routed(Net):
    """An expert with room for half of the rows at hand, the first ones of them."""

    def forward(self, x: Tensor) -> Tensor:
        wants = (x[:, 0] > -1).long()
        return super().forward(x) * (wants.cumsum(0) <= len(x) // 2)[:, None]


class Recurrent(Net):
    """Its hidden state goes from one batch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros_like(x) if self.hidden is None else self.hidden
        self.hidden = (x + 0.5 * hidden).tanh().detach()
        return super().forward(x + hidden)


class Following(Net):
    """A running mean over rows goes from one batch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = torch.zeros_like(x[0]) if self.before is None else self.before
        self.before = 0.9 * before + 0.1 * x.detach().mean(0)
        return super().forward(x - before)


class Dropping(Net):
    """Draws, and keeps a memory of each row, by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(ROWS, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(F.dropout(x, 0.5, self.training))
        mine = (x[:, 3] * 1e6).round().long()
        before = self.memory[mine]
        self.memory[mine] = 1.0 + output.detach().square().mean(1)
        return output + 0.1 * before[:, None]


OF_OTHERS: dict[str, type[nn.Module]] = {
    "normed": Normed,
    "routed": Routed,
    "recurrent": Recurrent,
    "following": Following,
    "none": Dropping,
}


def said_of_model(text: str, name: str) -> list[str]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(OF_OTHERS[name], plan, mesh, seed=1)
        step = sw.make_step(
            sw.TrainState(placed, sw.sgd(placed, lr=0.01)), lambda o, batch: F.cross_entropy(o, batch[1])
        )
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x[:, 3] = torch.arange(ROWS) / 1e6
        mine = slice(mesh.batch.rank, None, mesh.batch.size)
        for _ in range(2):
            step((x[mine], torch.arange(ROWS)[mine] % 3))
    return [str(each.message) for each in caught if "the model " in str(each.message)]


@pytest.mark.parametrize("name", ["normed", "routed"])
def test_a_model_that_makes_rows_of_other_rows_is_remarked(world: World, name: str) -> None:
    """Each part had a norm, or a capacity, of its own, without a word."""
    assert world(1, said_of_model, "dp1", name) == [[]]
    found = world(2, said_of_model, "dp2", name)
    assert sorted(map(len, found)) == [0, 1] and "from the other rows that it is given" in sum(found, [])[0]


def test_a_model_that_keeps_something_of_a_micro_batch_is_remarked(world: World) -> None:
    """The second micro-batch had the hidden state of the first, without a word."""
    (text,) = world(1, said_of_model, "dp1 / mb2", "recurrent")[0]
    assert "keeps something of one forward for the next" in text
    assert world(2, said_of_model, "dp2", "recurrent") == [[], []]


def test_a_model_that_keeps_something_of_all_rows_is_remarked(world: World) -> None:
    """Each rank went on with the mean of its own rows, without a word."""
    (text,) = sum(world(2, said_of_model, "dp2", "following"), [])
    assert text.startswith("the model keeps something of all rows of one call for the next")


@pytest.mark.parametrize("text", ["dp1 / mb2", "dp1 / mb3"])
def test_what_a_model_keeps_of_each_row_or_draws_is_not(world: World, text: str) -> None:
    assert world(1, said_of_model, text, "none") == [[]]


class OfSamples:
    """Weighs each sample by its last loss."""

    def __init__(self) -> None:
        self.last = torch.zeros(ROWS, dtype=torch.float64)

    def __call__(self, output: Tensor, batch: Pair) -> Any:
        each = F.cross_entropy(output, batch[1] % 3, reduction="none")
        weights = 1 + self.last[batch[1]]
        self.last[batch[1]] = 0.5 * self.last[batch[1]] + each.detach()
        return sw.mean_over(each * weights)


def of_samples(text: str) -> tuple[list[float], list[str]]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(Net, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.01)), OfSamples())
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        mine = slice(mesh.batch.rank, None, mesh.batch.size)
        losses = [step((x[mine], torch.arange(ROWS)[mine])).loss for _ in range(3)]
    return losses, [str(each.message) for each in caught]


@pytest.mark.parametrize("text", ["dp2", "dp1 / mb2"])
def test_what_a_loss_keeps_of_each_sample_is_as_on_one_process(world: World, text: str) -> None:
    """The look wrote into it: rank 0 went on with the losses of five calls, and trained otherwise; and it was
    remarked, though no sample reads what is another's."""
    expected, _ = world(1, of_samples, "dp1")[0]
    for losses, said_of_it in world(2 if text == "dp2" else 1, of_samples, text):
        assert losses == pytest.approx(expected, rel=1e-12) and not said_of_it


class Doubling(Net):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def hooked(output: Tensor, batch: Pair) -> Tensor:
    if output.requires_grad:
        output.register_hook(lambda grad: 2 * grad)
    return F.cross_entropy(output, batch[1])


def cooled(output: Tensor, batch: Pair) -> Tensor:
    return F.cross_entropy(output.div_(2), batch[1])


def relabelled(output: Tensor, batch: Pair) -> Any:
    batch[1][batch[1] == 2] = -100
    return sw.token_cross_entropy(output, batch[1])


def turned(output: Tensor, batch: Pair) -> Tensor:
    return F.cross_entropy(output, batch[1].add_(1).remainder_(3))


WRITING: dict[str, Callable[..., Any]] = {
    "hook": hooked,
    "output": cooled,
    "labels": relabelled,
    "labels again": turned,
    "input": ALIKE["mean"],
}


def written(text: str, name: str) -> tuple[list[tuple[float, float]], list[str]]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(Doubling if name == "input" else Net, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), WRITING[name])
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        mine = slice(mesh.batch.rank, None, mesh.batch.size)
        steps = [step((x[mine].clone(), torch.arange(ROWS)[mine] // 2 % 3)) for _ in range(3)]
    return [(m.loss, m.grad_norm) for m in steps], [str(each.message) for each in caught]


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("text", ["dp2", "dp1 / mb2", "fsdp2 / mb2"])
def test_what_is_given_may_be_written_into_and_hooked(world: World, text: str, name: str) -> None:
    """A look left its hook on the logits, whose gradient counted once more; labels that it wrote into again ended the
    backward pass in torch's words, and a loss that divides its output was taken for one that remembers."""
    (expected, _), *_ = world(1, written, "dp1", name)
    for found, said_of_it in world(1 if text.startswith("dp1") else 2, written, text, name):
        assert not said_of_it
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)
