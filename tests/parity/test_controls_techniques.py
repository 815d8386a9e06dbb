"""Negative controls of single techniques: a fault is planted in every rank, and the technique's own test must fail.

What is called is the test itself, with a world whose workers plant a fault before they run; one process stays right.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate

from shardwise.parallel import data, tensor
from shardwise.parallel.context import ContextSplit
from shardwise.parallel.randomness.counter import Elements, Stream
from shardwise.testing.world import World, WorldError
from shardwise.train.ema import Ema
from shardwise.train.updates import low_bits, rounding
from shardwise.train.updates.several import SeveralOptimizers
from shardwise.train.updates.update_rules import local_shard
from tests.parity import hf_models, test_groups, test_hf, test_lora, test_low_bits, test_rounding
from tests.parity.test_controls import doubled_gradients, nothing

FAMILIES = ("llama", "qwen3")

# ---------------------------------------------------------------- faults


def adapter_not_reduced() -> None:
    """Data parallelism forgets the second halves of some adapters: each rank steps them on its own rows' gradient."""
    shard = data.fully_shard

    def wrong(module: nn.Module, **options: Any) -> Any:
        forgotten = {p for n, p in module.named_parameters() if n.endswith("wq.lora_B.default.weight")}
        return shard(module, **options | {"ignored_params": forgotten})

    data.fully_shard = wrong


def adapter_summed_twice() -> None:
    """The whole half of an adapter has its whole gradient on every tp rank, and they are added up."""
    right = tensor.with_local_parameters
    tensor.with_local_parameters = lambda module, gradient: right(module, Partial())


def norm_of_heads_not_summed() -> None:
    """A norm inside attention sees this rank's heads only, and its gradient is taken for the whole one."""
    right = tensor.with_local_parameters
    tensor.with_local_parameters = lambda module, gradient: right(module, Replicate())


def positions_from_zero() -> None:
    """Each rank of cp numbers its own tokens from 0."""
    right = ContextSplit._numbers
    ContextSplit._numbers = lambda self, layout, main: torch.arange(right(self, layout, main).shape[1]).expand(
        main.shape[0], -1
    )


def scale_of_a_part() -> None:
    """Where tp splits a row, each rank divides by the largest number of its own part of a block."""
    low_bits._groups_along_rows = lambda parameter: []


def own_elements(parameter: torch.Tensor, name: str) -> Elements:
    local = local_shard(parameter)
    return Elements.row_major(local.shape, local.device)


def averages_rounded_by_place_in_the_shard() -> None:
    low_bits.elements_in = own_elements


def rounded_by_place_in_the_shard() -> None:
    rounding.elements_in = own_elements


def rounded_by_rank() -> None:
    """The seed of rounding is another one on each rank."""
    rounding.Stream = SimpleNamespace(of=lambda seed, *key: Stream.of(seed + dist.get_rank(), *key))


def decay_of_another_group() -> None:
    """All groups get the weight decay of the first that has one."""
    right = SeveralOptimizers.__init__

    def wrong(self: SeveralOptimizers, parts: Any) -> None:
        right(self, parts)
        for group in self.param_groups:
            group["weight_decay"] = 0.1

    SeveralOptimizers.__init__ = wrong


def group_that_stands_still() -> None:
    """The last rank steps only the first of its groups."""
    right = SeveralOptimizers.step

    def wrong(self: SeveralOptimizers) -> None:
        if dist.get_rank() < dist.get_world_size() - 1:
            right(self)
        else:
            next(iter(self.parts.values())).step()

    SeveralOptimizers.step = wrong


def average_of_the_first_rank_only() -> None:
    """The other ranks keep what they began with."""
    right = Ema.update
    Ema.update = lambda self: right(self) if dist.get_rank() == 0 else None


def average_taken_twice() -> None:
    """As where it is updated for each of two micro-batches."""
    right = Ema.update
    Ema.update = lambda self: (right(self), right(self))[0]


# ---------------------------------------------------------------- what must see them


class Faulty:
    """A world whose ranks plant a fault first, where there are several of them."""

    def __init__(self, world: World, fault: Callable[[], None]) -> None:
        self.world, self.fault = world, fault

    def __call__(self, ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        if ranks == 1:
            return self.world(ranks, function, *args, **options)
        return self.world(ranks, planted, self.fault, function, *args, **options)


def planted(fault: Callable[[], None], function: Callable[..., Any], *args: Any) -> Any:
    fault()
    return function(*args)


def families(world: Any, plan: str) -> None:
    """`test_hf.test_families_train_as_one_process_does`, for two of them."""
    made = {name: hf_models.config(name) for name in FAMILIES}
    wrong = test_hf.compared(world, plan, made, family_truth(world))
    assert not any("Traceback" in text for text in wrong.values()), wrong
    assert not wrong, str(wrong)


@functools.cache
def family_truth(world: Any) -> dict[str, Any]:
    return world(1, hf_models.references, {name: hf_models.config(name) for name in FAMILIES})[0]


lora = functools.partial(test_lora.test_adapters_train_as_in_one_process, kind="decoder")
groups = test_groups.test_groups_average_and_frozen
low = test_low_bits.test_every_layout_makes_the_update_of_one_process
stochastic = test_rounding.test_a_sharded_parameter_is_rounded_as_the_whole_one

CONTROLS: list[tuple[Callable[..., None], tuple[str, ...], Callable[[], None], str]] = [
    (lora, ("fsdp2 / mb2",), doubled_gradients, "approx"),
    (lora, ("fsdp2 / mb2",), adapter_not_reduced, "approx"),
    (lora, ("tp2",), adapter_summed_twice, "approx"),
    (families, ("fsdp2",), doubled_gradients, r"'norm': (1\.0|0\.99)"),
    (families, ("tp2",), norm_of_heads_not_summed, "disagree about"),
    (families, ("cp2",), positions_from_zero, r"'loss': \d\.\d+(e-0[1-5])?,"),
    (low, ("tp2", "8bit"), scale_of_a_part, "down.weight"),
    (low, ("tp2", "4bit"), scale_of_a_part, "down.weight"),
    (low, ("fsdp2", "bf16-stochastic"), averages_rounded_by_place_in_the_shard, "cube"),
    (groups, ("dp2 / mb2",), decay_of_another_group, "weight"),
    (groups, ("fsdp2 tp2 / seq",), group_that_stands_still, "weight"),
    (groups, ("fsdp2 tp2 / seq",), average_of_the_first_rank_only, r"ema\."),
    (groups, ("dp2 / mb2",), average_taken_twice, r"ema\."),
    (stochastic, ("fsdp4",), rounded_by_rank, ""),
    (stochastic, ("fsdp4",), rounded_by_place_in_the_shard, ""),
]


@pytest.mark.share(3)
@pytest.mark.parametrize("control", CONTROLS, ids=lambda c: f"{c[2].__name__}-{' '.join(c[1])}")
def test_a_planted_fault_is_seen_by_the_techniques_own_test(world: World, control: Any) -> None:
    test, arguments, fault, said = control
    with pytest.raises(AssertionError) as caught:
        test(Faulty(world, fault), *arguments)
    assert not isinstance(caught.value, WorldError), "the fault broke the run, where it should have changed numbers"
    assert re.search(said, str(caught.value)), caught.value


@pytest.mark.parametrize("control", [CONTROLS[1], CONTROLS[5]], ids=["lora", "families"])
def test_without_a_fault_the_same_test_passes(world: World, control: Any) -> None:
    test, arguments, _, _ = control
    test(Faulty(world, nothing), *arguments)
