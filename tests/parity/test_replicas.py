"""Planted differences between ranks that must hold the same bits: named, healed by majority, refused at step 0."""

from __future__ import annotations

import functools
import warnings
from typing import Any, cast

import pytest
import torch
from torch import nn
from torchao.optim import AdamW8bit

import shardwise as sw
from shardwise.errors import ReplicaError
from shardwise.models.moe import MoEDecoder
from shardwise.testing import World
from shardwise.train.guards.replicas import Replicas, checksum
from shardwise.train.updates.update_rules import local_shard
from tests.parity import grid, moe_models, points
from tests.parity.points import Case
from tests.parity.test_nonfinite import is_same, snapshot

CASE = Case(steps=6, clip=None)
CHECK = sw.StepOptions(check_replicas=1)


def flip(state: sw.TrainState, name: str) -> None:
    """Change the lowest bit of one element of a parameter on this rank."""
    local = local_shard(state.placed.named_parameters()[name].detach())
    local.view(torch.int64).view(-1)[-1] ^= 1


def faulty(text: str, rank: int, name: str, options: sw.StepOptions = CHECK, at: int = 3) -> Any:
    """A bit flips on a rank, and on those after it, after step `at`; what was said, and the end."""
    events: list[Any] = []
    with points.placed_state(text, CASE) as state:
        step, batches = sw.make_step(state, points.weighted, options=options), cast(Any, state.batches)
        try:
            while state.step < CASE.steps:
                if state.step == at and state.mesh.rank >= rank:
                    flip(state, name)
                events += step(next(batches)).events
        except ReplicaError as error:
            return str(error)
        own = {key: local_shard(tensor).clone() for key, tensor in state.tensors().items()}
        return events, own, snapshot(state)


