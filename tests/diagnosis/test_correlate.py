"""One NaN is one incident, however many detectors see it and in whatever order they speak."""

import itertools
from typing import Any

import msgspec
import pytest

from holter.diagnosis import Incident, correlate
from holter.faults import BRINGS_ABOUT, CAUSES, DETECTORS
from holter.faults.family import Stage
from holter.records import Finding, TableRequest


def finding(detector: str, step: int, ranks: tuple[int, ...] = (1,), **facts: Any) -> Finding:
    return Finding(
        detector=detector,
        severity="critical",
        first_step=step,
        detected_step=step,
        ranks=ranks,
        summary=f"{detector} {step}",
        facts=facts,
    )


BAD_BATCH = finding("nonfinite_values", 30, has_nonfinite_input=True, has_nonfinite_loss=True)
NAN_LATER = finding("nonfinite_values", 31, (0, 1), has_nonfinite_input=False, has_nonfinite_loss=True)
APART = finding("replica_divergence", 30, (0, 1), first_class="gradients", gradients_differ=True)
GAVE_UP = finding("dead_rank", 35, is_exception=True)
KILLED = finding("dead_rank", 35, is_signal=True, is_killed=True)
FLIPPED = finding(
    "replica_divergence", 30, first_class="parameters_before", own_history_broke_on_some=True, gradients_differ=False
)
OVERFLOW = finding("nonfinite_values", 30, has_nonfinite_input=False, has_nonfinite_loss=True)


def run(*rounds: list[Finding]) -> list[Incident]:
    known: dict[str, Incident] = {}
    for findings in rounds:
        known |= {incident.id: incident for incident in correlate(tuple(known.values()), findings, stamp="T")}
    return list(known.values())


def open_ones(*rounds: list[Finding]) -> list[Incident]:
    return [incident for incident in run(*rounds) if incident.is_open]


@pytest.mark.parametrize("order", list(itertools.permutations([BAD_BATCH, NAN_LATER, APART, GAVE_UP])))
def test_nan_divergence_and_death_are_one_incident_in_any_order(order: tuple[Finding, ...]) -> None:
    (incident,) = open_ones(*([one] for one in order))
    assert incident.id == "T-1"
    assert incident.leading == BAD_BATCH
    assert {"replica_divergence", "dead_rank"} <= {one.detector for one in incident.consequences}


def test_all_at_once_are_one_incident_too() -> None:
    (incident,) = run([GAVE_UP, APART, NAN_LATER, BAD_BATCH])
    assert incident.leading == BAD_BATCH
    assert incident.consequences == (APART, NAN_LATER, GAVE_UP)


def test_the_same_finding_again_is_no_news() -> None:
    known = correlate((), [BAD_BATCH], stamp="T")
    assert correlate(known, [BAD_BATCH], stamp="T") == ()
    assert correlate(known, [msgspec.structs.replace(BAD_BATCH, summary="other words")], stamp="T") == ()


def test_the_same_fault_better_understood_keeps_its_incident() -> None:
    better = msgspec.structs.replace(
        OVERFLOW, modules=("blocks.2",), facts=OVERFLOW.facts | {"has_origin_module": True}
    )
    (incident,) = run([OVERFLOW], [better])
    assert (incident.id, incident.leading.modules) == ("T-1", ("blocks.2",))


def test_the_same_fault_seen_again_later_leaves_its_beginning_alone() -> None:
    (incident,) = run([BAD_BATCH], [msgspec.structs.replace(BAD_BATCH, first_step=60)])
    assert incident.leading.first_step == 30


def test_a_finding_of_the_run_that_is_seen_on_more_ranks_later_keeps_its_step() -> None:
    early = finding("missing_gradients", 14, (0,), is_called=True, is_gradient_off=True)
    (incident,) = run([early], [msgspec.structs.replace(early, first_step=54, ranks=(0, 1))])
    assert (incident.leading.first_step, incident.leading.ranks) == (14, (0, 1))
    sooner = msgspec.structs.replace(early, first_step=9)
    assert run([early], [sooner])[0].leading.first_step == 9


