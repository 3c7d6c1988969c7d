"""The script's own checkpoints: judged when they are finished, and again when more is known."""

from pathlib import Path

import pytest

from holter.coordinator.disk import Disk
from holter.coordinator.halt.checkpoint_verdicts import CheckpointVerdicts, compared_until, reported_until
from holter.faults.window import ClassHistory, StepView
from holter.halting import halt_record
from holter.halting.vault import store
from holter.halting.verdicts import Sight
from holter.records import Attached, Begun, Finding, Halting, Healthy, Kept, Observation
from made_up import HALT, diagnosis

NOTHING: tuple = ()


def seen(until_step: int = 1000):
    return lambda: Sight(until_step=until_step)


def kept(path: Path | str, step: int, rank: int = 0) -> Observation:
    return Observation(
        rank=rank, step=step, at_ns=step * 10**9, body=Kept(path=str(path), framework="torch", seconds=1)
    )


def attached(pid: int) -> Observation:
    body = Attached(pid=pid, host="h", world_size=1, local_rank=0, command=[], versions={}, framework="loop")
    return Observation(rank=0, step=0, at_ns=0, body=body)


def applied(step: int) -> Finding:
    return Finding(
        detector="nonfinite_values", severity="critical", first_step=step, detected_step=step, ranks=(1,), summary=""
    )


