"""Several notes in a row make a streak; a healthy one between them breaks it; ranks that take turns count together."""

from holter.faults.shared.streaks import Streak, find_streak
from holter.faults.window import Note
from holter.records import Skipped
from made_up import made_window


def note(rank: int, step: int, *, is_bad: bool = True) -> Note:
    body = Skipped(in_a_row=int(is_bad), scale=1.0, lowest_scale=1.0, first_scale=1.0, loss=0.0)
    return Note(rank, step, 0, body)


def find(*notes: Note, at_least: int = 3, min_steps: int = 0) -> Streak[Skipped] | None:
    window = made_window(notes=notes)
    return find_streak(window, Skipped, lambda body: body.in_a_row > 0, at_least=at_least, min_steps=min_steps)


def test_three_in_a_row_are_found_and_the_rank_named() -> None:
    found = find(*(note(rank, step, is_bad=rank == 1) for step in range(4) for rank in (0, 1)))
    assert found is not None
    assert (found.ranks, found.first_step, found.last[0].step) == ((1,), 0, 2)


def test_a_healthy_one_between_breaks_it() -> None:
    assert find(note(0, 0), note(0, 1), note(0, 2, is_bad=False), note(0, 3), note(0, 4)) is None


def test_a_rank_one_note_behind_is_named_too() -> None:
    found = find(*(note(0, step) for step in range(3)), *(note(1, step) for step in range(2)))
    assert found is not None
    assert found.ranks == (0, 1)


def test_a_streak_must_span_its_steps() -> None:
    assert find(*(note(0, step) for step in range(8)), min_steps=8) is None
    found = find(*(note(0, step) for step in range(12)), min_steps=8)
    assert found is not None
    assert len(found.notes) == 9


def test_ranks_that_take_turns_count_together() -> None:
    found = find(*(note(step % 5, step) for step in range(5)))
    assert found is not None
    assert found.ranks == (0, 1, 2)
    assert find(*(note(step % 5, step, is_bad=step != 2) for step in range(5))) is None
