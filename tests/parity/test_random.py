"""Randomness keyed by location: under every plan the masks, and so the training, of one process."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.plan.plan import Plan
from tests.parity import grid
from tests.parity.random_models import RULES, SEQ, VOCAB, Block, Masks, Net
from tests.parity.test_grid import cells

ROWS, STEPS, SEED, GLOBAL_BATCH, TOLERANCE = 40, 2, 7, 16, 1e-11
PLANS = [
    "dp1 / mb4",
    "dp1 / recompute=blocks / mb2",
    "dp2 / mb3 / recompute=ops",
    "dp8",
    "fsdp2 / mb3",
    "tp2",
    "tp2 / seq",
    "fsdp2 tp2 / seq / recompute=blocks / mb2",
    "pp2 / 1f1b mb4",
    "pp2 / zero-bubble mb4 / recompute=blocks",
    "pp2 / zero-bubble-v mb4",
    "pp2 fsdp2 tp2 / 1f1b mb4 / seq / recompute=blocks",
]


class Rows:
    def __init__(self) -> None:
        self.ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(11))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index, :-1], "labels": self.ids[index, 1:]}


def loss_fn(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(logits, batch["labels"])


def start(plan: sw.Plan, mesh: sw.Mesh, model=Net, seed: int = SEED) -> sw.TrainState:
    rules = RULES if plan.axes.tp > 1 else None
    placed = sw.apply(model, plan, mesh, seed=seed, rules=rules)
    batch = sw.Batch(global_size=GLOBAL_BATCH, micro_batches=plan.batch.micro_batches)
    return sw.TrainState(placed, sw.adamw(placed, lr=1e-2), sw.loader(Rows(), batch, mesh, seed=SEED))


def train(text: str, model=Net, precision: str = "fp64") -> grid.Trace:
    plan, trace = sw.Plan.parse(f"{text} / {precision}"), grid.Trace()
    with sw.open_mesh(plan) as mesh:
        state = start(plan, mesh, model)
        grid.spy_on_gradients(state, trace)
        for metrics in sw.steps(state, loss_fn, until=STEPS, clip=0.5):
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        trace.params = {n: grid.whole(p) for n, p in state.placed.named_parameters().items()}
    return trace


@functools.cache
def truth(world, model=Net, precision: str = "fp64") -> grid.Trace:
    return grid.merged(world(1, train, "dp1", model, precision))


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", cells(PLANS, {"dp8", "pp2 fsdp2 tp2 / 1f1b mb4 / seq / recompute=blocks"}))
def test_training_with_dropout_is_that_of_one_process(world, plan: str) -> None:
    worst = grid.differences(world(Plan.parse(plan).world, train, plan, timeout_s=300), truth(world))
    assert max(worst.values()) <= TOLERANCE, worst


FUSED = functools.partial(Net, fused=True)


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["cp2 / mb2 / recompute=blocks", "cp2 tp2"])
def test_a_divided_sequence_draws_for_its_own_tokens(world, plan: str) -> None:
    worst = grid.differences(world(Plan.parse(plan).world, train, plan, FUSED), truth(world, FUSED))
    assert max(worst.values()) <= TOLERANCE, worst


class QuietBlock(Block):
    """Draws in modules inside it alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.path(self.ffn(self.norm2(x + self.attn(self.norm1(x)))))


def quiet() -> nn.Module:
    net = Net(fused=True)
    net.blocks = nn.ModuleList(QuietBlock(0.2, fused=True) for _ in range(2))
    return net


def train_compiled(text: str, precision: str) -> grid.Trace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo and inductor trip over warnings of torch's own
        return train(text, quiet, precision)


@pytest.mark.soak  # in every run: compiled blocks, and modules that draw, alone
def test_modules_that_draw_stay_outside_of_compiled_blocks(world) -> None:
    # torch 2.11 and 2.12 compile the backward of fp64 attention on a CPU wrongly, without Shardwise too
    precision = "fp32" if torch.__version__ < "2.13" else "fp64"
    compiled = world(1, train_compiled, "dp1 / mb2 / compile", precision)
    worst = grid.differences(compiled, truth(world, quiet, precision))
    if precision == "fp32":  # AdamW makes of its rounding other parameters; other draws would be in the loss
        assert max(worst["loss"], worst["norm"]) <= 1e-6, worst
        return
    assert max(worst.values()) <= TOLERANCE, worst


def masks(text: str, steps: int = 1) -> dict[str, list[torch.Tensor]]:
    """The attention masks of the last step on this rank, in the order of their making."""
    with sw.open_mesh(plan := sw.Plan.parse(text)) as mesh:
        state = start(plan, mesh)
        step = sw.make_step(state, loss_fn)
        for _ in range(steps):
            forget(state)
            step(next(state.batches))
        return kept(state)


