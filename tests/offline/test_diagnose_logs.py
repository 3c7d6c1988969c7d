"""Logs of a run that never wore holter: read by content, judged in the live words, silent on healthy ones."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from holter.cli import main


def diagnosed(capsys: pytest.CaptureFixture[str], path: Path, code: int) -> list[dict[str, Any]]:
    assert code == main(["diagnose", str(path), "--json"])
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def falling(num: int, seed: int = 1, noise: float = 0.03) -> list[float]:
    rng = random.Random(seed)  # noqa: S311 - noise
    return [1.0 + 2.0 * math.exp(-6 * i / num) + rng.gauss(0, noise) for i in range(num)]


def hf(losses: list[float]) -> str:
    return "\n".join(
        str({"loss": round(v, 4), "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": round(i / 50, 2)})
        for i, v in enumerate(losses, 1)
    )


def nano(losses: list[float]) -> str:
    return "\n".join(f"iter {i}: loss {v:.4f}, time 55.12ms, mfu 1.20%" for i, v in enumerate(losses))


def megatron(losses: list[float]) -> str:
    return "\n".join(
        f"[default7]: iteration {i:8d}/  100000 | learning rate: 1.000E-04 | lm loss: {v:.6E} | loss scale: 4096.0 | grad norm: 0.713 | number of nan iterations:   0 |"
        for i, v in enumerate(losses, 1)
    )


def titan(losses: list[float]) -> str:
    return "\n".join(
        f"[rank{r}]:[titan] 2026-05-18 16:04:46,338 - root - INFO - step: {i}  loss:  {v:.5f}  grad_norm:  0.83  memory:  9.46GiB(64.99%)  tps: 7,282"
        for i, v in enumerate(losses, 1)
        for r in range(2)
    )


def csv(losses: list[float]) -> str:
    return "\n".join(["epoch,step,train_loss,val_loss", *(f"{i // 50},{i},{v:.4f}," for i, v in enumerate(losses))])


def state(losses: list[float]) -> str:
    return json.dumps({"log_history": [{"step": 10 * i, "loss": v} for i, v in enumerate(losses, 1)]})


def json_lines(losses: list[float]) -> str:
    return "\n".join(json.dumps({"step": i, "loss": str(v)}) for i, v in enumerate(losses))


def two_columns(losses: list[float]) -> str:
    return "\n".join(f"{i} {v:.4f}" for i, v in enumerate(losses))


def verl(losses: list[float]) -> str:
    return "\n".join(
        f"\x1b[36m(TaskRunner pid=4071)\x1b[0m step:{i} - train/loss:np.float64({v}) - train/lr:1e-4"
        for i, v in enumerate(losses)
    )


FORMATS = [hf, nano, megatron, titan, csv, state, json_lines, two_columns, verl]


@pytest.mark.parametrize("write", FORMATS)
def test_a_healthy_run_is_silent_in_every_format(
    write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(write(falling(200)))
    assert [] == diagnosed(capsys, tmp_path, 0)


@pytest.mark.parametrize("write", FORMATS)
def test_a_loss_that_rises_is_found_at_its_onset_in_every_format(
    write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = falling(150) + [1.0 + 0.05 * i for i in range(1, 51)]
    (tmp_path / "log").write_text(write(losses))
    (found,) = diagnosed(capsys, tmp_path, 0)
    scale = 10 if write is state else 1
    assert "loss_divergence" == found["causes"][0]["cause"]
    assert abs(found["first_step"] / scale - 150) <= 10
    assert {"file", "line", "step"} <= set(found["causes"][0]["evidence"][0]["values"])


def test_ten_epochs_with_a_jump_of_the_rate_name_the_rate_and_the_norm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [2.3, 1.8, 1.5, 1.3, 1.2, 1.15, 1.9, 2.6, 3.3, 4.1]
    rows = [
        f"Epoch {e}/10 - loss: {v} - grad_norm: {1.0 if e < 7 else 40.0} - lr: {1e-3 if e < 7 else 1e-1}"
        for e, v in enumerate(losses, 1)
    ]
    (tmp_path / "train.log").write_text("\n".join(rows))
    (tmp_path / "config.yaml").write_text("optimizer: adam\nlr: 0.001\nscheduler:\n  milestones: 7\n  gamma: 100\n")
    (found,) = diagnosed(capsys, tmp_path, 0)
    first = found["causes"][0]
    assert ("learning_rate_too_high", 7) == (first["cause"], found["first_step"])
    text = " ".join(one["summary"] for one in first["evidence"])
    assert "learning rate 0.001 before step 7" in text
    assert "gradient norm: usually 1" in text
    assert "scheduler.gamma = 100" in text


def test_a_traceback_is_a_script_error_with_the_scripts_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "err").write_text(
        'step 10 | loss: 2.0\nTraceback (most recent call last):\n  File "/home/me/train.py", line 42, in main\n    out = model(x)\n'
        '  File "/usr/lib/python3/site-packages/torch/nn/linear.py", line 9, in forward\n    return F.linear(x)\n'
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 6x7)\n"
    )
    (found,) = diagnosed(capsys, tmp_path, 1)
    assert "script_error" == found["causes"][0]["cause"]
    assert any(one["values"].get("line") == 42 for one in found["causes"][0]["evidence"])


def test_the_rank_that_is_behind_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        f"[rank{r}]:[E626 06:24:44 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {r}] failure detected by watchdog at work sequence id: 808 "
        f"PG status: last enqueued work: {805 if r == 2 else 811}, last completed work: {805 if r == 2 else 807}"
        for r in range(4)
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    (found,) = diagnosed(capsys, tmp_path, 1)
    assert ("rank_missing_from_collective", [2]) == (found["causes"][0]["cause"], found["causes"][0]["ranks"])


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02" * 100, b"{", b"[[[[", b"\x80\x04junk", b"hello world\n"])
def test_what_cannot_be_read_is_one_sentence_and_exit_2(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(content)
    assert 2 == main(["diagnose", str(tmp_path)])
    assert "Traceback" not in capsys.readouterr().err
