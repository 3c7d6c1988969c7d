"""A slice of the campaign as real jobs: the machine works from the draw to the score, and what was told rightly once still is."""

import pytest
from tests.campaign.grammar import draw
from tests.campaign.runner import Runner

pytestmark = pytest.mark.job

RELEASE = pytest.mark.release
RIGHT = ("0-0", "0-1", "0-2")
"""Faults that are told wholly rightly, beside a silent twin."""
RAN = ()
"""Faults whose scripts must run and have their effect, whatever is said of them."""
HEALTHY = ("0-h0",)


@pytest.mark.parametrize("seed", RIGHT)
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
