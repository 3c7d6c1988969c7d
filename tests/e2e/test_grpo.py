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
        ("missing", "stale_rollout_weights"), ("empty", "no_learning_signal"), ("same-reference", "kl_inactive"), ("wrong-reference", "wrong_reference"),
        ("plain", ""), ("cut-healthy", ""), ("pushed", ""), ("synced-reference", ""), ("cast", ""), ("reference", ""),
    ],
)  # fmt: skip
def test_what_it_says(jobs: Launcher, fault: str, cause: str) -> None:
    ended = jobs.start(SCRIPT, fault, 24 if "reference" in fault else 12, by="python").wait()
    assert 0 == ended.code, ended.stderr[-3000:]
    # What is wrong with a reference may be on purpose: a remark.
    told = ended.diagnoses if "reference" in fault else ended.alarms
    assert [cause] * bool(cause) == [one["causes"][0]["cause"] for one in told]
