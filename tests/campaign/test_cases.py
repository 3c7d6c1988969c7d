"""A slice of the campaign as real jobs: the machine works from the draw to the score, and what was told rightly once still is."""

import pytest
from tests.campaign.grammar import draw
from tests.campaign.runner import Runner

pytestmark = pytest.mark.job

RELEASE = pytest.mark.release
QUICK = ("0-16", "0-17")
"""What `make test` runs of these: accelerate, an optimizer that holds nothing to train."""
RIGHT = (*QUICK, "0-0", "0-1", "0-3", "0-7", "0-9", "0-11", "0-14")
"""Faults that are told wholly rightly, beside a silent twin."""
RAN = ("0-2", "0-8", "0-13", "0-15")
"""Faults that are not found yet, or (0-2, one call that does not match, in a job of two seconds) not every time: their scripts must run and have their effect, whatever is said of them."""
HEALTHY = ("0-h6", "0-h11")


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed in QUICK else RELEASE) for seed in RIGHT])
def test_a_drawn_fault_is_told_rightly_and_its_twin_is_silent(nursery, tmp_path, seed):
    result = Runner(tmp_path, nursery=nursery).run(draw(seed))
    assert ("ran", "", []) == (result.status, result.twin_failure, result.mistakes), (result.why, result.said)


@pytest.mark.release
@pytest.mark.parametrize("seed", RAN)
def test_a_drawn_fault_has_its_effect_and_its_twin_is_silent(nursery, tmp_path, seed):
    result = Runner(tmp_path, nursery=nursery).run(draw(seed))
    assert ("ran", "", []) == (result.status, result.twin_failure, result.twin_alarms), result.why


@pytest.mark.release
@pytest.mark.parametrize("seed", HEALTHY)
def test_a_drawn_healthy_run_raises_nothing(nursery, tmp_path, seed):
    result = Runner(tmp_path, nursery=nursery).run(draw(seed))
    assert ("ran", []) == (result.status, result.said), result.why
