"""`holter replay`: what it prints; other thresholds are taken or refused in one sentence."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.coordinator.conftest import exited
from tests.coordinator.recovery.test_replay import diverging, healthy, record

from holter.cli import main
from holter.cli.replay import changed
from holter.errors import UsageError
from holter.faults import ALL
from holter.faults.window import Window
from holter.records import Finding


def test_a_healthy_run_replays_to_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, [*healthy(20), [exited(0, 20), exited(1, 20)]])
    assert 0 == main(["replay", str(tmp_path)])
    said = capsys.readouterr()
    assert "no incident" in said.out
    assert "equals what was recorded" in said.out
    assert "" == said.err


def test_the_command_prints_the_diagnosis_and_that_it_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = record(tmp_path, diverging(6))
    assert 1 == main(["replay", str(tmp_path)])
    assert "equals what was recorded" in capsys.readouterr().out
    assert 1 == main(["replay", str(tmp_path), "--json"])
    assert (
        json.loads(msgspec.json.encode(live.diagnoses))[0]["causes"] == json.loads(capsys.readouterr().out)[0]["causes"]
    )
    assert 0 == main(["replay", str(tmp_path), "--detector", "dead_rank"])
    out = capsys.readouterr().out
    assert "With these settings the replay differs" in out
    assert "recorded but not replayed" in out


def test_a_torn_or_empty_journal_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, healthy(30))
    path = tmp_path / "journal" / "0001.msgpack"
    path.write_bytes(path.read_bytes()[:-7])
    assert 0 == main(["replay", str(tmp_path)])
    assert "0001.msgpack: 1 place damaged, 0 entries could not be read; all others were" in capsys.readouterr().err
    for path in (tmp_path / "journal").iterdir():
        path.unlink()
    assert 0 == main(["replay", str(tmp_path)])
    assert "is empty or missing" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class Picky:
    """A detector with thresholds."""

    limit: float = 2.0
    num_steps: int = 3
    names: tuple[str, ...] = ()
    name: str = dataclasses.field(default="picky", init=False)

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise ValueError(f"picky.limit must be positive, got {self.limit}")

    def judge(self, window: Window) -> Iterator[Finding]:
        del window
        return iter(())


def test_thresholds_are_replaced() -> None:
    settings = ["picky.limit=0.5", "picky.num_steps=7", 'picky.names=["a"]']
    assert [Picky(0.5, 7, ("a",))] == changed([Picky()], settings)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("picky.limit", "write it as detector.field=value"),
        ("limit=3", "write it as detector.field=value"),
        ("nobody.limit=3", "there is no detector nobody; there are picky"),
        ("picky.bound=3", "picky has no threshold bound; it has limit, num_steps, names"),
        ("picky.name=x", "picky has no threshold name"),
        ("picky.limit=many", "expected `float`"),
        ("picky.num_steps=2.5", "expected `int`"),
        ("picky.limit=-1", "picky.limit must be positive, got -1"),
    ],
)
def test_a_threshold_that_cannot_be_is_one_sentence(setting: str, reason: str) -> None:
    with pytest.raises(UsageError, match=r"^--set") as raised:
        changed([Picky()], [setting])
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_wrong_use_ends_with_2(tmp_path: Path) -> None:
    record(tmp_path, healthy(2))
    for options in (["--detector", "nobody"], ["--set", "x"]):
        command = [sys.executable, "-m", "holter.cli", "replay", str(tmp_path), *options]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (2, 1) == (ended.returncode, ended.stderr.count("\n"))


def test_every_threshold_of_every_detector_can_be_set_to_what_it_is() -> None:
    for detector in ALL:
        for field in dataclasses.fields(detector):  # type: ignore[arg-type]
            value = getattr(detector, field.name)
            if field.init and isinstance(value, int | float | str | bool):
                text = json.dumps(value)
                assert list(ALL) == changed(ALL, [f"{detector.name}.{field.name}={text}"]), (detector.name, field.name)
