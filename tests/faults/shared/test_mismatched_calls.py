"""Who has called fewer than its peers since when; nobody, where a call merely counts to the neighbouring step."""

import pytest

from holter.faults.shared.mismatched_calls import Behind, behind, left_out, step_of
from holter.faults.window import CallCounts


def counts(*lasts: tuple[int | None, ...], first: int = 0) -> list[CallCounts]:
    """What each rank said at the end of each step; None: nothing."""
    found = []
    for step, row in enumerate(lasts, first):
        said: dict[int, list[int]] = {}
        for rank, last in enumerate(row):
            if last is not None:
                said.setdefault(last, []).append(rank)
        found.append(CallCounts(step, {last: tuple(ranks) for last, ranks in said.items()}))
    return found


ALIKE = [(1, 1, 1), (2, 2, 2), (3, 3, 3)]


def test_a_rank_that_left_one_out_is_behind_from_that_step_on() -> None:
    told = counts(*ALIKE, (4, 3, 4), (5, 4, 5), (6, 5, 6))
    assert Behind(step=3, by=1, num_steps=3, last=3) == behind(told, (1,), (0, 2))
    assert behind(told, (0,), (1,)) is None


def test_the_step_in_which_it_called_nothing_at_all_is_not_told_and_still_named() -> None:
    told = counts(*ALIKE, (4, None, 4), (5, 4, 5), (6, 5, 6), (7, 6, 7))
    assert Behind(step=3, by=1, num_steps=3, last=3) == behind(told, (1,), (0, 2))


@pytest.mark.parametrize(
    "after",
    [
        [],
        [(4, 4, 4), (5, 5, 5), (6, 6, 6)],
        # Too few steps to tell from a call at the border of two.
        [(4, 3, 4), (5, 4, 5)],
        # A call that counts to this step here and to the next one there, now and then.
        [(4, 3, 4), (5, 5, 5), (6, 5, 6), (7, 7, 7)],
        [(4, 3, 4), (5, 4, 5), (6, 5, 6), (7, 7, 7)],
        # Falls further and further behind: it counts its steps otherwise.
        [(4, 3, 4), (5, 3, 5), (6, 3, 6), (7, 3, 7)],
        # Ahead of the others.
        [(4, 5, 4), (5, 6, 5), (6, 7, 6)],
        # The others do not agree.
        [(4, 3, 5), (5, 4, 6), (6, 5, 7)],
    ],
)
def test_what_is_not_known_to_be_behind(after: list[tuple[int, ...]]) -> None:
    assert behind(counts(*ALIKE, *after), (1,), (0, 2)) is None


def test_a_rank_that_always_counted_otherwise_has_left_out_nothing() -> None:
    assert behind(counts(*((n + 1, n, n + 1) for n in range(20))), (1,), (0, 2)) is None


def test_the_step_of_a_call_is_the_first_that_ended_after_it() -> None:
    told = counts((3, 3), (6, 6), (9, 8), first=10)
    assert [None, 11, 11, 12] == [step_of(told, number) for number in (3, 4, 6, 7)]
    assert 13 == step_of(told, 10)
    assert step_of([], 1) is None


def test_who_left_calls_out_is_known_although_the_ranks_were_held_up_later() -> None:
    told = counts(*((3 * n, 3 * n) for n in range(1, 6)), (18, None), (21, 18), (24, 21), (27, 24), (29, 27))
    assert ((1,), (0,), Behind(step=5, by=3, num_steps=3, last=15)) == left_out(told)


@pytest.mark.parametrize(
    "after",
    [
        # Not known yet: one step may be a call at the border of two.
        [(18, 15)],
        [(18, 15), (21, 21), (24, 24)],
        # Rank 0 called too often, rank 1 as ever.
        [(21, 18), (24, 21), (27, 24)],
    ],
)
def test_who_left_nothing_out(after: list[tuple[int, ...]]) -> None:
    assert left_out(counts(*((3 * n, 3 * n) for n in range(1, 6)), *after)) is None