def kept(state: sw.TrainState) -> dict[str, list[torch.Tensor]]:
    return {n: m.kept for part in state.placed.parts for n, m in part.root.named_modules() if isinstance(m, Masks)}


def forget(state: sw.TrainState) -> None:
    for made in kept(state).values():
        made.clear()


def whole(ranks: list[dict[str, list[torch.Tensor]]], name: str, tp: int) -> torch.Tensor:
    """(rows, heads, queries, keys) of all ranks: rows follow the data ranks and micro-batches, heads the tp ranks."""
    heads = [torch.cat(rank[name]) for rank in ranks]
    return torch.cat([torch.cat(heads[i : i + tp], dim=1) for i in range(0, len(heads), tp)])


@functools.cache
def true_masks(world, steps: int = 1) -> dict[str, torch.Tensor]:
    (rank,) = world(1, masks, "dp1", steps)
    return {name: torch.cat(made) for name, made in rank.items()}


@pytest.mark.share(3)
@pytest.mark.parametrize("plan", ["dp2 / mb3", "dp8", "fsdp2 tp2 / seq / bf16 / mb2"])
def test_masks_are_the_same_bits_on_any_number_of_ranks(world, plan: str) -> None:
    parsed = Plan.parse(plan)
    ranks, truth = world(parsed.world, masks, plan), true_masks(world)
    assert len(truth) == 4 and not torch.equal(truth["blocks.0.attn.drop"], truth["blocks.1.attn.drop"])
    for name, mask in truth.items():
        assert torch.equal(whole(ranks, name, parsed.axes.tp), mask), name


def test_a_recomputed_block_draws_the_same_masks(world) -> None:
    (rank,) = world(1, masks, "dp1 / recompute=blocks")
    for name, mask in true_masks(world).items():
        first, again = rank[name]
        assert torch.equal(first, mask) and torch.equal(again, mask)


def test_each_step_draws_other_masks(world) -> None:
    name = "blocks.0.attn.drop"
    assert not torch.equal(true_masks(world, 1)[name], true_masks(world, 2)[name])


def save_after_one(directory: str) -> None:
    with sw.open_mesh(plan := sw.Plan.parse("fsdp2")) as mesh:
        state = start(plan, mesh)
        sw.make_step(state, loss_fn)(next(state.batches))
        sw.Store(directory).save(state).wait()


def masks_after_resume(directory: str) -> dict[str, list[torch.Tensor]]:
    with sw.open_mesh(plan := sw.Plan.parse("dp2 / mb2")) as mesh:
        state = start(plan, mesh, seed=SEED + 1)
        sw.Store(directory).load_latest(state)
        sw.make_step(state, loss_fn)(next(state.batches))
        return kept(state)


def test_a_resumed_run_draws_the_masks_of_the_run_that_was_saved(world, tmp_path: Path) -> None:
    world(2, save_after_one, str(tmp_path))
    ranks, truth = world(2, masks_after_resume, str(tmp_path)), true_masks(world, 2)
    for name, mask in truth.items():
        assert torch.equal(whole(ranks, name, 1), mask), name


