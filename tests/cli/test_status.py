"""What `holter status` says beside the table of ranks: findings, a halt under way or done."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from holter.cli import main
from holter.cli.status import _live
from holter.coordinator.http.status import rank_status, status
from holter.coordinator.identity import RunSettings
from holter.coordinator.roster import LineState, Member, RankNumbers
from holter.coordinator.run import Run
from holter.halting import halt_record
from holter.halting.halt_record import HaltRecord
from holter.records import ExamRequest, Finding, Severity
from holter.transport.wire import Hello

HALT = {"number": 1, "course": "preparing", "step": 31, "cause": "requested", "reason": "wrong\x1b[2Jdata"}


def finding(detector: str, severity: Severity, summary: str, *needs: ExamRequest) -> Finding:
    return Finding(
        detector=detector, severity=severity, first_step=7, detected_step=7, ranks=(1,), summary=summary, needs=needs
    )


def heard(rank: int, loss: float | None) -> Member:
    hello = Hello(run_id="", rank=rank, world_size=3, host="h", rank_pid=1, sidecar_pid=2, metrics_address="")
    return Member(hello, LineState(rank), numbers=RankNumbers(loss=loss))


def said(run_dir: Path, **changed: object) -> list[str]:
    """The lines that follow on the table of a run without ranks."""
    run = Run(RunSettings(run_dir, "r", "http://127.0.0.1:1", 2))
    run.judging.findings = (
        finding("slow_rank", "warning", "Rank 1 is slow."),
        finding("stalled_rank", "critical", "Rank 1 stands.", ExamRequest(asked_ns=0, depth="quick", ranks=(0, 1))),
    )
    run.disk.close(1.0)
    return list(_live(status(run, 0) | changed))[2:]


def test_findings_are_told_with_their_words_and_what_they_wait_for(tmp_path: Path) -> None:
    assert [
        "finding: warning: slow_rank: Rank 1 is slow.",
        "finding: critical: stalled_rank (waits for evidence): Rank 1 stands.",
    ] == said(tmp_path)


def test_a_halt_is_told_with_its_course_and_reason_and_then_with_what_became_of_it(tmp_path: Path) -> None:
    under_way = HALT | {"outcome": None, "text": ""}
    assert "halt: preparing, step 31 (requested: wrong?[2Jdata)" == said(tmp_path, halt=under_way)[-1]
    assert "halt: asked for" == said(tmp_path, halt={"course": "asked for", "outcome": None, "text": ""})[-1]
    done = HALT | {"course": "done", "outcome": "completed", "text": "halted after 31 steps"}
    assert "halt: completed: halted after 31 steps" == said(tmp_path, halt=done)[-1]


def test_a_loss_that_is_no_number_is_not_taken_for_one_that_nobody_read(tmp_path: Path) -> None:
    # As JSON, which has no NaN.
    losses = (math.nan, None, 1.5)
    told = json.loads(msgspec.json.encode([rank_status(heard(rank, loss), 0) for rank, loss in enumerate(losses)]))
    assert [["loss"], [], []] == [one["not_finite"] for one in told]
    shown = [line.split() for line in said(tmp_path, ranks=told)[:3]]
    assert ["NaN", "-", "1.5"] == [words[5] for words in shown]


def test_of_a_run_that_is_over_it_is_told_where_it_was_halted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "ended_at": "2026-11-15T10:15:00Z"}))
    assert 0 == main(["status", str(tmp_path)])
    assert "halted" not in capsys.readouterr().out
    kept = HaltRecord(
        cause="rank_dead", ranks=[1], step=30, checkpoint="checkpoints/30/state", verdict="healthy", at=""
    )
    halt_record.write(tmp_path, kept)
    assert 0 == main(["status", str(tmp_path)])
    assert (
        "  halted    after 30 steps, Rank dead (rank_dead); checkpoints/30/state, healthy\n" in capsys.readouterr().out
    )
    assert 0 == main(["status", "--json", str(tmp_path)])
    assert 30 == json.loads(capsys.readouterr().out)["halt"]["step"]
