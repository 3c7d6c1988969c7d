"""A rank looked at from outside, part by part; what cannot be had leaves its reason."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holter.page import PageHeartbeat
from holter.records import (
    Call,
    Exam,
    Flight,
    Frame,
    Group,
    Observation,
    Phase,
    ProcessState,
    StepDone,
    ThreadStack,
)
from holter.sidecar import examination
from holter.sidecar.examination import Examiner, bounded
from holter.sidecar.process import Process, started_ticks
from holter.sidecar.progress import Deadlines, ProgressWatch
from holter.sidecar.state import RankState

SPIN = "def spin():\n    print('ready', flush=True)\n    while True:\n        pass\nspin()\n"
STEP = StepDone(
    seconds=0.25,
    phase_seconds={},
    micro_steps=1,
    loss=1.5,
    gradient_norm=0.5,
    learning_rate=0.1,
    batch=0,
    roots={},
    nonfinite=[],
    overhead_ratio=0.0,
    check_interval=1,
)


def flight(num_calls: int = 3) -> Flight:
    calls = [
        Call("0", number, "all_reduce", ((4,),), ("float32",), number, number < num_calls - 1)
        for number in range(num_calls)
    ]
    return Flight(groups=[Group("0", "default", (0, 1))], calls=calls, taken_ns=7)


class FakeCopies:
    """Answers as told: with a flight, never, or with an error."""

    def __init__(self, answer: Flight | None = None, *, error: str = "", last: Flight | None = None) -> None:
        self.last, self.error = last, error
        self._answer = answer
        self.num_asked = 0

    async def now(self) -> None:
        self.num_asked += 1
        if self._answer is None and not self.error:
            await asyncio.sleep(60)
        if self._answer is not None:
            self.last = self._answer


class FakeRecorder:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def is_lock_free(self) -> bool | None:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def call_lines(self) -> dict[int, tuple[str, ...]]:
        return {}


async def until_stopped(examiner: Examiner) -> None:
    for _ in range(1000):
        if examiner.look(time.perf_counter()).state == "stopped":
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited ten seconds")


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", SPIN], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def examiner(rank) -> Examiner:
    watch = ProgressWatch(Deadlines())
    state = RankState(0, "host")
    state.learn(Observation(rank=0, step=4, at_ns=1, body=STEP))
    watch.look(PageHeartbeat(step=5, phase=Phase.FORWARD, micro_step=2, at_ns=1), None, time.perf_counter() - 9.0)
    return Examiner(0, 2, Process(rank.pid, started_ticks(rank.pid)), watch, state)


async def test_everything_that_can_be_had_is_there(examiner):
    examiner.use(FakeRecorder(True), FakeCopies(flight()))
    exam = await examiner.exam(42, "quick", "asked")
    assert ("asked", 42, "quick", Phase.FORWARD, 2) == (
        exam.reason,
        exam.asked_ns,
        exam.depth,
        exam.phase,
        exam.micro_step,
    )
    assert 8.0 < exam.waited_s < 60.0
    assert "running" == exam.process.state
    assert (True, 3, "") == (exam.is_lock_free, len(exam.flight.calls), exam.flight_error)
    assert ("spin", "") == (exam.stacks[0].frames[0].function, exam.stack_error)
    assert {"step": 4.0, "loss": 1.5, "gradient_norm": 0.5, "seconds": 0.25, "learning_rate": 0.1} == exam.statistics
    body = msgspec.msgpack.encode(Observation(rank=0, step=5, at_ns=1, body=exam))
    assert exam.waited_s == msgspec.msgpack.decode(body, type=Observation).body.waited_s


async def test_a_rank_without_a_recorder_still_has_a_process_and_stacks(examiner):
    exam = await examiner.exam(1, "native", "asked")
    assert (None, None) == (exam.flight, exam.is_lock_free)
    assert "this rank has no recorder that could be asked" == exam.flight_error
    assert "spin" in [frame.function for frame in exam.stacks[0].frames]


async def test_who_belongs_to_a_group_is_as_the_rank_says(examiner):
    examiner.use(FakeRecorder(True), FakeCopies(flight()))
    examiner.learn([Group("0", "", (8, 9)), Group("3", "pair", (0, 5))])
    exam = await examiner.exam(5, "quick", "asked")
    assert [("0", (0, 1)), ("3", (0, 5))] == [(group.name, group.ranks) for group in exam.flight.groups]


@pytest.mark.slow
async def test_a_recorder_that_fails_or_is_silent_leaves_the_last_copy_and_the_reason(examiner):
    examiner.use(FakeRecorder(OSError("gone")), FakeCopies(error="it is broken", last=flight(2)))
    exam = await examiner.exam(1, "quick", "asked")
    assert (2, "it is broken", None) == (len(exam.flight.calls), exam.flight_error, exam.is_lock_free)
    examiner.use(FakeRecorder(False), FakeCopies(last=flight(2)))
    began = time.monotonic()
    exam = await examiner.exam(1, "quick", "asked")
    assert (2, "the recorder did not answer in 3 s", False) == (
        len(exam.flight.calls),
        exam.flight_error,
        exam.is_lock_free,
    )
    assert exam.stacks
    assert time.monotonic() - began < 30


async def test_a_stopped_rank_is_not_asked_what_it_cannot_answer(examiner, rank):
    copies = FakeCopies(last=flight(2))
    examiner.use(FakeRecorder(False), copies)
    rank.send_signal(signal.SIGSTOP)
    await until_stopped(examiner)
    exam = await examiner.exam(1, "native", "asked")
    assert (0, None) == (copies.num_asked, exam.is_lock_free)
    assert "its process is stopped and cannot answer" == exam.flight_error
    assert "spin" == exam.stacks[0].frames[0].function
    assert exam.stack_error.startswith("no native frames: ")


@pytest.fixture
def patient(monkeypatch) -> None:
    """Native frames may take long on a machine that runs other tests."""
    monkeypatch.setattr(examination, "NATIVE_PATIENCE_S", 20.0)
    monkeypatch.setattr(examination, "NATIVE_S", 20.0)


@pytest.mark.usefixtures("patient")
async def test_two_requests_are_both_answered_and_stacks_are_taken_one_after_the_other(examiner):
    examiner.use(FakeRecorder(True), FakeCopies(flight()))
    exams = await asyncio.gather(examiner.exam(1, "native", "asked"), examiner.exam(2, "quick", "asked"))
    assert [1, 2] == [exam.asked_ns for exam in exams]
    assert all(exam.stacks for exam in exams)
    assert not examiner.is_spying


async def test_a_rank_that_moves_is_not_paused_for_native_frames(examiner):
    beat = PageHeartbeat(step=6, phase=Phase.FORWARD, micro_step=0, at_ns=2)
    examiner._watch.look(beat, None, time.perf_counter())
    exam = await examiner.exam(1, "native", "asked")
    assert ("native", "no native frames: the rank moves, and is not to be paused") == (exam.depth, exam.stack_error)
    assert not any(frame.is_native for frame in exam.stacks[0].frames)


async def test_many_ranks_together_send_no_more_calls_than_few(rank):
    examiner = Examiner(0, 16_000, Process(rank.pid, 0), ProgressWatch(Deadlines()), RankState(0, "host"))
    examiner.use(FakeRecorder(True), FakeCopies(flight(300)))
    exam = await examiner.exam(1, "quick", "asked")
    assert 16 == len(exam.flight.calls)


@pytest.fixture
def slow_spy(tmp_path, monkeypatch) -> Path:
    """py-spy on a busy machine: native frames come when the file `go` beside is there. Each time it is asked for them is a line of the file."""
    asked = tmp_path / "asked"
    real = Path(sys.executable).parent / "py-spy"
    program = tmp_path / "py-spy"
    slow = f'case "$*" in *--native*) echo native >> {asked}; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done;; esac'
    program.write_text(f'#!/bin/sh\n{slow}\nexec {real} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(examination.sys, "executable", str(tmp_path / "python"))
    return asked


def stand_still(examiner: Examiner, step: int = 5) -> None:
    beat = PageHeartbeat(step=step, phase=Phase.FORWARD, micro_step=2, at_ns=1)
    held = ProcessState(state="stopped", cpu_s=1.0, cpu_share=0.0, stopped_s=4.0)
    for _ in range(2):
        examiner._watch.look(beat, held, time.perf_counter() - 9.0)
    assert examiner._watch.is_standing


@pytest.mark.slow
async def test_native_frames_that_take_long_come_with_the_next_exam(examiner, slow_spy, monkeypatch):
    stand_still(examiner)
    first = await examiner.exam(1, "native", "asked")
    assert "no native frames: py-spy has not answered in 2 s" == first.stack_error
    assert "spin" == first.stacks[0].frames[0].function
    monkeypatch.setattr(examination, "NATIVE_PATIENCE_S", 20.0)
    slow_spy.with_name("go").touch()
    second, third = await asyncio.gather(examiner.exam(2, "quick", "asked"), examiner.exam(3, "native", "asked"))
    assert [("native", ""), ("native", "")] == [(exam.depth, exam.stack_error) for exam in (second, third)]
    assert all(any(frame.is_native for frame in exam.stacks[0].frames) for exam in (second, third))
    fourth = await examiner.exam(4, "quick", "asked")
    assert "native" == fourth.depth, "it stands where it stood"
    assert ["native"] == slow_spy.read_text().split(), "the rank is paused once for all of them"
    stand_still(examiner, step=6)
    assert "quick" == (await examiner.exam(5, "quick", "asked")).depth, "it has moved on since"


@pytest.mark.slow
async def test_native_frames_are_waited_for_where_they_alone_can_tell(examiner, slow_spy, monkeypatch):
    monkeypatch.setattr(examination, "LOCKED_PATIENCE_S", 20.0)
    asyncio.get_running_loop().call_later(3.0, slow_spy.with_name("go").touch)
    stand_still(examiner)
    examiner.use(FakeRecorder(False), FakeCopies(flight()))
    exam = await examiner.exam(1, "native", "asked")
    assert (False, "native", "") == (exam.is_lock_free, exam.depth, exam.stack_error)
    assert any(frame.is_native for frame in exam.stacks[0].frames)
    assert ["native"] == slow_spy.read_text().split()


@pytest.mark.slow
async def test_native_frames_of_a_rank_that_ends_are_given_up(examiner, slow_spy):
    stand_still(examiner)
    await examiner.exam(1, "native", "asked")
    assert examiner.is_spying
    examiner.of_the_dead(0, None)
    await asyncio.wait({examiner._spying}, timeout=5.0)
    assert (True, False) == (examiner._spying.cancelled(), examiner.is_spying)
    assert slow_spy.exists()


async def test_while_stacks_are_taken_the_process_is_not_looked_at(examiner):
    assert examiner.look(1.0) is not None
    examiner._num_spies = 1
    assert examiner.look(2.0) is None


async def test_of_a_rank_that_died_there_is_what_was_last_seen(examiner, rank):
    examiner.use(FakeRecorder(True), FakeCopies(flight(300)))
    await examiner.exam(1, "quick", "asked")
    rank.kill()
    exam = examiner.of_the_dead(0, None)
    assert ("death", 0, 300) == (exam.reason, exam.asked_ns, len(exam.flight.calls))
    assert "spin" == exam.stacks[0].frames[0].function
    assert "before its end was seen" in exam.stack_error
    assert 1.5 == exam.statistics["loss"]
    assert "running" == exam.process.state
    assert 32 == len(examiner.of_the_dead(0, 0).flight.calls)
    assert 100 == len(examiner.of_the_dead(0, 100).flight.calls), "what nobody was told of"


def test_of_a_rank_of_which_nothing_was_seen_there_are_reasons(rank):
    examiner = Examiner(0, 2, Process(rank.pid, 0), ProgressWatch(Deadlines()), RankState(0, "host"))
    exam = examiner.of_the_dead(9, None)
    assert isinstance(exam, Exam)
    assert (9, {}, [], None, Phase.ATTACH) == (exam.asked_ns, exam.statistics, exam.stacks, exam.flight, exam.phase)
    assert "no stack was taken before it ended" == exam.stack_error


async def test_the_exam_of_a_crash_takes_the_recorder_and_a_stack_within_its_second(examiner):
    examiner.use(FakeRecorder(False), FakeCopies(last=flight(2)))
    exam = await examiner.exam(0, "quick", "last_breath")
    assert ("last_breath", None) == (exam.reason, exam.is_lock_free)
    assert "the recorder did not answer in 1 s" == exam.flight_error
    assert 2 == len(exam.flight.calls)


@pytest.mark.usefixtures("patient")
async def test_a_rank_that_does_not_stand_still_is_paused_for_native_frames_only_now_and_then(examiner):
    first = await examiner.exam(1, "native", "asked")
    assert "" == first.stack_error
    again = await examiner.exam(2, "native", "asked")
    assert "spin" == again.stacks[0].frames[0].function
    assert again.stack_error.startswith("no native frames: it was paused for them"), (
        "it would cost a healthy rank too much"
    )
    held = ProcessState(state="stopped", cpu_s=1.0, cpu_share=0.0, stopped_s=4.0)
    examiner._watch.look(examiner._watch.beat, held, time.perf_counter())
    await asyncio.sleep(0.7)
    assert "" == (await examiner.exam(3, "native", "asked")).stack_error


def test_what_all_ranks_together_say_of_their_threads_is_bounded() -> None:
    frames = [Frame(f"f{number}", "/home/u/train.py", number) for number in range(100)]
    threads = [ThreadStack(f"t{number}", number == 0, False, False, frames) for number in range(40)]
    assert threads == bounded(threads, 40 * 100)
    few = bounded(threads, 130)
    assert [("t0", 100), ("t1", 30)] == [(stack.name, len(stack.frames)) for stack in few]
    assert frames[:30] == few[1].frames, "the innermost ones"
