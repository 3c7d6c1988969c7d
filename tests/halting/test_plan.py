"""Which order begins a halt, from where the ranks are."""

from dataclasses import replace

import pytest

from holter.halting.plan import HaltPlan, JobShape, NotYet, RankSituation, Wish, choose
from holter.patience import STAND_S

NAN = Wish(cause="nonfinite_input", reason="r", ranks=(1,), first_bad=31)
HANG = Wish(cause="rank_stuck_in_python", reason="r", ranks=(1,), is_blocked=True)
ASKED = Wish(cause="requested", reason="r", is_operator=True)
JOB = JobShape(step_s=0.5)
SHARDS = JobShape(step_s=0.5, is_sharded=True)


def ranks(*steps: int | None, **how: object) -> list[RankSituation]:
    return [RankSituation(rank=number, step=step, **how) for number, step in enumerate(steps)]


def but(of: list[RankSituation], rank: int, **how: object) -> list[RankSituation]:
    return [replace(one, **how) if one.rank == rank else one for one in of]


def test_all_who_stand_before_one_step_save_together_and_who_writes_what_they_share_reads_it_back() -> None:
    """Of a framework that is its first process, also when it is to blame."""
    for culprit in range(3):
        wish = replace(NAN, ranks=(culprit,))
        assert HaltPlan(kind="commit", step=30, savers=(0, 1, 2)) == choose(
            wish, ranks(30, 30, 30, state="held"), JOB, waited_s=0
        )


def test_others_are_given_time_to_come_to_the_step_and_then_what_stands_is_rescued() -> None:
    part = but(ranks(30, 30, state="held"), 1, state=None)
    assert isinstance(choose(NAN, part, JOB, waited_s=STAND_S - 1), NotYet)
    assert HaltPlan(kind="rescue", step=30, savers=(0, 1)) == choose(NAN, part, JOB, waited_s=STAND_S + 1)


def test_a_dead_rank_is_not_waited_for() -> None:
    part = but(ranks(30, 30, state="held"), 1, is_there=False)
    assert HaltPlan(kind="rescue", step=30, savers=(0,), lost=(1,)) == choose(NAN, part, JOB, waited_s=0)


@pytest.mark.parametrize("how", [{"is_there": False}, {"is_able": False}])
def test_a_hang_is_rescued_by_those_who_can(how: dict[str, bool]) -> None:
    plan = choose(HANG, but(ranks(30, 30, 30), 1, **how), JOB, waited_s=0)
    assert HaltPlan(kind="rescue", step=30, savers=(0, 2), lost=(1,)) == plan


def test_who_can_save_its_own_part_does_though_it_is_the_culprit() -> None:
    assert HaltPlan(kind="rescue", step=30, savers=(0, 1)) == choose(HANG, ranks(30, 30), JOB, waited_s=0)


def test_of_several_steps_the_commonest_is_kept_then_the_latest() -> None:
    assert (32, (0, 2)) == _step_and_savers(choose(HANG, ranks(32, 30, 32), JOB, waited_s=0))
    assert (32, (0,)) == _step_and_savers(choose(HANG, ranks(32, 30), JOB, waited_s=0))
    assert (30, (2, 1)) == _step_and_savers(choose(HANG, ranks(31, 30, 30), JOB, waited_s=0))


def test_replicas_that_are_one_step_apart_go_on_from_the_rank_that_is_behind() -> None:
    assert (30, (1,)) == _step_and_savers(choose(HANG, ranks(31, 30, 31), JOB, waited_s=0))
    assert (30, (1,)) == _step_and_savers(choose(NAN, ranks(31, 30, state="held"), JOB, waited_s=0))
    torn = but(ranks(31, 30), 1, is_torn=True)
    assert (31, (0,)) == _step_and_savers(choose(HANG, torn, JOB, waited_s=0)), "it has nothing that is whole"


def test_a_torn_state_is_not_saved_and_where_all_are_torn_a_snapshot_is() -> None:
    assert (30, (0,)) == _step_and_savers(choose(HANG, but(ranks(30, 30), 1, is_torn=True), JOB, waited_s=0))
    torn = but(ranks(30, 30, is_torn=True, snapshots=(20, 25)), 1, snapshots=(15, 20))
    plan = choose(HANG, torn, JOB, waited_s=0)
    assert HaltPlan(kind="rescue", step=30, savers=(0, 1), snapshot=20) == plan
    assert 20 == plan.kept_step


def test_ranks_that_stand_between_two_optimizers_go_back_to_a_snapshot_or_are_asked_to_say_why_not() -> None:
    torn = but(ranks(30, 30, state="held", snapshots=(20, 30)), 1, is_torn=True)
    assert HaltPlan(kind="commit", step=30, savers=(0, 1), snapshot=30) == choose(NAN, torn, JOB, waited_s=0)
    bare = ranks(30, 30, state="held", is_torn=True)
    assert HaltPlan(kind="commit", step=30, savers=(0, 1)) == choose(NAN, bare, JOB, waited_s=0)


def test_torn_without_a_snapshot_somebody_is_asked_to_say_so() -> None:
    assert HaltPlan(kind="rescue", step=30, savers=(0,)) == choose(HANG, ranks(30, 30, is_torn=True), JOB, waited_s=0)


def test_shards_of_different_steps_go_back_to_what_all_have() -> None:
    apart = ranks(31, 30, snapshots=(25,))
    assert 25 == choose(HANG, apart, SHARDS, waited_s=0).snapshot
    assert -1 == choose(HANG, apart, JOB, waited_s=0).snapshot
    assert (31, (0,)) == _step_and_savers(choose(HANG, ranks(31, 30), SHARDS, waited_s=0))


def test_a_state_that_the_fault_is_in_is_left_for_a_snapshot_from_before() -> None:
    late = ranks(33, 33, state="held", snapshots=(28, 32))
    assert 28 == choose(NAN, late, JOB, waited_s=0).snapshot
    assert -1 == choose(NAN, ranks(30, 30, state="held", snapshots=(28,)), JOB, waited_s=0).snapshot


def test_who_trains_is_asked_for_a_step_that_nobody_has_reached() -> None:
    plan = choose(ASKED, ranks(100, 103), JOB, waited_s=0)
    assert ("prepare", (0, 1)) == (plan.kind, plan.savers)
    assert 105 <= plan.step <= 115
    assert choose(ASKED, ranks(100, 103), JOB, waited_s=0, attempt=2).step > plan.step
    assert isinstance(choose(ASKED, ranks(100, None), JOB, waited_s=0), NotYet)


def test_nobody_left_is_said() -> None:
    assert NotYet("no rank is left that could save") == choose(HANG, ranks(3, 3, is_there=False), JOB, waited_s=0)


def _step_and_savers(plan: HaltPlan | NotYet) -> tuple[int, tuple[int, ...]]:
    assert isinstance(plan, HaltPlan)
    return plan.step, plan.savers
