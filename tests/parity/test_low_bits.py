"""AdamW with averages in few bits: the update of one process under every layout, and checkpoints into any mesh."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torchao.optim import subclass_4bit, subclass_8bit
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit

from shardwise.checkpoint.store import Store
from shardwise.errors import ConfigError, UsageError
from shardwise.parallel.mesh import open_mesh
from shardwise.train.optimizers import adamw
from shardwise.train.updates import low_bits
from shardwise.train.updates.low_bits import STATE_KINDS
from tests.parity.placing import LAYOUTS, State, full, place, train

STEPS, WIDE = 3, 1300
"""`up` is 1300 x 6, `down` 5 x 1300: rows of one short block, and rows of blocks that tp cuts in the middle."""
DIALS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def trained(layout: str, kind: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole parameters and whole state after some steps."""
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh, dtype, wide=WIDE)
        optimizer = adamw(placed, **DIALS, state_dtype=kind)
        train(placed, optimizer, range(STEPS))
        parameters = {name: full(p) for name, p in placed.named_parameters().items()}
        return parameters, {name: full(t) for name, t in optimizer.state_tensors().items()}


@functools.cache
def truth(world: Any, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    (result,) = world(1, trained, "one", kind, torch.float64)
    return result


@pytest.mark.share(6)
@pytest.mark.parametrize("kind", STATE_KINDS)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp4", "tp2", "hsdp2x2", "fsdp2tp2", "pp2"])
def test_every_layout_makes_the_update_of_one_process(world, layout: str, kind: str) -> None:
    want, state = truth(world, kind)
    for found, its_state in world(LAYOUTS[layout].world, trained, layout, kind, torch.float64):
        for name, parameter in found.items():
            assert torch.equal(parameter, want[name]), name
        for name, tensor in its_state.items():
            assert torch.equal(tensor, state[name]), name


def saved(layout: str, kind: str, path: str) -> None:
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh, torch.float64, wide=WIDE)
        state = State(placed, adamw(placed, **DIALS, state_dtype=kind))
        state.run(2)
        Store(path).save(state)


def resumed(layout: str, kind: str, path: str) -> dict[str, Tensor]:
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh, torch.float64, wide=WIDE)
        state = State(placed, adamw(placed, **DIALS, state_dtype=kind))
        Store(path).load_latest(state)
        state.run(STEPS - 2)
        return {name: full(p) for name, p in placed.named_parameters().items()}


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", STATE_KINDS)
@pytest.mark.parametrize(("before", "after"), [("fsdp2tp2", "one"), ("fsdp2", "tp2"), ("one", "fsdp4")])
def test_a_checkpoint_goes_on_under_another_mesh(world, tmp_path, before: str, after: str, kind: str) -> None:
    want, _ = truth(world, kind)
    world(LAYOUTS[before].world, saved, before, kind, str(tmp_path))
    for found in world(LAYOUTS[after].world, resumed, after, kind, str(tmp_path)):
        assert all(torch.equal(parameter, want[name]) for name, parameter in found.items())


@pytest.mark.parametrize(("kind", "bytes_each"), [("bf16", 4), ("8bit", 2), ("4bit", 1)])
def test_state_is_as_small_as_it_says(world, kind: str, bytes_each: int) -> None:
    (_, state), *_ = world(1, trained, "one", kind, torch.float32)
    large = [t for name, t in state.items() if "up.weight" in name or "down.weight" in name]
    codes = [t for t in large if t.dtype in (torch.uint8, torch.bfloat16)]
    assert sum(t.numel() * t.element_size() for t in codes) == bytes_each * 11 * WIDE


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_mean_the_same_whatever_the_default_type_is_when_they_are_first_used(bits: int) -> None:
    library = subclass_8bit if bits == 8 else subclass_4bit
    kept = (library.get_qmap_signed, library.get_qmap_unsigned, low_bits.table)
    usual = torch.get_default_dtype()
    found = []
    for default in (torch.float32, torch.float16, torch.float64):
        torch.set_default_dtype(default)
        try:
            found.append((low_bits.table(bits, True), low_bits.table(bits, False)))
        finally:
            torch.set_default_dtype(usual)
            for made in kept:
                made.cache_clear()
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def torchaos(kind: str) -> float:
    """Against torchao's own step on rows that are one block, where its blocks and ours are the same."""
    draw = torch.Generator().manual_seed(3)
    size = low_bits.BLOCK[kind]
    start = torch.randn(40, size, generator=draw)
    ours, theirs = torch.nn.Parameter(start.clone()), start.clone()
    optimizer = low_bits.LowBitAdamW(
        [ours], {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, kind, {id(ours): "p"}, 0
    )
    state = OptimState8bit if kind == "8bit" else OptimState4bit
    mean, square = (state.zeros(start.shape, signed, size) for signed in (True, False))
    for step in range(1, STEPS + 1):
        grad = torch.randn(start.shape, generator=draw)
        ours.grad = grad
        optimizer.step()
        single_param_adam(
            theirs, grad, torch.tensor(float(step)), mean, square, None,
            torch.tensor(0.01), 0.9, 0.999, 0.1, 1e-8, True, False,
        )  # fmt: skip
    return float((ours.detach() - theirs).abs().max())


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_it_is_torchaos_update(kind: str) -> None:
    assert torchaos(kind) < 1e-6


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_mesh(LAYOUTS["one"]) as mesh:
        placed = place("one", mesh)
        with pytest.raises(UsageError, match=r"state_dtype='8bits'.*did you mean '8bit'"):
            adamw(placed, 1e-3, state_dtype="8bits")
        low_bits.table.cache_clear()

        def missing(name: str) -> Any:
            raise ImportError("No module named 'torchao'")

        monkeypatch.setattr(low_bits, "import_module", missing)
        with pytest.raises(ConfigError, match=r"pip install 'shardwise\[fp8\]'"):
            adamw(placed, 1e-3, state_dtype="8bit")
