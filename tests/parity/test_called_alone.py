"""What every rank must call, called by one alone; and what the others say when one has failed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, ReplicaError, UsageError
from shardwise.parallel import together
from shardwise.testing import World, WorldError


def model() -> nn.Module:
    return sw.GPT(sw.GPTConfig(vocab_size=8, dim=8, num_layers=2, num_heads=2, max_seq_len=8))


def left(text: str, call: str) -> str:
    """Rank 0 looks at the model, the other one trains on; what ends that."""
    plan, ids = sw.Plan.parse(text), torch.zeros(2, 4, dtype=torch.int64)
    patch = pytest.MonkeyPatch()  # of this process, which ends with the test
    patch.setattr(together, "_PATIENCE", 0.1)
    with pytest.raises((UsageError, RuntimeError)) as caught, sw.open_mesh(plan, timeout_s=6.0) as mesh:
        placed = sw.apply(model, plan, mesh, seed=3)
        step: Any = sw.make_step(
            sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda output, _: output.square().mean()
        )
        step(ids)
        if mesh.is_first and call == "evaluate":
            sw.evaluate(placed, lambda output, _: output.square().mean(), [ids])
        if mesh.is_first and call == "predict":
            sw.predict(placed, lambda output, _: output, [ids])
        if mesh.is_first and call == "generate":
            sw.generate(placed, ids, 2)
        step(ids)
        dist.barrier()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(("text", "call"), [("dp2", "evaluate"), ("dp2", "predict"), ("fsdp2", "generate")])
def test_a_rank_that_looks_at_the_model_alone_says_so(world: World, text: str, call: str) -> None:
    """Its messages were taken for those of a step: gloo ended the process, or one waited for ever."""
    looks, trains = world(2, left, text, call)
    assert trains.startswith("RuntimeError")
    assert looks.startswith(
        f"UsageError: {call}(): rank 0 has waited 1 s for the other ranks, and not all of them came"
    )


def failing(text: str) -> list[str]:
    """The last rank fails in its loss function: this rank's error, and its notes."""
    plan, ids = sw.Plan.parse(text), torch.zeros(4, 4, dtype=torch.int64)
    with pytest.raises((KeyError, RuntimeError)) as caught, sw.open_mesh(plan) as mesh:

        def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return output.mean() + 0 * batch["labels" if mesh.rank == mesh.world - 1 else "input_ids"].sum()

        placed = sw.apply(model, plan, mesh, seed=3, sample={"input_ids": ids})
        sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)({"input_ids": ids})
    return [str(caught.value), *getattr(caught.value, "__notes__", [])]


@pytest.mark.parametrize("text", ["pp2 / 1f1b mb2", "dp2"])
def test_a_rank_that_loses_another_names_the_cause(world: World, text: str) -> None:
    """Without `shardwise run`, which shows the first error alone, its own was all that it said: a closed connection."""
    echo, cause = world(2, failing, text)
    assert cause[0] == "'labels'" and not any("lost" in note for note in cause)
    assert any("is called where the last stage is" in note for note in cause) == text.startswith("pp2")
    assert echo[-1] == "This rank lost another one. What ended that: rank 1: KeyError: 'labels'"


def leaving(text: str) -> list[str]:
    """The last rank leaves the loop after a step, and the mesh: the others' error, and its notes."""
    plan, data = sw.Plan.parse(text), [{"input_ids": row} for row in torch.zeros(16, 4, dtype=torch.int64)]
    try:
        with sw.open_mesh(plan) as mesh:
            placed = sw.apply(model, plan, mesh, seed=3, sample={"input_ids": torch.zeros(4, 4, dtype=torch.int64)})
            state = sw.TrainState(placed, sw.sgd(placed, lr=0.1), sw.loader(data, plan.batch, mesh, global_size=4))
            for _ in sw.steps(state, lambda output, batch: sw.Loss(output.sum(), output.numel()), until=3):
                if mesh.rank == mesh.world - 1:
                    break
    except RuntimeError as error:
        return [str(error), *getattr(error, "__notes__", [])]
    return []


def test_a_rank_that_loses_one_which_left_the_loop_says_which(world: World) -> None:
    """The one that left has no error, and so no message to look at."""
    echo, left = world(2, leaving, "dp2")
    assert left == []
    assert echo[-1].startswith(
        "This rank lost another one. What ended that: rank 1 had come to the end of its open_mesh block, without an "
        "error; every rank must make as many steps"
    )


def raising(text: str) -> None:
    raise RuntimeError(" ".join(failing(text)))


def test_a_world_shows_the_cause_first(world: World) -> None:
    with pytest.raises(WorldError, match="^rank 1:\n"):
        world(2, raising, "dp2")


