"""A script's own forwards beside its steps (a teacher, a look at the model), what it writes into weights, its hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import open_mesh
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import Plan
from shardwise.testing import World, fake_world
from shardwise.train.batches import loader
from shardwise.train.loop import steps
from shardwise.train.loss import Loss, mean_over
from shardwise.train.optimizers import sgd
from shardwise.train.state import TrainState
from shardwise.train.step import TrainStep, make_step
from shardwise.train.updates.several import several as combined

DIM = 6


class Net(nn.Module):
    """Blocks, which are gathered each by itself, and layers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(torch.tanh(x))


def rows(seed: int, placed: Placed) -> Tensor:
    """This rank's part of 8."""
    batch = placed.mesh.batch
    whole = torch.randn(8, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return whole.tensor_split(batch.size)[batch.rank]


def taught(text: str, is_frozen: bool) -> list[float]:
    """Steps of a model whose teacher, a second one, follows it by a list of parameters that was made once."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed, teacher = (apply(Net, plan, mesh, seed=seed) for seed in (3, 4))
        if is_frozen:
            teacher.module.requires_grad_(False)
        pairs = list(zip(teacher.parameters(), placed.parameters(), strict=True))

        def loss_fn(output: Tensor, x: Tensor) -> Loss:
            return mean_over((output - teacher.module(x.flip(1)).detach()).square())

        step, found = make_step(TrainState(placed, sgd(placed, lr=0.3)), loss_fn), []
        for number in range(3):
            found.append(step(rows(number, placed)).loss)
            with torch.no_grad():
                for follower, leader in pairs:
                    follower.lerp_(leader, 0.5)
        return found


@pytest.mark.parametrize(("text", "is_frozen"), [("fsdp2 / fp64", True), ("fsdp2 zero1 / fp64", False)])
def test_a_teacher_is_what_the_script_has_written_into_it(world: World, text: str, is_frozen: bool) -> None:
    """What its forward had gathered stayed, and it taught for ever what it was at first, without a word."""
    (alone,) = world(1, taught, "dp1 / fp64", is_frozen)
    assert world(2, taught, text, is_frozen) == [pytest.approx(alone, rel=1e-12)] * 2


def hooked(text: str, several: bool) -> str | list[float]:
    """Losses of a run whose optimizer clips by itself; or what that is told."""
    plan = Plan.parse(text)

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)

    def made(placed: Placed) -> Any:
        optimizer = sgd(placed, lr=0.3)
        optimizer.torch.register_step_pre_hook(clip)
        return optimizer

    with open_mesh(plan) as mesh:
        placed = apply(Net, plan, mesh, seed=3)
        optimizer = combined(placed, {"*": made}) if several else made(placed)
        step = make_step(TrainState(placed, optimizer), lambda y, x: mean_over((y - x).square()))
        try:
            return [step(rows(number, placed)).loss for number in range(3)]
        except ModelError as error:
            return str(error)


def test_a_hook_that_clips_by_a_norm_of_its_part_is_refused(world: World) -> None:
    """Each rank scaled its part by another norm, without a word."""
    (alone,) = world(1, hooked, "dp1 / fp64", False)
    assert world(2, hooked, "dp2 / fp64", False) == [pytest.approx(alone, rel=1e-12)] * 2
    for text, several, what in (("fsdp2 / fp64", False, "a shard"), ("pp2 / mb2 / fp64", True, "of one stage")):
        for said in world(2, hooked, text, several):
            assert "a norm over gradients (clip_grad_norm_), of which" in said and f"is {what}:" in said


def centralized(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    if weight.dim() > 1:
        weight.grad.sub_(weight.grad.mean(dim=0, keepdim=True))


def noisy(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    weight.grad.add_(torch.randn_like(weight.grad), alpha=0.1)


def normalized(weight: nn.Parameter) -> None:
    if weight.dim() > 1:
        weight.copy_(nn.functional.normalize(weight, dim=0))


def over_rows(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    if weight.dim() > 1:
        weight.grad.sub_(weight.grad.data.mean(1, keepdim=True))


def scaled(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    weight.grad.div_(weight.grad.norm())


def mixed(text: str, change: Callable[[nn.Parameter], None], is_torch: bool) -> str | tuple[list[float], list[str]]:
    """Losses of a run with a hook on its optimizer's step, and what was warned of; or what was refused."""
    plan = Plan.parse(text)

    @torch.no_grad()
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            change(weight)

    with open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.manual_seed(7)
        placed = apply(Net, plan, mesh, seed=3)
        optimizer: Any = torch.optim.SGD(placed.parameters(), lr=0.3) if is_torch else sgd(placed, lr=0.3)
        hooked = optimizer if is_torch else optimizer.torch
        (hooked.register_step_post_hook if change is normalized else hooked.register_step_pre_hook)(hook)
        step = make_step(TrainState(placed, optimizer), lambda y, x: mean_over((y - x).square()))
        try:
            losses = [step(rows(number, placed)).loss for number in range(3)]
        except ModelError as error:
            return str(error)
        return losses, [str(each.message) for each in seen if "a hook of" in str(each.message)]


@pytest.mark.parametrize("change", [centralized, noisy, normalized])
def test_a_hook_that_mixes_what_is_cut_is_refused(world: World, change: Any) -> None:
    """Each rank stepped by what is of its shard, without a word; an optimizer of torch's has whole tensors."""
    (alone,) = world(1, mixed, "dp1 / fp64", change, False)
    assert world(2, mixed, "dp2 / fp64", change, False) == [(pytest.approx(alone[0], rel=1e-12), [])] * 2
    assert world(2, mixed, "fsdp2 / fp64", change, True) == [(pytest.approx(alone[0], rel=1e-12), [])] * 2
    for said in world(2, mixed, "fsdp2 / fp64", change, False):
        assert "of first.weight, of which this rank has a shard, cut along dim 0" in said


def test_what_a_hook_draws_for_a_stage_is_refused(world: World) -> None:
    for is_torch in (False, True):
        for said in world(2, mixed, "pp2 / mb2 / fp64", noisy, is_torch):
            assert "of which this rank has one stage" in said


def test_a_hook_along_a_dim_that_is_not_cut_works(world: World) -> None:
    (alone,) = world(1, mixed, "dp1 / fp64", over_rows, False)
    assert world(2, mixed, "fsdp2 / fp64", over_rows, False) == [(pytest.approx(alone[0], rel=1e-12), [])] * 2


def read(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    float(weight.grad.norm())


def test_a_number_that_a_hook_takes_of_a_shard_is_refused_in_a_gradient_and_warned_of_where_it_is_read(
    world: World,
) -> None:
    for said in world(2, mixed, "fsdp2 / fp64", scaled, False):
        assert "found div_ that takes to first.weight what is made of elements of first.weight" in said
    (alone,) = world(1, mixed, "dp1 / fp64", read, False)
    for losses, (said,) in world(2, mixed, "fsdp2 / fp64", read, False):
        assert losses == pytest.approx(alone[0], rel=1e-12)
        assert "found a number that is read" in said and "or a sum over ranks" in said


def of_output(module: Any) -> None:
    module.blocks[1].register_forward_hook(lambda block, args, output: 0.9 * output)


def of_input(module: Any) -> None:
    module.blocks[2].register_forward_pre_hook(lambda block, args: (0.9 * args[0],))


def of_gradient(module: Any) -> None:
    module.blocks[1].register_full_backward_pre_hook(lambda block, to_output: (0.5 * to_output[0],))


def with_hook_on_a_block(text: str, register: Callable[[Any], None]) -> list[float]:
    """Losses and norms of a run whose script puts a hook on a block after `apply`."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Net, plan, mesh, seed=3)
        register(placed.module)
        step = make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda y, x: mean_over((y - x).square()))
        metrics = [step(rows(number, placed)) for number in range(3)]
        return [each.loss for each in metrics] + [each.grad_norm for each in metrics]


@pytest.mark.parametrize("register", [of_output, of_input, of_gradient])
def test_a_hook_on_a_block_is_called_by_the_stage_that_has_it(world: World, register: Any) -> None:
    """At a stage's end the other stage called it once more, for what stands in the block's place, without a word."""
    (alone,) = world(1, with_hook_on_a_block, "dp1 / fp64", register)
    assert world(2, with_hook_on_a_block, "pp2 / mb2 / fp64", register) == [pytest.approx(alone, rel=1e-12)] * 2


def changed(text: str, what: str, since: int) -> str:
    """What a script is told that puts other weights into the model after some steps."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Net, plan, mesh, seed=3)
        module: Any = placed.module

        def made() -> TrainStep:
            return make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda y, x: mean_over(y.square()))

        step = made() if since else None
        for number in range(since):
            assert step is not None
            step(rows(number, placed))
        if what == "tied":
            module.last.weight = module.first.weight
        elif what == "assigned":
            module.last = nn.Linear(DIM, DIM, dtype=torch.float64)
        else:
            nn.utils.parametrize.register_parametrization(module.last, "weight", nn.Tanh())
        with pytest.raises(ModelError) as caught:
            (step or made())(rows(9, placed))
        return str(caught.value)


@pytest.mark.parametrize(
    ("text", "what", "since"),
    [
        ("dp1 / fp64", "assigned", 1),
        ("dp2 / fp64", "tied", 1),
        ("dp2 / fp64", "tied", 0),
        ("fsdp2 / fp64", "tied", 2),
        ("fsdp2 / fp64", "parametrized", 1),
    ],
)
def test_weights_that_are_put_in_the_place_of_others_are_refused(
    world: World, text: str, what: str, since: int
) -> None:
    """`fully_shard` went on with those from before, and a new module was in no optimizer, without a word."""
    needed = "last.weight was replaced or removed after make_step" if since else "last.weight was removed after apply"
    assert all(needed in said for said in world(Plan.parse(text).world, changed, text, what, since))


def compiled(text: str) -> list[float]:
    """Losses of a model that the script compiles itself."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh, warnings.catch_warnings(action="ignore"):  # dynamo trips over warnings of torch's own
        placed = apply(Net, plan, mesh, seed=3)
        placed.module.compile(backend="eager")
        step = make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda y, x: mean_over((y - x).square()))
        return [step(rows(number, placed)).loss for number in range(2)]


@pytest.mark.soak
def test_a_model_that_the_script_compiles(world: World) -> None:
    """What looks at values in a first forward was compiled, too, and ended in an AttributeError."""
    (alone,) = world(1, compiled, "dp1 / fp64", timeout_s=100)
    assert world(2, compiled, "fsdp2 / fp64", timeout_s=100) == [pytest.approx(alone, rel=1e-12)] * 2


def dropping(text: str, how: str) -> list[float]:
    """Losses of a model with dropout that is compiled by the script, or not."""
    plan = Plan.parse(text)

    def make() -> nn.Module:
        model = Net()
        model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)) for _ in range(4))
        if how == "before":
            model.compile(backend="eager")
        return model

    with open_mesh(plan) as mesh, warnings.catch_warnings(action="ignore"):
        placed = apply(make, plan, mesh, seed=3)
        if how == "after":
            placed.module.compile(backend="eager")
        dataset = list(torch.randn(24, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        data = loader(dataset, plan.batch, mesh, global_size=8)  # its rows have numbers of their own in each step
        state = TrainState(placed, sgd(placed, lr=0.3), data)
        return [m.loss for m in steps(state, lambda y, x: mean_over((y - x).square()), until=3)]


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_model_that_draws_and_is_compiled_by_the_script(world: World, how: str) -> None:
    """The compiler went into what keys the draws, and ended the run with a page of its own errors."""
    (alone,) = world(1, dropping, "dp1 / fp64", "not", timeout_s=100)
    assert world(2, dropping, "fsdp2 / fp64", how, timeout_s=100) == [pytest.approx(alone, rel=1e-12)] * 2


def checked_by_torch(text: str) -> tuple[list[float], str]:
    """Losses under torch's own checks of collectives, and what these say of one that differs between ranks."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # what TORCH_DISTRIBUTED_DEBUG=DETAIL is when torch is imported
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Net, plan, mesh, seed=3)
        step = make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda y, x: mean_over((y - x).square()))
        losses = [step(rows(number, placed)).loss for number in range(2)]
        try:
            mesh.all_reduce_sum(torch.zeros(1 + mesh.rank))
        except RuntimeError as error:
            return losses, str(error)
    return losses, ""


