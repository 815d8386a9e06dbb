"""The decision tables of guides (size of the model, memory, number of nodes -> strategy) fall out of the search.

| parameters | memory | strategy | test |
|---|---|---|---|
| below 500 M | fits one device | one device | `test_it_fits_on_one_device_and_there_is_one` |
| below 500 M | fits each of several | replicas | `test_below_half_a_billion_parameters_...` |
| 500 M to 3 B | little | states sharded | `test_up_to_three_billion_parameters_and_little_memory_...` |
| above 3 B | very little | parameters sharded | `test_a_model_too_large_for_one_device_and_little_memory_...` |
| any | the least possible | states on the host | `test_where_nothing_else_fits_states_go_to_the_host` |
| any | several nodes | replicas below 500 M, shards above | `test_several_nodes` |
| above 70 B | several nodes | several axes at once | `test_seventy_billion_parameters_take_several_axes` |
"""

from __future__ import annotations

import pytest

from shardwise.hardware.cluster import load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.plan import Plan
from shardwise.plan.search import find_plan
from shardwise.plan.timing import estimate_time
from shardwise.plan.workload import Workload


def best(model: str, where: str, seq_len: int, batch: int, **options: object) -> Plan:
    sizes = preset(model)
    workload = Workload(seq_len=seq_len, global_batch=batch)
    found = find_plan(profile_of(sizes), sizes, load_cluster(where), workload, top=1, **options)  # type: ignore[arg-type]
    assert found.best is not None
    return found.best.plan


def model_axes(plan: Plan) -> int:
    return plan.axes.pp * plan.axes.tp * plan.axes.cp * plan.axes.ep


def test_it_fits_on_one_device_and_there_is_one() -> None:
    assert best("gpt2-small", "h100:1", 1024, 16).world == 1


@pytest.mark.parametrize("where", ["h100:8", "a100-80g:8", "h100:8x2"])
def test_below_half_a_billion_parameters_data_parallelism_alone(where: str) -> None:
    plan = best("gpt2-small", where, 1024, 512)
    assert model_axes(plan) == 1
    assert plan.recompute.mode == "none"
    assert not plan.offload.state


def test_optimizer_state_that_does_not_fit_is_sharded() -> None:
    plan = best("llama-8b", "h100:8", 4096, 64)
    assert model_axes(plan) == 1
    assert (plan.axes.dp_shard, plan.zero) == (8, 3)


def test_a_model_too_large_for_one_device_and_little_memory_shards_parameters_and_recomputes_or_offloads() -> None:
    plan = best("llama-8b", "rtx4090:8", 4096, 64)
    assert plan.axes.dp_shard * plan.axes.tp * plan.axes.pp >= 4
    assert plan.zero == 3 or plan.axes.pp > 1
    assert plan.recompute.mode != "none" or plan.offload.state or plan.axes.cp * plan.axes.tp * plan.axes.pp > 1


@pytest.mark.parametrize(
    ("model", "where"), [("llama-1b", "rtx4070:8"), ("llama-1b", "rtx3080:8"), ("llama-3b", "rtx4090:8")]
)
def test_up_to_three_billion_parameters_and_little_memory_shard_states(model: str, where: str) -> None:
    plan = best(model, where, 2048, 64, forbid=("tp", "cp", "pp"))
    assert plan.axes.dp_shard >= 4
    assert plan.zero >= 2
    free = best(model, where, 2048, 64)
    assert free.zero >= 1 or free.axes.pp * free.axes.tp > 1


@pytest.mark.parametrize(("where", "slower"), [("l4:1x8", 1.2), ("a4000:8", 1.15)])
def test_whole_gradients_that_fit_are_reduced_once_per_step_where_links_are_slow(where: str, slower: float) -> None:
    """Over a network, or PCIe, with several micro-batches: zero 2 would reduce behind each of them."""
    plan = best("llama-1b", where, 2048, 64, forbid=("tp", "cp", "pp"))
    assert plan.axes.dp_shard >= 4 and plan.zero == 1 and plan.batch.micro_batches > 1
    sizes, cluster, workload = preset("llama-1b"), load_cluster(where), Workload(seq_len=2048, global_batch=64)
    one, two = (estimate_time(profile_of(sizes), cluster, plan.with_(zero=zero), workload).total for zero in (1, 2))
    assert two > slower * one


def test_where_nothing_else_fits_states_go_to_the_host() -> None:
    plan = best("llama-8b", "rtx4090:2", 2048, 16)
    assert plan.offload.state
    assert plan.zero == 3 or plan.axes.pp > 1


def test_several_nodes() -> None:
    small, large = best("gpt2-small", "h100:8x2", 1024, 512), best("llama-3b", "h100:8x2", 4096, 128)
    assert (small.axes.data, model_axes(small)) == (16, 1)
    assert large.axes.dp_shard > 1 and large.zero >= 1
    assert model_axes(large) == 1


def test_seventy_billion_parameters_take_several_axes() -> None:
    plan = best("llama-70b", "a100-80g:8x4", 4096, 64)
    assert sum(degree > 1 for degree in (plan.axes.pp, plan.axes.tp, plan.axes.cp, plan.axes.data)) >= 2
    assert plan.zero >= 1 or plan.axes.pp > 1


def test_too_few_samples_for_all_devices_divides_the_model_or_the_sequence() -> None:
    plan = best("llama-8b", "h100:8", 8192, 2)
    assert plan.axes.data <= 2
    assert plan.axes.tp * plan.axes.cp * plan.axes.pp >= 4


def test_tensor_parallelism_stays_inside_a_node() -> None:
    plan = best("llama-70b", "h100:8x4", 4096, 32, forbid=("cp", "offload"))
    assert plan.axes.tp <= 8


def test_slow_networks_are_crossed_by_the_pipeline_or_replicas_and_not_by_gathering_parameters() -> None:
    """Where parameters are gathered per micro-batch over a slow network, stages or sharding inside a node win."""
    sizes, workload = preset("llama-13b"), Workload(seq_len=4096, global_batch=64)
    fast = load_cluster("a100-80g:8x4")
    slow = fast.with_(network=load_cluster("l4:8").network)
    plans = [find_plan(profile_of(sizes), sizes, where, workload, top=1).ranked[0] for where in (fast, slow)]
    assert plans[1].time.total > plans[0].time.total
    crossing = plans[1].plan
    assert crossing.axes.pp > 1 or crossing.axes.dp_replicate > 1 or crossing.zero < 3


def test_experts_go_over_ranks_when_they_do_not_fit_otherwise() -> None:
    plan = best("mixtral-8x7b", "h100:8x4", 4096, 256)
    assert plan.axes.ep > 1 or plan.zero == 3 or plan.axes.pp > 1
