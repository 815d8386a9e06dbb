"""Stacks of fewer experts than shards are cut inside of the experts: the same training, updates and checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralForCausalLM

import shardwise as sw
from shardwise.checkpoint.compare import verify
from shardwise.checkpoint.hf_weights import load_hf
from shardwise.models.hf import hf_config, hf_factory
from shardwise.models.moe import MoEDecoder
from shardwise.parallel.init import init_model, local_slice
from shardwise.testing import World
from shardwise.testing.fake import fake_world
from tests.parity import grid, moe_models
from tests.parity.placing import State, full
from tests.parity.test_experts import BATCH, check
from tests.parity.test_hf_weights import bytes_read, saved

moe_models.MODELS |= {
    "pair": functools.partial(MoEDecoder, moe_models.config(num_experts=2, score="sigmoid", bias_rate=0.05)),
    "pair-narrow": functools.partial(MoEDecoder, moe_models.config(num_experts=2, ffn_dim=18)),
}
"""Two experts; 4 shards divide no rows of the second one's `w1` and `w3`, but their columns."""


@pytest.mark.share(8)
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("fsdp4", "pair"),
        ("fsdp4 / reshard=false / mb2", "pair-narrow"),
        ("fsdp4 ep2 / zero2 / mb2", "pair"),
        ("dp2 fsdp4 ep2 / zero1", "pair"),
        ("fsdp4 tp2 / recompute=blocks", "pair"),
        ("fsdp4 tp2 ep2 / seq / mb2", "pair-narrow"),
        ("fsdp2 cp2", "pair"),
        ("pp2 fsdp4 / 1f1b mb2", "pair"),
        ("fsdp4 / reshard=2", "pair"),  # torch regroups along the first dim only
    ],
)
def test_experts_that_are_cut_train_as_in_one_process(world: World, plan: str, model: str) -> None:
    check(world, plan, model)


@pytest.mark.parametrize(
    ("plan", "text", "local"),
    [
        ("fsdp64", "Shard(1) over dp_shard", (8, 1, 48)),
        ("fsdp64 ep8", "experts: Shard(0) over ep; Shard(1) over expert_shard", (1, 8, 48)),
        ("dp2 fsdp32 tp2 ep8 / zero1", "experts: Shard(0) over ep; Shard(1) over expert_shard", (1, 8, 48)),
        ("fsdp24", "Shard(2) over dp_shard", (8, 64, 2)),
        ("fsdp40", "Shard(0) over dp_shard", (0, 64, 48)),  # 40 divide neither: filled up
        ("fsdp32 / reshard=2", "Shard(0) over dp_shard", (0, 64, 48)),  # torch regroups along the first dim
        ("fsdp8", "Shard(0) over dp_shard", (1, 64, 48)),
    ],
)
def test_where_experts_lie(plan: str, text: str, local: tuple[int, ...]) -> None:
    make = functools.partial(MoEDecoder, moe_models.config(num_experts=8, ffn_dim=64, dim=48))
    parsed = sw.Plan.parse(plan)
    rank = parsed.world - 1
    with fake_world(parsed.world, rank), sw.open_mesh(parsed, device="cpu") as mesh:
        placed = sw.apply(make, parsed, mesh)
        name = "layers.1.moe.experts.w1"
        assert placed.placements[name].text == text
        parameter = placed.named_parameters()[name]
        assert tuple(parameter.to_local().shape) == local
        assert torch.equal(
            placed.local_parameters()[name], local_slice(init_model(make).get_parameter(name), parameter)
        )
        assert placed.placements["layers.1.moe.router.weight"].text.endswith("Shard(0) over dp_shard")


# ---------------------------------------------------------------- updates


class Stacks(nn.Module):
    """Over 4 shards `rows` is cut along its second dim, `columns` along its third, in the middle of low-bit blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(2, 8, 300))
        self.columns = nn.Parameter(torch.empty(3, 2, 1200))
        self.uneven = nn.Parameter(torch.empty(3, 5, 7))
        self.matrix = nn.Linear(40, 6)
        for parameter in (self.rows, self.columns, self.uneven):
            nn.init.normal_(parameter)


DIMS = {"rows": 1, "columns": 2, "uneven": 0}
RULES: dict[str, Callable[[sw.Placed], Any]] = {
    "adamw": lambda placed: sw.adamw(placed, 1e-2),
    "lion": lambda placed: sw.lion(placed, 1e-2),
    "lamb": lambda placed: sw.lamb(placed, 1e-2),
    "muon": lambda placed: sw.muon(placed, 1e-2),
    "adafactor": lambda placed: sw.adafactor(placed, 1e-2),
    **{kind: functools.partial(sw.adamw, lr=1e-2, state_dtype=kind) for kind in ("bf16-stochastic", "8bit", "4bit")},
    "stochastic": lambda placed: sw.stochastic_adamw(placed, 1e-2),
}


BY_ELEMENT = ("bf16-stochastic", "8bit", "4bit", "stochastic")
"""Rules in which a number's last bit decides to which of two it is rounded."""


