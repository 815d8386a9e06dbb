"""The sample order is a permutation per epoch and a pure function of (seed, epoch, index)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, DataError
from shardwise.train.data.order import NUM_ROUNDS, SampleOrder

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_order(size: int, seed: int, position: int) -> int:
    """The same function in Python's unbounded integers: knows nothing of numpy, word size or byte order."""
    epoch, index = divmod(position, size)
    state = mix(mix((seed + GOLDEN) & MASK) ^ mix((epoch + GOLDEN) & MASK))
    keys = []
    for _ in range(NUM_ROUNDS):
        state = (state + GOLDEN) & MASK
        keys.append(mix(state))
    bits = max(1, (size - 1).bit_length())
    low_bits = (bits + 1) // 2
    high_bits = bits - low_bits
    while True:
        low, high = index & ((1 << low_bits) - 1), index >> low_bits
        for number, key in enumerate(keys):
            if number % 2 == 0:
                low ^= mix((high + key) & MASK) & ((1 << low_bits) - 1)
            else:
                high ^= mix((low + key) & MASK) & ((1 << high_bits) - 1)
        index = (high << low_bits) | low
        if index < size:
            return index


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, MASK), epoch=st.integers(0, 1 << 20))
def test_each_epoch_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = SampleOrder(size, seed)
    assert sorted(order.slice(epoch * size, (epoch + 1) * size).tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 1 << 40), seed=st.integers(0, MASK), position=st.integers(0, 1 << 50))
def test_it_equals_the_function_in_plain_integers(size: int, seed: int, position: int) -> None:
    assert SampleOrder(size, seed).at(position) == plain_order(size, seed, position)


def test_golden_values_hold_on_every_platform() -> None:
    assert SampleOrder(10, seed=1).slice(0, 20).tolist() == [plain_order(10, 1, p) for p in range(20)]
    text = ",".join(map(str, SampleOrder(1000, seed=1234).slice(0, 3000).tolist()))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "7fd98b1530e1dc3a"


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 50), start=st.integers(0, 200), length=st.integers(0, 120), seed=st.integers(0, 99))
def test_a_slice_over_epochs_is_its_single_positions(size: int, start: int, length: int, seed: int) -> None:
    order = SampleOrder(size, seed)
    assert order.slice(start, start + length).tolist() == [order.at(p) for p in range(start, start + length)]


def test_take_keeps_the_shape() -> None:
    positions = np.arange(12).reshape(3, 4)
    assert SampleOrder(5, 1).take(positions).tolist() == SampleOrder(5, 1).slice(0, 12).reshape(3, 4).tolist()


def test_epochs_and_seeds_give_different_orders() -> None:
    order = SampleOrder(100, seed=3)
    epochs = {tuple(order.slice(e * 100, (e + 1) * 100).tolist()) for e in range(50)}
    seeds = {tuple(SampleOrder(100, seed=s).slice(0, 100).tolist()) for s in range(50)}
    assert len(epochs) == 50 and len(seeds) == 50


@pytest.mark.parametrize("size", [3, 8, 20])
def test_each_sample_comes_equally_often_at_each_place(size: int) -> None:
    num_epochs = 4000
    table = np.zeros((size, size))
    orders = SampleOrder(size, seed=5).slice(0, size * num_epochs).reshape(num_epochs, size)
    for place in range(size):
        table[place] = np.bincount(orders[:, place], minlength=size)
    expected = num_epochs / size
    chi_squared = ((table - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert chi_squared < freedom + 6 * np.sqrt(2 * freedom)


def test_the_uniformity_check_sees_a_bad_order() -> None:
    rotated = (np.arange(20)[None, :] + np.arange(4000)[:, None] // 1000) % 20  # four orders only
    table = np.stack([np.bincount(rotated[:, place], minlength=20) for place in range(20)])
    assert ((table - 200) ** 2 / 200).sum() > 361 + 6 * np.sqrt(722)


def test_neighbours_do_not_stay_neighbours() -> None:
    order = SampleOrder(10_000, seed=1).slice(0, 10_000)
    assert (np.abs(np.diff(order)) == 1).mean() < 0.002  # 2 / 10,000 by chance


def test_without_shuffle_it_counts() -> None:
    assert SampleOrder(3, seed=9, shuffle=False).slice(1, 8).tolist() == [1, 2, 0, 1, 2, 0, 1]


def test_position_and_epoch() -> None:
    assert [SampleOrder(4).epoch_of(p) for p in (0, 3, 4, 11)] == [0, 0, 1, 2]


def test_an_empty_data_set_and_a_negative_position_are_refused() -> None:
    with pytest.raises(DataError, match="holds 0 samples"):
        SampleOrder(0)
    with pytest.raises(ConfigError, match="position -1 is negative"):
        SampleOrder(4).at(-1)
