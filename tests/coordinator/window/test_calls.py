"""Ranks that called something else are known by their digests, those that left one out by their counts; memory stays bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.coordinator.window import calls
from holter.coordinator.window.assembly import Assembly
from holter.coordinator.window.calls import (
    MAX_COUNTED_GROUPS,
    MAX_COUNTED_RANKS,
    MAX_COUNTED_STEPS,
    CallBlockBook,
    CallCountBook,
)
from holter.faults.window import CallCounts, PartedBlock
from holter.records import Attached, CallBlock, Observation, StepCalls, Traffic


def told(book: CallBlockBook, rank: int, block: int, digest: int, *, group: str = "0", at_ns: int = 1) -> None:
    book.add(rank, [CallBlock(group, block, digest)], at_ns)


def test_ranks_that_agree_have_not_parted() -> None:
    book = CallBlockBook()
    for rank in range(4):
        for block in range(10):
            told(book, rank, block, 100 + block)
    assert () == book.parted()


def test_two_digests_part_the_ranks_as_soon_as_the_second_is_told() -> None:
    book = CallBlockBook()
    told(book, 0, 7, 51, at_ns=10)
    assert () == book.parted()
    told(book, 1, 7, 99, at_ns=20)
    assert (PartedBlock("0", 7, 20, {51: (0,), 99: (1,)}),) == book.parted()
    told(book, 2, 7, 51, at_ns=30)
    (parted,) = book.parted()
    assert (20, [(51, (0, 2)), (99, (1,))]) == (parted.at_ns, list(parted.digests.items()))


def test_groups_and_blocks_are_compared_each_for_itself() -> None:
    book = CallBlockBook()
    told(book, 0, 7, 1, group="tp0")
    told(book, 1, 7, 2, group="tp1")
    told(book, 0, 8, 3)
    told(book, 1, 9, 4)
    assert () == book.parted()


@given(st.permutations([(rank, block, block + (rank == 5) * (block == 3)) for rank in range(8) for block in range(5)]))
def test_the_order_of_arrival_does_not_matter(order: list[tuple[int, int, int]]) -> None:
    book = CallBlockBook()
    for rank, block, digest in order:
        told(book, rank, block, digest)
    assert (PartedBlock("0", 3, 1, {3: (0, 1, 2, 3, 4, 6, 7), 4: (5,)}),) == book.parted()


def test_the_same_object_is_given_until_something_changes() -> None:
    book = CallBlockBook()
    told(book, 0, 1, 5)
    told(book, 1, 1, 6)
    before = book.parted()
    assert book.parted() is before
    told(book, 2, 1, 6)
    assert book.parted() is not before


def test_a_rank_in_a_new_process_is_compared_with_nobodys_past() -> None:
    book = CallBlockBook()
    told(book, 0, 1, 5)
    told(book, 1, 1, 6)
    told(book, 1, 1, 6, group="other")
    book.forget(1)
    assert () == book.parted()
    told(book, 1, 1, 5)
    assert () == book.parted()
    book.forget(7)


def test_a_group_that_both_ranks_begin_anew_is_compared_anew() -> None:
    book = CallBlockBook()
    for rank in (0, 1):
        told(book, rank, 0, 5)
    told(book, 0, 0, 8)
    assert 1 == len(book.parted())
    told(book, 1, 0, 8)
    assert () == book.parted()


def test_old_blocks_are_forgotten_but_not_the_first_that_parted() -> None:
    book = CallBlockBook()
    for block in range(10 * calls.MAX_BLOCKS):
        for rank in (0, 1):
            told(book, rank, block, 1000 + block + (rank if block in {3, 400} else 0), at_ns=block)
    assert [3] == [parted.block for parted in book.parted()]
    assert calls.MAX_BLOCKS == len(book._groups["0"].blocks)


def test_of_a_group_that_parts_all_the_time_the_first_and_the_newest_are_shown() -> None:
    book = CallBlockBook()
    for block in range(200):
        for rank in (0, 1):
            told(book, rank, block, 2 * block + rank, at_ns=block)
    assert [0, 199] == [parted.block for parted in book.parted()]


def test_many_ranks_are_kept_as_the_lowest_of_each_digest() -> None:
    book = CallBlockBook()
    for rank in sorted(range(5000), key=lambda rank: rank * 2654435761 % 4999):
        told(book, rank, 0, int(rank == 4321))
    (parted,) = book.parted()
    assert {0: tuple(range(calls.MAX_RANKS)), 1: (4321,)} == parted.digests


def test_ranks_that_all_call_something_else_cost_no_more() -> None:
    book = CallBlockBook()
    for rank in range(200):
        told(book, rank, 0, 0 if rank < 100 else rank)
    (parted,) = book.parted()
    assert calls.MAX_DIGESTS == len(parted.digests)
    assert tuple(range(calls.MAX_RANKS)) == parted.digests[0]


def test_groups_are_bounded_and_a_silent_one_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_GROUPS", 2)
    book = CallBlockBook()
    told(book, 0, 0, 1, group="a", at_ns=0)
    told(book, 0, 0, 1, group="b", at_ns=calls.QUIET_NS)
    told(book, 0, 0, 1, group="c", at_ns=calls.QUIET_NS - 1)
    assert {"a", "b"} == set(book._groups)
    told(book, 0, 0, 1, group="c", at_ns=calls.QUIET_NS)
    assert {"b", "c"} == set(book._groups)
    book.forget(0)
    assert {} == book._groups


def test_the_assembly_shows_what_parted_and_forgets_it_with_the_process() -> None:
    assembly = Assembly(2)

    def attach(rank: int, pid: int) -> None:
        body = Attached(pid=pid, host="a", world_size=2, local_rank=rank, command=[], versions={})
        assembly.add(Observation(rank=rank, step=0, at_ns=0, body=body), 0)

    for rank in (0, 1):
        attach(rank, 100 + rank)
        body = Traffic(base_ns=0, steps=[], blocks=[CallBlock("0", 0, rank)])
        assembly.add(Observation(rank=rank, step=5, at_ns=0, body=body), 5)
    (parted,) = assembly.window(6).calls.parted
    assert {0: (0,), 1: (1,)} == parted.digests
    attach(1, 222)
    assert () == assembly.window(7).calls.parted


def counted(step: int, **lasts: int) -> StepCalls:
    return StepCalls(step, 0.0, [], lasts)


def test_counts_that_agree_are_kept_together_and_steps_in_order() -> None:
    book = CallCountBook()
    book.add(0, [counted(4, tp=9), counted(3, tp=7)])
    book.add(1, [counted(3, tp=7), counted(4, tp=8, dp=2)])
    assert {
        "tp": (CallCounts(3, {7: (0, 1)}), CallCounts(4, {9: (0,), 8: (1,)})),
        "dp": (CallCounts(4, {2: (1,)}),),
    } == book.counts()


def test_counts_that_have_not_changed_are_the_same_object() -> None:
    book = CallCountBook()
    book.add(0, [counted(3, tp=7, dp=1)])
    before = book.counts()
    book.add(0, [counted(4, dp=2)])
    after = book.counts()
    assert before["tp"] is after["tp"]
    assert [3, 4] == [one.step for one in after["dp"]]


def test_of_many_ranks_groups_and_steps_some_are_kept() -> None:
    book = CallCountBook()
    for rank in range(2 * MAX_COUNTED_RANKS):
        book.add(rank, [counted(0, tp=7 if rank else 6)])
    assert [1, MAX_COUNTED_RANKS] == [len(ranks) for ranks in book.counts()["tp"][0].lasts.values()]
    book.add(0, [counted(step, tp=step) for step in range(2 * MAX_COUNTED_STEPS)])
    assert (MAX_COUNTED_STEPS, 2 * MAX_COUNTED_STEPS - 1) == (len(book.counts()["tp"]), book.counts()["tp"][-1].step)
    book.add(0, [counted(0, **{f"g{number}": 1 for number in range(2 * MAX_COUNTED_GROUPS)})])
    assert MAX_COUNTED_GROUPS == len(book.counts())


def test_a_new_process_counts_from_the_beginning() -> None:
    book = CallCountBook()
    book.add(0, [counted(3, tp=7)])
    book.clear()
    assert {} == book.counts()
