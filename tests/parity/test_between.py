"""What a script does to weights between the steps of a pipeline: as in one process, refused, or warned of."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.errors import ModelError, UsageError
from shardwise.testing import World
from shardwise.train.torch_private import has_modes
from tests.parity.test_flow import Net

Params = dict[str, nn.Parameter]


def noise(named: Params, step: int, generator: torch.Generator) -> None:
    for p in named.values():
        p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.01)


def noise_in_place(named: Params, step: int, generator: torch.Generator) -> None:
    for p in named.values():
        p.add_(torch.empty_like(p).normal_(generator=generator), alpha=0.01)


def noise_alike(named: Params, step: int, generator: torch.Generator) -> None:
    for p in named.values():
        p.add_(torch.randn_like(p), alpha=0.01)


def noise_by_name(named: Params, step: int, generator: torch.Generator) -> None:
    for name, p in named.items():
        generator.manual_seed(zlib.crc32(f"{name} {step}".encode()))
        p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.01)


def threshold(named: Params, step: int, generator: torch.Generator) -> None:
    limit = torch.cat([p.abs().flatten() for p in named.values()]).quantile(0.3)
    for p in named.values():
        p.mul_(p.abs() > limit)


def threshold_of_each(named: Params, step: int, generator: torch.Generator) -> None:
    """And what is usual in a loop: clipping, copies, numbers that are printed."""
    for p in named.values():
        p.mul_(p.abs() > p.abs().flatten().quantile(0.3))
        p.clamp_(-0.3, 0.3)
        float(p.norm())
    vector = torch.nn.utils.parameters_to_vector(named.values())
    torch.nn.utils.vector_to_parameters(0.99 * vector, named.values())
    torch.randn(3).sum().item()


def norm_of_all(named: Params, step: int, generator: torch.Generator) -> None:
    squares = torch.stack([p.square().sum() for p in named.values()]).sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(squares)
    for p in named.values():
        p.div_(squares.sqrt())


def read(named: Params, step: int, generator: torch.Generator) -> None:
    float(torch.stack([p.norm() for p in named.values()]).norm())


def late(body: Callable[..., None]) -> Callable[..., None]:
    """The same from the third step on; before, what a script logs."""

    def wait(named: Params, step: int, generator: torch.Generator) -> None:
        if step > 1:
            body(named, step, generator)
        else:
            for p in named.values():
                float(p.detach().norm())

    return wait


LATE = {body.__name__: late(body) for body in (noise, noise_in_place, noise_alike, threshold, read, norm_of_all)}


def trained_late(text: str, name: str, around: str = "") -> Any:
    return trained(text, LATE[name], around)


def trained(text: str, body: Callable[..., None], around: str = "") -> Any:
    """Weights after four steps, what was warned of, and whether a mode was left; or what was refused."""
    plan = sw.Plan.parse(f"{text} / fp64")
    torch.manual_seed(0)
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(Net, plan, mesh, seed=1)

        def loss_fn(output: Tensor, batch: Tensor) -> sw.Loss:
            return sw.mean_over((output - batch).square())

        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
        generator = torch.Generator().manual_seed(3)
        try:
            for i in range(4):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
                guard: Any = {"guard": partial(torch.inference_mode, False), "device": partial(torch.device, "cpu")}
                guard["step"] = partial(FlopCounterMode, display=False)
                with guard.get(around, nullcontext)():
                    step(x)
                counter: Any = FlopCounterMode(display=False) if around == "body" else nullcontext()
                if around == "evaluate":
                    sw.evaluate(placed, loss_fn, sw.eval_batches(list(x), plan.batch, mesh, global_size=8))
                if around == "refused":
                    with pytest.raises(UsageError):
                        sw.evaluate(placed, loss_fn, x)
                with counter, torch.no_grad():
                    body(placed.named_parameters(), i, generator)
        except ModelError as error:
            return str(error)
    weights = {name: p.detach().clone() for name, p in placed.named_parameters().items()}
    return weights, [str(one.message) for one in caught if "between steps" in str(one.message)], has_modes()


PP = "pp2 / 1f1b mb2"


@pytest.mark.parametrize("body", [noise, noise_in_place, noise_alike])
def test_noise_of_one_generator_for_several_weights_is_warned_of_once(world: World, body: Callable[..., None]) -> None:
    """Each stage drew other numbers than one process, as many as the others, without a word."""
    for _, said, left in world(2, trained, PP, body):
        assert len(said) == 1 and "numbers of one generator" in said[0] and not left
    assert world(1, trained, "dp1", body)[0][1] == []


def test_a_threshold_over_all_weights_is_refused(world: World) -> None:
    for said in world(2, trained, PP, threshold):
        assert isinstance(said, str) and "what is made of all parameters that this rank has" in said


def test_a_number_of_all_weights_that_is_read_is_warned_of(world: World) -> None:
    for _, said, _ in world(2, trained, PP, read):
        assert len(said) == 1 and "a number that is read" in said[0]


@pytest.mark.parametrize("around", ["", "step", "guard", "device", "body", "evaluate"])
@pytest.mark.parametrize("body", [noise_by_name, threshold_of_each, norm_of_all])
def test_what_is_right_is_as_in_one_process(world: World, body: Callable[..., None], around: str) -> None:
    (alone, _, _) = world(1, trained, "dp1", body)[0]
    for weights, said, left in world(2, trained, PP, body, around):
        assert not said and not left
        for name, value in weights.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-12)


def test_what_a_script_begins_later_is_followed_too(world: World) -> None:
    """Its first two turns alone were: what began in the third was another training, without a word."""
    for name in ("noise", "noise_in_place", "noise_alike"):
        for _, said, left in world(2, trained_late, PP, name):
            assert len(said) == 1 and "numbers of one generator" in said[0] and not left
    for said in world(2, trained_late, PP, "threshold", "evaluate"):
        assert isinstance(said, str) and "what is made of all parameters that this rank has" in said
    for _, said, _ in world(2, trained_late, PP, "read"):
        assert len(said) == 1 and "a number that is read" in said[0]
    (alone, _, _) = world(1, trained_late, "dp1", "norm_of_all")[0]
    for weights, said, left in world(2, trained_late, PP, "norm_of_all", "evaluate"):
        assert not said and not left
        for name, value in weights.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-12)


def test_a_script_that_goes_on_after_an_evaluation_failed_is_followed(world: World) -> None:
    """A threshold over a stage's weights trained on, without a word."""
    for said in world(2, trained, PP, threshold, "refused"):
        assert isinstance(said, str) and "what is made of all parameters that this rank has" in said


def changed_elsewhere(text: str, how: str) -> str:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        module: Any = sw.apply(Net, plan, mesh, seed=1).module
        block = next(m for m in module.modules() if type(m).__name__ == "PassThrough")
        assert not hasattr(block, "nothing") and getattr(block, "nothing", None) is None
        with pytest.raises(AttributeError) as caught:
            if how == "read":
                float(block.up.weight.norm())
            else:
                prune.l1_unstructured(block if how == "prune" else block.up, "weight", amount=0.5)
    return str(caught.value)


@pytest.mark.parametrize("how", ["read", "prune", "prune within"])
def test_a_layer_of_another_stage_says_what_it_is(world: World, how: str) -> None:
    """A rank ended in torch's words, of an attribute that a stand-in has not."""
    for said in world(2, changed_elsewhere, PP, how):
        assert "found a layer of another stage of the pipeline" in said
