"""All runs below a folder, in one table; errors that point to the help of the command that was meant; colours that can be refused."""

import json
from pathlib import Path

import pytest

from holter import config
from holter.cli import main, runs
from holter.files import as_json
from made_up import diagnosis


def made_run(folder: Path, started: str, *incidents: str, **about: object) -> None:
    folder.mkdir(parents=True)
    known = {"run_id": folder.name, "started_at": started, "coordinator": "", "ranks": [0, 1], "world_size": 2, **about}
    (folder / "run.json").write_text(json.dumps(known))
    for number, severity in enumerate(incidents, start=1):
        one = diagnosis(id=f"20261115T101500-{number}", severity=severity)
        (folder / "incidents" / one.id).mkdir(parents=True)
        (folder / "incidents" / one.id / "diagnosis.json").write_bytes(as_json(one))


def test_runs_below_a_folder_are_listed_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path / "a" / "first", "2026-11-15T10:00:00Z", ended_at="2026-11-15T11:00:00Z", steps=400)
    made_run(tmp_path / "second", "2026-11-16T10:00:00Z", "warning", "critical")
    assert 1 == main(["runs", str(tmp_path)])
    _, newest, oldest = capsys.readouterr().out.splitlines()
    assert "second" in newest
    assert "silent" in newest
    assert "2 open" in newest
    assert "critical: " in newest
    assert ["ended", "400", "none"] == [word for word in oldest.split() if word in {"ended", "400", "none"}]


def test_runs_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path / "first", "2026-11-15T10:00:00Z", "info", ended_at="2026-11-15T11:00:00Z", steps=7)
    assert 0 == main(["runs", str(tmp_path), "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert ("ended", 7, 1, False) == (found["state"], found["steps"], found["num_open"], found["is_critical"])


@pytest.mark.parametrize(
    ("words", "pointer"),
    [
        (["runs", "/nowhere"], "holter runs --help"),
        (["status", "/nowhere"], "holter status --help"),
        (["status", "--wach"], "holter status --help"),
        (["stats"], "holter --help"),
        (["resume", "."], "holter resume --help"),
    ],
)
def test_errors_point_to_the_help_of_the_command(
    words: list[str], pointer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(words)
    said = capsys.readouterr().err
    assert 1 == said.count("\n")
    assert 1 == said.count("--help`")
    assert f"`{pointer}`" in said


def test_an_unknown_command_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["statsu"])
    assert (
        "holter: there is no command 'statsu'; `holter status` is near; see `holter --help`\n"
        == capsys.readouterr().err
    )


def test_a_narrow_terminal_keeps_what_is_worst_and_names_can_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "a", "2026-11-17T10:00:00Z", steps=400)
    monkeypatch.chdir(tmp_path)
    main(["runs", "."])
    head, row = capsys.readouterr().out.splitlines()
    assert ["run", "state", "steps", "worst", "incidents", "ranks", "started"] == head.split()
    assert "a" == row.split()[0]


def test_runs_of_a_server_stand_under_the_same_heads() -> None:
    one = {
        "run_id": "r1",
        "state": "running",
        "started_at": "2026-11-17T10:00:00Z",
        "ranks": 2,
        "world_size": 2,
        "steps": 40,
    }
    row = dict(zip(runs.COLUMNS, runs._row_of_server(one), strict=True))
    assert {
        "run": "r1",
        "state": "running",
        "steps": 40,
        "worst": "",
        "incidents": "none",
        "ranks": "2 of 2",
        "started": "2026-11-17 10:00",
    } == row


def test_in_a_narrow_terminal_sentences_go_on_below_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "a", "2026-11-17T10:00:00Z", "critical", ended_at="2026-11-17T11:00:00Z")
    assert 1 == main(["status", str(tmp_path / "a")])
    whole = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    assert 1 == main(["status", str(tmp_path / "a")])
    shown = capsys.readouterr().out
    assert 50 >= max(map(len, shown.splitlines()))
    assert whole.split() == shown.split(), "nothing is cut off"


def test_no_color_and_dumb_terminals_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert config.wants_color(is_terminal=True)
    assert not config.wants_color(is_terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not config.wants_color(is_terminal=True)


def test_a_run_that_is_over_is_watched_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path / "first", "2026-11-15T10:00:00Z", ended_at="2026-11-15T11:00:00Z")
    assert 0 == main(["status", "--watch", str(tmp_path / "first")])
    assert 1 == capsys.readouterr().out.count("no open incident")
    assert 2 == main(["status", "--watch", "--interval", "0", str(tmp_path / "first")])
