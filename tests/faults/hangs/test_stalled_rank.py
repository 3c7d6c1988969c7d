"""Names whom the others wait for, when its own time is up and not before; says nothing of whatever only looks like it."""

import signal
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.faults.standing_jobs import (
    COMPILING,
    LOADING,
    LOCKED,
    SAVING,
    SITE,
    SPIN,
    START_S,
    UPLOADING,
    WAIT,
    Actor,
    calls,
    play,
)

from holter.diagnosis import rank_causes, top_cause
from holter.diagnosis.correlate import _substance
from holter.faults import ExamKey
from holter.faults.hangs.stalled_rank import StalledRank
from holter.records import Call, Exam, Farewell, Flight, Frame, Group, Phase

BUSY = {"last_call": 811, "is_in_call": False, "phase": Phase.FORWARD}
"""A rank that has not entered what the others wait in."""


def job(ranks: int, **culprit: Any) -> dict[int, Actor]:
    """All wait for the last one."""
    return {rank: Actor() for rank in range(ranks - 1)} | {ranks - 1: Actor(**culprit)}


def skipping(last: int, *, skips: int | None = None) -> Any:
    """A recorder of a program of three calls in turn, of which one was left out; the last is not over."""

    def flight(now_s: float) -> Flight:
        made = [(10, 20, 30)[number % 3] for number in range(last + (skips is not None)) if number != skips]
        entries = [
            Call(
                group="0",
                sequence=number,
                operation="all_reduce",
                sizes=((size,),),
                dtypes=("float32",),
                created_ns=int((now_s - 5 - (len(made) - number) / 10) * 1e9),
                is_retired=number < len(made),
                record=number,
            )
            for number, size in enumerate(made, 1)
        ]
        return Flight(groups=[Group(name="0", description="default_pg")], calls=entries, taken_ns=int(now_s * 1e9))

    return flight


SHELL = (
    Frame("wait4", "libc.so.6", 0, is_native=True),
    Frame("os_system", "libpython3.11.so", 0, is_native=True),
    *SPIN,
)
WRITING = (Frame("write", "libc.so.6", 0, is_native=True), *SPIN)
SAMPLING = (Frame("decode", "/home/u/sampling.py", 30), Frame("sample_images", "/home/u/train.py", 70), *SPIN[1:])
EVALUATING = (Frame("forward", "/home/u/model.py", 9), Frame("evaluate", "/home/u/train.py", 60), *SPIN[1:])
RECEIVING = (Frame("recv", f"{SITE}/torch/distributed/distributed_c10d.py", 2500), *SPIN[1:])


def computing(operation: str) -> tuple[Frame, ...]:
    """An operation of torch's, called by the script."""
    native = (f"at::native::{operation}_out", f"at::_ops::{operation}::call")
    return (*(Frame(name, "libtorch_cpu.so", 0, is_native=True) for name in native), *SPIN)


DECOMPOSING = computing("linalg_svd")