@pytest.mark.parametrize(
    ("plan", "name"), [("dp3", "last.weight"), pytest.param("dp3 fsdp2", "first.bias", marks=pytest.mark.soak)]
)
def test_a_flipped_bit_is_named_and_healed_from_the_majority(world: World, plan: str, name: str) -> None:
    """Healed in the step in which it is seen: the copies are equal again, optimizer state and all."""
    size = sw.Plan.parse(plan).world
    ranks = world(size, faulty, f"{plan} / fp64", size - 1, name)
    for events, _, _ in ranks:
        [event] = events
        assert (event["event"], event["step"], event["ranks"]) == ("healed", 4, [size - 1])
        assert name in event["parameters"] and not event["spread"]
    same = [own for rank, (_, own, _) in enumerate(ranks) if rank % (size // 3) == (size - 1) % (size // 3)]
    assert all(is_same(own, same[0]) for own in same)


def held_alike(text: str, flips: list[tuple[int, str, int]], every: int = 1) -> Any:
    """After step 2 bits flip on some ranks: (rank, tensor, bit). What was said, the end, and who holds what."""
    with points.placed_state(text, CASE) as state:
        step = sw.make_step(state, points.weighted, options=sw.StepOptions(check_replicas=every))
        batches, events = cast(Any, state.batches), list[Any]()
        while state.step < CASE.steps:
            for rank, name, bit in flips if state.step == 2 else []:
                if state.mesh.rank == rank:
                    local_shard(state.tensors()[name]).view(torch.int64).view(-1)[-1:] ^= 1 << bit
            events += step(next(batches)).events
        alike = {name: ends for ends, names in Replicas(state)._groups.items() for name in names}
        return events, {key: local_shard(tensor).clone() for key, tensor in state.tensors().items()}, alike


def differing_holders(ranks: list[Any]) -> set[str]:
    """Parameters, with their optimizer's state, that some ranks should hold alike and do not."""
    firsts: dict[Any, torch.Tensor] = {}
    keys = [(own, alike, key) for _, own, alike in ranks for key in own]
    named = [
        (own[key], key, alike.get(key.partition(".")[2]) or alike.get(key[6:].rpartition(".")[0]))
        for own, alike, key in keys
    ]
    return {
        key for tensor, key, ends in named if ends and not torch.equal(tensor, firsts.setdefault((key, ends), tensor))
    }


@pytest.mark.parametrize(
    ("plan", "every", "faulty", "spread", "said"),
    [
        ("dp3 tp2", 1, [5], [1, 3], "step 3 may have been trained with"),
        ("dp2 tp2", 2, [3], [1], "steps 3 to 4 may have been trained with"),
    ],
)
def test_a_bit_that_has_changed_the_gradients_of_its_tp_index_is_healed(
    world: World, plan: str, every: int, faulty: list[int], spread: list[int], said: str
) -> None:
    """A tensor that `tp` replicates: the gradients that each tp index makes for itself differ from then on."""
    size = sw.Plan.parse(plan).world
    ranks = world(size, held_alike, f"{plan} / fp64", [(size - 1, "model.first.weight", 50)], every)
    for [event], _, _ in ranks:
        assert (event["event"], event["ranks"], event["spread"]) == ("healed", faulty, spread)
        assert event["parameters"][0] == "first.weight" and "last.weight" in event["parameters"]
        assert event["said"].startswith(said) and "a checkpoint of that step" in event["said"]
    assert not differing_holders(ranks)


@pytest.mark.parametrize(
    ("plan", "faulty"), [("dp2 tp2", [0, 1, 3]), pytest.param("dp3 tp2", [0, 5], marks=pytest.mark.soak)]
)
def test_faults_at_every_tp_index_are_healed(world: World, plan: str, faulty: list[int]) -> None:
    """Both tp indices were trained with wrong bits. Of two replicas of a bias that tp sums apart, both may be it."""
    size = sw.Plan.parse(plan).world
    flips = [(0, "model.first.weight", 50), (size - 1, "model.last.bias", 50)]
    ranks = world(size, held_alike, f"{plan} / fp64", flips)
    for [event], _, _ in ranks:
        assert (event["event"], event["ranks"]) == ("healed", faulty)
        assert {"first.weight", "last.bias", "last.weight"} <= set(event["parameters"])
    assert not differing_holders(ranks)


def test_each_tensor_is_healed_from_its_own_majority(world: World) -> None:
    """Two ranks of four have a wrong bit, in other tensors: of all together only two agree."""
    flips = [(2, "model.first.weight", 50), (3, "model.last.weight", 50)]
    ranks = world(4, held_alike, "dp4 / fp64", flips)
    assert ranks[0][0][0]["ranks"] == [2, 3] and not differing_holders(ranks)


def test_a_bit_of_the_optimizer_that_is_seen_at_once_leaves_nothing(world: World) -> None:
    """No gradient was made with it: the end is that of a run that nobody disturbed, in every bit."""
    ranks = world(3, held_alike, "dp3 / fp64", [(2, "optim.last.weight.exp_avg", 50)])
    assert ranks[0][0][0]["ranks"] == [2]
    undisturbed = world(3, held_alike, "dp3 / fp64", [])
    assert not undisturbed[0][0] and all(is_same(own, undisturbed[0][1]) for _, own, _ in ranks)


def state_flipped(text: str, optimizer: str, changes: dict[int, str]) -> Any:
    """After two steps the lowest bit of a tensor of the optimizer's changes on some ranks; what the next checks say."""
    with points.placed_state(text, CASE) as state:
        state = sw.TrainState(state.placed, OPTIMIZERS[optimizer](state.placed), state.batches)
        for _ in sw.steps(state, points.weighted, until=2):
            pass
        kept, seen = state.optimizer.local_state(), list[Any]()
        replicas = Replicas(state)
        if state.mesh.rank in changes:
            kept[changes[state.mesh.rank]].view(-1)[-1:].view(torch.uint8)[0] ^= 1
        try:
            for number in range(4):
                seen += [(number, *event.items()) for event in replicas.check()]
        except ReplicaError as error:
            return str(error)
        sums = {key: checksum(tensor) for key, tensor in state.optimizer.local_state().items()}
        return [(number, dict(items)) for number, *items in seen], sums


OPTIMIZERS = {
    "adamw": lambda placed: sw.adamw(placed, lr=1e-2),
    "bf16": lambda placed: sw.adamw(placed, lr=1e-2, state_dtype="bf16"),
    "sgd": lambda placed: torch.optim.SGD(placed.parameters(), lr=1e-2, momentum=0.9),
    "several": lambda placed: sw.several(
        placed, {"*bias": lambda p: sw.adamw(p, lr=1e-3), "*": lambda p: sw.muon(p, lr=1e-2)}
    ),
}


@pytest.mark.parametrize(
    ("plan", "optimizer", "name", "check"),
    [
        ("dp3 / fp64", "adamw", "last.weight.exp_avg", 0),
        ("dp3 / fp64", "adamw", "last.weight.exp_avg_sq", 1),
        ("dp3 / fp64", "adamw", "first.bias.step", 2),
        ("dp3 / bf16-pure", "adamw", "last.weight.master", 2),
        ("dp3 / fp64", "bf16", "last.weight.exp_avg_sq", 1),
        ("dp3 / fp64", "sgd", "last.weight.momentum_buffer", 0),
        ("dp3 / fp64", "several", "first.bias.exp_avg", 0),
    ],
)
def test_a_bit_of_the_optimizer_that_no_weight_shows_is_seen_in_its_turn(
    world: World, plan: str, optimizer: str, name: str, check: int
) -> None:
    """Each check looks at one tensor of each parameter's state; healed is that one alone."""
    for seen, sums in (ranks := world(3, state_flipped, plan, optimizer, {2: f"optim.{name}"})):
        [(number, event)] = seen
        assert (number, event["ranks"], event["parameters"]) == (check, [2], [f"optim.{name}"])
        assert event["said"].startswith("state of the optimizer alone") and sums == ranks[0][1]


def test_a_bit_of_the_optimizer_of_one_of_two_is_an_error_that_names_it(world: World) -> None:
    for text in world(2, state_flipped, "dp2 / fp64", "adamw", {1: "optim.last.weight.exp_avg_sq"}):
        assert text.startswith("step 2: optim.last.weight.exp_avg_sq (1 tensors) must be equal on ranks 0, 1: found")
        assert "more than half" in text


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("plan", ["dp2 tp2 / fp64", "dp2 fsdp2 / fp64", "pp2 dp2 / mb2 fp64"])
def test_what_an_optimizer_keeps_is_alike_where_its_parameter_is(world: World, plan: str, optimizer: str) -> None:
    assert all(not seen for seen, _ in world(4, state_flipped, plan, optimizer, {}))


class Remarking(torch.optim.SGD):
    """Keeps a text beside each parameter, which no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["remark"] = "stepped"


def of_another_library(kind: str, flips: bool) -> tuple[list[Any], int]:
    """After two steps a bit of the state flips on the last rank; what checks say, and the sum of 8-bit codes."""
    plan = sw.Plan.parse("dp3 / fp32")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no checkpoint will hold the state
        placed = sw.apply(lambda: nn.Linear(64, 64), plan, mesh, seed=1)
        make: Any = AdamW8bit if kind == "8bit" else functools.partial(Remarking, momentum=0.9)
        optimizer = make(placed.parameters(), lr=1e-2)
        state = sw.TrainState(placed, optimizer)
        step = sw.make_step(state, lambda output, _: sw.mean_over(output.square().sum(1)), options=CHECK)
        rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).tensor_split(3)[mesh.batch.rank]
        events = [event for _ in range(2) for event in step(rows).events]
        kept, replicas = optimizer.state[placed.named_parameters()["weight"]], Replicas(state)
        if flips and mesh.rank == 2:
            kept["exp_avg"].codes.view(-1)[5] ^= 1
        events += [event for _ in range(3) for event in replicas.check()]
        return events, int(kept["exp_avg"].codes.long().sum()) if kind == "8bit" else 0


def test_state_in_tensors_of_another_library_is_compared_by_what_they_are_made_of(world: World) -> None:
    """A check ended in an error of the library's tensors, which have no bits of their own."""
    assert world(3, of_another_library, "8bit", False)[0][0] == []
    ranks = world(3, of_another_library, "8bit", True)
    for [event], codes in ranks:
        assert (event["ranks"], event["parameters"]) == ([2], ["optim.weight.exp_avg.codes"])
        assert codes == ranks[0][1]


def test_state_that_no_checkpoint_holds_is_not_compared(world: World) -> None:
    """A run that had been told so at its first step, and trained on, ended at its first check."""
    assert all(not events for events, _ in world(3, of_another_library, "remark", False))


def quiet(text: str, state_dtype: str) -> tuple[list[Any], set[str]]:
    """Four steps of a mixture of experts with an average, a check after each: what was said, and the state compared."""
    plan, events = sw.Plan.parse(text), list[Any]()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(functools.partial(MoEDecoder, WIDE), plan, mesh, seed=1)
        batches = sw.loader(grid.Rows(), grid.batch(plan, 8), mesh, seed=3)
        optimizer = sw.adamw(placed, lr=1e-2, state_dtype=state_dtype)
        state = sw.TrainState(placed, optimizer, batches, ema=sw.Ema(placed, 0.9))
        step = sw.make_step(state, moe_models.LOSSES, options=CHECK)
        for _ in range(4):
            events += step(next(batches)).events
        held = [name for tensors in Replicas(state)._held(is_trained=True).values() for name in tensors]
        return events, {name.rpartition(".")[2] for name in held if name.startswith("optim.")}


WIDE = moe_models.config(dim=64, ffn_dim=64, num_layers=1, score="sigmoid", bias_rate=0.05)
"""Weights large enough for averages of 8 bits."""


@pytest.mark.parametrize(
    ("plan", "state_dtype", "kept"),
    [
        ("dp2 fsdp2 ep2 / fp32", "8bit", {"step", "exp_avg", "exp_avg_sq", "codes", "codes_sq", "scale", "scale_sq"}),
        ("dp2 tp2 / mb2 / fp16", "fp32", {"step", "exp_avg", "exp_avg_sq"}),
        ("dp2 fsdp2 zero1 / mb2 / fp32 offload=state", "fp32", {"step", "exp_avg", "exp_avg_sq"}),
        pytest.param("dp2 cp2 / fp32", "8bit", {"codes"}, marks=pytest.mark.soak),
        pytest.param("dp2 fsdp2 zero2 / mb2 / bf16-pure", "bf16", {"master"}, marks=pytest.mark.soak),
    ],
)
def test_nothing_is_said_where_experts_scalers_and_codes_are_alike(
    world: World, plan: str, state_dtype: str, kept: set[str]
) -> None:
    for events, found in world(4, quiet, plan, state_dtype):
        assert not events and kept <= found, (events, found)


class Counting(nn.Module):
    """Counts its rows in a buffer that checkpoints hold; another one stays empty, a third is the rank's own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("later", torch.empty(3))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.scratch += len(x)
        return self.last(x)


def flipped(text: str, name: str) -> Any:
    """A bit of a buffer or an average flips on the last rank after step 2; what was said, and what it is at the end."""
    plan, events = sw.Plan.parse(text), list[Any]()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Counting, plan, mesh, seed=1)
        state = sw.TrainState(
            placed,
            sw.adamw(placed, lr=0.01),
            sw.loader(points.Points(64), 9, mesh, seed=3),
            ema=sw.Ema(placed, 0.9),
        )
        with torch.no_grad():
            placed.named_buffers()["later"].fill_(float(mesh.rank))  # what lies in memory that nobody has filled
        step = sw.make_step(state, points.weighted, options=sw.StepOptions(check_replicas=2))
        batches = cast(Any, state.batches)
        while state.step < 6:
            if state.step == 2 and mesh.rank == mesh.world - 1:
                held = local_shard(state.tensors()[name])
                held.view(torch.uint8).view(-1)[-1] ^= 1
            try:
                events += step(next(batches)).events
            except ReplicaError as error:
                return str(error)
        return events, local_shard(state.tensors()[name]).clone()


@pytest.mark.parametrize("name", ["model.seen", "ema.last.weight"])
def test_a_flipped_bit_of_a_buffer_or_an_average_is_healed_too(world: World, name: str) -> None:
    ranks = world(3, flipped, "dp3 / fp64", name)
    for events, tensor in ranks:
        [event] = events
        assert (event["step"], event["ranks"], event["parameters"]) == (4, [2], [name.removeprefix("model.")])
        assert torch.equal(tensor, ranks[0][1])
    for text in world(2, flipped, "fsdp2 / fp64", "model.seen"):
        assert text.startswith("step 4: seen (1 tensors) must be equal on ranks 0, 1: found other bits on rank 0, 1")


def test_negative_control_without_the_check_the_rank_stays_different(world: World) -> None:
    ranks = world(3, faulty, "dp3 / fp64", 2, "last.weight", sw.StepOptions())
    assert not ranks[0][0] and not is_same(ranks[0][1], ranks[2][1])
    ranks = world(3, faulty, "dp3 / fp64", 7, "last.weight")  # and nothing is said where nothing is wrong
    assert not ranks[0][0] and is_same(ranks[0][1], ranks[2][1])


@pytest.mark.parametrize(("plan", "name"), [("dp2", "last.weight"), ("tp2", "first.weight")])
def test_without_a_majority_it_stops_and_names_both(world: World, plan: str, name: str) -> None:
    for text in world(2, faulty, f"{plan} / fp64", 1, name):
        assert text.startswith(f"step 4: {name}") or name in text
        assert "must be equal on ranks 0, 1" in text and "more than half" in text


def test_without_a_majority_those_that_agree_are_named_together(world: World) -> None:
    for text in world(4, faulty, "dp4 / fp64", 2, "last.weight"):
        assert "found other bits on rank 0, 1, 2, 3 (alike: 0, 1; 2, 3); needed: more than half" in text


def test_what_is_sharded_is_not_compared(world: World) -> None:
    for events, _, _ in world(2, faulty, "fsdp2 / fp64", 1, "last.weight"):
        assert not events


@pytest.mark.parametrize(("plan", "name"), [("dp2", "layers.1.up.bias"), ("tp2", "last.bias")])
def test_initial_values_that_depend_on_the_rank_are_refused(world: World, plan: str, name: str) -> None:
    for text in world(2, faulty, f"{plan} / fp64", 1, name, sw.StepOptions(), 0):
        assert text.startswith(f"step 0: {name} (1 tensors)") and "let apply() initialise" in text


def holders(text: str) -> dict[tuple[int, int], list[str]]:
    with points.placed_state(text, CASE) as state:
        return {ends: sorted(names) for ends, names in Replicas(state)._groups.items()}


def test_who_holds_the_same(world: World) -> None:
    replicated = {"first.bias", "first.weight", "last.bias", "last.weight"}
    for rank, groups in enumerate(world(4, holders, "dp2 tp2 / fp64")):
        assert set(groups[0, 3]) == replicated | {f"layers.{i}.down.bias" for i in range(4)}
        assert "layers.0.up.weight" in groups[rank % 2, rank % 2 + 2]
    for rank, groups in enumerate(world(4, holders, "dp2 fsdp2 / fp64")):
        assert list(groups) == [(rank % 2, rank % 2 + 2)]
    assert all(not groups for groups in world(2, holders, "fsdp2 / fp64"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_a_checksum_sees_each_bit_and_each_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(300).to(dtype).view(3, 100)
    truth = checksum(tensor)
    swapped = tensor.clone()
    swapped[0, 3], swapped[2, 5] = tensor[2, 5], tensor[0, 3]
    assert checksum(swapped) != truth and checksum(tensor.t().contiguous().t()) == truth
    for bit in range(0, tensor.numel() * tensor.element_size() * 8, 37):
        flipped = tensor.clone()
        flipped.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        assert checksum(flipped) != truth


class Noisy(torch.optim.SGD):
    """Adds noise to the weights, from a generator of the process."""

    def __init__(self, parameters: Any, seed: int) -> None:
        super().__init__(parameters, lr=0.01)
        self.draw = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            local = local_shard(parameter)
            local.add_(torch.randn(local.shape, generator=self.draw, dtype=local.dtype), alpha=1e-3)


def noisy(text: str, by_rank: bool) -> str:
    with points.placed_state(text, CASE) as state:
        optimizer = Noisy(state.placed.parameters(), seed=state.mesh.rank if by_rank else 7)
        state = sw.TrainState(state.placed, optimizer, state.batches)
        try:
            for _ in sw.steps(state, points.weighted, until=2):
                pass
        except ReplicaError as error:
            return f"{state.step}: {error}"
        return ""


def test_an_update_that_depends_on_the_rank_is_refused_after_the_first(world: World) -> None:
    """Nobody asked for checks: three replicas would be three models, and a checkpoint parts of each."""
    for text in world(3, noisy, "dp3 / fp64", True):
        assert text.startswith("1: step 1: first.weight") and "after the first update; needed: the same" in text
    assert world(3, noisy, "dp3 / fp64", False) == [""] * 3  # the controls
    assert world(2, noisy, "fsdp2 / fp64", True) == [""] * 2


class Scaled(nn.Module):
    """A loss whose scale is learnt."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=trained)

    def forward(self, output: torch.Tensor, batch: list[torch.Tensor]) -> sw.Loss:
        loss = points.weighted(output, batch)
        return sw.Loss(loss.sum * self.scale, loss.weight)


def own_scale(kind: str, plan: str = "dp2") -> list[str]:
    with points.placed_state(f"{plan} / fp64", CASE) as state, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scaled: Any = Scaled(kind != "frozen")
        if kind == "placed":  # as the second model of a GAN, whose own state reduces its gradients
            scaled = sw.apply(lambda: Scaled(True), state.placed.plan, state.mesh, seed=0).module

        def called(output: torch.Tensor, batch: list[torch.Tensor]) -> sw.Loss:
            return scaled(output, batch) if state.step >= 0 else unset

        given = {"module": scaled, "method": scaled.forward}.get(kind, called)
        for _ in sw.steps(state, given, until=2):
            pass
        unset = points.weighted  # a variable that the function names, and that had no value
        return [str(one.message) for one in said if "loss function holds" in str(one.message)]


@pytest.mark.parametrize("kind", ["module", "function", "method", "frozen", "placed"])
def test_a_parameter_that_the_loss_function_holds_is_warned_of_once(world: World, kind: str) -> None:
    first, second = world(2, own_scale, kind)
    assert not second and len(first) == (kind not in ("frozen", "placed"))
    assert not first or "scale (1)" in first[0]


def test_it_is_warned_of_where_loss_functions_are_watched_too(world: World) -> None:
    first, second = world(2, own_scale, "function", "fsdp2")
    assert not second and "scale (1)" in first[0]


def test_it_is_warned_of_on_a_stage_that_has_the_loss(world: World) -> None:
    """The rank that spoke was one of the first stage, where no gradient comes."""
    first, _, last, other = world(4, own_scale, "function", "pp2 dp2 / mb2")
    assert not first and not other and "scale (1)" in last[0]
