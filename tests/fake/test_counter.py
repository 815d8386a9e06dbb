"""The hashed counter: its published sequence, any part of a tensor the same bits, and the statistics of its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from shardwise.parallel.randomness.counter import Elements, Numbers, Stream, mixed, signed, strides
from shardwise.parallel.randomness.draws import DRAWS, SKIP, UNKEYED

CPU = torch.device("cpu")
SIZE = 200_000


def numbers(*key: object, shape: tuple[int, ...] = (SIZE,)) -> Numbers:
    return Numbers(Stream.of(*key), Elements.row_major(shape, CPU), CPU)


def test_the_bits_are_those_of_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # SplittableRandom of seed 0
    counters = torch.tensor([signed(golden * i) for i in (1, 2, 3)])
    assert [bits % 2**64 for bits in mixed(counters).tolist()] == published


def test_a_part_of_a_tensor_has_the_bits_of_the_whole() -> None:
    whole = numbers("part", shape=(6, 10, 8)).uniform(torch.float64)
    rows, columns = torch.arange(2, 5) * 80, torch.arange(4, 8)
    part = Elements((3, 10, 4), (rows, torch.arange(10) * 8, columns))
    assert torch.equal(Numbers(Stream.of("part"), part, CPU).uniform(torch.float64), whole[2:5, :, 4:])


def test_no_two_places_of_a_tensor_share_an_index() -> None:
    shape = (32, 4, 64, 48)
    along = [torch.arange(size) * stride for size, stride in zip(reversed(shape), strides(4), strict=True)]
    index = (along[3][:, None, None, None] + along[2][:, None, None]) + (along[1][:, None] + along[0])
    assert len(index.unique()) == math.prod(shape)


def test_masks_do_not_depend_on_the_type_of_what_they_mask() -> None:
    masks = [
        DRAWS[F.dropout](Fixed("types"), torch.ones(50, 40, dtype=dtype), 0.3, True) != 0
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("drop", [0.0, 1e-3, 0.1, 0.5, 0.999, 1.0])
def test_as_many_are_dropped_as_asked(drop: float) -> None:
    share = 1 - float(numbers("share", drop).keep(drop).double().mean())
    assert abs(share - drop) <= 4 * math.sqrt(drop * (1 - drop) / SIZE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_fill_their_interval(dtype: torch.dtype) -> None:
    values = numbers("uniform", dtype).uniform(dtype)
    assert values.dtype == dtype and values.min() >= 0 and values.max() < 1
    bins = torch.histc(values.double(), 64, 0, 1)
    chi_square = float(((bins - SIZE / 64).square() / (SIZE / 64)).sum())
    assert 63 - 5 * math.sqrt(126) < chi_square < 63 + 5 * math.sqrt(126)


def test_normal_and_exponential_numbers_have_their_moments() -> None:
    normal = numbers("normal").normal(torch.float64)
    moments = [float(normal.pow(k).mean()) for k in (1, 2, 3, 4)]
    for found, exact, spread in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert abs(found - exact) < 5 * math.sqrt(spread / SIZE)
    exponential = numbers("exponential").exponential(torch.float64)
    assert exponential.min() > 0 and abs(float(exponential.mean()) - 1) < 5 / math.sqrt(SIZE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("seed", 0, "a", 0, 0), ("seed", 1, "a", 0, 0)),
        (("seed", 0, "a", 0, 0), ("seed", 0, "b", 0, 0)),
        (("seed", 0, "a", 0, 0), ("seed", 0, "a", 0, 1)),
        (("seed", 1, "layers.1", 0, 0), ("seed", 11, "layers.1", 0, 0)),
    ],
)
def test_neighbouring_keys_are_not_correlated(one: tuple[object, ...], other: tuple[object, ...]) -> None:
    a, b = (numbers(*key).uniform(torch.float64) - 0.5 for key in (one, other))
    for shift in (0, 1, 64):
        correlation = float((a[: SIZE - shift] * b[shift:]).mean()) * 12
        assert abs(correlation) < 5 / math.sqrt(SIZE)


def test_every_output_bit_depends_on_every_bit_of_the_counter() -> None:
    counters = torch.randint(-(2**62), 2**62, (4096,), generator=torch.Generator().manual_seed(0))
    before = mixed(counters.clone())
    for bit in range(64):
        changed = before ^ mixed(counters ^ signed(1 << bit))
        flips = torch.stack([(changed >> k & 1).double().mean() for k in range(64)])
        assert (flips - 0.5).abs().max() < 5 * 0.5 / math.sqrt(4096)


@dataclass
class Fixed:
    """Numbers of one stream, whatever is drawn."""

    key: str

    def numbers(self, shape: tuple[int, ...], device: torch.device) -> Numbers:
        return Numbers(Stream.of(self.key), Elements.row_major(shape, device), device)


WIDE = torch.randn(64, 32, 16, generator=torch.Generator().manual_seed(3))
CALLS = {
    "dropout": (F.dropout, (WIDE, 0.2, True)),
    "torch.dropout": (torch.dropout, (WIDE, 0.2, True)),
    "dropout1d": (F.dropout1d, (WIDE, 0.2, True)),
    "dropout2d": (F.dropout2d, (WIDE[..., None], 0.2, True)),
    "dropout3d": (F.dropout3d, (WIDE[..., None, None], 0.2, True)),
    "alpha_dropout": (F.alpha_dropout, (WIDE, 0.2, True)),
    "feature_alpha_dropout": (F.feature_alpha_dropout, (WIDE, 0.2, True)),
    "bernoulli": (torch.bernoulli, (WIDE.sigmoid(),)),
    "rand": (torch.rand, (64, 32, 16)),
    "rand of a size": (torch.rand, ((64, 32, 16),)),
    "randn": (torch.randn, (64, 32, 16)),
    "rand_like": (torch.rand_like, (WIDE,)),
    "randn_like": (torch.randn_like, (WIDE,)),
    "normal": (torch.normal, (torch.ones(64, 32, 16), 0.5)),
    "normal of a size": (torch.normal, (1.0, 0.5, (64, 32, 16))),
    "gumbel_softmax": (F.gumbel_softmax, (WIDE,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_keyed_function_has_the_shape_and_moments_of_torchs(name: str) -> None:
    function, args = CALLS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = function(*args)
    ours = DRAWS[function](Fixed(name), *args)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    channels = 64 * 32 if "1d" in name or "2d" in name or "3d" in name or "feature" in name else ours.numel()
    error = 6 * float(theirs.std()) / math.sqrt(channels)
    assert abs(float(ours.mean() - theirs.mean())) < error
    assert abs(float(ours.std() / theirs.std()) - 1) < 12 / math.sqrt(channels)
    if "dropout" in name and "alpha" not in name:
        x, kept = args[0], ours != 0
        assert torch.equal(ours[kept], (x * 1.25)[kept])


FILLS = {
    "uniform_": (torch.Tensor.uniform_, (-1.0, 3.0), 1.0, 4 / math.sqrt(12)),
    "normal_": (torch.Tensor.normal_, (2.0, 3.0), 2.0, 3.0),
    "exponential_": (torch.Tensor.exponential_, (2.0,), 0.5, 0.5),
    "bernoulli_": (torch.Tensor.bernoulli_, (0.3,), 0.3, math.sqrt(0.21)),
}


@pytest.mark.parametrize("name", FILLS)
def test_a_keyed_fill_has_its_mean_and_deviation(name: str) -> None:
    function, args, mean, deviation = FILLS[name]
    tensor = torch.empty(SIZE, dtype=torch.float64)
    assert DRAWS[function](Fixed(name), tensor, *args) is tensor
    assert abs(float(tensor.mean()) - mean) < 5 * deviation / math.sqrt(SIZE)
    assert abs(float(tensor.std()) - deviation) < 10 * deviation / math.sqrt(SIZE)


def test_dropout_in_place_and_its_gradient() -> None:
    x = torch.ones(40, 50, requires_grad=True)
    out = DRAWS[F.dropout](Fixed("gradient"), x, 0.5, True)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    again = torch.ones(40, 50)
    assert DRAWS[F.dropout](Fixed("gradient"), again, 0.5, True, True) is again and torch.equal(again, out.detach())
    assert not DRAWS[F.dropout](Fixed("all"), torch.ones(9), 1.0, True).any()
    assert DRAWS[F.dropout](Fixed("none"), x, 0.0, True) is SKIP is DRAWS[F.dropout](Fixed("none"), x, 0.5, False)


def test_no_function_is_both_keyed_and_refused() -> None:
    assert not DRAWS.keys() & UNKEYED.keys()