FAULTS: dict[str, tuple[dict[str, Any], str, float, str]] = {
    "a loop": (
        {**BUSY, "frames": SPIN, "cpu_share": 1.0, "state": "running"},
        "rank_stuck_in_python",
        6.0,
        "it loops in spin (/home/u/train.py:41)",
    ),
    "a loop in an evaluation": (
        {**BUSY, "phase": Phase.EVALUATION, "frames": EVALUATING, "cpu_share": 1.0, "has_evaluated": True},
        "rank_stuck_in_python",
        6.0,
        "it loops in forward (/home/u/model.py:9)",
    ),
    "a loop in an evaluation, where no hook sees it": (
        {**BUSY, "frames": EVALUATING, "cpu_share": 1.0, "state": "running", "has_evaluated": True},
        "rank_stuck_in_python",
        60.0,
        "it loops in forward (/home/u/model.py:9)",
    ),
    "a sleep": ({**BUSY, "frames": SPIN}, "rank_stuck_in_python", 6.0, "it waits in spin (/home/u/train.py:41)"),
    "a locked interpreter": (
        {**BUSY, "frames": LOCKED, "cpu_share": 1.0, "is_lock_free": False},
        "interpreter_locked",
        6.0,
        "native code holds its interpreter lock, in burn_forever, below step (/home/u/train.py:52)",
    ),
    "a locked interpreter that nobody could ask": (
        {**BUSY, "frames": LOCKED, "cpu_share": 1.0, "is_lock_free": None, "owns_lock": True},
        "interpreter_locked",
        6.0,
        "native code holds its interpreter lock",
    ),
    "SIGSTOP": (
        {**BUSY, "state": "stopped", "stopped_since_s": 1.0},
        "rank_suspended",
        4.0,
        "its process is stopped by a signal",
    ),
    "SIGSTOP within the collective": (
        {"state": "stopped", "stopped_since_s": 1.0},
        "rank_suspended",
        4.0,
        "its process is stopped by a signal",
    ),
    "a debugger": (
        {**BUSY, "state": "traced", "stopped_since_s": 1.0},
        "rank_suspended",
        4.0,
        "its process is held by a debugger",
    ),
    "the freezer": (
        {**BUSY, "state": "frozen", "stopped_since_s": 1.0},
        "rank_suspended",
        4.0,
        "its process is frozen by its control group",
    ),
    "a dead mount": (
        {**BUSY, "frames": SPIN, "state": "uninterruptible", "stopped_since_s": 0.0},
        "rank_suspended",
        6.0,
        "it is in uninterruptible sleep",
    ),
    "no next batch": (
        {**BUSY, "phase": Phase.DATA, "frames": LOADING},
        "stalled_data_loader",
        6.0,
        "it waits for its next batch",
    ),
    "a loop in the data set": (
        {**BUSY, "phase": Phase.DATA, "frames": SPIN, "cpu_share": 1.0},
        "stalled_data_loader",
        6.0,
        "it waits for its next batch, in spin (/home/u/train.py:41)",
    ),
    "a save that does not end": (
        {**BUSY, "phase": Phase.CHECKPOINT, "frames": SAVING, "deadline_s": 20.0},
        "stalled_checkpoint",
        20.0,
        "it is in a save",
    ),
    "a save that holds the lock": (
        {**BUSY, "phase": Phase.CHECKPOINT, "frames": SAVING, "deadline_s": 20.0, "is_lock_free": False},
        "stalled_checkpoint",
        20.0,
        "native code holds its interpreter lock",
    ),
    "a lock held by other code in a save's phase": (
        {
            **BUSY,
            "phase": Phase.CHECKPOINT,
            "frames": LOCKED,
            "deadline_s": 20.0,
            "cpu_share": 1.0,
            "is_lock_free": False,
        },
        "interpreter_locked",
        20.0,
        "burn_forever",
    ),
    "a silent host": (
        {**BUSY, "silent_since_s": 1.0},
        "host_unreachable",
        6.0,
        "nothing is heard from its host node",
    ),
    "a call left out": (
        {"flight": skipping(60, skips=50)},
        "rank_missing_from_collective",
        6.0,
        "it left out all_reduce float32",
    ),
    "an early end": (
        {**BUSY, "ends_s": 1.0, "exit_code": 0},
        "rank_missing_from_collective",
        6.0,
        "its process has ended in step 20",
    ),
    "a library that does not come back": (
        {**BUSY, "frames": UPLOADING},
        "rank_missing_from_collective",
        600.0,
        "it waits in urlopen",
    ),
    "a stack that cannot be seen": ({**BUSY, "frames": ()}, "rank_missing_from_collective", 60.0, "has waited for"),
}


def fault(name: str, ranks: int) -> tuple[dict[int, Actor], str, float, str]:
    """A job with one culprit, the last rank; what must be said of it, from when on."""
    culprit, cause, overdue_s, words = FAULTS[name]
    actors = job(ranks, **culprit)
    if name == "a call left out":
        for rank in range(ranks - 1):
            actors[rank] = replace(actors[rank], flight=skipping(60))
    return actors, cause, overdue_s, words


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAULTS)
def test_the_culprit_is_named_soon_after_its_time_is_up_and_stays(name: str, ranks: int) -> None:
    actors, cause, overdue_s, words = fault(name, ranks)
    played = play(actors, until_s=overdue_s + 8)
    at_s, finding = played.first
    assert overdue_s <= at_s <= overdue_s + 3
    assert (ranks - 1,) == finding.ranks
    assert cause == top_cause(finding)
    assert words in finding.summary.replace("have", "has")
    assert ("warning" if name == "a debugger" else "critical") == finding.severity
    assert 20 == finding.first_step
    assert round((START_S + overdue_s) * 1e9) == pytest.approx(finding.facts["overdue_at_ns"], abs=0.5e9)
    num_later = int((overdue_s + 8 - at_s) / 0.25)
    assert num_later <= len(played.confirmed)
    assert {str(_substance(finding))} == {str(_substance(one)) for _, one in played.confirmed}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ("a silent host", "an early end")])
