"""The waits of a halt fit into each other: the coordinator decides before a rank that stands or dies gives up."""

from holter import patience
from holter.records import Phase


def test_every_phase_has_its_wait():
    assert set(Phase) == set(patience.PHASES)
    assert all(wait.floor_s <= wait.ceiling_s and wait.unseen_s <= wait.ceiling_s for wait in patience.PHASES.values())


def test_the_coordinator_decides_before_a_rank_that_stands_goes_on():
    assert patience.STAND_S < patience.UNEXPLAINED_S < patience.HOLD_S


def test_the_coordinator_decides_before_a_rank_that_is_about_to_end_is_gone():
    assert patience.KEEP_DYING_S < patience.DYING_S


def test_a_rank_that_has_saved_waits_longer_than_the_coordinator_for_the_last_answer():
    assert patience.ANSWER_S < patience.LEAVE_S
