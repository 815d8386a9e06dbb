"""Is a model right under these plans? Run `pytest -p shardwise.testing.plugin examples/test_parity.py`."""

import pytest
import torch
from own_loop import ROWS, Net, global_batch, loss_fn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.parallel.init import init_model

STEPS, LR = 3, 0.1
RULES = {
    "first": "replicate",
    "blocks.*.norm": "replicate",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "last": "replicate",
}


def one_process():
    """Plain PyTorch: losses, gradient norms, parameters."""
    model = init_model(Net, seed=5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    numbers = []
    for i in range(STEPS):
        x, y = (t.double() for t in global_batch(i))
        loss = (model(x) - y).square().sum() / ROWS
        loss.backward()
        numbers += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, {name: p.detach() for name, p in model.named_parameters()}


def under(text):
    """The same under a plan; runs in each process of a world."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Net, plan, mesh, seed=5, rules=RULES if plan.axes.tp > 1 else None)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=LR)), loss_fn, clip=1.0)
        numbers = []
        for i in range(STEPS):
            m = step(tuple(t.double().tensor_split(mesh.batch.size)[mesh.batch.rank] for t in global_batch(i)))
            numbers += [m.loss, m.grad_norm]
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in placed.named_parameters().items()}
        return numbers, {name: p.detach() for name, p in whole.items()}


@pytest.mark.parametrize("plan", ["fsdp2 / mb2 / recompute=blocks", "tp2", "pp2 / 1f1b mb4"])
def test_equals_one_process(world, plan):
    plan = f"{plan} / fp64"
    numbers, parameters = one_process()
    ranks = world(sw.Plan.parse(plan).world, under, plan)
    for theirs, _ in ranks:
        assert theirs == pytest.approx(numbers, rel=1e-11)
    found = {name: tensor for _, mine in ranks for name, tensor in mine.items()}  # pipeline stages hold different names
    assert found.keys() == parameters.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, parameters[name], rtol=1e-11, atol=1e-13)