def test_replicas_that_parted_before_the_nan_are_an_incident_of_their_own() -> None:
    earlier = finding("replica_divergence", 0, (0, 1), first_class="parameters_before", parameters_differ_at_first=True)
    assert len(open_ones([earlier], [BAD_BATCH])) == 2


def test_a_corrupted_weight_that_overflows_leads_the_nan_it_makes_in_the_same_step() -> None:
    for rounds in ([[FLIPPED, OVERFLOW]], [[OVERFLOW], [FLIPPED]]):
        (incident,) = open_ones(*rounds)
        assert incident.leading == FLIPPED
        assert incident.consequences == (OVERFLOW,)


def test_a_corrupted_weight_does_not_spoil_a_batch() -> None:
    assert len(open_ones([FLIPPED], [BAD_BATCH])) == 2


def test_a_kill_is_no_consequence_of_a_nan() -> None:
    assert len(open_ones([BAD_BATCH], [KILLED])) == 2


def test_everything_after_a_death_follows_from_it() -> None:
    death = finding("dead_rank", 20, is_signal=True)
    (incident,) = run([death], [APART], [finding("nonfinite_values", 21)])
    assert death == incident.leading
    assert len(incident.consequences) == 2


def test_an_incident_that_was_part_of_another_is_merged_not_lost() -> None:
    alone = [finding("replica_divergence", 12, (0, 1), first_class="parameters_before"), BAD_BATCH]
    death = finding("dead_rank", 10, (0,), is_signal=True)
    first, second = run(alone, [death])
    assert (death, None) == (first.leading, first.merged_into)
    assert second.merged_into == first.id


def test_a_better_opinion_on_who_died_first_replaces_the_old_one() -> None:
    complained = finding("dead_rank", 20, (0,), is_exception=True, is_connection_lost=True)
    killed = finding("dead_rank", 21, (1,), is_signal=True)
    (incident,) = run([complained], [killed])
    assert (incident.id, incident.leading) == ("T-1", killed)


def test_a_finding_that_still_needs_evidence_opens_nothing() -> None:
    asking = msgspec.structs.replace(APART, needs=(TableRequest("gradients", 30, (0, 1)),))
    assert correlate((), [asking], stamp="T") == ()


def test_a_closed_incident_takes_no_more_findings() -> None:
    (incident,) = run([BAD_BATCH])
    closed = msgspec.structs.replace(incident, is_closed=True)
    assert [new.id for new in correlate((closed,), [BAD_BATCH], stamp="T")] == ["T-2"]


def test_consequences_speak_of_detectors_and_causes_that_exist() -> None:
    assert {name for line in BRINGS_ABOUT for name in (line.leader, *line.after)} <= set(DETECTORS)
    causes = {name for line in BRINGS_ABOUT for name in (*line.if_leader_is, *line.unless_follower_is)}
    assert causes <= set(CAUSES)
    assert all(line.after or line.groups for line in BRINGS_ABOUT)


def test_every_detector_but_one_has_its_place_in_a_step() -> None:
    assert ["replica_divergence"] == [name for name, entry in DETECTORS.items() if entry.stage is Stage.UNKNOWN]


def test_a_curve_that_follows_from_a_learning_rate_is_listed_under_it() -> None:
    jump = finding("learning_rate", 40, (0, 1), has_jump=True, has_consequence=True)
    spike, rise = finding("gradient_explosion", 41, (0, 1)), finding("loss_trend", 43, (0, 1))
    for order in itertools.permutations([jump, spike, rise]):
        (incident,) = open_ones(*([one] for one in order))
        assert incident.leading.detector == "learning_rate"


def test_what_was_set_up_wrongly_explains_what_was_dated_before_it() -> None:
    stale, grown = finding("optimizer_identity", 1, (0, 1)), finding("uncleared_gradients", 0, (0, 1))
    (incident,) = open_ones([grown], [stale])
    assert incident.leading == stale


