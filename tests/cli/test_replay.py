"""What a replay finds is what the coordinator found; other thresholds are taken or refused in one sentence."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from tests.coordinator.conftest import RUN_ID, attached, census, done, exited, healthy_roots, seen

from holter.cli import main
from holter.cli.replay import changed
from holter.coordinator.identity import RunSettings
from holter.coordinator.incidents.tracker import IncidentTracker
from holter.coordinator.judge import Judge
from holter.coordinator.recovery import journal, restart
from holter.coordinator.recovery.replay import Replay, differences, substances
from holter.coordinator.run import Run
from holter.coordinator.window.assembly import Assembly
from holter.errors import UsageError
from holter.faults import ALL, Detector
from holter.faults.window import Window
from holter.records import Diagnosis, Finding, Judged, Nonfinite, Observation, Overdue, Phase, Table
from holter.transport import wire

SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS
NAN = Nonfinite(where="gradient", name="a.weight", nans=1, infs=0, numel=16)


@dataclasses.dataclass
class Recorded:
    """A run that was watched, and what was said of it then."""

    run_dir: Path
    diagnoses: list[Diagnosis]


def record(
    run_dir: Path,
    rounds: list[list[Observation]],
    *,
    has_tables: bool = True,
    is_killed: bool = False,
    detectors: Sequence[Detector] = ALL,
) -> Recorded:
    """As the service does it: hear, judge, fetch, judge again, twice a second."""
    run = Run(RunSettings(run_dir, RUN_ID, "http://127.0.0.1:1"), detectors)
    for rank in range(2):
        hello = wire.Hello(
            run_id=RUN_ID, rank=rank, world_size=2, host="h", rank_pid=1, sidecar_pid=2, metrics_address=""
        )
        run.roster.connect(hello, START_NS)
    now_ns = START_NS
    for said in rounds:
        now_ns += SECOND_NS // 2
        for observation in said:
            run.intake.hear(
                observation.rank, wire.Report(heartbeat=None, observations=[observation], dropped=0), now_ns
            )
        judge(run, now_ns + 1, has_tables=has_tables)
    if not is_killed:
        judge(run, now_ns + SECOND_NS, has_tables=has_tables, is_final=True)
    if is_killed:
        run.intake.write_down()
        run.intake.journal.flush(run.disk, is_now=True)
        assert run.disk.close(5.0)
    else:
        run.intake.end(now_ns + SECOND_NS)
        run.close(5.0)
    return Recorded(run_dir, run.incidents.all())


def judge(run: Run, now_ns: int, *, has_tables: bool, is_final: bool = False) -> None:
    for number in range(4):
        needs = run.judge(now_ns + number, is_final=is_final).tables
        if not needs:
            return
        for tensor_class, step, rank in needs:
            body = Table(
                tensor_class=tensor_class,
                root=rank,
                names=["a.weight", "b.weight"],
                fingerprints=[rank, 1],
                norms=[1.0, 1.0],
            )
            run.intake.hear_table(
                (tensor_class, step, rank), seen(rank, step, body) if has_tables else None, now_ns + number
            )


def healthy(num_steps: int) -> list[list[Observation]]:
    says = [[attached(rank) for rank in range(2)] + [census(rank) for rank in range(2)]]
    return says + [[done(rank, step) for rank in range(2)] for step in range(num_steps)]


def diverging(num_steps: int) -> list[list[Observation]]:
    apart = [
        [done(rank, step, healthy_roots(step) | {"parameters_after": rank}) for rank in range(2)]
        for step in range(num_steps, num_steps + 5)
    ]
    return healthy(num_steps) + apart


def replayed(run_dir: Path, detectors: Sequence[Detector] = ALL) -> list[Diagnosis]:
    replay = Replay(RUN_ID, "halt", detectors)
    replay.read(journal.read(run_dir / "journal"))
    return replay.finish()


@pytest.mark.parametrize("has_tables", [True, False])
def test_a_divergence_replays_to_the_same_diagnosis(tmp_path: Path, has_tables: bool) -> None:  # noqa: FBT001
    live = record(tmp_path, diverging(10), has_tables=has_tables)
    assert [] == differences(live.diagnoses, replayed(tmp_path))
    assert 1 == len(substances(live.diagnoses))
    assert live.diagnoses == replayed(tmp_path), "to the last word, number and time"


def test_a_nan_that_brings_a_death_replays_to_the_same_diagnosis(tmp_path: Path) -> None:
    bad = [[done(0, 8), done(1, 8, nonfinite=[NAN])], [exited(1, 8, 1)], [exited(0, 8, number=15)]]
    live = record(tmp_path, healthy(8) + bad)
    assert live.diagnoses == replayed(tmp_path)
    assert live.diagnoses


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


def test_a_journal_without_marks_is_judged_all_the_same(tmp_path: Path) -> None:
    live = record(tmp_path, diverging(6))
    replay = Replay(RUN_ID, "halt", ALL)
    entries = journal.read(tmp_path / "journal")
    replay.read((one for one in entries if not isinstance(one.observation.body, Judged)), has_marks=False)
    assert [] == differences(live.diagnoses, replay.finish())


def test_silence_is_judged_as_time_passes_but_not_all_night(tmp_path: Path) -> None:
    moments: list[int] = []

    @dataclasses.dataclass(frozen=True)
    class Watcher:
        name: str = "watcher"

        def judge(self, window: Window) -> Iterator[Finding]:
            moments.append(window.now_ns)
            return iter(())

    replay = Replay(RUN_ID, "halt", [Watcher()])
    record(tmp_path, healthy(2))
    entries = list(journal.read(tmp_path / "journal"))
    late = journal.Entry(entries[-1].received_ns + 8 * 3600 * SECOND_NS, done(0, 2))
    replay.read([*entries, late], "silence")
    silence = [moment for moment in moments if moment > entries[-1].received_ns]
    assert 10 < len(silence) < 30


def test_a_torn_or_empty_journal_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, healthy(30))
    path = tmp_path / "journal" / "0001.msgpack"
    path.write_bytes(path.read_bytes()[:-7])
    assert 0 == main(["replay", str(tmp_path)])
    assert "0001.msgpack is torn or damaged after" in capsys.readouterr().err
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


def test_a_coordinator_that_is_started_again_knows_what_the_former_one_knew(tmp_path: Path) -> None:
    live = record(tmp_path, diverging(6), is_killed=True)
    again = Run(RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1"))
    now_ns = START_NS + 60 * SECOND_NS
    restart.recall(again, now_ns)
    assert 11 == len(again.assembly.window(now_ns).steps)
    assert not any(dataclasses.astuple(again.judge(now_ns))), "sidecars are given time to come back"
    assert () == again.judge(now_ns + 5 * SECOND_NS).fresh, "the same incident is told once"
    assert live.diagnoses == again.incidents.all()
    assert [0, 1] == again.intake.introductions.record().ranks
    again.intake.end(now_ns)
    again.close(5.0)


class Standing:
    """Names rank 1 while its sidecar says that it stands still."""

    name = "stalled_rank"

    def judge(self, window: Window) -> Iterator[Finding]:
        for rank, delay in window.processes.delays.items():
            yield Finding(
                detector=self.name,
                severity="critical",
                first_step=delay.step,
                detected_step=delay.step,
                ranks=(rank,),
                summary="It stands still.",
                facts={"is_suspended": True},
            )


def overdue(tier: Literal["overdue", "moved"], step: int) -> list[Observation]:
    body = Overdue(tier=tier, phase=Phase.FORWARD, micro_step=0, waited_s=9.0, deadline_s=3.0, because="")
    return [seen(1, step, body)]


def stalling(at: int, num_silent: int, num_after: int) -> list[list[Observation]]:
    """Rank 1 stands still in a step, and later moves on: two steps a second."""
    steps = healthy(at + num_after)
    return [*steps[: at + 1], overdue("overdue", at), *([[]] * num_silent), overdue("moved", at), *steps[at + 1 :]]


@pytest.mark.parametrize(("num_after", "is_open"), [(60, True), (130, False)])
def test_a_hang_that_is_over_replays_as_one(tmp_path: Path, num_after: int, is_open: bool) -> None:  # noqa: FBT001
    live = record(tmp_path, stalling(10, 600, num_after), detectors=[Standing()])
    (found,) = live.diagnoses
    assert is_open is (found.closed_at is None)
    assert live.diagnoses == replayed(tmp_path, [Standing()])


def test_a_coordinator_that_is_started_again_tells_a_hang_that_came_back_from_the_one_that_was_over(
    tmp_path: Path,
) -> None:
    twice = [*stalling(10, 10, 130), overdue("overdue", 140)]
    live = record(tmp_path, twice, is_killed=True, detectors=[Standing()])
    assert [False, True] == [one.closed_at is None for one in live.diagnoses]
    again = Run(RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1"), [Standing()])
    now_ns = START_NS + 90 * SECOND_NS
    restart.recall(again, now_ns)
    again.judge(now_ns + 5 * SECOND_NS)
    assert live.diagnoses == again.incidents.all()
    assert [live.diagnoses[1].id] == [one.id for one in again.incidents.standing()]
    assert [False, True] == [one.closed_at is None for one in again.saves.diagnoses], (
        "a halt is wished for by open ones"
    )
    again.intake.end(now_ns)
    again.close(5.0)


@pytest.mark.parametrize("case", ["none", "ended", "another run", "long ago"])
def test_another_past_is_not_recalled(tmp_path: Path, case: str) -> None:
    if case != "none":
        record(tmp_path, diverging(6), is_killed=case != "ended")
    run = Run(RunSettings(tmp_path, "run-2" if case == "another run" else RUN_ID, "http://127.0.0.1:1"))
    written_ns = max((path.stat().st_mtime_ns for path in tmp_path.rglob("*.msgpack")), default=0)
    restart.recall(run, written_ns + (3600 * SECOND_NS if case == "long ago" else 1))
    assert (0, ()) == (run.silent_until_ns, run.assembly.window(0).steps)
    run.intake.end(START_NS)
    run.close(5.0)


def test_reading_the_past_ends_in_time(tmp_path: Path) -> None:
    record(tmp_path, healthy(50))
    ticking = iter(range(10_000))
    judging = Judge(Assembly(), IncidentTracker(RUN_ID, "halt"), ALL)
    found = restart.read(journal.read(tmp_path / "journal"), judging, lambda: float(next(ticking)), deadline_s=20.0)
    assert not found.is_complete
    assert 21 == found.num_entries


def test_every_threshold_of_every_detector_can_be_set_to_what_it_is() -> None:
    for detector in ALL:
        for field in dataclasses.fields(detector):  # type: ignore[arg-type]
            value = getattr(detector, field.name)
            if field.init and isinstance(value, int | float | str | bool):
                text = json.dumps(value)
                assert list(ALL) == changed(ALL, [f"{detector.name}.{field.name}={text}"]), (detector.name, field.name)
