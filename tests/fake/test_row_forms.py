"""Rows that `verify` compares: padding alone makes no other row."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from shardwise.diagnose.verifying.evidence import _as_known
from shardwise.train.guards.fingerprints import row_forms, row_names

ROWS = [[5, 6, 7, 8, 9], [5, 6, 7], [5, 6], [5, 0], [4, 4, 4]]


def padded(rows: list[list[int]], *, left: bool = False) -> dict[str, Any]:
    longest = max(map(len, rows))

    def fill(row: list[int], value: int) -> list[int]:
        more = [value] * (longest - len(row))
        return more + row if left else row + more

    ids = [fill(row, 0) for row in rows]
    mask, labels = [fill([1] * len(row), 0) for row in rows], [fill([-100, *row[1:]], -100) for row in rows]
    return {
        "ids": torch.tensor(ids),
        "mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
        "n": torch.ones(len(rows)),
    }


def forms(batch: dict[str, Any]) -> dict[str, list[str]]:
    return dict(zip(row_names(batch), row_forms(batch), strict=True))


@pytest.mark.parametrize("left", [False, True])
def test_other_padding_is_no_other_row(left: bool) -> None:
    whole, parts = padded(ROWS, left=left), [padded(ROWS[1:4], left=left), padded(ROWS[4:], left=left)]
    known = forms(whole)
    ours = {name: own for part in parts for name, own in forms(part).items()}
    assert not set(ours) & set(known)
    renamed = _as_known(Counter(list(ours)), Counter(list(known)), ours, known)
    assert sorted(renamed.elements()) == sorted(list(known)[1:])


def test_other_rows_stay_others() -> None:
    known = forms(padded(ROWS))
    for other in ([5, 6, 8], [6, 7], [5, 5], [4, 4]):
        own = forms(padded([other]))
        assert _as_known(Counter(list(own)), Counter(list(known)), own, known) == Counter(list(own)), other
