"""What a halt leaves on a real disk, and the run's part in it: what it seals with, what it makes of it, and where it goes on."""

import errno
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.conftest import RUN_ID, attached, census, done, exited, seen
from tests.halting.vault.test_store import write

from holter.coordinator.halt.driver import Act, Open
from holter.coordinator.halt.sealing import HaltEnding, open_directory, seal
from holter.coordinator.identity import RunSettings
from holter.coordinator.recovery import rebuilt_run
from holter.coordinator.run import Run
from holter.halting import halt_record
from holter.halting.plan import Wish
from holter.halting.protocol import Seal, Tell
from holter.halting.vault import manifest, store
from holter.halting.vault.manifest import Circumstances
from holter.halting.vault.store import Vault
from holter.records import FirstStep, Halting, Healthy, Nonfinite, Phase, RankState
from holter.transport import wire

SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS
ABOUT = Circumstances(
    run_id=RUN_ID, step=30, world_size=2, savers=(0, 1), cause="nonfinite_input", why="held before it was applied"
)
NAN = Nonfinite(where="gradient", name="a.weight", nans=1, infs=0, numel=16)


def ending(run_dir: Path, partial: Path, **changes: Any) -> HaltEnding:
    wish = Wish(cause=ABOUT.cause, reason="", ranks=(1,), incident="i-1")
    made = HaltEnding(run_dir=run_dir, partial=partial, about=ABOUT, wish=wish, last_healthy=None)
    return replace(made, **changes)


def saved(run_dir: Path, ranks: tuple[int, ...] = (0, 1)) -> Path:
    """What these ranks have written."""
    partial, why_not = open_directory(run_dir, 30)
    assert "" == why_not
    for rank in ranks:
        files = {"model.bin": b"weights"} if rank == 0 else {}
        write(partial, rank, files | {f"random_states_{rank}.pkl": b"r"})
    return partial


def halt_json(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "halt.json").read_text())
    return found


def test_what_all_have_saved_gets_its_name_and_the_stone_says_what_to_go_on_from(tmp_path: Path) -> None:
    kept = seal(ending(tmp_path, saved(tmp_path)))
    assert ("completed", "checkpoints/30", True) == (
        kept.outcome.name,
        kept.outcome.checkpoint,
        kept.outcome.is_halted,
    )
    assert "halted after 30 steps; checkpoint checkpoints/30, verified, healthy" == kept.outcome.text
    assert kept.sealed == Vault(tmp_path).last_good()
    found = halt_json(tmp_path)
    assert ("nonfinite_input", [1], 30, "checkpoints/30/state", "healthy", "i-1", RUN_ID, "accelerate") == tuple(
        found[name] for name in ("cause", "ranks", "step", "checkpoint", "verdict", "incident", "run_id", "framework")
    )


def test_why_ranks_could_not_save_is_in_the_manifest_the_stone_and_the_outcome(tmp_path: Path) -> None:
    about = replace(ABOUT, failures={0: "No space left on device"})
    healthy = Healthy(step=20, path="checkpoints/20/state")
    kept = seal(ending(tmp_path, saved(tmp_path, (1,)), about=about, last_healthy=healthy))
    assert ("incomplete", "checkpoints/30-incomplete") == (kept.outcome.name, kept.outcome.checkpoint)
    reason = "rank 0 saved nothing that it could prove (No space left on device)"
    assert reason in manifest.read(tmp_path / "checkpoints" / "30-incomplete").why
    assert reason in kept.outcome.text
    found = halt_json(tmp_path)
    assert (None, "incomplete") == (found["checkpoint"], found["verdict"])
    assert found["why"].endswith("; the last healthy checkpoint is of step 20: checkpoints/20/state")


