"""The script's own checkpoints: judged when they are finished, and again when more is known."""

from pathlib import Path

import pytest

from holter.coordinator.disk import Disk
from holter.coordinator.halt.checkpoint_verdicts import CheckpointVerdicts, compared_until, reported_until
from holter.faults.window import ClassHistory, StepView
from holter.halting import halt_record
from holter.halting.vault import store
from holter.halting.vault.manifest import Manifest
from holter.halting.vault.store import Sealed
from holter.halting.verdicts import Sight
from holter.records import Attached, Finding, FirstStep, Halting, Healthy, Observation, SaveFinished
from made_up import HALT, diagnosis

NOTHING: tuple = ()


def seen(until_step: int = 1000):
    return lambda: Sight(until_step=until_step)


def kept(path: Path | str, step: int, rank: int = 0) -> Observation:
    return Observation(
        rank=rank, step=step, at_ns=step * 10**9, body=SaveFinished(path=str(path), framework="torch", seconds=1)
    )


def attached(pid: int) -> Observation:
    body = Attached(pid=pid, host="h", world_size=1, local_rank=0, command=[], versions={}, framework="loop")
    return Observation(rank=0, step=0, at_ns=0, body=body)


def applied(step: int) -> Finding:
    return Finding(
        detector="nonfinite_values", severity="critical", first_step=step, detected_step=step, ranks=(1,), summary=""
    )