def updated(text: str) -> dict[str, dict[str, Tensor]]:
    """Every tensor of parameters and optimizer after three updates from given gradients, by rule."""
    found = {}
    with sw.open_mesh(sw.Plan.parse(text)) as mesh:
        for rule, make in RULES.items():
            plan = sw.Plan.parse(f"{text} / {'bf16-pure' if rule == 'stochastic' else 'fp64'}")
            placed = sw.apply(Stacks, plan, mesh, seed=1)
            cut = {name: placed.placements[name].text for name in ("rows", "columns", "uneven")}
            assert plan.world == 1 or cut == {n: f"Shard({d}) over dp_shard" for n, d in DIMS.items()}
            state = State(placed, make(placed))
            state.run(3)
            found[rule] = state.whole()
    return found


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["fsdp4", "dp2 fsdp4"])
def test_every_rule_makes_the_update_of_one_process(world: World, plan: str) -> None:
    (want,) = world(1, updated, "dp1")
    for found in world(sw.Plan.parse(plan).world, updated, plan):
        for rule, tensors in want.items():
            exact = rule in BY_ELEMENT  # others' kernels, and sums over shards, round in another order
            for name, tensor in tensors.items():
                mine = found[rule][name]
                same = torch.equal(mine, tensor) if exact else torch.allclose(mine, tensor, rtol=1e-12, atol=1e-13)
                assert same, (rule, name)


# ---------------------------------------------------------------- checkpoints


def trained(text: str, folder: str, until: int) -> dict[str, Tensor]:
    """Go on from the checkpoint in a folder, if there is one, to a step, and save there; the whole state."""
    plan = sw.Plan.parse(f"{text} / fp32")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(moe_models.MODELS["pair"], plan, mesh, seed=grid.SEED)
        batches = sw.loader(grid.Rows(), grid.batch(plan, BATCH), mesh, seed=grid.SEED)
        state = sw.TrainState(placed, sw.adamw(placed, lr=grid.LR, state_dtype="bf16"), batches)
        store = sw.Store(folder, keep=9)
        loaded = store.load_latest(state)
        assert loaded is None or loaded.changes == ()
        for _ in sw.steps(state, moe_models.LOSSES, until=until, clip=grid.CLIP):
            pass
        store.save(state).wait()
        return {name: full(tensor) for name, tensor in state.tensors().items()}


@pytest.mark.share(3)
@pytest.mark.parametrize(("first", "then"), [("fsdp4", "fsdp2"), ("fsdp2", "fsdp4"), ("fsdp4", "fsdp4 ep2")])
def test_a_checkpoint_loads_where_experts_are_cut_otherwise(
    world: World, tmp_path: Path, first: str, then: str
) -> None:
    saved = world(4 if first == "fsdp4" else 2, trained, first, str(tmp_path), 1)[0]
    assert verify(tmp_path).step == 1  # every bit, by other code than a load
    for state in world(sw.Plan.parse(then).world, trained, then, str(tmp_path), 1):
        assert state.keys() == saved.keys() and all(torch.equal(state[name], saved[name]) for name in saved)


@pytest.mark.soak  # in every run: the state is loaded bit by bit, above
def test_a_resumed_run_equals_the_uninterrupted_one_bit_by_bit(world: World, tmp_path: Path) -> None:
    straight = world(4, trained, "fsdp4", str(tmp_path / "a"), 3)[0]
    world(4, trained, "fsdp4", str(tmp_path / "b"), 1)
    resumed = world(4, trained, "fsdp4", str(tmp_path / "b"), 3)[0]
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


# ---------------------------------------------------------------- weights of transformers


def loaded(text: str, source: str) -> dict[str, Tensor]:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = load_hf(sw.apply(hf_factory(hf_config(source)), plan, mesh, seed=1), source)
        return {name: full(p) for name, p in placed.named_parameters().items()}


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["fsdp4", "fsdp4 ep2"])
def test_of_an_expert_a_rank_reads_its_own_part(world: World, tmp_path: Path, plan: str) -> None:
    """Gate and up matrices become one, of which a rank holds rows of either."""
    directory = str(saved(tmp_path, "mixtral", num_local_experts=2))
    for read, held, _ in world(4, bytes_read, plan, directory):
        experts = sum(size for key, size in read.items() if ".experts." in key)
        assert experts == sum(size for name, size in held.items() if ".experts." in name)
    whole = MixtralForCausalLM.from_pretrained(directory, local_files_only=True).state_dict()
    for tensors in world(4, loaded, plan, directory):
        assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())
