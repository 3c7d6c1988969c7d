"""A halt that stands in a run directory: found, said, lifted, remembered."""

import errno
import os
import time

import pytest
from msgspec.structs import replace

from holter.config import Settings
from holter.frameworks import attach
from holter.frameworks.place import RankPlace
from holter.halting import halt_record
from made_up import HALT

AGENT = {"TORCHELASTIC_RESTART_COUNT": "1"}


def place(rank: int = 0) -> RankPlace:
    return RankPlace(rank=rank, world_size=2, local_rank=rank, is_one_host=True, address="127.0.0.1")


def test_a_halt_comes_back_as_it_was_written(tmp_path):
    halt_record.write(tmp_path, HALT)
    assert halt_record.read(tmp_path) == HALT


@pytest.mark.parametrize("why", ["", "nothing was saved: " + 3000 * "ä"], ids=["short", "long"])
def test_on_a_disk_that_is_full_by_then_it_stands_too(tmp_path, monkeypatch, why):
    attach.begin_life(str(tmp_path), {})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(halt_record, "write_whole", full)
    halt_record.write(tmp_path, replace(HALT, why=why))
    found = halt_record.read(tmp_path)
    assert found == replace(HALT, why=found.why)
    assert why.startswith(found.why.removesuffix("…"))
    assert (tmp_path / "halt.json").stat().st_size == halt_record.ROOM_BYTES
    with pytest.raises(OSError, match="No space"):
        halt_record.write(tmp_path, HALT)


def test_a_halt_that_cannot_be_read_stands_too(tmp_path):
    (tmp_path / "halt.json").write_text("{", encoding="utf-8")
    halt = halt_record.read(tmp_path)
    assert halt is not None
    assert halt.checkpoint is None


def test_a_halt_that_may_not_be_read_stands_too(tmp_path):
    (tmp_path / "halt.json").mkdir()
    assert halt_record.read(tmp_path) is not None


@pytest.mark.parametrize("run_dir", ["", "nowhere", "file", "file/run", "x" * 300])
def test_no_halt_stands_where_no_run_directory_can_be(tmp_path, run_dir):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert halt_record.read(tmp_path / run_dir) is None


def test_lifting_forgets_nothing(tmp_path):
    assert halt_record.lift(tmp_path) is None
    assert halt_record.base_step(tmp_path) == 0
    halt_record.write(tmp_path, HALT)
    assert halt_record.lift(tmp_path) == HALT
    assert halt_record.read(tmp_path) is None
    assert halt_record.base_step(tmp_path) == 30
    halt_record.write(tmp_path, HALT)
    halt_record.lift(tmp_path)
    assert sorted(path.name for path in (tmp_path / "halts").iterdir()) == ["1.json", "2.json"]


def test_what_was_lifted_counts_for_the_life_that_follows_and_for_none_after(tmp_path):
    halt_record.begin(tmp_path)
    halt_record.write(tmp_path, HALT)
    halt_record.lift(tmp_path)
    attach.begin_life(str(tmp_path), {})
    assert 30 == halt_record.base_step(tmp_path)
    attach.begin_life(str(tmp_path), {})
    assert 0 == halt_record.base_step(tmp_path)
    halt_record.write(tmp_path, HALT)
    halt_record.lift(tmp_path)
    attach.begin_life(str(tmp_path), {})
    assert 30 == halt_record.base_step(tmp_path)


def test_a_rank_that_is_started_blindly_ends_with_93_and_says_how_to_resume(tmp_path, capsys):
    halt_record.write(tmp_path, HALT)
    with pytest.raises(SystemExit) as ended:
        attach.obey_standing_halt(Settings(run_dir=str(tmp_path)), place(), {})
    assert ended.value.code == 93
    said = capsys.readouterr().err
    assert "Non-finite input (nonfinite_input) on rank 1" in said
    assert f"holter resume {tmp_path}" in said
    assert str(tmp_path / "checkpoints/30/state") in said


def test_the_other_ranks_leave_after_the_one_that_says_why(tmp_path, capsys, monkeypatch):
    halt_record.write(tmp_path, HALT)
    monkeypatch.setattr(attach, "SAYS_S", 0.2)
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        attach.obey_standing_halt(Settings(run_dir=str(tmp_path)), place(rank=1), {})
    assert 93 == ended.value.code
    assert time.monotonic() - began >= 0.2
    assert "" == capsys.readouterr().err


