"""Settings held against the curve: what the schedule did at the step at which the loss began to rise, and what else began there."""

import json
from pathlib import Path
from typing import Any

import pytest

from holter.cli import main
from holter.offline.schedules import Setting, schedule_of


def settings(**values: object) -> list[Setting]:
    return [Setting(name, str(value), "config.yaml", 1) for name, value in values.items()]


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        ({"lr": 0.1, "milestones": [30, 60], "gamma": 10}, {0: 0.1, 29: 0.1, 30: 1.0, 60: 10.0}),
        ({"lr": 0.1, "step_size": 10, "gamma": 0.5}, {9: 0.1, 10: 0.05, 20: 0.025}),
        ({"learning_rate": 1.0, "warmup_steps": 10, "max_steps": 110, "lr_scheduler_type": "linear"}, {0: 0.1, 9: 1.0, 60: 0.5, 110: 0.0}),
        ({"learning_rate": 1.0, "warmup_ratio": 0.1, "max_steps": 100, "scheduler": "cosine"}, {4: 0.5, 10: 1.0, 55: 0.5, 100: 0.0}),
        ({"lr": 1.0, "T_0": 50}, {0: 1.0, 25: 0.5, 50: 1.0}),
        ({"lr": 0.3}, {0: 0.3, 1000: 0.3}),
    ],
)  # fmt: skip
def test_the_rate_at_a_step(values: dict[str, object], rates: dict[int, float]) -> None:
    made = schedule_of(settings(**values), 100)

    assert made is not None
    assert pytest.approx(rates) == {step: made.rate(step) for step in rates}


def test_without_a_rate_there_is_no_schedule() -> None:
    assert schedule_of(settings(gamma=0.1, milestones=[3]), 100) is None


def run(folder: Path, config: str, *, norm: bool = False, name: str = "config.yaml") -> Path:
    """A loss that rises from step 60 of 120 on; the log has no rates."""
    losses = [3 - 0.04 * step for step in range(60)] + [0.6 + 0.1 * step for step in range(60)]
    rows = [f"step {step}: loss {loss:.3f}" + (f" grad_norm {0.5 if step < 60 else 90.0}" if norm else "") + "\n" for step, loss in enumerate(losses)]  # fmt: skip
    (folder / "train.log").write_text("".join(rows))
    (folder / name).write_text(config)
    return folder


def diagnosed(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[dict[str, Any], str]:
    main(["diagnose", str(folder), "--json"])
    (diagnosis,) = json.loads(capsys.readouterr().out)
    cause = diagnosis["causes"][0]
    return diagnosis, " ".join(one["summary"] for one in cause["evidence"] if one["kind"] == "setting")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("optimizer:\n  lr: 0.1\nscheduler:\n  milestones:\n    - 58\n  gamma: 10\n", "config.yaml"),
        ('{"lr": 0.1, "milestones": [58], "gamma": 10}', "config.json"),
        ("import torch\n\n\ndef build(opt):\n    lr = 0.1\n    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=58)\n", "train.py"),
    ],
)  # fmt: skip
def test_a_rise_of_the_rate_is_computed_where_the_log_has_none(
    config: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path, config, name=name)
    if name == "train.py":
        (folder / "more.yaml").write_text("lr: 0.1\nseed: 1\n")

    diagnosis, told = diagnosed(capsys, folder)

    cause = diagnosis["causes"][0]
    assert ("learning_rate_too_high", "inference") == (cause["cause"], cause["basis"])
    assert "at step 58" in told


def test_a_rate_that_did_not_change_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis, told = diagnosed(capsys, run(tmp_path, "lr: 0.1\nmilestones: [10]\ngamma: 0.1\n"))

    assert diagnosis["causes"][0]["cause"] != "learning_rate_too_high"
    assert "no change of the rate begins it" in told


def test_what_else_begins_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = diagnosed(
        capsys, run(tmp_path, "unfreeze_backbone_at_step: 59\neval_steps: 60\nbatch_size: 60\nlr: 0.1\n")
    )

    assert "unfreeze_backbone_at_step = 59" in told
    assert "frozen or unfrozen there, 2 before" in told
    assert "eval_steps" not in told


def test_clipping_that_is_off_is_held_against_the_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = diagnosed(capsys, run(tmp_path, "max_grad_norm: 0.0\nlr: 0.1\n", norm=True))

    assert "clipping is off, and the gradient norm went to 90 at step" in told
    assert "180 times its usual 0.5" in told
