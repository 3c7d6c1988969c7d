"""What comes next if it goes on as before, and how far a rank is from that."""

import pytest

from holter.flight.deviations import align, is_within_step, pattern


@pytest.mark.parametrize(
    ("history", "following"),
    [
        ("ABCABCAB", "CAB"),
        ("AAAAA", "AAA"),
        ("AAABAAABAA", "ABA"),
        ("XYZABABABAB", "ABA"),
        ("TTTTETTTTETTTT", "ETT"),
        # An evaluation not long ago does not hide what every step has been since.
        ("ABABABABABEABABABA", "BAB"),
    ],
)
def test_a_program_goes_on_as_before(history, following):
    found = pattern(history)
    assert found is not None
    assert list(following) == found.extended(history, 3)


# The last: the evaluation that came after as many steps before may be due again.
@pytest.mark.parametrize("history", ["", "A", "ABC", "ABCDA", "AA", "ABCDEABCD", "XABABABABEABABABAB"])
def test_less_than_a_whole_round_that_came_back_is_no_history(history):
    assert pattern(history) is None


@pytest.mark.parametrize(
    ("seen", "expected", "shift", "by"),
    [
        ("B", "ABCABC", "missing", 1),
        ("CABCAB", "ABXCABCAB", "missing", 3),
        ("CABC", "ABCABCABC", "extra", 1),
        ("BAC", "ABCABC", "swapped", 1),
        ("XABC", "ABCABC", "extra", 1),
        ("XYABC", "ABCABC", "extra", 2),
        ("XBC", "ABCABC", "other", 1),
        ("X", "ABC", "other", 1),
        ("C", "ABCABC", "missing", 2),
    ],
)
def test_the_fewest_changes_explain_it(seen, expected, shift, by):
    numbers = [[ord(letter) for letter in word] for word in (seen, expected)]
    found = align(*numbers)
    assert (found.shift, found.by) == (shift, by)


@pytest.mark.parametrize(
    ("pauses", "ahead", "is_within"),
    [
        ((30, 1, 1), 0, False),
        ((30, 1, 1), 1, True),
        ((30, 1, 1), 2, True),
        ((30, 1, 1), 3, False),
        ((10, 10), 1, False),
        ((0, 0, 0), 1, False),
    ],
)
def test_the_first_call_of_a_step_follows_on_its_longest_pause(pauses, ahead, is_within):
    times = [0]
    for index in range(1, 8 * len(pauses)):
        times.append(times[-1] + pauses[index % len(pauses)])
    assert is_within_step(times, len(pauses), ahead) is is_within


def test_without_a_whole_round_no_call_is_known_to_be_within_a_step():
    assert not is_within_step([0, 1], 3, 1)