def evaluated(text: str, counts: list[int], is_same: bool) -> tuple[str | float, list[str]]:
    """The weight of an evaluation of a script's own batches, so many on a rank, or what ends it; the warnings."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        placed = sw.apply(model, plan, mesh, seed=3)
        batches = [torch.full((2, 4), i if is_same else mesh.rank + 1) for i in range(counts[mesh.rank])]
        try:
            total = sw.evaluate(placed, lambda output, _: sw.mean_over(output.mean((1, 2))), iter(batches))
        except (UsageError, ReplicaError) as error:
            return str(error), []
        return float(total.weight), [str(each.message) for each in seen if "evaluate()" in str(each.message)]


@pytest.mark.parametrize(
    ("text", "counts", "found"),
    [
        ("fsdp2", [2, 3], "evaluate(): found a batch 3 on 1 of 2 ranks"),
        ("fsdp2 zero1", [0, 1], "evaluate(): found a batch 1 on 1 of 2 ranks"),
        ("tp2", [1, 1], "evaluate(): "),
    ],
)
def test_batches_that_do_not_go_together_end_an_evaluation(
    world: World, text: str, counts: list[int], found: str
) -> None:
    """The ranks that had one more waited for the others until the time limit; those of `tp` met rows of others."""
    for said, _ in world(2, evaluated, text, counts, False):
        assert isinstance(said, str) and said.startswith(found)


def test_batches_of_each_rank_that_wait_for_nobody_are_evaluated(world: World) -> None:
    assert world(2, evaluated, "dp2", [2, 3], False) == [(10.0, [])] * 2
    assert world(2, evaluated, "fsdp2", [2, 2], False) == [(8.0, [])] * 2
    for said, warned in world(2, evaluated, "fsdp2", [0, 0], False):
        assert "found no batch on any rank" in said and not warned


def test_an_evaluation_of_the_same_rows_on_all_data_ranks_is_warned_of(world: World) -> None:
    """Each counted twice, without a word."""
    first, second = world(2, evaluated, "dp2", [2, 2], True)
    assert (first[0], second) == (8.0, (8.0, []))
    assert "all 2 data ranks were given the same rows, each of which counts 2 times" in first[1][0]
    assert world(2, evaluated, "tp2", [2, 2], True) == [(4.0, [])] * 2


def looked(text: str, how: str) -> list[float] | str:
    """Losses of steps between which a script looks at the model in torch's inference mode; or what was refused."""
    plan, ids = sw.Plan.parse(f"{text} / fp64"), torch.arange(8).view(2, 4)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(model, plan, mesh, seed=3)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda out, _: out.square().mean())
        found = []
        for _ in range(2):
            with torch.inference_mode():
                if how == "evaluate":
                    sw.evaluate(placed, lambda out, _: out.square().mean(), [ids.clone()])
                elif how == "generate":
                    sw.generate(placed, ids, 2)
                else:
                    try:
                        placed.module(ids)
                    except ModelError as error:
                        return str(error)
            found.append(step(ids).loss)
        return found


@pytest.mark.parametrize("how", ["evaluate", "generate", "call"])
@pytest.mark.parametrize("text", ["fsdp2", "dp2"])
def test_a_look_in_inference_mode_leaves_steps_as_they_are(world: World, text: str, how: str) -> None:
    """Under fsdp the next step ended in torch's words, on what was gathered in that mode."""
    (alone,) = world(1, looked, "dp1", how)
    for found in world(2, looked, text, how):
        if (text, how) == ("fsdp2", "call"):
            assert "was called in torch.inference_mode()" in found and "torch.no_grad()" in found
        else:
            assert found == pytest.approx(alone, rel=1e-12)


class Ascending(torch.optim.Optimizer):
    """SAM, as it is published: two passes in one step."""

    def __init__(self, params: Any, says: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.says = says

    def step(self, closure: Any = None) -> None:
        if self.says:
            assert closure is not None
        closure()


def closed(says: bool) -> str:
    plan = sw.Plan.parse("dp1")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(model, plan, mesh, seed=3)
        state = sw.TrainState(placed, Ascending(placed.parameters(), says))
        with pytest.raises(UsageError) as caught:
            sw.make_step(state, lambda out, _: out.square().mean())(torch.zeros(2, 4, dtype=torch.int64))
        return str(caught.value)


@pytest.mark.parametrize("says", [False, True])
def test_a_rule_that_needs_a_closure_is_refused(world: World, says: bool) -> None:
    """It was told that None cannot be called."""
    (said,) = world(1, closed, says)
    assert said.startswith("Ascending.step() needs a closure") and "Two passes are two steps" in said
