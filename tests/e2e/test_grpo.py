"""Reinforcement learning through TRL's own GRPOTrainer, with a tiny model that is made there: each fault, and its healthy twin."""

import importlib.util
from pathlib import Path

import pytest
from tests.conftest import Launcher

SCRIPT = Path(__file__).parent / "scripts" / "grpo_faults.py"
pytestmark = [
    pytest.mark.job,
    pytest.mark.release,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed (make frameworks)"),
]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("constant", "no_learning_signal"), ("cut", "no_learning_signal"), ("stale", "stale_rollout_weights"), ("partly", "stale_rollout_weights"),
        ("plain", ""), ("cut-healthy", ""), ("pushed", ""), ("synced-reference", ""),
    ],
)  # fmt: skip
def test_what_it_says(jobs: Launcher, fault: str, cause: str) -> None:
    alarms = jobs.start(SCRIPT, fault, 12, by="python").wait().alarms
    assert [cause] * bool(cause) == [alarm["causes"][0]["cause"] for alarm in alarms]
