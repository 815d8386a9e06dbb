"""Fits tell constants back: timings made with known ones and a noise of 2 % give them again to 5 %."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shardwise.hardware.cluster import device_names, load_cluster
from shardwise.hardware.fit import (
    Heads,
    Message,
    Product,
    Stream,
    fit_attention,
    fit_link,
    fit_products,
    fit_stream,
    least,
    nearest_preset,
)
from shardwise.model.ops import Attention
from shardwise.plan.costs.kernels import attention_time, matmul_time, pointwise_time
from shardwise.plan.costs.links import Group, collective_time
from shardwise.plan.stack import load_stack

SIZES = {"cpu": (16, 256, 512, 1024), "h100": (256, 1024, 4096, 8192), "mi300x": (256, 1024, 4096, 8192)}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def noise() -> float:
    return random.lognormvariate(0.0, 0.02)


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(5)


def products_of(name: str) -> list[Product]:
    device, sizes = load_cluster(name).device, SIZES[name]
    shapes = [(m, n, k) for m in sizes[1:] for n in sizes[1:3] for k in sizes]
    return [
        Product(dtype, m, n, k, matmul_time(m, n, k, device, dtype) * noise())
        for dtype in ("fp32", "bf16", "fp8")
        if getattr(device.rates, dtype)
        for m, n, k in shapes
    ]


@pytest.mark.parametrize("name", SIZES)
def test_products_give_the_curve_of_a_known_device(name: str) -> None:
    device = load_cluster(name).device
    found = fit_products(products_of(name), device, units=device.curve.units, nominal=device.rates)
    assert found.curve.best == pytest.approx(device.curve.best, rel=0.05)
    assert found.curve.depth == pytest.approx(device.curve.depth, rel=0.05)
    assert found.rates.fp32 == pytest.approx(device.rates.fp32, rel=0.05)
    if device.rates.fp8:
        assert found.low_best == pytest.approx(device.low_best, rel=0.05)
    assert found.error < 0.03


def test_products_tell_the_units_of_a_device_that_does_not() -> None:
    device = load_cluster("mi300x").device
    assert fit_products(products_of("mi300x"), device, nominal=device.rates).curve.units == 304


def test_without_a_data_sheet_the_best_product_is_nominal_and_times_are_told_back() -> None:
    device, rows = load_cluster("h100").device, products_of("h100")
    found = fit_products(rows, device, units=132)
    assert found.rates.bf16 == max(row.rate for row in rows if row.dtype == "bf16")
    blind = replace(device, rates=found.rates, curve=found.curve, low_best=found.low_best)
    for row in rows:
        assert matmul_time(row.m, row.n, row.k, blind, row.dtype) == pytest.approx(row.seconds, rel=0.1)


def test_rows_that_are_no_multiples_of_8_give_their_share_and_do_not_touch_the_curve() -> None:
    device, rows = load_cluster("h100").device, products_of("h100")
    for sizes in ((8192, 16386, 1024), (8192, 1024, 16386), (8192, 16385, 1024), (8192, 1024, 16385)):
        seconds = matmul_time(*sizes, device, "bf16") / (0.3 if sizes[1] % 2 == 0 and sizes[2] % 2 == 0 else 0.15)
        rows.append(Product("bf16", *sizes, seconds * noise()))
    found = fit_products(rows, device, units=132, nominal=device.rates)
    assert found.curve.unaligned == pytest.approx(0.3, rel=0.05)
    assert found.curve.best == pytest.approx(device.curve.best, rel=0.05)
    assert fit_products(products_of("h100"), device, units=132, nominal=device.rates).curve.unaligned == 1.0


def test_a_missing_dtype_has_no_rate() -> None:
    rows = [row for row in products_of("h100") if row.dtype == "bf16"]
    found = fit_products(rows, load_cluster("h100").device, units=132)
    assert (found.rates.fp16, found.rates.fp8, found.rates.tf32) == (0.0, 0.0, 0.0)
    assert found.rates.of("fp32") == found.rates.bf16


def test_negative_control_a_wrong_curve_is_seen_in_the_error() -> None:
    rows = [replace(row, seconds=row.seconds * (8 if row.k > 512 else 1)) for row in products_of("cpu")]
    assert fit_products(rows, load_cluster("cpu").device, units=1).error > 0.2


def test_streams_give_the_share_of_the_bandwidth() -> None:
    device = load_cluster("h100").device
    rows = [
        Stream("add", 4.0 * count, pointwise_time(count, device, 4.0) * noise())
        for count in (2**20, 2**22, 2**24, 2**26)
    ]
    share, error = fit_stream(rows, device.bandwidth)
    assert share == pytest.approx(device.stream, rel=0.05)
    assert error < 0.03


@pytest.mark.parametrize("name", ["cpu", "h100"])
def test_attention_gives_its_share(name: str) -> None:
    device, stack = load_cluster(name).device, load_stack("shardwise")
    rows = [
        Heads(2, 8, size, length, attention_time(Attention(8, 8, size, size), (2, length, length), 1, device, stack))
        for size in (64, 128)
        for length in (256, 2048)
    ]
    share, error = fit_attention(rows, device, stack)
    assert share == pytest.approx(getattr(device.attention, stack.attention), rel=0.01)
    assert error < 0.01


@pytest.mark.parametrize(("name", "size", "stride", "tier"), [
    ("h100:8x2", 8, 1, "local"), ("h100:8x2", 2, 8, "network"), ("h100:8x16", 16, 8, "network"),
    ("cpu:2", 2, 1, "local"), ("gb200:4x2", 2, 4, "local"),
])  # fmt: skip
def test_messages_give_the_links_of_a_tier(name: str, size: int, stride: int, tier: str) -> None:
    cluster, group = load_cluster(name), Group(size, stride)
    rows = [
        Message(kind, count, collective_time(kind, count, group, cluster) * noise())
        for kind in KINDS
        for count in (2**10, 2**14, 2**18, 2**22, 2**26, 2**28)
    ]
    found, error = fit_link(rows, group, cluster)
    link = getattr(cluster, tier)
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=0.05)
    assert found.latency == pytest.approx(link.latency, rel=0.05)
    assert (found.origin, error < 0.03) == ("measured", True)


@pytest.mark.parametrize("name", [name for name in device_names() if name not in ("a100-80g", "h100-96g")])
def test_a_preset_is_nearest_to_itself(name: str) -> None:
    device = load_cluster(name).device
    near = load_cluster(nearest_preset(device)).device
    assert (near.rates.bf16, near.bandwidth, near.memory) == (device.rates.bf16, device.bandwidth, device.memory)


@pytest.mark.parametrize("where", [1e-6, 0.03, 1.0, 700.0])
def test_least_finds_the_bottom(where: float) -> None:
    assert least(lambda x: abs(x - where) ** 0.5, 1e-7, 1e4) == pytest.approx(where, rel=1e-3)