def test_a_rank_that_is_told_to_resume_lifts_it_once(tmp_path):
    halt_record.write(tmp_path, HALT)
    settings = Settings(run_dir=str(tmp_path), resume=1)
    attach.obey_standing_halt(settings, place(rank=1), {})
    assert halt_record.read(tmp_path) is not None
    attach.obey_standing_halt(settings, place(rank=0), {})
    assert halt_record.read(tmp_path) is None


@pytest.mark.parametrize("again", [AGENT, {"SLURM_RESTART_COUNT": "1"}])
def test_a_job_that_was_told_to_resume_does_not_lift_the_next_halt_when_it_is_started_again(tmp_path, capsys, again):
    halt_record.write(tmp_path, HALT)
    with pytest.raises(SystemExit) as ended:
        attach.obey_standing_halt(Settings(run_dir=str(tmp_path), resume=1), place(), again)
    assert 93 == ended.value.code
    assert HALT == halt_record.read(tmp_path)
    assert "HOLTER_RESUME=1" not in capsys.readouterr().err, "it would not help"


def test_the_same_launcher_is_known_again_without_a_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "holter-runs" / "one"
    run_dir.mkdir(parents=True)
    attach.begin_life(str(run_dir), AGENT)
    halt_record.write(run_dir, HALT)
    with pytest.raises(SystemExit):
        attach.obey_standing_halt(Settings(), place(), AGENT)


RENDEZVOUS = {"TORCHELASTIC_RUN_ID": "100", "TORCHELASTIC_RESTART_COUNT": "0", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize("again", [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "1"}])
def test_the_same_rendezvous_and_launcher_are_the_same_job_only_in_a_restart(tmp_path, monkeypatch, again):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "holter-runs" / "one"
    run_dir.mkdir(parents=True)
    attach.begin_life(str(run_dir), RENDEZVOUS)
    halt_record.write(run_dir, HALT)
    attach.obey_standing_halt(Settings(), place(), RENDEZVOUS)
    with pytest.raises(SystemExit):
        attach.obey_standing_halt(Settings(), place(), RENDEZVOUS | again)


@pytest.mark.parametrize("action", ["observe", "notify"])
def test_it_stands_whatever_the_action_is(tmp_path, action):
    halt_record.write(tmp_path, HALT)
    with pytest.raises(SystemExit):
        attach.obey_standing_halt(Settings(run_dir=str(tmp_path), action=action), place(), {})


def test_the_halt_of_another_job_is_none_of_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "holter-runs" / "one"
    run_dir.mkdir(parents=True)
    halt_record.introduce(run_dir, ["slurm:7", "launcher:elsewhere:1:2"])
    halt_record.write(run_dir, HALT)
    attach.obey_standing_halt(Settings(), place(), AGENT | {"SLURM_JOB_ID": "8"})
    attach.obey_standing_halt(Settings(), place(), {"SLURM_JOB_ID": "7"})
    with pytest.raises(SystemExit):
        attach.obey_standing_halt(Settings(), place(), {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})


def test_a_launcher_is_named_by_more_than_its_number():
    (name,) = halt_record.job_names(AGENT, os.getpid())
    assert name.count(":") == 3
    assert halt_record.job_names({"TORCHELASTIC_RUN_ID": "none"}, os.getpid()) == []


def test_where_what_was_kept_is_suspect_the_last_healthy_one_is_offered_and_gone_on_from(tmp_path):
    suspect = replace(HALT, verdict="suspect", healthy_step=20, healthy_checkpoint="/data/step-20")
    assert ((HALT.step, HALT.checkpoint), (20, "/data/step-20")) == (HALT.offered, suspect.offered)
    halt_record.write(tmp_path, suspect)
    assert (
        "go on from step 20: /data/step-20 (healthy; what was kept" in halt_record.sentences(tmp_path, suspect, {})[0]
    )
    halt_record.lift(tmp_path)
    assert 20 == halt_record.base_step(tmp_path)
