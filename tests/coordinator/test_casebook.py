"""How long after its beginning a fault was found."""

import pytest

from holter.coordinator.casebook import Casebook
from holter.detectors import RankExit, Window
from holter.records import Exited, Finding, Phase

SECOND = 1_000_000_000


def finding(detector: str, **facts: object) -> Finding:
    return Finding(
        detector=detector, severity="critical", first_step=20, detected_step=20, ranks=(1,), summary="s", facts=facts
    )


def settled_after_s(seen: Finding, window: Window, now_s: float) -> float:
    (diagnosis,) = Casebook("run", "notify").settle([seen], window, int(now_s * SECOND))
    return diagnosis.detected_after_s


def test_a_hang_is_counted_from_when_its_step_was_overdue() -> None:
    window = Window(now_ns=109 * SECOND, world_size=2, attached=frozenset({0, 1}))
    stalled = finding("stalled_rank", is_suspended=True, overdue_at_ns=107 * SECOND)
    assert 1.5 == settled_after_s(stalled, window, 108.5)
    assert 0.0 == settled_after_s(stalled, window, 106.9)


def test_a_death_is_counted_from_itself() -> None:
    exited = Exited(
        pid=1, exit_code=None, signal=9, out_of_memory=False, last_step=20, last_phase=Phase.DATA, farewell=None
    )
    window = Window(now_ns=0, world_size=2, attached=frozenset({0, 1}), exits=(RankExit(1, 100 * SECOND, exited),))
    assert 2.0 == settled_after_s(finding("dead_rank", is_signal=True), window, 102.0)


@pytest.mark.parametrize("detector", ["stalled_rank", "dead_rank"])
def test_without_a_beginning_it_was_found_at_once(detector: str) -> None:
    window = Window(now_ns=0, world_size=2, attached=frozenset({0, 1}))
    assert 0.0 == settled_after_s(finding(detector), window, 102.0)
