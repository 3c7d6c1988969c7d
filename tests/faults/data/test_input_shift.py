"""Inputs that leave what they were, on one rank or on all; trends, spikes and noise are silent."""

import math
import random
from collections.abc import Callable

import pytest

from holter.diagnosis import rank_causes
from holter.faults import Window
from holter.faults.data.input_shift import InputShift
from holter.faults.window import Spread, StepNumbers
from holter.records import Finding

Values = Callable[[int, int], tuple[float, float]]
"""(step, rank) -> mean and spread of a batch."""


def judge(values: Values, *, num_steps: int = 80, num_ranks: int = 2, leaf: str = "input") -> list[Finding]:
    series = []
    for step in range(num_steps):
        of_ranks = [values(step, rank) for rank in range(num_ranks)]
        numbers = {
            f"batch.{leaf}.{stat}": _spread([one[which] for one in of_ranks])
            for which, stat in enumerate(("mean", "spread"))
        }
        series.append(StepNumbers(step, step, numbers))
    window = Window(now_ns=0, world_size=num_ranks, attached=frozenset(range(num_ranks)), series=tuple(series))
    return list(InputShift().judge(window))


def _spread(values: list[float]) -> Spread:
    low, high = min(values), max(values)
    return Spread(sum(values) / len(values), low, high, values.index(low), values.index(high), len(values))


def noise(seed: int = 0) -> Values:
    draw = random.Random(seed)  # noqa: S311
    return lambda *_: (draw.gauss(0, 0.05), 1 + draw.gauss(0, 0.03))


@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("scale", [4.0, 0.2])
def test_another_scale_on_one_rank_names_it(scale: float, num_ranks: int):
    usual = noise()

    def values(step: int, rank: int) -> tuple[float, float]:
        mean, spread = usual(step, rank)
        return (mean * scale, spread * scale) if rank == 1 and step >= 40 else (mean, spread)

    (finding,) = judge(values, num_ranks=num_ranks)
    assert ("warning", (1,), 40) == (finding.severity, finding.ranks, finding.first_step)
    assert ["distribution_shift"] == [cause.cause for cause in rank_causes(finding)]
    assert ("input",) == finding.tensors
    assert 40 == finding.evidence[0].values["step"]


def test_a_change_on_all_ranks_is_information():
    usual = noise()
    (finding,) = judge(lambda step, rank: (usual(step, rank)[0] + 2 * (step >= 30), usual(step, rank)[1]))
    assert ("info", (0, 1), 30) == (finding.severity, finding.ranks, finding.first_step)


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_silent(seed: int):
    assert [] == judge(noise(seed), num_steps=200)


def test_trends_spikes_and_what_comes_back_are_silent():
    usual = noise()
    assert [] == judge(lambda step, rank: (usual(step, rank)[0], 0.2 + step / 60))
    assert [] == judge(lambda step, rank: (usual(step, rank)[0], 20.0 if step % 31 == 30 else usual(step, rank)[1]))
    assert [] == judge(lambda step, rank: (2.0 if 30 <= step < 50 else usual(step, rank)[0], usual(step, rank)[1]))
    assert [] == judge(lambda step, rank: (math.sin(step / 12), usual(step, rank)[1]), num_steps=200)


def test_masks_and_short_runs_are_not_judged():
    usual = noise()

    def shifted(step: int, rank: int) -> tuple[float, float]:
        return usual(step, rank)[0] + 2 * (step >= 30), usual(step, rank)[1]

    assert [] == judge(shifted, leaf="attention_mask")
    assert [] == judge(shifted, num_steps=34)
