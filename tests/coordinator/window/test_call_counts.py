"""How far ranks had come at the end of each step: kept by group, bounded."""

from holter.coordinator.window.call_counts import MAX_GROUPS, MAX_RANKS, MAX_STEPS, CallCountBook
from holter.faults.window import CallCounts
from holter.records import StepCalls


def told(step: int, **lasts: int) -> StepCalls:
    return StepCalls(step, 0.0, [], lasts)


def test_ranks_that_agree_are_kept_together_and_steps_in_order() -> None:
    book = CallCountBook()
    book.add(0, [told(4, tp=9), told(3, tp=7)])
    book.add(1, [told(3, tp=7), told(4, tp=8, dp=2)])
    assert {
        "tp": (CallCounts(3, {7: (0, 1)}), CallCounts(4, {9: (0,), 8: (1,)})),
        "dp": (CallCounts(4, {2: (1,)}),),
    } == book.counts()


def test_what_has_not_changed_is_the_same_object() -> None:
    book = CallCountBook()
    book.add(0, [told(3, tp=7, dp=1)])
    before = book.counts()
    book.add(0, [told(4, dp=2)])
    after = book.counts()
    assert before["tp"] is after["tp"]
    assert [3, 4] == [pace.step for pace in after["dp"]]


def test_of_many_ranks_groups_and_steps_some_are_kept() -> None:
    book = CallCountBook()
    for rank in range(2 * MAX_RANKS):
        book.add(rank, [told(0, tp=7 if rank else 6)])
    assert [1, MAX_RANKS] == [len(ranks) for ranks in book.counts()["tp"][0].lasts.values()]
    book.add(0, [told(step, tp=step) for step in range(2 * MAX_STEPS)])
    assert (MAX_STEPS, 2 * MAX_STEPS - 1) == (len(book.counts()["tp"]), book.counts()["tp"][-1].step)
    book.add(0, [told(0, **{f"g{number}": 1 for number in range(2 * MAX_GROUPS)})])
    assert MAX_GROUPS == len(book.counts())


def test_a_new_life_counts_from_the_beginning() -> None:
    book = CallCountBook()
    book.add(0, [told(3, tp=7)])
    book.clear()
    assert {} == book.counts()
