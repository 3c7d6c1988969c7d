"""Memory that only rises is told, with the steps that are left and who keeps it; what fills up and stays is not."""

import math
from collections.abc import Sequence

import pytest

from holter.diagnosis import rank_causes
from holter.faults import Window
from holter.faults.memory.memory_growth import MB, MemoryGrowth
from holter.faults.window import Note, Spread, StepNumbers
from holter.records import Finding, Hoard


def judge(
    megabytes: Sequence[float], *notes: Note, place: str = "host", left_mb: float = 4000.0, every: int = 1
) -> list[Finding]:
    series = tuple(
        StepNumbers(
            step,
            step,
            {
                f"memory.{place}_bytes": Spread(held * MB, held * MB, held * MB, 0, 1, 2),
                f"memory.{place}_left_bytes": Spread(left_mb * MB, left_mb * MB, left_mb * MB, 0, 1, 2),
            },
        )
        for step, held in enumerate(megabytes)
        if step % every == 0
    )
    window = Window(now_ns=0, world_size=2, attached=frozenset({0, 1}), series=series, notes=notes)
    return list(MemoryGrowth().judge(window))


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("rate", [2.0, 8.0])
def test_a_leak_is_found_with_its_rate_and_the_steps_that_are_left(place: str, rate: float) -> None:
    (finding,) = judge([500 + rate * step + math.sin(7 * step) for step in range(80)], place=place)
    assert ("warning", (1,)) == (finding.severity, finding.ranks)
    proof = finding.evidence[-1].values
    assert rate * MB == pytest.approx(proof["bytes_a_step"], rel=0.15)
    assert 4000 / rate == pytest.approx(proof["steps_left"], rel=0.2)
    assert f"{place}_memory_leak" == rank_causes(finding)[0].cause


def test_a_device_that_is_asked_every_few_steps_leaks_as_much_a_step() -> None:
    (finding,) = judge([500 + 2.0 * step for step in range(120)], place="device", every=4)
    assert 2 * MB == pytest.approx(finding.evidence[-1].values["bytes_a_step"], rel=0.15)
    assert 2000 == pytest.approx(finding.evidence[-1].values["steps_left"], rel=0.2)


def test_a_leak_that_began_late_is_dated() -> None:
    (finding,) = judge([500.0] * 200 + [500 + 4.0 * step for step in range(100)])
    assert 190 <= finding.first_step <= 260


def test_who_keeps_it_is_named() -> None:
    hoard = Hoard(name="outputs", where="/home/me/train.py", length=90, grown=24, num_steps=24)
    (finding,) = judge([500 + 4.0 * step for step in range(80)], Note(1, 70, 0, hoard))
    assert "owner" == finding.evidence[0].kind
    assert "`outputs` of /home/me/train.py grew by 24 entries in 24 steps" in finding.evidence[0].summary


FILLS_UP = [500 + 300 * (1 - math.exp(-step / 20)) for step in range(200)]
STAIRCASE = [500 + 100.0 * (step // 50) for step in range(200)]
SAW = [500 + 3.0 * (step % 40) for step in range(200)]
SLOW = [500 + 0.01 * step for step in range(2000)]


@pytest.mark.parametrize(
    "healthy", [[500.0] * 200, FILLS_UP, STAIRCASE, SAW, SLOW, [500 + 4.0 * step for step in range(30)]]
)
def test_what_fills_up_climbs_in_steps_or_comes_back_is_silent(healthy: list[float]) -> None:
    for num in range(20, len(healthy), 10):
        assert [] == judge(healthy[:num])
