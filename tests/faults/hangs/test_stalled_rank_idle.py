"""A rank that never trains is overdue for hours: its peers are no victims of it, and their own hang is still found."""

import msgspec
from tests.faults.standing_jobs import MAIN, SPIN, START_S, WAIT, Actor, calls, play

from holter.records import Flight, Frame, Group, Phase, ThreadStack

IDLE = (Frame("wait", "/usr/lib/python3.11/threading.py", 300), MAIN)


def of_three(flight: Flight) -> Flight:
    return msgspec.structs.replace(flight, groups=[Group(name="0", description="train", ranks=(0, 1, 2))])


class Moving(Actor):
    """Trains until `since_s`, and is in a collective whenever it is looked at, another one each time."""

    def exam(self, key, now_s):
        exam = super().exam(key, now_s)
        if now_s >= self.since_s:
            return msgspec.structs.replace(exam, flight=of_three(exam.flight))
        flight = of_three(calls(700 + int(now_s * 4), is_last_open=self.is_in_call, now_s=START_S + now_s))
        return msgspec.structs.replace(
            exam, waited_s=0.05, flight=flight, stacks=[ThreadStack("MainThread", True, False, False, list(WAIT))]
        )


def job(stands_s):
    idle = Actor(since_s=-700, deadline_s=600, phase=Phase.ATTACH, frames=IDLE, step=0, flight=lambda _: None)
    culprit = Moving(since_s=stands_s, phase=Phase.FORWARD, frames=SPIN, last_call=811, is_in_call=False)
    return {0: Moving(since_s=stands_s), 1: Moving(since_s=stands_s), 2: culprit, 3: idle}


def test_peers_that_train_are_no_victims_of_a_rank_that_never_does():
    assert [] == play(job(1e6), 140.0).confirmed


def test_a_hang_beside_a_rank_that_never_moves_is_found():
    found = play(job(60.0), 140.0).confirmed
    assert [(2,)] == [finding.ranks for _, finding in found[:1]]