def test_what_is_found_in_a_state_is_in_what_the_script_saved_of_it_too(tmp_path: Path) -> None:
    partial = saved(tmp_path)
    write(partial, 0, {"model.bin": b"weights", "random_states_0.pkl": b"r"}, oversized={"a.weight": 1e37})
    same = Healthy(step=30, path="checkpoint-30")
    assert "last healthy" not in seal(ending(tmp_path, partial, last_healthy=same)).outcome.text
    assert ("suspect", None) == (halt_json(tmp_path)["verdict"], halt_json(tmp_path).get("healthy_checkpoint"))


def test_who_asked_for_it_and_why_is_in_the_stone_and_in_what_a_blind_restart_says(tmp_path: Path) -> None:
    asked = "asked for by ann@head: node drain"
    wish = Wish(cause="requested", reason=asked, incident="i-1")
    seal(ending(tmp_path, saved(tmp_path), about=replace(ABOUT, cause="requested"), wish=wish))
    assert asked == halt_json(tmp_path)["reason"]
    found = halt_record.read(tmp_path)
    assert found is not None
    assert f"halted: requested: {asked};" in halt_record.sentences(tmp_path, found, {})[0]


@pytest.mark.parametrize("verdict", ["unknown", "poisoned"])
def test_a_doubt_is_said_with_its_reason(tmp_path: Path, verdict: Any) -> None:
    kept = seal(ending(tmp_path, saved(tmp_path), about=replace(ABOUT, verdict=verdict, why="since step 28")))
    assert "completed" == kept.outcome.name
    assert kept.outcome.text.endswith(f"verified, {verdict} (since step 28)")


def test_where_nothing_can_be_saved_the_run_is_halted_and_the_stone_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    partial, why_not = open_directory(tmp_path, 30)
    assert "nothing can be saved below" in why_not
    assert ".30.partial" == partial.name
    about = replace(ABOUT, failures={0: "Not a directory", 1: "Not a directory"})
    kept = seal(ending(tmp_path, partial, about=about))
    assert kept.sealed is None
    assert ("failed", "halted after 30 steps, and nothing was saved: Not a directory", None, True) == (
        kept.outcome.name,
        kept.outcome.text,
        kept.outcome.checkpoint,
        kept.outcome.is_halted,
    )
    assert ("incomplete", "nothing was saved: Not a directory") == (
        halt_json(tmp_path)["verdict"],
        halt_json(tmp_path)["why"],
    )