def masks_by_hand(text: str, ends: list[int], tokens: int = SEQ) -> dict[str, list[torch.Tensor]]:
    """A loop of the user's own: rank r gets rows from `ends[r - 1]` to `ends[r]`, those of rank 0 cut to `tokens`."""
    with sw.open_mesh(plan := sw.Plan.parse(text)) as mesh:
        state, rank = start(plan, mesh), mesh.batch.rank
        ids = Rows().ids[[0, *ends][rank] : ends[rank], : SEQ + 1 if rank else tokens + 1]
        sw.make_step(state, loss_fn)({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
        return kept(state)


def test_rows_that_the_user_divides_and_pads_unevenly_keep_their_masks(world) -> None:
    own = SEQ - 3  # rank 0's rows are padded to the longest of them alone
    one, (first, second) = world(1, masks_by_hand, "dp1", [8]), world(2, masks_by_hand, "dp2 / mb2", [5, 8], own)
    for name in one[0]:
        truth = whole(one, name, 1)
        assert torch.equal(torch.cat(first[name]), truth[:5, :, :own, :own])
        assert torch.equal(torch.cat(second[name]), truth[5:])


def losses_unkeyed(text: str) -> list[float]:
    torch.manual_seed(0)
    with sw.open_mesh(plan := sw.Plan.parse(f"{text} / fp64")) as mesh:
        state = start(plan, mesh)
        state.placed = state.placed.with_(randomness=None)
        return [m.loss for m in sw.steps(state, loss_fn, until=1)]


def test_without_keys_the_layout_changes_the_training(world) -> None:
    ((one,),), ((two,), _) = world(1, losses_unkeyed, "dp1"), world(2, losses_unkeyed, "dp2")
    assert abs(one - two) > 1e-4


def test_evaluation_draws_nothing(world) -> None:
    assert world(1, evaluated)[0]


def evaluated() -> bool:
    with sw.open_mesh(plan := sw.Plan.parse("dp1")) as mesh:
        state = start(plan, mesh)
        sw.make_step(state, loss_fn)(next(state.batches))
        before = torch.get_rng_state()
        losses = [
            float(sw.evaluate(state.placed, loss_fn, sw.eval_batches(Rows(), plan.batch, mesh, global_size=8)).sum)
            for _ in range(2)
        ]
        return losses[0] == losses[1] and torch.equal(before, torch.get_rng_state())


class Odd(nn.Module):
    """Draws in one way that is refused."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True) if kind == "module" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        match self.kind:
            case "fused":
                return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
            case "module":
                return self.attention(x, x, x)[0]
            case "multinomial":
                return x * torch.multinomial(x.flatten(1).softmax(-1), 1).unsqueeze(-1)
            case "generator":
                return x + torch.rand(x.shape, generator=torch.Generator())
            case "all pairs of rows":
                return x + torch.rand(len(x), len(x)).mean()
            case "data":
                return F.dropout(x, 0.5) if x.sum() > -1e9 else x
            case _:
                return checkpoint(nn.Dropout(0.5), x, use_reentrant=False)


ADVICE = {
    "fused": "the model itself calls scaled_dot_product_attention.*set this dropout to 0, or write the attention out",
    "module": "attention calls multi_head_attention_forward.*set this dropout to 0",
    "multinomial": "the model itself calls multinomial.*Gumbel",
    "generator": "generator of its own",
    "all pairs of rows": "random call rand in the model itself: found a tensor whose rows cannot be told",
    "checkpoint": "calls dropout inside torch.utils.checkpoint.*recompute=blocks",
    "data": "does not run without data.*torch.where.*dropout 0",
}


def refusal(text: str, kind: str) -> str:
    with sw.open_mesh(plan := sw.Plan.parse(text)) as mesh:
        placed = sw.apply(functools.partial(Odd, kind), plan, mesh)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda output, batch: output.square().mean())
        try:
            step(torch.ones(2, 3, 4))
        except ModelError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("kind", ADVICE)
def test_what_cannot_be_keyed_is_refused_by_name(world, kind: str) -> None:
    for message in world(2, refusal, "dp2", kind):
        assert re.search(ADVICE[kind], message), message


@pytest.mark.parametrize("kind", ["all pairs of rows", "data"])
def test_one_process_with_one_micro_batch_need_not_know_the_shape_of_the_whole(world, kind: str) -> None:
    assert world(1, refusal, "dp1", kind) == [""]


def drawing_modules(rates: tuple[float, ...]) -> list[list[str]]:
    """Names of the modules that are wrapped, after a step with each rate."""
    found = []
    with sw.open_mesh(plan := sw.Plan.parse("dp1")) as mesh:
        placed = sw.apply(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(rates[0])), plan, mesh)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda output, batch: output.square().mean())
        for rate in rates:
            placed.module[1].p = rate
            step(torch.ones(2, 4))
            found.append([name for name, module in placed.module.named_modules() if "forward" in vars(module)])
    return found


def test_nothing_is_installed_where_nothing_is_drawn(world) -> None:
    assert world(1, drawing_modules, (0.0, 0.0, 0.1))[0] == [[], [], ["1"]]


class Shared(nn.Module):
    """Two blocks with one dropout module."""

    def __init__(self) -> None:
        super().__init__()
        drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), drop) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def refusal_of_blocks(text: str, model) -> str:
    with sw.open_mesh(plan := sw.Plan.parse(text)) as mesh:
        try:
            placed = sw.apply(model, plan, mesh)
            state = sw.TrainState(placed, sw.sgd(placed, lr=0.1))
            sw.make_step(state, lambda output, batch: output.square().mean())(torch.ones(2, 4))
        except ModelError as error:
            return str(error)
        return ""


def test_one_dropout_module_in_two_blocks_cannot_be_cut(world) -> None:
    for message in world(2, refusal_of_blocks, "pp2 / gpipe mb2", Shared):
        assert "random call dropout in blocks.0.1: it is called by the block blocks.1" in message
    assert world(1, refusal_of_blocks, "dp1 / mb2", Shared) == [""]