def test_victims_are_counted_and_never_named(name: str) -> None:
    actors, *_ = fault(name, 4)
    _, finding = play(actors, until_s=FAULTS[name][2] + 4).first
    (victims,) = [one for one in finding.evidence if one.kind == "victims"]
    assert {"count": 3, "ranks": [0, 1, 2]} == victims.values
    assert "not to blame" in victims.summary


def test_the_collective_that_the_peers_wait_in_is_named() -> None:
    _, finding = play(fault("a loop", 4)[0], until_s=9).first
    assert finding.collective is not None
    assert ("default_pg", 812, "all_reduce") == (
        finding.collective.group,
        finding.collective.sequence,
        finding.collective.operation,
    )
    assert (
        "Rank 3 has not entered all_reduce #812 of default_pg, in which ranks 0, 1 and 2 have waited" in finding.summary
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_where_all_are_in_a_call_the_one_that_was_left_out_is_named(ranks: int) -> None:
    _, finding = play(fault("a call left out", ranks)[0], until_s=9).first
    assert finding.collective is not None
    assert ("default_pg", 51, "all_reduce") == (
        finding.collective.group,
        finding.collective.sequence,
        finding.collective.operation,
    )
    assert f"in all_reduce #51 of default_pg for rank {ranks - 1}" in finding.summary


def test_every_proof_is_there() -> None:
    _, finding = play(fault("a loop", 2)[0], until_s=9).first
    said = {one.kind: one for one in finding.evidence}
    assert {"stacks", "collective", "last_collectives", "process_state", "deadline", "victims"} == said.keys()
    assert "rank 1 in spin (/home/u/train.py:41)" in said["stacks"].summary
    assert "rank 1: running, 1.00 of a core, the interpreter answers" == said["process_state"].summary
    assert "rank 1: longest of 43 was 0.06 s" == said["deadline"].summary


def test_two_looks_are_asked_for_and_no_more() -> None:
    played = play(fault("a loop", 4)[0], until_s=60)
    asked = sorted({(at_s, key.depth, key.asked_ns / 1e9 - START_S) for at_s, key in played.asked})
    assert [(3.0, "native", 3.0), (6.0, "quick", 6.0)] == asked
    assert 8 == len(played.asked)


HEALTHY: dict[str, dict[int, Actor]] = {
    "a slow step": job(2, **BUSY, frames=SPIN, until_s=5.5) | {0: Actor(until_s=5.6)},
    "one that comes back just when it is overdue": {0: Actor(until_s=6.5), 1: Actor(**BUSY, frames=SPIN, until_s=6.25)},
    "a rank that saves, within its time": job(
        4, **BUSY | {"phase": Phase.CHECKPOINT}, frames=SAVING, deadline_s=100.0, until_s=95.0
    ),
    "a save that no hook sees": job(4, **BUSY, frames=SAVING, until_s=250.0),
    "one rank compiles": job(4, **BUSY, frames=COMPILING, cpu_share=1.0),
    "one rank evaluates by hand": job(
        2, **BUSY, frames=(Frame("evaluate", "/home/u/train.py", 10), *WAIT[1:]), cpu_share=1.0, until_s=250.0
    ),
    "one rank evaluates by hand, in a library": job(
        2, **BUSY, has_evaluated=True, frames=(*UPLOADING[:1], *EVALUATING), cpu_share=1.0, until_s=250.0
    ),
    "one rank uploads": job(2, **BUSY, frames=UPLOADING, until_s=200.0),
    "a first step": {rank: Actor(**BUSY, frames=SPIN, deadline_s=600.0) for rank in range(2)},
    "Ctrl-Z": {rank: Actor(**BUSY, state="stopped", stopped_since_s=1.0) for rank in range(4)},
    "a stop of two seconds": job(2, **BUSY, state="stopped", stopped_since_s=1.0, until_s=3.0),
    "slow storage for everyone": {
        rank: Actor(**BUSY | {"phase": Phase.DATA}, frames=LOADING, until_s=55.0) for rank in range(4)
    },
    "long work of the script on all ranks": {
        rank: Actor(**BUSY | {"phase": Phase.OTHER}, frames=SPIN, cpu_share=1.0, until_s=280.0) for rank in range(4)
    },
    "the last one tidies up": {
        0: Actor(phase=Phase.OTHER, frames=SPIN, is_in_call=False),
        1: Actor(ends_s=1.0, exit_code=0, since_s=0.0),
        2: Actor(ends_s=1.5, exit_code=0, since_s=0.0),
    },
    "Ctrl-C": {
        0: Actor(),
        1: Actor(**BUSY, ends_s=1.0, exit_code=1, farewell=Farewell(kind="interrupt", text="", where="")),
    },
    "one rank behind its peers, and nobody in a collective": {
        rank: Actor(**BUSY, frames=SPIN, step=20 - (rank == 3), until_s=250.0) for rank in range(4)
    },
    "a whole job stopped, one rank after the other": {
        rank: Actor(state="stopped", stopped_since_s=0.5 + 1.5 * rank, answers_after_s=0.1 + 0.5 * rank)
        for rank in range(2)
    },
    "a shell command of one rank": job(2, **BUSY, frames=SHELL, until_s=200.0),
    "one long operation of one rank": job(2, **BUSY, frames=DECOMPOSING, cpu_share=1.0, until_s=200.0),
    "one rank writes a file": job(2, **BUSY, frames=WRITING, until_s=200.0),
    "one rank makes samples": job(2, **BUSY, frames=SAMPLING, cpu_share=1.0, until_s=200.0),
    "workers that start while no hook sees it": job(2, **BUSY | {"phase": Phase.OTHER}, frames=LOADING, until_s=200.0),
    "a debugger on all ranks": {rank: Actor(state="traced", stopped_since_s=2.0) for rank in range(2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_what_only_looks_like_a_hang_raises_nothing(name: str) -> None:
    assert [] == play(HEALTHY[name], until_s=290.0).confirmed


def test_nobody_delayed_asks_nothing() -> None:
    actors = {rank: Actor(deadline_s=600.0) for rank in range(4)}
    assert [] == play(actors).asked


def test_a_rank_that_calls_without_changing_its_phase_is_not_stuck_until_it_is() -> None:
    """A loop of evaluation by hand: no hook fires, but the recorder grows, until at 20 s one rank no longer comes."""

    def growing(now_s: float, *, is_culprit: bool) -> Flight:
        last = 100 + int(10 * (min(now_s, START_S + 20) - START_S))
        return calls(last - is_culprit, is_last_open=not is_culprit, now_s=now_s)

    actors = {
        0: Actor(phase=Phase.OTHER, flight=lambda now_s: growing(now_s, is_culprit=False)),
        1: Actor(phase=Phase.OTHER, frames=SPIN, flight=lambda now_s: growing(now_s, is_culprit=True)),
    }
    at_s, finding = play(actors, until_s=60).first
    assert (1,) == finding.ranks
    assert 26 <= at_s <= 36


def test_a_hang_that_ends_is_no_longer_found() -> None:
    actors, *_ = fault("a loop", 2)
    actors = {rank: replace(actor, until_s=12.0) for rank, actor in actors.items()}
    played = play(actors, until_s=20)
    assert played.confirmed
    assert 12.0 > played.confirmed[-1][0]


@pytest.mark.parametrize(
    "ends", [(12.0, 12.5), (12.5, 12.0), (12.0, 40.0)], ids=["victim first", "culprit first", "one"]
)
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL, None])
def test_a_hung_job_that_is_killed_keeps_its_verdict(ends: tuple[float, float], by: int | None) -> None:
    actors, *_ = fault("a loop", 2)
    code = 1 if by is None else None
    actors = {rank: replace(actor, ends_s=ends[rank], exit_code=code, signal=by) for rank, actor in actors.items()}
    played = play(actors, until_s=20)
    assert 20.0 == played.confirmed[-1][0]
    assert {str(_substance(played.first[1]))} == {str(_substance(one)) for _, one in played.confirmed}


GAVE_UP = Farewell(
    kind="exception",
    text="RuntimeError: Timed out waiting 5000ms for recv operation to complete",
    where="/home/u/train.py:88",
)


@pytest.mark.parametrize("name", ["a loop", "a locked interpreter", "a library that does not come back"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_backends_timeout_proves_a_hang_before_the_culprits_own_time_is_up(name: str, ranks: int) -> None:
    actors, *_ = fault(name, ranks)
    actors = {rank: replace(one, ends_s=5.5, exit_code=None, signal=signal.SIGTERM) for rank, one in actors.items()}
    played = play(actors | {0: replace(actors[0], ends_s=5.0, exit_code=1, signal=None, farewell=GAVE_UP)}, until_s=10)
    at_s, finding = played.first
    assert (5.0, (ranks - 1,)) == (at_s, finding.ranks)
    assert "rank 0, which waited for it, ended with RuntimeError: Timed out waiting 5000ms" in str(finding.evidence)
    assert {str(_substance(finding))} == {str(_substance(one)) for _, one in played.confirmed}
    own = msgspec.structs.replace(GAVE_UP, text="ValueError: bad label 7")
    assert (
        [] == play(actors | {0: replace(actors[0], ends_s=5.0, exit_code=1, signal=None, farewell=own)}, 10).confirmed
    )


def test_survivors_that_wait_for_the_dead_say_so() -> None:
    actors = job(4, **BUSY, ends_s=1.0, exit_code=None, signal=signal.SIGKILL)
    _, finding = play(actors, until_s=10).first
    assert (3,) == finding.ranks
    assert finding.facts["has_died"] is True


def test_who_waits_for_a_rank_that_its_own_exception_ended_waits_for_no_hang() -> None:
    own = Farewell(kind="exception", text="FileNotFoundError: shard-0003.bin", where="/home/u/train.py:11")
    actors = job(4, **BUSY, ends_s=7.6, exit_code=1, farewell=own)
    assert [] == play(actors, until_s=14, failing={3: 0}).confirmed
    assert [] == play(job(4, **BUSY, ends_s=1.0, exit_code=1, farewell=own), until_s=14).confirmed
    assert [] == play(job(4, **BUSY), until_s=20, failing={3: 0}).confirmed
    assert {(3,)} == {finding.ranks for _, finding in play(job(4, **BUSY), until_s=50, failing={3: 0}).confirmed}, (
        "it does not end"
    )


def test_a_debugger_on_a_survivor_is_no_second_fault() -> None:
    actors = job(4, **BUSY, ends_s=1.0, exit_code=None, signal=signal.SIGKILL)
    actors[0] = replace(actors[0], state="traced", stopped_since_s=12.0)
    assert {(3,)} == {finding.ranks for _, finding in play(actors, until_s=20).confirmed}


def test_an_answer_that_is_late_is_not_waited_for() -> None:
    actors, cause, overdue_s, _ = fault("a loop", 4)
    actors[0] = replace(actors[0], answers_after_s=20.0)
    actors[3] = replace(actors[3], answers_after_s=2.9)
    at_s, finding = play(actors, until_s=12).first
    assert overdue_s <= at_s <= overdue_s + 3
    assert ((3,), cause) == (finding.ranks, top_cause(finding))


def test_without_recorders_the_stacks_tell() -> None:
    actors = {rank: replace(actor, flight=lambda _: None) for rank, actor in fault("a loop", 4)[0].items()}
    at_s, finding = play(actors, until_s=12).first
    assert (3,) == finding.ranks
    assert finding.collective is None
    assert "rank_stuck_in_python" == top_cause(finding)
    assert at_s <= 9


def test_without_recorders_and_stacks_whoever_is_behind_is_named_later_and_unsure() -> None:
    blind = {rank: Actor(flight=lambda _: None, frames=()) for rank in range(3)}
    actors = blind | {3: Actor(flight=lambda _: None, frames=(), phase=Phase.FORWARD)}
    played = play(actors, until_s=310)
    at_s, finding = played.first
    assert (3,) == finding.ranks
    assert at_s >= 60
    assert rank_causes(finding)[0].confidence < 0.7


def test_an_old_copy_of_a_recorder_blames_nobody() -> None:
    """Rank 0's recorder could not be read since before the standstill: it seems to be behind, and is not."""
    actors, *_ = fault("a loop", 4)
    taken_long_ago = calls(700, now_s=START_S - 60)
    actors[0] = replace(actors[0], flight=lambda _: taken_long_ago)
    _, finding = play(actors, until_s=9).first
    assert (3,) == finding.ranks


def test_everyone_without_a_batch_is_said_after_a_minute_and_more() -> None:
    actors = {rank: Actor(**BUSY | {"phase": Phase.DATA}, frames=LOADING) for rank in range(4)}
    at_s, finding = play(actors, until_s=70).first
    assert 60 <= at_s <= 63
    assert ("stalled_data_loader", "warning") == (top_cause(finding), finding.severity)
    assert (0, 1, 2, 3) == finding.ranks


def test_a_stopped_rank_that_waits_for_another_culprit_is_not_blamed() -> None:
    actors, *_ = fault("a loop", 4)
    actors[0] = replace(actors[0], state="traced", stopped_since_s=4.0)
    _, finding = play(actors, until_s=9).first
    assert (3,) == finding.ranks


def test_an_interpreter_that_answered_once_is_not_locked() -> None:
    """A crowded host: the answer came late at the second look."""
    actors, *_ = fault("a loop", 2)

    class Crowded(Actor):
        def exam(self, key: ExamKey, now_s: float) -> Exam:
            return msgspec.structs.replace(super().exam(key, now_s), is_lock_free=now_s < 5)

    crowded = Crowded(**BUSY, frames=SPIN, cpu_share=0.1, state="running")
    _, finding = play(actors | {1: crowded}, until_s=9).first
    assert "rank_stuck_in_python" == top_cause(finding)


def test_two_culprits_are_both_named() -> None:
    actors, *_ = fault("a loop", 4)
    actors[1] = replace(actors[3])
    _, finding = play(actors, until_s=9).first
    assert (1, 3) == finding.ranks
    assert "Ranks 1 and 3 have not entered" in finding.summary


def test_a_setting_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stalled_rank\.late_s must not be negative, got -1"):
        StalledRank(late_s=-1)


def test_a_rank_without_a_sidecar_is_named_by_its_peers_after_a_minute() -> None:
    """Nobody tells whether it moves; its stack is not to be had."""
    actors = job(4, **BUSY, frames=(), deadline_s=1e6, flight=lambda _: None, answers_after_s=None)
    at_s, finding = play(actors, until_s=75).first
    assert ((3,), "rank_missing_from_collective") == (finding.ranks, top_cause(finding))
    assert at_s >= 66
    assert rank_causes(finding)[0].confidence < 0.7


def test_of_ranks_that_are_all_in_the_collective_the_one_in_a_dead_system_call_is_named() -> None:
    actors = job(4, state="uninterruptible", stopped_since_s=0.0)
    at_s, finding = play(actors, until_s=12).first
    assert ((3,), "rank_suspended") == (finding.ranks, top_cause(finding))
    assert at_s <= 9


def test_ranks_that_are_all_in_the_collective_are_named_all_and_late() -> None:
    at_s, finding = play({rank: Actor() for rank in range(4)}, until_s=70).first
    assert (0, 1, 2, 3) == finding.ranks
    assert at_s >= 60
    assert finding.facts["is_culprit_clear"] is False
    assert rank_causes(finding)[0].confidence < 0.7


def test_a_rank_that_stands_still_while_the_others_train_on_is_no_hang() -> None:
    actors = {rank: Actor(deadline_s=1e6, is_in_call=False) for rank in range(3)}
    assert [] == play(actors | {3: Actor(**BUSY, frames=SPIN)}, until_s=290).confirmed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "SIGSTOP",
        *(pytest.param(name, marks=pytest.mark.release) for name in ("a loop", "a silent host", "a call left out")),
    ],
)
def test_sixteen_thousand_ranks_are_judged_in_bounded_time(name: str) -> None:
    ranks = 16_000
    actors, cause, overdue_s, _ = fault(name, ranks)
    if name != "a call left out":
        actors = {rank: replace(actor, flight=_few(actor)) for rank, actor in actors.items()}
    played = play(actors, until_s=overdue_s + 3, tick_s=1.5)
    _, finding = played.first
    assert ((ranks - 1,), cause) == (finding.ranks, top_cause(finding))
    assert len([key for _, key in played.asked if key.depth == "native"]) <= 16
    assert played.window is not None
    began = time.perf_counter()
    (again,) = StalledRank().judge(played.window)
    assert time.perf_counter() - began < 5
    assert _substance(finding) == _substance(again)
    assert sum(len(str(one)) for one in again.evidence) < 200_000


def _few(actor: Actor) -> Any:
    return lambda now_s: calls(actor.last_call, is_last_open=actor.is_in_call, first=actor.last_call - 3, now_s=now_s)


def test_of_nested_groups_the_one_that_holds_up_all_is_spoken_of() -> None:
    """Ranks 0 and 1 wait for rank 2, which waits for rank 3 in a group of theirs that nobody named."""

    def inside(group: str, members: tuple[int, ...], last: int, *, is_open: bool) -> Any:
        def flight(now_s: float) -> Flight:
            world, own = calls(811, now_s=now_s), calls(last, is_last_open=is_open, now_s=now_s, group=group)
            groups = [*world.groups, Group(name=group, description="undefined", ranks=members)]
            later = [msgspec.structs.replace(call, record=1000 + call.record) for call in own.calls]
            return Flight(groups=groups, calls=[*world.calls, *later], taken_ns=world.taken_ns)

        return flight

    three, two = ("5", (0, 1, 2)), ("7", (2, 3))
    actors = {rank: Actor(flight=inside(*three, 9, is_open=True)) for rank in (0, 1)}
    actors[2] = Actor(flight=inside(*two, 51, is_open=True))
    actors[3] = Actor(**{**BUSY, "frames": SPIN, "cpu_share": 1.0, "flight": inside(*two, 50, is_open=False)})
    _, finding = play(actors, until_s=9).first
    assert (3,) == finding.ranks
    assert "Rank 3 has not entered all_reduce #51 of group 7, in which rank 2 has waited for 6" in finding.summary
    assert [3, 2] == [one.values["rank"] for one in finding.evidence if one.kind == "last_collectives"]


def coming(at_s: float, **more: Any) -> Actor:
    """A rank that computes, and comes to the collective then."""

    def flight(now_s: float) -> Flight:
        has_come = now_s - START_S >= at_s
        return calls(812 if has_come else 811, is_last_open=has_come, now_s=now_s)

    return Actor(since_s=at_s, flight=flight, **more)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("phase", [Phase.OTHER, Phase.DATA])
@pytest.mark.parametrize(("at_s", "deadline_s"), [(2.9, 6.0), (3.5, 6.0), (5.0, 6.0), (5.0, 13.0), (5.5, 6.0)])
def test_peers_that_come_to_the_collective_after_the_first_look_are_seen_there(
    ranks: int, phase: Phase, at_s: float, deadline_s: float
) -> None:
    actors = job(ranks, **BUSY | {"phase": phase}, frames=SPIN, cpu_share=1.0)
    actors |= {rank: coming(at_s, deadline_s=deadline_s) for rank in range(ranks - 1)}
    found_s, finding = play(actors, until_s=20).first
    assert ((ranks - 1,), "critical") == (finding.ranks, finding.severity)
    assert 6.0 <= found_s <= 9.0


def test_peers_that_come_much_later_are_looked_for_now_and_then() -> None:
    actors = {0: coming(20.0, deadline_s=60.0), 1: Actor(**BUSY, frames=SPIN, cpu_share=1.0)}
    played = play(actors, until_s=40)
    assert (1,) == played.first[1].ranks
    assert 20.0 <= played.first[0] <= 27.0
    assert [3.0, 6.0, 12.0, 18.0, 24.0] == sorted({at_s for at_s, _ in played.asked})


def test_while_somebody_waits_all_are_looked_at_ever_less_often() -> None:
    played = play(job(4, **BUSY, frames=UPLOADING), until_s=120)
    assert [] == played.confirmed
    assert [3.0, 6.0, 12.0, 24.0, 48.0, 96.0] == sorted({at_s for at_s, _ in played.asked})


def test_a_large_job_is_looked_at_ever_less_often() -> None:
    actors = {rank: Actor(deadline_s=1e6, frames=SPIN, is_in_call=False) for rank in range(99)}
    played = play(actors | {99: Actor(**BUSY, frames=SPIN)}, until_s=60, tick_s=1.0)
    assert [] == played.confirmed
    assert [3.0, 6.0, 12.0, 24.0, 48.0] == sorted({at_s for at_s, _ in played.asked})


HIDDEN = {"frames": RECEIVING, "is_in_call": False, "last_call": 811}
"""A rank in a call of gloo's that the recorder does not show."""
LOOPING = {**BUSY, "frames": SPIN, "cpu_share": 1.0}


@pytest.mark.parametrize(
    "actors",
    [
        {0: Actor(**HIDDEN), 1: Actor(**LOOPING)},
        {0: Actor(**HIDDEN), 1: Actor(**LOOPING), 2: Actor(**HIDDEN), 3: Actor(**HIDDEN)},
        {0: Actor(**HIDDEN), 1: Actor(**LOOPING), 2: Actor(), 3: Actor()},
    ],
    ids=["two", "four", "others in a collective"],
)
def test_who_waits_in_what_no_recorder_shows_is_no_culprit(actors: dict[int, Actor]) -> None:
    at_s, finding = play(actors, until_s=12).first
    assert ((1,), "rank_stuck_in_python", "critical") == (finding.ranks, top_cause(finding), finding.severity)
    assert at_s <= 9


def test_behind_a_wait_that_no_recorder_shows_the_busy_one_is_looked_for() -> None:
    """Rank 0 waits for rank 1 in their group, rank 1 for a message of rank 2, which is no member of it."""
    pair = [Group(name="0", description="pair", ranks=(0, 1))]
    actors = {0: Actor(), 1: Actor(**HIDDEN), 2: Actor(**LOOPING, flight=lambda now_s: calls(0, now_s=now_s))}
    for rank in (0, 1):
        last, is_open = (812, True) if rank == 0 else (811, False)
        actors[rank].flight = lambda now_s, last=last, is_open=is_open: msgspec.structs.replace(
            calls(last, is_last_open=is_open, now_s=now_s), groups=pair
        )
    _, finding = play(actors, until_s=12).first
    assert (2,) == finding.ranks


def test_a_collective_and_a_message_that_wait_for_each_other_are_unclear() -> None:
    _, finding = play({0: Actor(), 1: Actor(**HIDDEN)}, until_s=12).first
    assert finding.facts["is_culprit_clear"] is False
    assert finding.facts["is_deadlock"] is False


def test_a_rank_stopped_alone_is_named_when_the_others_have_answered() -> None:
    actors = job(4, **BUSY, state="stopped", stopped_since_s=0.0)
    actors[1] = replace(actors[1], answers_after_s=0.9)
    at_s, finding = play(actors, until_s=8).first
    assert ((3,), "critical") == (finding.ranks, finding.severity)
    assert 3.9 <= at_s <= 4.5


def test_a_loop_of_many_operations_is_a_loop() -> None:
    class Looping(Actor):
        def exam(self, key: ExamKey, now_s: float) -> Exam:
            self.frames = computing("svd" if now_s < 5 else "mm")
            return super().exam(key, now_s)

    at_s, finding = play(job(2) | {1: Looping(**BUSY, cpu_share=1.0)}, until_s=12).first
    assert ((1,), "rank_stuck_in_python") == (finding.ranks, top_cause(finding))
    assert at_s <= 9


def test_a_loop_that_is_nearly_always_in_one_operation_is_looked_at_again_soon_and_not_for_ever() -> None:
    class Looping(Actor):
        def exam(self, key: ExamKey, now_s: float) -> Exam:
            self.frames = computing("tanh" if 8.5 < now_s < 10 else "mm")
            return super().exam(key, now_s)

    at_s, finding = play(job(2) | {1: Looping(**BUSY, cpu_share=1.0)}, until_s=30).first
    assert ((1,), "rank_stuck_in_python") == (finding.ranks, top_cause(finding))
    assert at_s <= 11
    decomposing = play(job(2, **BUSY, frames=DECOMPOSING, cpu_share=1.0), until_s=200)
    moments = sorted({at_s for at_s, key in decomposing.asked if key.depth == "native"})
    assert [] == decomposing.confirmed
    assert 6 <= sum(at_s <= 14 for at_s in moments) <= len(moments) <= 14


def test_an_operation_that_uses_no_processor_does_not_compute() -> None:
    at_s, _ = play(job(2, **BUSY, frames=DECOMPOSING, cpu_share=0.0), until_s=12).first
    assert at_s <= 9


SETTING_UP = {"step": 0, "phase": Phase.OTHER, "deadline_s": 1800.0, "suspect_s": 15.0}
PREPARING = (Frame("map", f"{SITE}/datasets/arrow_dataset.py", 3000), *SPIN[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("cpu_share", "named_s"), [(1.0, 7200.0), (0.0, 1800.0)])
def test_before_the_first_step_nothing_is_critical_and_who_works_has_hours(cpu_share: float, named_s: float) -> None:
    preparing = Actor(**SETTING_UP, frames=PREPARING, is_in_call=False, last_call=1, cpu_share=cpu_share)
    played = play({0: preparing, 1: Actor(**SETTING_UP, last_call=2)}, until_s=named_s + 10, tick_s=5.0)
    at_s, finding = played.first
    assert at_s >= named_s
    assert "warning" == finding.severity
    assert {"quick"} == {key.depth for at_s, key in played.asked if at_s < 1800}


@pytest.mark.parametrize("step", [0, 1])
def test_what_is_proven_is_not_waited_for_even_in_the_first_steps(step: int) -> None:
    first = {"step": step, "deadline_s": 600.0, "suspect_s": 15.0}
    actors = {rank: Actor(**first, flight=skipping(60, skips=50 if rank == 3 else None)) for rank in range(4)}
    for rank in range(3):
        actors[rank] = Actor(**first, flight=skipping(60))
    at_s, finding = play(actors, until_s=40).first
    assert ((3,), "rank_missing_from_collective") == (finding.ranks, top_cause(finding))
    assert 20 <= at_s <= 23
    assert ("warning" if step == 0 else "critical") == finding.severity


def test_a_first_step_that_only_takes_long_is_looked_at_quickly_and_not_named() -> None:
    first = {"step": 1, "deadline_s": 600.0, "suspect_s": 15.0}
    played = play(job(2, **BUSY | first, frames=SPIN) | {0: Actor(**first)}, until_s=290)
    assert [] == played.confirmed
    assert {(15.0, "quick")} == {(at_s, key.depth) for at_s, key in played.asked}
