from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.ranks.sequence import divide, num_pieces

RANKS = st.sampled_from([1, 2, 3, 4, 8])
BALANCE = st.sampled_from(["zigzag", "contiguous"])


@given(st.integers(16, 300), RANKS, BALANCE)
def test_every_token_is_on_one_rank_and_the_order_puts_them_back(length: int, ranks: int, balance: str) -> None:
    layout = divide(length, ranks, balance)
    held = [[t for start, end in own for t in range(start, end)] for own in layout.ranges]
    assert sorted(t for own in held for t in own) == list(range(length))
    assert all(own == sorted(own) and own for own in held)
    assert layout.sizes == tuple(map(len, held))
    assert [t for rank, first, end in layout.order for t in held[rank][first:end]] == list(range(length))


@given(st.integers(16, 300), RANKS)
def test_zigzag_gives_every_rank_the_same_causal_work_up_to_the_uneven_tokens(length: int, ranks: int) -> None:
    layout = divide(length, ranks, "zigzag")
    work = [sum(t + 1 for start, end in own for t in range(start, end)) for own in layout.ranges]
    assert max(work) - min(work) <= 2 * length
    if length % (2 * ranks) == 0:
        assert len(set(work)) == len({max(work), min(work)}) and max(work) == min(work)


def test_zigzag_pairs_the_first_piece_with_the_last() -> None:
    assert divide(16, 4, "zigzag").ranges == (
        ((0, 2), (14, 16)),
        ((2, 4), (12, 14)),
        ((4, 6), (10, 12)),
        ((6, 8), (8, 10)),
    )


def test_lengths_that_do_not_divide_leave_pieces_that_differ_by_one_token() -> None:
    assert divide(7, 2, "zigzag").ranges == (((0, 2), (6, 7)), ((2, 4), (4, 6)))
    assert divide(7, 2, "contiguous").ranges == (((0, 4),), ((4, 7),))


def test_the_least_length_has_one_token_in_each_piece() -> None:
    for balance in ("zigzag", "contiguous"):
        layout = divide(num_pieces(4, balance), 4, balance)
        assert {end - start for own in layout.ranges for start, end in own} == {1}
