"""Gradients joined into one tensor: the same elements, each once, and found anew when they have moved."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.train.norm import sum_of_squares
from shardwise.train.updates.joined import SMALL, Joined, JoinedGradients

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2), "d": (6,)}


def views(order: str, gap: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Gradients in one buffer, in an order of their own, `gap` elements apart; in the dict as they are named."""
    buffer = torch.full((200,), 1e3, dtype=dtype)
    found, at = {}, 7
    for name in order:
        size = math.prod(SHAPES[name])
        found[name] = buffer[at : at + size].view(SHAPES[name]).fill_(ord(name) / 100)
        at += size + gap
    return {name: found[name] for name in sorted(found)}


def parts(joined: Joined) -> tuple[int, int]:
    return len(joined.runs), len(joined.alone)


def doubled(gradients: dict[str, torch.Tensor], joined: Joined) -> bool:
    """Whether each element is in exactly one tensor, and nothing else is: the rest of the buffer stays as it was."""
    before = {name: gradient.clone() for name, gradient in gradients.items()}
    for tensor in [*joined.runs, *joined.alone]:
        tensor.mul_(2)
    storage = next(iter(gradients.values())).untyped_storage()
    whole = torch.empty(0, dtype=torch.float32).set_(storage)
    outside = int((whole == 1e3).sum()) == 200 - sum(g.numel() for g in gradients.values())
    return outside and all(torch.equal(gradients[name], 2 * old) for name, old in before.items())


@pytest.mark.parametrize("order", ["abcd", "dbca"])
def test_neighbours_in_any_order_become_one_tensor(order: str) -> None:
    gradients = views(order)
    joined = JoinedGradients().of(gradients)
    assert parts(joined) == (1, 0) and joined.runs[0].shape == (27,)
    assert doubled(gradients, joined)


def test_a_gap_parts_them_and_an_overlap_too() -> None:
    gradients = views("abcd", gap=1)
    assert parts(JoinedGradients().of(gradients)) == (0, 4)
    two = torch.ones(8)
    assert parts(JoinedGradients().of({"a": two[:5], "b": two[4:]})) == (0, 2)
    assert parts(JoinedGradients().of({"a": two, "b": two})) == (0, 2)


def test_what_is_large_strided_or_of_another_type_stays_alone() -> None:
    large = torch.ones(SMALL + 5)
    assert parts(JoinedGradients().of({"a": large[: SMALL + 1], "b": large[SMALL + 1 :]})) == (0, 2)
    square = torch.ones(4, 2)
    assert parts(JoinedGradients().of({"a": square[:, 0], "b": square[:, 1]})) == (0, 2)
    assert parts(JoinedGradients().of(views("abcd", dtype=torch.float64))) == (0, 4)


def test_they_are_found_again_when_they_moved_or_one_is_missing() -> None:
    finder = JoinedGradients()
    for gradients in (views("abcd"), views("dcba"), views("abcd", gap=2), views("abd"), views("abcd")):
        joined = finder.of(gradients)
        assert doubled(gradients, joined)
        assert sum(t.numel() for t in [*joined.runs, *joined.alone]) == sum(g.numel() for g in gradients.values())
    separate = {name: gradient.clone() for name, gradient in views("abcd").items()}
    assert parts(finder.of(separate)) == (0, 4)
    assert parts(finder.of({})) == (0, 0)


def test_the_norm_does_not_show_the_order_of_the_buffer() -> None:
    truth = sum(float(g.double().square().sum()) for g in views("abcd").values())
    sums = {float(sum_of_squares(JoinedGradients().of(views(order)))) for order in ("abcd", "dbca", "bdac")}
    assert len(sums) == 1 and sums.pop() == pytest.approx(truth, rel=2e-7)


def test_half_types_and_nothing_at_all() -> None:
    mixed = {"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.full((4,), 2.0), **views("cd")}
    truth = 4 + 16 + sum(float(g.double().square().sum()) for g in views("cd").values())
    total = sum_of_squares(JoinedGradients().of(mixed))
    assert total.dtype == torch.float64 and float(total) == pytest.approx(truth, rel=2e-7)
    assert float(sum_of_squares(Joined([], []))) == 0.0