@pytest.mark.parametrize("failures", [{0: "No space left on device"}, {}], ids=["cut-off", "whole"])
def test_where_the_disk_is_full_what_was_cut_off_makes_room_and_what_is_whole_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: dict[int, str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    partial = saved(tmp_path, (0, 1))
    monkeypatch.setattr(store, "write_whole", full)
    kept = seal(ending(tmp_path, partial, about=replace(ABOUT, failures=failures)))
    assert bool(failures) is not partial.exists()
    assert (str(partial) in kept.outcome.text) is partial.exists()
    assert "No space left on device" in kept.outcome.text


def test_a_stone_that_cannot_be_set_is_said_and_the_checkpoint_is_kept(tmp_path: Path) -> None:
    (tmp_path / "halt.json" / "in the way").mkdir(parents=True)
    kept = seal(ending(tmp_path, saved(tmp_path)))
    assert "completed" == kept.outcome.name
    assert "halt.json could not be written" in kept.outcome.text
    assert kept.outcome.text.endswith("nothing stops a blind restart")
    assert Vault(tmp_path).last_good() is not None


def test_a_rank_that_nobody_hears_is_waited_for_by_what_it_writes(tmp_path: Path) -> None:
    partial = saved(tmp_path)
    part, beside = partial / "parts" / "0.json", tmp_path / "0.json"
    part.rename(beside)
    late = threading.Timer(0.3, lambda: beside.rename(part))
    late.start()
    assert "completed" == seal(ending(tmp_path, partial, unheard=(0,))).outcome.name
    late.join()


class Watched:
    """A run with two ranks that train, without a socket; the test carries out what it asks for."""

    def __init__(self, run_dir: Path, start_ns: int = START_NS, **settings: Any) -> None:
        self.run = Run(RunSettings(run_dir, RUN_ID, "http://127.0.0.1:1", world_size=2, **settings))
        self.run_dir, self.now_ns = run_dir, start_ns
        self.told: list[Tell] = []

    def begin(self, steps: int = 4) -> None:
        self.connect()
        for rank in range(2):
            self.hear(rank, attached(rank), census(rank))
        for step in range(steps):
            self.now_ns += SECOND_NS // 10
            for rank in range(2):
                self.hear(rank, done(rank, step), step=step + 1)

    def connect(self) -> None:
        for rank in range(2):
            hello = wire.Hello(
                run_id=RUN_ID, rank=rank, world_size=2, host="h", rank_pid=1, sidecar_pid=2, metrics_address=""
            )
            self.run.intake.connect(hello, self.now_ns)

    def hear(self, rank: int, *observations: Any, step: int = 0) -> None:
        beat = wire.Heartbeat(step, Phase.FORWARD, 0, self.now_ns)
        report = wire.Report(heartbeat=beat, observations=list(observations), dropped=0)
        self.run.intake.hear(rank, report, self.now_ns)

    def say(
        self, state: RankState, halt: int = 0, step: int = 4, ranks: tuple[int, ...] = (0, 1), why: str = ""
    ) -> None:
        for rank in ranks:
            self.hear(rank, seen(rank, step, Halting(state=state, halt=halt, why=why)), step=step)

    def judge(self, after_s: float = 0.1) -> list[Act]:
        """As the service carries it out; a seal is left to the test."""
        self.now_ns += int(after_s * SECOND_NS)
        acts = list(self.run.judge(self.now_ns).acts)
        self.told += [act for act in acts if isinstance(act, Tell)]
        for act in acts:
            if isinstance(act, Open):
                base_step = self.run.checkpoints.base_step
                opened = open_directory(self.run_dir, base_step + act.step)
                self.run.halts.opened(*opened, self.now_ns, base_step)
                acts += self.judge(0.0)
        return acts

    def orders(self) -> list[str]:
        found, self.told = [tell.order.kind for tell in self.told], []
        return found

    def die(self) -> None:
        """As by SIGKILL, a moment after all was written."""
        self.run.intake.write_down()
        self.run.intake.journal.flush(self.run.disk, is_now=True)
        assert self.run.disk.close(5.0)
        for path in (self.run_dir / "journal").iterdir():
            # Files have the time of the run's clock, which is the test's.
            os.utime(path, ns=(self.now_ns, self.now_ns))


@pytest.fixture
def watch(tmp_path: Path) -> Callable[..., Watched]:
    return lambda **settings: Watched(tmp_path, **settings)


def held_by_nan(watched: Watched) -> None:
    """Rank 1 has a NaN before step 4 is applied, and both stand there: a commit is ordered."""
    watched.begin()
    watched.hear(1, done(1, 4, nonfinite=[NAN]), step=4)
    watched.say("held", why="nonfinite")
    for _ in range(100):
        if watched.judge():
            break
    assert ["commit"] == watched.orders()


def test_a_nan_is_halted_and_its_incident_says_what_became_of_it(watch: Callable[..., Watched]) -> None:
    watched = watch()
    held_by_nan(watched)
    attempt = watched.run.halts.attempt
    assert attempt is not None
    assert attempt.wish.incident is not None
    watched.say("saving", 1)
    watched.say("failed", 1, ranks=(0,), why="No space left on device")
    watched.say("saved", 1, ranks=(1,))
    (sealing_it,) = [act for act in watched.judge() if isinstance(act, Seal)]
    end = watched.run.ending(sealing_it.order)
    assert (4, 2, {0: "No space left on device"}) == (end.about.step, end.about.world_size, end.about.failures)
    assert (attempt.wish.incident, ()) == (end.wish.incident, end.unheard)
    write(end.partial, 1, {"random_states_1.pkl": b"r"})
    watched.run.sealed(seal(end))
    watched.judge()
    assert ["leave"] == watched.orders()
    known = watched.run.incidents.get(attempt.wish.incident)
    assert known is not None
    assert ("halt", "checkpoints/4-incomplete", 93) == (
        known.action.directive,
        known.action.checkpoint,
        known.action.exit_code,
    )
    assert "No space left on device" in known.action.reason
    watched.run.close(5.0)


def test_a_saver_that_has_not_answered_and_was_not_seen_to_end_may_still_be_at_it(
    watch: Callable[..., Watched],
) -> None:
    watched = watch(action="notify")
    watched.begin()
    watched.say("held", why="nonfinite")
    watched.judge()
    watched.judge(8.1)
    watched.say("saving", 1)
    watched.judge()
    attempt = watched.run.halts.attempt
    assert attempt is not None
    assert attempt.halt is not None
    assert (0, 1) == watched.run.ending(attempt.halt.order).unheard
    watched.say("saved", 1, ranks=(0,))
    watched.judge()
    assert (1,) == watched.run.ending(attempt.halt.order).unheard
    watched.hear(1, exited(1, 4, number=9))
    assert () == watched.run.ending(attempt.halt.order).unheard
    watched.run.close(5.0)


def test_steps_before_a_resume_are_counted_in_what_is_sealed(tmp_path: Path) -> None:
    past = halt_record.HaltRecord(
        cause="requested",
        ranks=[],
        step=100,
        checkpoint="checkpoints/100/state",
        verdict="healthy",
        incident=None,
        at="2026-01-01T00:00:00Z",
        why="",
        framework="accelerate",
        run_id=RUN_ID,
    )
    halt_record.write(tmp_path, past)
    halt_record.lift(tmp_path)
    watched = Watched(tmp_path)
    watched.begin()
    watched.run.halts.ask("me", "", watched.now_ns)
    watched.judge()
    attempt = watched.run.halts.attempt
    assert attempt is not None
    assert attempt.halt is not None
    assert 100 + attempt.plan.step == watched.run.ending(attempt.halt.order).about.step
    watched.run.close(5.0)


def test_steps_before_attach_are_counted_in_what_is_sealed_and_told_to_who_saves(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.begin()
    watched.hear(1, seen(1, 0, FirstStep(completed=200, source="AdamW")))
    watched.run.halts.ask("me", "", watched.now_ns)
    watched.judge()
    attempt = watched.run.halts.attempt
    assert attempt is not None
    assert attempt.halt is not None
    order = attempt.halt.order
    assert 200 == order.base_step
    assert str(200 + order.step) in Path(order.directory).name
    assert 200 + order.step == watched.run.ending(order).about.step
    watched.run.close(5.0)


def test_a_coordinator_that_is_started_again_seals_the_halt_of_the_former_one(
    tmp_path: Path, watch: Callable[..., Watched]
) -> None:
    former = watch()
    held_by_nan(former)
    former.say("saving", 1)
    former.say("failed", 1, ranks=(0,), why="No space left on device")
    former.judge()
    wish = former.run.halts.attempt.wish  # type: ignore[union-attr]
    former.die()

    again = Watched(tmp_path, former.now_ns + 2 * SECOND_NS)
    rebuilt_run.recall(again.run, again.now_ns)
    again.connect()
    assert [] == again.judge(), "sidecars are given time to come back"
    again.say("saved", 1, ranks=(1,))
    acts = again.judge(4.0)
    (sealing_it,) = [act for act in acts if isinstance(act, Seal)]
    end = again.run.ending(sealing_it.order)
    assert (wish.cause, wish.ranks, wish.incident) == (end.about.cause, end.wish.ranks, end.wish.incident)
    assert {0: "No space left on device"} == end.about.failures
    write(end.partial, 1, {"random_states_1.pkl": b"r"})
    again.run.sealed(seal(end))
    again.judge()
    assert "leave" in again.orders()
    known = again.run.incidents.get(str(wish.incident))
    assert known is not None
    assert "checkpoints/4-incomplete" == known.action.checkpoint
    again.run.close(5.0)
