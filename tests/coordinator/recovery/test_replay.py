"""What a journal that is judged again finds is what the coordinator found, whoever reads it: a restart, the page, a replay."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from tests.coordinator.conftest import RUN_ID, attached, census, done, exited, healthy_roots, seen

from holter.coordinator.identity import RunSettings
from holter.coordinator.judge import IncidentTracker, Judge
from holter.coordinator.recovery import journal, rebuilt_run
from holter.coordinator.recovery.rebuilt_run import FinishedRun
from holter.coordinator.recovery.replay import Replay, differences, substances
from holter.coordinator.run import Run
from holter.coordinator.window.assembly import Assembly
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
        run.roster.connect(hello)
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


class Watcher:
    """Finds nothing, and notes when it was asked."""

    name = "watcher"

    def __init__(self) -> None:
        self.moments: list[int] = []

    def judge(self, window: Window) -> Iterator[Finding]:
        self.moments.append(window.real_ns)
        return iter(())


def written_at(folder: Path, at_ns: int) -> None:
    """By the clock of these tests, which is not the host's."""
    for path in folder.rglob("*.msgpack"):
        os.utime(path, ns=(at_ns, at_ns))


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


def test_a_journal_without_marks_is_judged_all_the_same(tmp_path: Path) -> None:
    live = record(tmp_path, diverging(6))
    replay = Replay(RUN_ID, "halt", ALL)
    entries = journal.read(tmp_path / "journal")
    replay.read((one for one in entries if not isinstance(one.observation.body, Judged)), has_marks=False)
    assert [] == differences(live.diagnoses, replay.finish())


def test_silence_is_judged_as_time_passes_but_not_all_night(tmp_path: Path) -> None:
    watcher = Watcher()
    replay = Replay(RUN_ID, "halt", [watcher])
    record(tmp_path, healthy(2))
    entries = list(journal.read(tmp_path / "journal"))
    late = journal.Entry(entries[-1].received_ns + 8 * 3600 * SECOND_NS, done(0, 2))
    replay.read([*entries, late], "silence")
    silence = [moment for moment in watcher.moments if moment > entries[-1].received_ns]
    assert 10 < len(silence) < 30


def test_a_coordinator_that_is_started_again_knows_what_the_former_one_knew(tmp_path: Path) -> None:
    live = record(tmp_path, diverging(6), is_killed=True)
    again = Run(RunSettings(tmp_path, RUN_ID, "http://127.0.0.1:1"))
    now_ns = START_NS + 60 * SECOND_NS
    written_at(tmp_path, now_ns)
    rebuilt_run.recall(again, now_ns)
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
    written_at(tmp_path, now_ns)
    rebuilt_run.recall(again, now_ns)
    again.judge(now_ns + 5 * SECOND_NS)
    assert live.diagnoses == again.incidents.all()
    assert [live.diagnoses[1].id] == [one.id for one in again.incidents.standing()]
    assert [False, True] == [one.closed_at is None for one in again.checkpoints.diagnoses], (
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
    rebuilt_run.recall(run, written_ns + (3600 * SECOND_NS if case == "long ago" else 1))
    assert (0, ()) == (run.silent_until_ns, run.assembly.window(0).steps)
    run.intake.end(START_NS)
    run.close(5.0)


def test_reading_the_past_ends_in_time(tmp_path: Path) -> None:
    record(tmp_path, healthy(50))
    ticking = iter(range(10_000))
    judging = Judge(Assembly(), IncidentTracker(RUN_ID, "halt"), ALL)
    found = rebuilt_run.read(journal.read(tmp_path / "journal"), judging, lambda: float(next(ticking)), deadline_s=20.0)
    assert not found.is_complete
    assert 21 == found.num_entries


CASES = {
    "divergence": diverging(10),
    "death after NaN": [*healthy(8), [done(0, 8), done(1, 8, nonfinite=[NAN])], [exited(1, 8, 1)]],
    "hang that is over": stalling(10, 20, 140),
}


@pytest.mark.parametrize("case", CASES)
def test_restart_finished_run_and_replay_judge_when_the_live_run_did(tmp_path: Path, case: str) -> None:
    detectors = [Standing()] if "hang" in case else ALL
    live, restarted, finished, replayed_now = (Watcher() for _ in range(4))
    recorded = record(tmp_path, CASES[case], detectors=[*detectors, live]).diagnoses
    entries = list(journal.read(tmp_path / "journal"))
    marks = {one.received_ns: one.observation.body for one in entries if isinstance(one.observation.body, Judged)}
    news = [at_ns for at_ns, mark in marks.items() if mark.is_news or mark.is_final]

    judging = Judge(Assembly(), IncidentTracker(RUN_ID, "halt"), [*detectors, restarted])
    known = rebuilt_run.read(entries, judging, lambda: 0.0, deadline_s=1.0)
    page = FinishedRun(RunSettings(tmp_path / "page", RUN_ID, "http://127.0.0.1:1"), {}, [*detectors, finished])
    page.read(entries)
    replay = Replay(RUN_ID, "halt", [*detectors, replayed_now])
    replay.read(entries)

    assert set(marks) <= set(live.moments)
    assert list(marks) == replayed_now.moments
    assert news == restarted.moments == finished.moments
    assert recorded
    assert recorded == list(known.diagnoses.values()) == list(page.diagnoses.values()) == replay.finish()
    page.run.close(5.0)
