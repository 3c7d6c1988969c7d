"""A slice of the campaign as real jobs: the machine works from the draw to the score, and what was told rightly once still is."""

import pytest
from tests.campaign.grammar import draw
from tests.campaign.runner import Runner

pytestmark = pytest.mark.job

RELEASE = pytest.mark.release
QUICK = ("901-318", "901-159")
"""What `make test` runs of these: accelerate with other weights on one rank, an optimizer that holds nothing to train."""
RIGHT = (
    *QUICK,
    "901-19",
    "901-81",
    "901-247",
    "901-26",
    "901-37",
    "901-44",
    "901-48",
    "901-97",
    "901-8",
    "901-333",
    "901-457",
)
"""Faults that are told wholly rightly, beside a silent twin."""
RAN = ("901-1", "901-18", "901-116")
"""Faults that are not found yet: their scripts must run and have their effect, whatever is said of them."""
HEALTHY = ("901-h0", "901-h1")


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
