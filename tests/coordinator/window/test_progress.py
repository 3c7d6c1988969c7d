"""What is remembered of ranks that do not move on, and what is not believed."""

import math

import pytest

from holter.coordinator.intake import is_sound
from holter.coordinator.window.progress import ProgressBook
from holter.records import Body, Exam, Link, Observation, Overdue, Phase, ProcessState

S = 10**9


def overdue(tier: str = "suspect", waited_s: float = 3.0, step: int = 20) -> Observation:
    body = Overdue(
        tier=tier, phase=Phase.FORWARD, micro_step=0, waited_s=waited_s, deadline_s=3.0, because="it was never so long"
    )
    return Observation(rank=1, step=step, at_ns=0, body=body)


def link(state: str) -> Observation:
    return Observation(rank=1, step=-1, at_ns=0, body=Link(state=state))


def test_a_standstill_that_is_told_again_is_the_same_one() -> None:
    book = ProgressBook()
    book.add(overdue(waited_s=3.0), 100 * S)
    book.add(overdue(waited_s=12.2), 109 * S)
    assert 100 * S == book.delays[1].at_ns, "the line was lost and found again in between"
    book.add(overdue("overdue", waited_s=13.0), 110 * S)
    assert ("overdue", 110 * S) == (book.delays[1].overdue.tier, book.delays[1].at_ns)
    book.add(overdue("overdue", waited_s=4.0), 120 * S)
    assert 120 * S == book.delays[1].at_ns, "it moved in between: another standstill"


def test_whose_sidecar_hung_up_is_not_taken_to_stand_still_for_ever() -> None:
    book = ProgressBook()
    book.add(overdue(), 100 * S)
    book.add(link("silent"), 106 * S)
    assert 1 in book.delays
    book.add(link("closed"), 107 * S)
    assert {} == book.delays, "nobody would say that it moves on"


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, 1e12])
def test_times_that_cannot_be_are_not_believed(odd: float) -> None:
    process = ProcessState(state="sleeping", cpu_s=1.0, cpu_share=math.nan, stopped_s=odd)
    bodies: list[Body] = [overdue(waited_s=odd).body, Exam(reason="asked", waited_s=odd)]
    bodies.append(Exam(reason="asked", process=process))
    assert [False] * 3 == [is_sound(body) for body in bodies]
    assert is_sound(overdue().body)
    assert is_sound(Exam(reason="asked", waited_s=3.0))


def test_the_last_look_with_native_frames_outlives_quick_ones() -> None:
    book = ProgressBook()
    for number, depth in enumerate(["native", "native", "quick", "quick", "quick", "quick"], 1):
        exam = Exam(reason="asked", asked_ns=number, depth=depth)
        book.add(Observation(rank=1, step=20, at_ns=0, body=exam), number)
    assert [2, 4, 5, 6] == [seen.exam.asked_ns for seen in book.exams[1]]