class Desk:
    """A book and its disk."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.disk = run_dir, Disk()
        self.book = CheckpointVerdicts(run_dir, self.disk)

    def save(self, name: str, step: int, rank: int = 0) -> Path:
        path = self.run_dir.parent / name
        path.write_text("weights")
        self.book.hear(kept(path, step, rank))
        return path

    def written(self) -> dict[str, tuple[int, str]]:
        assert self.disk.close(10)
        assert not self.disk.failures
        return {Path(save.path).name: (save.step, save.verdict) for save in store.read_script_saves(self.run_dir)}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "run")


def test_a_save_is_healthy_once_its_steps_were_seen_and_stays_so_when_sight_is_lost(desk):
    path = desk.save("a.pt", 10)
    assert [] == desk.book.judge(NOTHING, NOTHING, seen(9))
    assert desk.book.last_healthy() is None
    assert [] == desk.book.judge(NOTHING, NOTHING, seen(10))
    assert Healthy(step=10, path=str(path)) == desk.book.last_healthy()
    desk.book.judge(NOTHING, NOTHING, lambda: Sight(until_step=10, blind=("rank 0: gone",)))
    assert {"a.pt": (10, "healthy")} == desk.written()


def test_the_latest_is_said_to_be_poisoned_at_once_and_once(desk):
    good = desk.save("a.pt", 10)
    desk.book.judge(NOTHING, NOTHING, seen())
    bad = desk.save("b.pt", 20)
    poisoned = f"the checkpoint saved at step 20 ({bad}) is poisoned: NaN or Inf was applied to the weights at step 12"
    assert [f"{poisoned}; the last healthy one is of step 10 ({good})"] == desk.book.judge(
        [applied(12)], NOTHING, seen()
    )
    assert [] == desk.book.judge([applied(12)], NOTHING, seen())
    assert {"a.pt": (10, "healthy"), "b.pt": (20, "poisoned")} == desk.written()


def test_an_incident_that_began_earlier_takes_the_health_of_what_was_called_healthy(desk):
    good = desk.save("a.pt", 10)
    desk.save("b.pt", 20)
    desk.book.judge(NOTHING, NOTHING, seen())
    assert 20 == desk.book.last_healthy().step
    assert 1 == len(desk.book.judge([applied(12)], NOTHING, seen()))
    assert Healthy(step=10, path=str(good)) == desk.book.last_healthy()
    # What the window has forgotten is not forgotten here.
    desk.save("c.pt", 5000)
    assert 1 == len(desk.book.judge(NOTHING, NOTHING, seen(5000)))


def test_the_ranks_words_about_one_path_are_one_save_and_a_later_one_takes_its_place(desk):
    desk.save("latest.pt", 10, rank=0)
    desk.save("latest.pt", 10, rank=1)
    desk.book.judge(NOTHING, NOTHING, seen())
    desk.save("latest.pt", 20)
    assert desk.book.last_healthy() is None
    assert {"latest.pt": (20, "unknown")} == desk.written()


def test_one_that_was_rotated_away_is_not_named(desk):
    old, new = desk.save("old.pt", 10), desk.save("new.pt", 20)
    desk.book.judge(NOTHING, NOTHING, seen())
    new.unlink()
    desk.book._look()
    assert str(old) == desk.book.last_healthy().path


def test_what_halts_write_is_not_the_scripts(desk):
    desk.book.hear(kept(desk.run_dir.absolute() / "checkpoints" / ".30.partial" / "state", 30))
    assert {} == desk.written()


def test_a_job_that_begins_again_counts_anew(desk):
    desk.book.hear(attached(1))
    desk.save("a.pt", 20)
    desk.book.judge(NOTHING, NOTHING, seen())
    desk.book.hear(attached(2))
    assert [] == desk.book.judge([applied(3)], NOTHING, seen())
    assert {"a.pt": (20, "healthy")} == desk.written()


def begun(completed: int | None, rank: int = 0) -> Observation:
    return Observation(rank=rank, step=0, at_ns=0, body=Begun(completed=completed))


def test_steps_are_counted_from_where_the_script_goes_on(desk):
    assert 0 == desk.book.base_step
    desk.book.hear(begun(120))
    desk.book.hear(begun(118, rank=1))
    path = desk.save("a.pt", 10)
    desk.book.judge(NOTHING, NOTHING, seen(10))
    assert Healthy(step=130, path=str(path)) == desk.book.last_healthy()
    assert {"a.pt": (130, "healthy")} == desk.written()


def test_what_ranks_count_goes_before_the_halt_that_was_lifted(tmp_path):
    halt_record.write(tmp_path, HALT)
    halt_record.lift(tmp_path)
    disk = Disk()
    book = CheckpointVerdicts(tmp_path, disk)
    book.hear(begun(None))
    assert 30 == book.base_step, "nobody counts"
    book.hear(begun(0))
    assert 0 == book.base_step, "it was begun anew"
    disk.close(10)


def test_a_coordinator_that_is_started_again_knows_them(desk, tmp_path):
    path = desk.save("a.pt", 20)
    desk.book.judge(NOTHING, NOTHING, seen())
    desk.written()
    again = Desk(tmp_path / "run")
    assert Healthy(step=20, path=str(path)) == again.book.last_healthy()
    again.book.recall(())
    assert 1 == len(again.book.judge([applied(3)], NOTHING, seen()))
    again.disk.close(10)


def test_a_save_between_two_comparisons_of_replicas_is_healthy_after_the_second_or_never(desk):
    good = desk.save("a.pt", 50)
    desk.book.judge(NOTHING, NOTHING, lambda: Sight(until_step=66, compared_until=65))
    desk.save("b.pt", 100)
    desk.book.judge(NOTHING, NOTHING, lambda: Sight(until_step=101, compared_until=65))
    assert Healthy(step=50, path=str(good)) == desk.book.last_healthy()
    found = diagnosis("silent_data_corruption", 128, agreed_steps=65)
    assert 1 == len(desk.book.judge(NOTHING, [found], lambda: Sight(until_step=129)))
    assert Healthy(step=50, path=str(good)) == desk.book.last_healthy()
    assert {"a.pt": (50, "healthy"), "b.pt": (100, "poisoned")} == desk.written()


def history(last_equal: int | None, unequal: int | None = None) -> ClassHistory:
    return ClassHistory(0, True, last_equal, unequal, 1, 0)


def test_replicas_are_compared_until_the_last_state_that_was_equal():
    assert compared_until({}, []) is None
    assert compared_until({"hyperparameters": history(99)}, []) is None, "nobody compares weights: nothing to wait for"
    assert 65 == compared_until({"parameters_before": history(0), "parameters_after": history(64)}, [])
    assert -1 == compared_until({"parameters_before": history(None, 0)}, [])
    parted = {"parameters_before": history(65), "parameters_after": history(64, 128)}
    assert 65 == compared_until(parted, [diagnosis()]), "not explained yet"
    assert compared_until(parted, [diagnosis("nondeterministic_drift", 128, agreed_steps=65)]) is None


def view(step: int, *missing: int) -> StepView:
    return StepView(step, 0, 1, missing)


def test_steps_are_seen_up_to_the_first_that_somebody_owes():
    assert 0 == reported_until(())
    assert 8 == reported_until((view(6), view(7)))
    assert 6 == reported_until((view(6, 1), view(7)))


def test_what_a_rank_learned_too_late_to_hold_is_in_what_was_saved_since(desk):
    desk.save("before", 28)
    desk.save("after", 29)
    desk.book.hear(Observation(rank=1, step=31, at_ns=0, body=Halting(state="held", why="nonfinite")))
    assert "healthy" == desk.book.verdict_of(31, None).verdict, "held in time"
    for step in (29, 28):
        body = Halting(state="held", why="nonfinite", poisoned_step=step)
        desk.book.hear(Observation(rank=1, step=31, at_ns=0, body=body))
    assert ["healthy", "poisoned"] == [desk.book.verdict_of(step, None).verdict for step in (28, 29)]
    assert "at step 28" in desk.book.verdict_of(31, None).why
    desk.book.judge(NOTHING, NOTHING, seen())
    assert {"before": (28, "healthy"), "after": (29, "poisoned")} == desk.written()
    for pid in (7, 8):
        desk.book.hear(attached(pid))
    assert "healthy" == desk.book.verdict_of(31, None).verdict, "another process counts anew"