def test_a_rank_that_died_explains_lateness_and_lateness_explains_no_death() -> None:
    death, late = finding("dead_rank", 20, is_signal=True), finding("slow_rank", 30, (0,))
    (incident,) = run([death], [late])
    assert (death, (late,)) == (incident.leading, incident.consequences)
    assert len(run([finding("slow_rank", 10, (0,))], [death])) == 2


STUCK = finding("stalled_rank", 20, is_in_script=True, is_interpreter_locked=False, is_everyone_stuck=False)
HELD = finding("stalled_rank", 20, is_suspended=True)
MISMATCH = finding("collective_mismatch", 20, is_shape=True)


@pytest.mark.parametrize(
    "death",
    [
        finding("dead_rank", 20, (0,), is_exception=True),
        finding("dead_rank", 19, (0,), is_signal=True, is_terminated=True),
        finding("dead_rank", 20, (1,), is_signal=True, is_killed=True),
    ],
    ids=["timeout", "terminated", "killed"],
)
@pytest.mark.parametrize("hang", [STUCK, HELD], ids=["stuck", "held"])
def test_a_job_that_hung_and_was_ended_is_one_incident_led_by_the_hang(hang: Finding, death: Finding) -> None:
    (incident,) = open_ones([hang], [hang, death], [hang, death])
    assert (hang, (death,)) == (incident.leading, incident.consequences)


def test_a_timeout_is_led_by_the_hang_that_it_proves_whichever_is_told_first() -> None:
    given_up = finding("dead_rank", 20, is_timed_out=True, is_absent_seen=False, is_absent_known=True)
    (incident,) = open_ones([given_up], [given_up, STUCK])
    assert (STUCK, (given_up,)) == (incident.leading, incident.consequences)


def test_memory_that_ran_out_on_the_rank_that_stood_still_leads() -> None:
    death = finding("dead_rank", 20, is_signal=True, is_killed=True, is_out_of_memory=True)
    (incident,) = open_ones([STUCK], [STUCK, death])
    assert death == incident.leading


@pytest.mark.parametrize("in_one_round", [True, False])
def test_survivors_that_wait_for_the_dead_are_one_incident_led_by_the_death(in_one_round: bool) -> None:  # noqa: FBT001
    death = finding("dead_rank", 21, is_signal=True, is_killed=True)
    waiting = finding("stalled_rank", 20, has_ended=True, has_died=True)
    rounds = [[waiting, death]] if in_one_round else [[death], [death, waiting]]
    (incident,) = open_ones(*rounds, *rounds)
    assert (death, (waiting,)) == (incident.leading, incident.consequences)


def test_a_suspended_rank_is_not_the_doing_of_a_mismatch() -> None:
    assert 2 == len(open_ones([MISMATCH], [HELD]))


@pytest.mark.parametrize(
    "leader",
    [MISMATCH, finding("batch_lengths", 12, has_uneven_lengths=True), finding("structure_mismatch", 20)],
    ids=lambda leader: leader.detector,
)
def test_what_makes_ranks_call_differently_leads_the_hang_and_the_death(leader: Finding) -> None:
    death = finding("dead_rank", 20, (0,), is_exception=True)
    for order in itertools.permutations([leader, STUCK, death]):
        (incident,) = open_ones(*([one] for one in order), list(order))
        assert leader == incident.leading
        assert {"stalled_rank", "dead_rank"} == {one.detector for one in incident.consequences}


def test_a_nan_explains_no_hang() -> None:
    assert 2 == len(open_ones([BAD_BATCH], [finding("stalled_rank", 31, is_in_script=True)]))


def test_another_rank_that_hangs_later_is_another_incident_and_the_same_one_is_not() -> None:
    again = msgspec.structs.replace(STUCK, first_step=90)
    assert 1 == len(open_ones([STUCK], [again]))
    assert 2 == len(open_ones([STUCK], [msgspec.structs.replace(again, ranks=(0,))]))
