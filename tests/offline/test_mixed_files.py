"""Files that hold more than one thing, and settings in another unit than the log's: rows and a traceback, pairs of numbers, stages, counters, epochs."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

from holter.cli import main

RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 7, in <module>\n    tokens = batch["ids"]\nKeyError: \'ids\'\n'


def diagnosed(capsys: pytest.CaptureFixture[str], path: Path) -> list[dict[str, Any]]:
    main(["diagnose", str(path), "--json"])
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def told(found: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(one["causes"][0]["cause"], one["first_step"]) for one in found]


def falling(step: float, by: float = 100.0) -> float:
    return 1 + 3 * math.exp(-step / by)


@pytest.mark.parametrize("header", ["", "step,loss\n"])
def test_a_traceback_below_rows_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], header: str) -> None:
    rows = [
        f"{step},{falling(step)}" if header else json.dumps({"step": step, "loss": falling(step)}) for step in range(60)
    ]
    path = tmp_path / "run"
    path.write_text(header + "\n".join(rows) + "\n" + RAISED)

    assert [("script_error", 59)] == told(diagnosed(capsys, path))


def test_a_log_whose_first_line_is_json_is_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"step={step} loss={falling(step) if step < 300 else step / 30:.4f}" for step in range(0, 400, 5)]
    path = tmp_path / "run.log"
    path.write_text('{"event": "start", "lr": 0.001}\n' + "\n".join(rows))

    ((cause, step),) = told(diagnosed(capsys, path))
    assert cause == "loss_divergence"
    assert abs(step - 300) <= 20


def test_lists_of_pairs_are_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = [[step, falling(step, 400) if step < 3000 else 1 + (step - 2900) / 200] for step in range(0, 4000, 100)]
    (tmp_path / "curve.json").write_text(json.dumps(curve))
    package = {"task": "why?", "artifacts": {"loss_curves": curve, "config": "config.yaml"}, "symptoms": []}
    (tmp_path / "package.json").write_text(json.dumps(package))

    alone, inside = (diagnosed(capsys, tmp_path / name) for name in ("curve.json", "package.json"))
    assert ["loss_divergence"] * 2 == [told(found)[0][0] for found in (alone, inside)]
    assert all(abs(told(found)[0][1] - 3000) <= 200 for found in (alone, inside))


def test_a_plan_s_next_stage_is_no_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = Random(3)  # noqa: S311
    rows = [
        (step, step // 1000, 0.3 + 0.3 * (step // 1000) + 1.5 * math.exp(-(step % 1000) / 200) + random.gauss(0, 0.02))
        for step in range(0, 4000, 20)
    ]
    path = tmp_path / "run.csv"
    path.write_text("step,stage,loss\n" + "\n".join(f"{a},{b},{c:.4f}" for a, b, c in rows))
    assert diagnosed(capsys, path) == []

    later = [(a, b, c if a < 3500 else c + (a - 3500) / 100) for a, b, c in rows]
    path.write_text("step,stage,loss\n" + "\n".join(f"{a},{b},{c:.4f}" for a, b, c in later))
    ((cause, step),) = told(diagnosed(capsys, path))
    assert cause == "loss_divergence"
    assert abs(step - 3500) <= 100


@pytest.mark.parametrize("skips", [True, False])
def test_every_step_skipped_by_the_log_s_own_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, skips: bool
) -> None:
    rows = []
    for step in range(2, 400, 2):
        lost = skips and step > 200
        loss = "" if lost else f" lm loss: {falling(step):.4E} |"
        rows.append(f" iteration {step:8d}/ 1000 |{loss} loss scale: {1.0 if step > 220 else 64.0} | grad norm: {'inf' if lost else 1.1} | number of skipped iterations: {2 if lost or step < 14 else 0:3d} | number of nan iterations:   0 |")  # fmt: skip
    path = tmp_path / "run.log"
    path.write_text("\n".join(rows))

    assert ([("every_step_skipped", 202)] if skips else []) == told(diagnosed(capsys, path))


@pytest.mark.parametrize("end", [400, 970])
def test_a_rate_of_zero_long_before_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], end: int) -> None:
    random = Random(1)  # noqa: S311
    rows = [{"step": step, "loss": falling(min(step, end)) + random.gauss(0, 0.02), "lr": 1e-3 * max(0.0, 1 - step / end)} for step in range(0, 1000, 10)]  # fmt: skip
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    assert ([("loss_plateau", 400)] if end == 400 else []) == told(diagnosed(capsys, path))


def test_updates_of_the_run_outrank_those_of_the_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        f"| INFO | train_inner | {json.dumps({'epoch': 1 + step // 500, 'update': step / 500, 'loss': str(falling(step) if step < 1200 else step / 150), 'num_updates': str(step)})}"
        for step in range(50, 1500, 50)
    ]
    path = tmp_path / "train.log"
    path.write_text("\n".join(rows))

    ((_, step),) = told(diagnosed(capsys, path))
    assert 1150 <= step <= 1250


def test_a_counter_made_as_wide_as_the_last_one_will_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"INFO [{step:>6d}] avg_loss={falling(step, 500) if step < 8000 else 1 + (step - 7900) / 400:.4f}" for step in range(0, 12000, 100)]  # fmt: skip
    path = tmp_path / "run.log"
    path.write_text("\n".join(rows))
    ((_, step),) = told(diagnosed(capsys, path))
    assert abs(step - 8000) <= 300

    # A process's number is none.
    path.write_text("\n".join(f"[31337] loss={falling(i)}" for i in range(300)))
    main(["diagnose", str(path)])
    assert "300 logs" in capsys.readouterr().out


def test_answers_beside_their_questions_are_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "samples.txt"
    path.write_text(
        "\n".join(f"prompt: {asked}\noutput: {'the ' * 30}" for asked in ("Who?", "2+2=", "Why?", "Where?"))
    )

    assert told(diagnosed(capsys, path))[0][0] == "degenerate_outputs"


def test_a_period_in_epochs_is_held_against_a_log_in_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        f"epoch {epoch}/10 batch {batch}/200 loss={falling(epoch, 2) if epoch < 7 else epoch - 5.0:.4f}"
        for epoch in range(1, 11)
        for batch in range(0, 200, 40)
    ]
    (tmp_path / "train.log").write_text("\n".join(rows))
    (tmp_path / "config.yaml").write_text(
        "epochs: 10\nlr: 3.0e-4\nscheduler:\n  name: step\n  step_size: 6\n  gamma: 10\n"
    )

    (found,) = diagnosed(capsys, tmp_path)
    assert ("learning_rate_too_high", 1200) == (found["causes"][0]["cause"], found["first_step"])
    assert "0.0003 to 0.003 at step 1200" in found["symptom"]


def test_what_a_log_does_not_say_of_a_variance_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "err.txt"
    path.write_text("/app/halt.py:33: UserWarning: var(): degrees of freedom is <= 0. Correction should be strictly less than the reduction factor\n  p.var()\n")  # fmt: skip

    (found,) = diagnosed(capsys, path)
    assert "A variance was taken over one sample or none at /app/halt.py:33." == found["symptom"]


def test_layers_that_explode_and_layers_that_vanish_are_two_things(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for step in range(0, 400, 10):
        norms = {f"grad_norm/encoder.{i}": 3e-9 * 3**i if i < 4 else 0.02 * i for i in range(12)}
        rows.append({"step": step, "loss": 2.3 + max(0, step - 250) / 50, **norms, "grad_norm/head": 0.5 * math.exp(step / 40)})  # fmt: skip
    path = tmp_path / "grads.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    found = diagnosed(capsys, path)
    assert {"vanishing_gradients", "exploding_gradients"} == {cause for cause, _ in told(found)}
    exploding = next(one for one in found if one["causes"][0]["cause"] == "exploding_gradients")
    assert ["head"] == exploding["causes"][0]["modules"]


def test_an_entropy_falls_since_it_left_its_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"step:{step} - actor/entropy:{0.6 if step < 120 else max(0.004, 0.6 * math.exp((120 - step) / 18)):.5f} - critic/rewards/mean:0.4" for step in range(1, 300)]  # fmt: skip
    path = tmp_path / "run.log"
    path.write_text("\n".join(rows))

    ((cause, step),) = told(diagnosed(capsys, path))
    assert cause == "entropy_collapse"
    assert 120 <= step <= 135


def test_a_reward_that_falls_at_once_after_a_long_rise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = Random(7)  # noqa: S311
    rows = [f"step:{step} - critic/rewards/mean:{(step * 5 if step < 70 else 10) + random.gauss(0, 6):.3f} - actor/entropy:0.5" for step in range(1, 121)]  # fmt: skip
    path = tmp_path / "run.log"
    path.write_text("\n".join(rows))
    ((cause, step),) = told(diagnosed(capsys, path))
    assert cause == "reward_collapse"
    assert 70 <= step <= 72

    # It came back, and is no collapse.
    rows = [f"step:{step} - critic/rewards/mean:{(step * 5 if not 70 <= step < 75 else 10) + random.gauss(0, 6):.3f} - actor/entropy:0.5" for step in range(1, 121)]  # fmt: skip
    path.write_text("\n".join(rows))
    assert diagnosed(capsys, path) == []
