"""Ranks that only a file's name tells, ranks that write into one file, and texts in another encoding."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from holter import offline
from holter.cli import main
from holter.offline.by_name import rank_of

WATCHDOG = "[E ProcessGroupNCCL.cpp:481] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=1800) ran for 1801 milliseconds before timing out.\n"


def loss(step: int, rank: int = 0) -> str:
    return f"step {step}: loss {3 - step / 50 + 0.01 * rank + 0.02 * math.sin(7 * step):.4f} lr 0.001\n"


def diagnosed(capsys: pytest.CaptureFixture[str], path: Path) -> list[dict[str, Any]]:
    main(["diagnose", str(path), "--json"])
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("logs/rank_3.log", 3), ("train.rank03.out", 3), ("attempt_0/12/stderr.log", 12), ("rank7/stdout", 7), ("a/3/b.log", None), ("franks_log_3.txt", None), ("log_3.txt", None)],
)  # fmt: skip
def test_the_rank_in_a_name(name: str, rank: int | None) -> None:
    assert rank == rank_of(name)


@pytest.mark.parametrize("name", ["rank_{rank}.log", "attempt_0/{rank}/stdout.log"])
def test_a_file_a_rank_is_one_run_and_the_culprit_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        path = tmp_path / name.format(rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(loss(step, rank) if rank != 2 or step < 70 else f"step {step}: loss nan lr 0.001\n" for step in range(100)))  # fmt: skip

    (diagnosis,) = diagnosed(capsys, tmp_path)

    assert len(offline.read([tmp_path]).runs) == 1
    assert (70, [2]) == (diagnosis["first_step"], diagnosis["causes"][0]["ranks"])


def test_healthy_ranks_in_files_of_their_own_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        (tmp_path / f"train-rank{rank}.log").write_text("".join(loss(step, rank) for step in range(100)))

    assert not diagnosed(capsys, tmp_path)


def test_a_rank_whose_file_says_nothing_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        text = "".join(loss(step) for step in range(30))
        (tmp_path / f"rank{rank}.log").write_text(text + ("" if rank == 3 else WATCHDOG.format(rank=rank)))

    (diagnosis,) = diagnosed(capsys, tmp_path)

    assert ("rank_missing_from_collective", [3]) == (diagnosis["causes"][0]["cause"], diagnosis["causes"][0]["ranks"])


def test_an_error_is_of_the_rank_that_its_file_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.log").write_text("".join(loss(step) for step in range(30)))
    (tmp_path / "rank1.log").write_text('Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    step()\nValueError: bad batch\n')  # fmt: skip

    (diagnosis,) = diagnosed(capsys, tmp_path)

    assert ("script_error", [1]) == (diagnosis["causes"][0]["cause"], diagnosis["causes"][0]["ranks"])


def test_ranks_that_write_into_one_file_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.log"
    path.write_text("".join(f"[rank{rank}]: {loss(step, rank)}" if rank != 1 or step < 60 else f"[rank{rank}]: step {step}: loss nan lr 0.001\n" for step in range(90) for rank in range(3)))  # fmt: skip

    (diagnosis,) = diagnosed(capsys, path)

    assert (60, [1]) == (diagnosis["first_step"], diagnosis["causes"][0]["ranks"])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize("form", ["lines", "csv", "json"])
def test_other_encodings_are_read(encoding: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(step, 3 - step / 50 if step < 70 else math.nan) for step in range(100)]
    texts = {
        "lines": "".join(f"step {step}: loss {value}\r\n" for step, value in rows),
        "csv": "step,loss\r\n" + "".join(f"{step},{value}\r\n" for step, value in rows),
        "json": json.dumps({"log_history": [{"step": step, "loss": value} for step, value in rows]}),
    }
    path = tmp_path / "log"
    path.write_bytes(texts[form].encode(encoding))

    (diagnosis,) = diagnosed(capsys, path)

    assert diagnosis["first_step"] == 70