def test_plain_replication_under_torchs_own_checks(world: World) -> None:
    """DDP took the wrapper of a group for the group itself, and the process was killed by SIGSEGV."""
    (alone,) = world(1, plainly, "dp1 / fp64")
    for losses, said in world(2, checked_by_torch, "dp2 / fp64"):
        assert losses == pytest.approx(alone, rel=1e-12) and "Detected mismatch between collectives" in said


def plainly(text: str) -> list[float]:
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Net, plan, mesh, seed=3)
        step = make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda y, x: mean_over((y - x).square()))
        return [step(rows(number, placed)).loss for number in range(2)]


def by_list(placed: Placed, kept: list[nn.Parameter]) -> list[nn.Parameter]:
    return kept


def by_module(placed: Placed, kept: list[nn.Parameter]) -> list[nn.Parameter]:
    return list(placed.module.parameters())


def by_name(placed: Placed, kept: list[nn.Parameter]) -> list[nn.Parameter]:
    module: Any = placed.module
    return [module.last.weight, module.blocks[1].bias]


def clipped(text: str, written: Callable[[Placed, list[nn.Parameter]], list[nn.Parameter]], looks: str) -> list[float]:
    """Steps between which a script looks at the model, and clips weights."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Net, plan, mesh, seed=3)
        kept = list(placed.parameters())
        step, found = make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda y, x: mean_over((y - x).square())), []
        for number in range(3):
            metrics = step(rows(number, placed))
            found += [metrics.loss, metrics.grad_norm]
            with torch.set_grad_enabled(looks == "for gradients"):
                placed.module(rows(9, placed))
            with torch.no_grad():
                for parameter in written(placed, kept):
                    parameter.clamp_(-0.2, 0.2)
        return found


@pytest.mark.parametrize(
    ("text", "written", "looks"),
    [
        ("fsdp2 / fp64", by_list, "for values"),
        ("fsdp2 / fp64", by_name, "for gradients"),
        ("fsdp2 zero2 / mb2 / fp64", by_module, "for values"),
        ("fsdp2 zero1 / fp64", by_list, "for gradients"),
        ("fsdp2 / reshard=false / fp64", by_name, "for values"),
    ],
)
def test_weights_are_what_a_script_writes_after_a_look(world: World, text: str, written: Any, looks: str) -> None:
    """It wrote into copies, or into shards of which copies were there; the next step took the other ones."""
    (alone,) = world(1, clipped, "dp1 / fp64", written, looks)
    assert world(2, clipped, text, written, looks) == [pytest.approx(alone, rel=1e-12)] * 2


def test_what_is_kept_on_some_ranks_is_given_back(world: World) -> None:
    (alone,) = world(1, clipped, "dp1 / fp64", by_list, "for values")
    found = world(4, clipped, "fsdp4 / reshard=2 / fp64", by_list, "for values")
    assert found == [pytest.approx(alone, rel=1e-12)] * 4


@pytest.mark.parametrize("text", ["fsdp4", "fsdp4 / reshard=2", "fsdp4 zero1", "dp2 fsdp2 / reshard=false"])
def test_what_a_forward_gathers_stays_as_planned_within_a_step(text: str) -> None:
    """The private name: `post_forward_mesh_info` of each group, None where what is gathered stays."""
    plan = Plan.parse(text)
    with fake_world(4), open_mesh(plan, device="cpu") as mesh:
        placed: Any = apply(Net, plan, mesh)
        groups = [group for group, _ in placed.gathered._planned]
        assert len(groups) == 5 and shards(groups) == [4 // plan.axes.dp_replicate] * 5
        with placed.gathering(), placed.gathering():
            planned = {"fsdp4": 4, "fsdp4 / reshard=2": 2}.get(text)
            assert shards(groups) == [None, *[planned] * 4]  # the model's own group comes first
        assert shards(groups) == [4 // plan.axes.dp_replicate] * 5


def shards(groups: list[Any]) -> list[int | None]:
    found = [group.post_forward_mesh_info for group in groups]
    return [info and info.shard_mesh_size for info in found]
