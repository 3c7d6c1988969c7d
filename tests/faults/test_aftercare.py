"""Every cause says the small fix and the thorough one, what prevents the next, and the way back; a documented one says what it rests on."""

import pytest

from holter.faults import CAUSES
from holter.faults.aftercare import TABLE, complete, sources_of
from holter.offline import causes as offline_causes


@pytest.mark.parametrize("cause", CAUSES)
def test_a_fix_is_followed_up(cause):
    fix = complete(CAUSES[cause])
    small, thorough = fix.alternatives
    assert small.startswith("Small: ")
    assert thorough.startswith("Thorough: ")
    assert f'cause="{cause}"' in fix.prevent
    assert "checkpoint" in fix.roll_back
    assert ("healthy" in fix.roll_back) == (CAUSES[cause].damage is not None)


def test_a_documented_pattern_says_what_it_rests_on_and_most_cite_others():
    rows = [(name, row) for name, entry in CAUSES.items() for row in entry.rows] + list(offline_causes.ROWS)
    documented = {name for name, row in rows if row.basis == "documented"}
    cited = [name for name in documented if any("http" in one or "arXiv" in one for one in sources_of(name))]
    assert len(cited) > 0.8 * len(documented)
    assert all(sources_of(name) for name in documented)


def test_no_cause_is_written_down_twice_or_for_nobody():
    known = set(CAUSES) | {name for name, _ in offline_causes.ROWS}
    planned = {"gradient_scale_mismatch", "parallel_input_mismatch", "data_leakage", "class_imbalance", "distribution_shift", "expert_collapse", "expert_overflow", "host_memory_leak", "nonfinite_loss_function"}  # fmt: skip
    assert set() == set(TABLE) - known - planned