class Saver:
    """The verdicts and their disk."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.disk = run_dir, Disk()
        self.checkpoints = CheckpointVerdicts(run_dir, self.disk)

    def save(self, name: str, step: int, rank: int = 0) -> Path:
        path = self.run_dir.parent / name
        path.write_text("weights")
        self.checkpoints.hear(kept(path, step, rank))
        return path

    def written(self) -> dict[str, tuple[int, str]]:
        assert self.disk.close(10)
        assert not self.disk.failures
        return {Path(save.path).name: (save.step, save.verdict) for save in store.read_script_saves(self.run_dir)}


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(tmp_path / "run")


def test_a_save_is_healthy_once_its_steps_were_seen_and_stays_so_when_sight_is_lost(saver):
    path = saver.save("a.pt", 10)
    assert [] == saver.checkpoints.judge(NOTHING, NOTHING, seen(9))
    assert saver.checkpoints.last_healthy() is None
    assert [] == saver.checkpoints.judge(NOTHING, NOTHING, seen(10))
    assert Healthy(step=10, path=str(path)) == saver.checkpoints.last_healthy()
    saver.checkpoints.judge(NOTHING, NOTHING, lambda: Sight(until_step=10, blind=("rank 0: gone",)))
    assert {"a.pt": (10, "healthy")} == saver.written()


def test_the_latest_is_said_to_be_poisoned_at_once_and_once(saver):
    good = saver.save("a.pt", 10)
    saver.checkpoints.judge(NOTHING, NOTHING, seen())
    bad = saver.save("b.pt", 20)
    poisoned = f"the checkpoint saved at step 20 ({bad}) is poisoned: NaN or Inf was applied to the weights at step 12"
    assert [f"{poisoned}; the last healthy one is of step 10 ({good})"] == saver.checkpoints.judge(
        [applied(12)], NOTHING, seen()
    )
    assert [] == saver.checkpoints.judge([applied(12)], NOTHING, seen())
    assert {"a.pt": (10, "healthy"), "b.pt": (20, "poisoned")} == saver.written()


def test_an_incident_that_began_earlier_takes_the_health_of_what_was_called_healthy(saver):
    good = saver.save("a.pt", 10)
    saver.save("b.pt", 20)
    saver.checkpoints.judge(NOTHING, NOTHING, seen())
    assert 20 == saver.checkpoints.last_healthy().step
    assert 1 == len(saver.checkpoints.judge([applied(12)], NOTHING, seen()))
    assert Healthy(step=10, path=str(good)) == saver.checkpoints.last_healthy()
    # What the window has forgotten is not forgotten here.
    saver.save("c.pt", 5000)
    assert 1 == len(saver.checkpoints.judge(NOTHING, NOTHING, seen(5000)))


def test_the_ranks_words_about_one_path_are_one_save_and_a_later_one_takes_its_place(saver):
    saver.save("latest.pt", 10, rank=0)
    saver.save("latest.pt", 10, rank=1)
    saver.checkpoints.judge(NOTHING, NOTHING, seen())
    saver.save("latest.pt", 20)
    assert saver.checkpoints.last_healthy() is None
    assert {"latest.pt": (20, "unknown")} == saver.written()


def test_what_a_halt_found_in_a_state_speaks_against_what_the_script_saved_of_it_and_since(saver):
    saver.save("a.pt", 9)
    saver.save("b.pt", 10)
    saver.checkpoints.judge(NOTHING, NOTHING, seen(10))
    manifest = Manifest(
        run_id="r",
        step=10,
        framework="dcp",
        world_size=1,
        verdict="suspect",
        why="a.weight",
        files={},
        tensors=[],
        sealed_at="",
    )
    saver.checkpoints.note_sealed(Sealed(saver.run_dir / "checkpoints" / "10", manifest))
    saver.checkpoints.judge(NOTHING, NOTHING, seen(10))
    assert {"a.pt": (9, "healthy"), "b.pt": (10, "suspect")} == saver.written()


def test_one_that_was_rotated_away_is_not_named(saver):
    old, new = saver.save("old.pt", 10), saver.save("new.pt", 20)
    saver.checkpoints.judge(NOTHING, NOTHING, seen())
    new.unlink()
    saver.checkpoints._look()
    assert str(old) == saver.checkpoints.last_healthy().path


def test_what_halts_write_is_not_the_scripts(saver):
    saver.checkpoints.hear(kept(saver.run_dir.absolute() / "checkpoints" / ".30.partial" / "state", 30))
    assert {} == saver.written()


def test_a_job_that_begins_again_counts_anew(saver):
    saver.checkpoints.hear(attached(1))
    saver.save("a.pt", 20)
    saver.checkpoints.judge(NOTHING, NOTHING, seen())
    saver.checkpoints.hear(attached(2))
    assert [] == saver.checkpoints.judge([applied(3)], NOTHING, seen())
    assert {"a.pt": (20, "healthy")} == saver.written()


def begun(completed: int | None, rank: int = 0) -> Observation:
    return Observation(rank=rank, step=0, at_ns=0, body=FirstStep(completed=completed))


def test_steps_are_counted_from_where_the_script_goes_on(saver):
    assert 0 == saver.checkpoints.base_step
    saver.checkpoints.hear(begun(120))
    saver.checkpoints.hear(begun(118, rank=1))
    path = saver.save("a.pt", 10)
    saver.checkpoints.judge(NOTHING, NOTHING, seen(10))
    assert Healthy(step=130, path=str(path)) == saver.checkpoints.last_healthy()
    assert {"a.pt": (130, "healthy")} == saver.written()


def test_what_ranks_count_goes_before_the_halt_that_was_lifted(tmp_path):
    halt_record.write(tmp_path, HALT)
    halt_record.lift(tmp_path)
    disk = Disk()
    checkpoints = CheckpointVerdicts(tmp_path, disk)
    checkpoints.hear(begun(None))
    assert 30 == checkpoints.base_step, "nobody counts"
    checkpoints.hear(begun(0))
    assert 0 == checkpoints.base_step, "it was begun anew"
    disk.close(10)


def test_a_coordinator_that_is_started_again_knows_them(saver, tmp_path):
    path = saver.save("a.pt", 20)
    saver.checkpoints.judge(NOTHING, NOTHING, seen())
    saver.written()
    again = Saver(tmp_path / "run")
    assert Healthy(step=20, path=str(path)) == again.checkpoints.last_healthy()
    again.checkpoints.recall(())
    assert 1 == len(again.checkpoints.judge([applied(3)], NOTHING, seen()))
    again.disk.close(10)


def test_a_save_between_two_comparisons_of_replicas_is_healthy_after_the_second_or_never(saver):
    good = saver.save("a.pt", 50)
    saver.checkpoints.judge(NOTHING, NOTHING, lambda: Sight(until_step=66, compared_until=65))
    saver.save("b.pt", 100)
    saver.checkpoints.judge(NOTHING, NOTHING, lambda: Sight(until_step=101, compared_until=65))
    assert Healthy(step=50, path=str(good)) == saver.checkpoints.last_healthy()
    found = diagnosis("silent_data_corruption", 128, agreed_steps=65)
    assert 1 == len(saver.checkpoints.judge(NOTHING, [found], lambda: Sight(until_step=129)))
    assert Healthy(step=50, path=str(good)) == saver.checkpoints.last_healthy()
    assert {"a.pt": (50, "healthy"), "b.pt": (100, "poisoned")} == saver.written()


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


def test_what_a_rank_learned_too_late_to_hold_is_in_what_was_saved_since(saver):
    saver.save("before", 28)
    saver.save("after", 29)
    saver.checkpoints.hear(Observation(rank=1, step=31, at_ns=0, body=Halting(state="held", why="nonfinite")))
    assert "healthy" == saver.checkpoints.verdict_of(31, None).verdict, "held in time"
    for step in (29, 28):
        body = Halting(state="held", why="nonfinite", poisoned_step=step)
        saver.checkpoints.hear(Observation(rank=1, step=31, at_ns=0, body=body))
    assert ["healthy", "poisoned"] == [saver.checkpoints.verdict_of(step, None).verdict for step in (28, 29)]
    assert "at step 28" in saver.checkpoints.verdict_of(31, None).why
    saver.checkpoints.judge(NOTHING, NOTHING, seen())
    assert {"before": (28, "healthy"), "after": (29, "poisoned")} == saver.written()
    for pid in (7, 8):
        saver.checkpoints.hear(attached(pid))
    assert "healthy" == saver.checkpoints.verdict_of(31, None).verdict, "another process counts anew"
