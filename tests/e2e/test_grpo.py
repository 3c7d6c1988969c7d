"""Reinforcement learning through TRL's own GRPOTrainer, with a tiny model that is made there: each fault, and its healthy twin."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Launcher
from tests.e2e.resuming import HALT, halt_json

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


def test_an_infinite_reward_is_halted_and_the_trainer_goes_on_to_the_same_bits(nursery: Any, tmp_path: Path) -> None:
    def run(name: str, *words: object, action: str) -> Any:
        (tmp_path / name).mkdir()
        return nursery.run(tmp_path / name, [str(SCRIPT), *map(str, words)], env=HALT | {"HOLTER_ACTION": action})

    halted = run("halted", "nan", 10, action="halt")
    assert 93 == halted.code, halted.stderr[-3000:]
    halt = halt_json(halted.run_dir)
    assert (5, "healthy") == (halt["step"], halt["verdict"]), halt["why"]
    resumed = run("resumed", "plain", 10, halted.run_dir / halt["checkpoint"], action="notify")
    whole = run("whole", "plain", 10, action="notify")
    assert (0, 0) == (resumed.code, whole.code), resumed.stderr[-3000:] + whole.stderr[-3000:]
    for rank in (0, 1):
        one, other = (torch.load(tmp_path / name / f"weights-{rank}.pt") for name in ("whole", "resumed"))
        assert [] == [name for name in one if not torch.equal(one[name], other[name])]
