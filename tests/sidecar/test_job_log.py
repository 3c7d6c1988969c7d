"""The last line on a rank's standard error, and what its launcher reads."""

import json
import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from holter.sidecar.job_log import ErrorFile, LastLine


def test_the_last_line_is_said_once_and_the_descriptor_let_go() -> None:
    read_end, write_end = os.pipe()
    line = LastLine(write_end)
    line.say("ended after 4 steps")
    line.say("not again")
    assert b"holter: ended after 4 steps\n" == os.read(read_end, 4096)
    assert b"" == os.read(read_end, 4096)
    os.close(read_end)


def test_a_pipe_that_nobody_empties_is_not_waited_for() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    while True:
        try:
            os.write(write_end, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write_end, True)
    LastLine(write_end).say("nobody reads this")
    os.close(read_end)


def test_torchruns_summary_shows_what_was_diagnosed_and_then_what_the_rank_said(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(
        json.dumps(
            {"message": {"message": "KeyError", "extraInfo": {"py_callstack": "Traceback …", "timestamp": "17"}}}
        )
    )
    file = ErrorFile(str(path))
    file.add("KeyError: 7\nat step 3, train.py:4 in main")
    file.add("warning: script_error on rank 1 at step 3 (confidence 0.93)")
    failure = ProcessFailure(local_rank=1, pid=9, exitcode=1, error_file=str(path))
    said = failure.message["extraInfo"]["py_callstack"].splitlines()  # type: ignore[index]
    assert [
        "holter: warning: script_error on rank 1 at step 3 (confidence 0.93)",
        "holter: KeyError: 7",
        "at step 3, train.py:4 in main",
        "Traceback …",
    ] == said
    assert 17 == failure.timestamp


def test_without_a_launcher_there_is_no_file(tmp_path: Path) -> None:
    ErrorFile("").add("whatever")
    assert [] == list(tmp_path.iterdir())
