"""Names the first death, not its victims; says nothing of ends that were meant."""

import signal
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from holter.diagnosis import rank_causes
from holter.faults import RankExit
from holter.faults.hangs.dead_rank import DeadRank
from holter.faults.window import Examined, StepView
from holter.records import LEFT, Call, Exam, Exited, Farewell, Finding, Flight, Frame, Group, Phase, ThreadStack
from made_up import made_window

SECOND = 1_000_000_000
LOST = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5120"


def ended(
    rank: int,
    at_s: float,
    *,
    code: int | None = None,
    by: int | None = None,
    said: Farewell | None = None,
    out_of_memory: bool = False,
) -> RankExit:
    exited = Exited(
        pid=4000 + rank,
        exit_code=code,
        signal=by,
        out_of_memory=out_of_memory,
        last_step=20 + rank,
        last_phase=Phase.BACKWARD,
        farewell=said,
    )
    return RankExit(rank, int(at_s * SECOND), exited)


def raised(text: str, where: str = "train.py:12 in step") -> Farewell:
    return Farewell(kind="exception", text=text, where=where)


END = Farewell(kind="end", text="", where="")
INTERRUPT = Farewell(kind="interrupt", text="KeyboardInterrupt", where="")


def judge(*exits: RankExit, now_s: float = 100.0, ranks: int = 2, **fields: Any) -> list[Finding]:
    in_time = tuple(sorted(exits, key=lambda end: end.at_ns))
    window = made_window(
        now_ns=int(now_s * SECOND), world_size=ranks, attached=frozenset(range(ranks)), exits=in_time, **fields
    )
    return list(DeadRank().judge(window))


def test_a_rank_that_a_launcher_ended_after_it_had_left_its_group_is_no_death_unless_it_was_killed() -> None:
    left = Farewell(kind="end", text=LEFT, where="")
    assert [] == judge(ended(0, 10.0, code=1, said=left), ended(1, 10.4, code=1, said=left))
    (finding,) = judge(ended(1, 10.0, by=signal.SIGKILL, said=left), ended(0, 10.4, code=1, said=left))
    assert (1,) == finding.ranks


def test_a_killed_rank_leads_and_the_peer_that_lost_its_connection_is_a_victim() -> None:
    (finding,) = judge(ended(1, 10.0, by=signal.SIGKILL), ended(0, 10.2, code=1, said=raised(LOST)))
    assert finding.ranks == (1,)
    assert finding.first_step == 21
    assert finding.facts["is_signal"] is True
    assert finding.facts["is_killed"] is True
    first, victim = finding.evidence
    assert first.summary == "rank 1 (pid 4001) ended by SIGKILL; last seen in step 21, backward"
    assert first.values["signal"] == "SIGKILL"
    assert "rank 0" in victim.summary
    assert "0.2 s later" in victim.summary


def test_a_killed_rank_leads_even_if_its_peer_was_seen_to_end_a_little_earlier() -> None:
    (finding,) = judge(ended(0, 10.0, code=1, said=raised(LOST)), ended(1, 10.9, by=signal.SIGKILL))
    assert finding.ranks == (1,)
    assert "seen 0.9 s earlier" in finding.evidence[1].summary


def test_a_kill_long_after_a_lost_connection_is_the_launcher_cleaning_up() -> None:
    (finding,) = judge(ended(0, 10.0, code=1, said=raised(LOST)), ended(1, 40.0, by=signal.SIGKILL))
    assert finding.ranks == (0,)
    assert finding.facts["is_connection_lost"] is True


def test_survivors_that_the_launcher_terminated_are_victims() -> None:
    (finding,) = judge(
        ended(1, 10.0, code=1, said=raised("ValueError: bad label 7")), ended(0, 10.1, by=signal.SIGTERM)
    )
    assert finding.ranks == (1,)
    assert "ValueError: bad label 7" in finding.summary
    assert finding.evidence[1].values["where"] == "train.py:12 in step"


def test_a_rank_that_the_launcher_terminated_on_its_way_out_died_of_its_exception() -> None:
    said = raised("RuntimeError: out of ideas")
    (finding,) = judge(ended(1, 10.0, code=1, said=said), ended(0, 10.2, by=signal.SIGTERM, said=said))
    assert finding.ranks == (0, 1)
    assert finding.facts["is_exception"] is True
    (end,) = [proof for proof in finding.evidence if proof.kind == "process_exit"]
    assert end.summary.startswith("ranks 0 and 1 ended with RuntimeError: out of ideas")
    assert "last seen in steps 20 to 21" in end.summary


def test_a_peer_that_lost_its_connection_and_was_then_terminated_is_a_victim() -> None:
    (finding,) = judge(
        ended(0, 10.0, by=signal.SIGTERM, said=raised(LOST)), ended(1, 10.1, code=1, said=raised("KeyError: 7"))
    )
    assert finding.ranks == (1,)


def test_a_rank_without_last_words_leads_over_a_lost_connection() -> None:
    (finding,) = judge(ended(0, 10.0, code=1, said=raised(LOST)), ended(1, 10.05))
    assert finding.ranks == (1,)
    assert "ended without last words" in finding.summary
    assert finding.facts["is_status_known"] is False
    assert finding.facts["is_order_clear"] is True


def test_all_ranks_silent_at_once_leave_the_order_unclear() -> None:
    (finding,) = judge(ended(0, 10.0), ended(1, 10.1))
    assert finding.facts["is_order_clear"] is False


@pytest.mark.parametrize(
    "exits",
    [
        (ended(0, 10, code=0, said=END), ended(1, 10, code=0, said=END)),
        (ended(0, 10, said=END), ended(1, 12, said=END)),
        (ended(0, 10, code=130, said=INTERRUPT), ended(1, 10, by=signal.SIGINT)),
        (ended(0, 10, code=1, said=raised(LOST)), ended(1, 10.3, code=1, said=INTERRUPT)),
        (ended(0, 10, said=INTERRUPT), ended(1, 40, by=signal.SIGKILL)),
        (ended(0, 10, by=signal.SIGTERM), ended(1, 10.4, by=signal.SIGTERM)),
        (ended(0, 10, code=143), ended(1, 10.1, by=signal.SIGTERM)),
        (ended(0, 10, code=143), ended(1, 11, code=143)),
        tuple(ended(rank, 10 + 0.2 * rank, by=signal.SIGTERM) for rank in range(4)),
        (ended(1, 10, by=signal.SIGTERM), ended(0, 15, code=0, said=END)),
        (ended(0, 10, code=0, said=END), ended(1, 15, by=signal.SIGTERM)),
        (ended(1, 10, code=-signal.SIGTERM), ended(0, 40, by=signal.SIGKILL)),
        (ended(0, 10, code=93), ended(1, 10, code=93)),
        (ended(0, 10, code=0, said=END),),
    ],
    ids=[
        "end",
        "end, code unknown",
        "ctrl-c",
        "ctrl-c, peer complains",
        "ctrl-c, launcher kills the rest",
        "stopped from outside",
        "stopped, by code",
        "stopped, one second apart",
        "stopped, one after the other",
        "stopped, one saves first",
        "stopped, one was quicker with its save",
        "stopped, one does not obey",
        "halted by decision",
        "one still runs",
    ],
)
def test_ends_that_were_meant_raise_nothing(exits: tuple[RankExit, ...]) -> None:
    assert judge(*exits) == []


def test_ctrl_c_after_a_death_does_not_hide_it() -> None:
    (finding,) = judge(ended(1, 10.0, by=signal.SIGKILL), ended(0, 10.5, said=INTERRUPT))
    assert finding.ranks == (1,)


def test_sigterm_to_one_rank_alone_is_a_death() -> None:
    (finding,) = judge(ended(1, 10.0, by=signal.SIGTERM))
    assert finding.ranks == (1,)
    assert finding.facts["is_terminated"] is True


STOPPED = ended(1, 10.0, by=signal.SIGTERM)


def test_where_sigterm_ended_a_rank_the_others_have_time_to_save_and_follow() -> None:
    assert [] == judge(STOPPED, now_s=39.0)
    (finding,) = judge(STOPPED, now_s=41.0)
    assert (1,) == finding.ranks


def test_sigterm_to_one_rank_alone_is_a_death_as_soon_as_its_peers_go_on() -> None:
    assert [] == judge(STOPPED, now_s=13.0, steps=(StepView(20, 10 * SECOND + 1, 1, ()),))
    (finding,) = judge(STOPPED, now_s=13.0, steps=(StepView(21, 12 * SECOND, 1, ()),))
    assert (1,) == finding.ranks


def test_sigterm_to_one_rank_alone_is_a_death_as_soon_as_its_peers_fail_over_it() -> None:
    lost = ended(0, 10.1, by=signal.SIGTERM, said=raised(LOST))
    (finding,) = judge(STOPPED, lost, now_s=11.5, signalled={0: int(10.05 * SECOND)})
    assert ((1,), True) == (finding.ranks, finding.facts["is_terminated"])
    (finding,) = judge(STOPPED, now_s=11.5, failing={0: int(10.1 * SECOND)})
    assert ((1,), True) == (finding.ranks, finding.facts["is_terminated"])


def test_a_rank_that_was_told_to_end_before_it_lost_its_peer_is_part_of_the_stop() -> None:
    told = {0: int(9.9 * SECOND), 1: int(9.9 * SECOND)}
    assert [] == judge(STOPPED, ended(0, 10.1, by=signal.SIGTERM, said=raised(LOST)), signalled=told)
    assert [] == judge(STOPPED, ended(0, 9.95, by=signal.SIGTERM, said=raised(LOST)), signalled=told)
    assert [] == judge(STOPPED, now_s=11.5, signalled=told, failing={0: int(10.1 * SECOND)})


def test_a_rank_that_the_kernel_killed_for_memory_after_a_sigterm_is_no_part_of_a_stop() -> None:
    assert judge(STOPPED, ended(0, 15.0, by=signal.SIGKILL, out_of_memory=True))


def test_sigterm_to_all_is_a_fault_if_one_of_them_died_otherwise() -> None:
    (finding,) = judge(ended(0, 10.0, by=signal.SIGTERM), ended(1, 10.01, by=signal.SIGSEGV))
    assert finding.ranks == (1,)
    assert "SIGSEGV" in finding.summary


def test_the_first_death_is_given_time_to_settle() -> None:
    death = ended(0, 10.0, code=1, said=raised(LOST))
    assert judge(death, now_s=10.9) == []
    assert len(judge(death, now_s=11.0)) == 1


def test_nobody_left_to_wait_for() -> None:
    assert len(judge(ended(1, 10.0, by=signal.SIGKILL), ended(0, 10.1, by=signal.SIGTERM), now_s=10.2)) == 1


def test_the_same_exception_on_all_ranks_names_all() -> None:
    exits = [
        ended(rank, 10 + rank / 10, code=1, said=raised(f"ValueError: no such file for rank {rank}"))
        for rank in range(4)
    ]
    (finding,) = judge(*exits, ranks=4)
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.facts["is_on_several_ranks"] is True


def test_another_exception_later_is_no_part_of_it() -> None:
    (finding,) = judge(
        ended(0, 10, code=1, said=raised("ValueError: x")),
        ended(1, 10.2, code=1, said=raised("KeyError: y", "data.py:3 in get")),
    )
    assert finding.ranks == (0,)


def test_out_of_memory_is_said() -> None:
    (finding,) = judge(ended(1, 10, by=signal.SIGKILL, out_of_memory=True))
    assert finding.facts["is_out_of_memory"] is True
    assert "out of memory" in finding.summary


def test_an_exit_code_is_said() -> None:
    (finding,) = judge(ended(1, 10, code=3, said=END))
    assert "exit code 3" in finding.summary


def test_a_negative_exit_code_is_a_signal() -> None:
    (finding,) = judge(ended(1, 10, code=-signal.SIGABRT))
    assert "SIGABRT" in finding.summary


LAST_CALL = Call(
    group="0",
    sequence=40,
    operation="all_reduce",
    sizes=((100,),),
    dtypes=("float32",),
    created_ns=9 * SECOND,
    is_retired=False,
)
FLIGHT = Flight(groups=[Group(name="0", description="default_pg")], calls=[LAST_CALL], taken_ns=int(9.5 * SECOND))
STACK = ThreadStack("MainThread", True, False, True, [Frame("crash", "/home/u/train.py", 12)])
STATISTICS = {"step": 21.0, "loss": 0.5, "gradient_norm": float("inf")}


def with_exams(*exams: Exam) -> list[Finding]:
    seen = tuple(Examined(21, 10 * SECOND, exam, 10 * SECOND) for exam in exams)
    window = made_window(
        now_ns=100 * SECOND,
        world_size=2,
        attached=frozenset({0, 1}),
        exits=(ended(1, 10.0, by=signal.SIGKILL), ended(0, 10.5, code=1, said=raised(LOST))),
        exams={1: seen, 0: seen},
    )
    return list(DeadRank().judge(window))


def test_what_a_killed_rank_last_did_is_in_the_evidence() -> None:
    (finding,) = with_exams(Exam(reason="death", flight=FLIGHT, statistics=STATISTICS, stacks=[STACK]))
    said = {proof.kind: proof for proof in finding.evidence}
    assert "all_reduce float32 [100], number 40 of group default_pg, not over" in said["last_collectives"].summary
    assert 1 == said["last_collectives"].values["rank"]
    assert "loss 0.5" in said["last_statistics"].summary
    assert {"rank": 1, "step": 21.0, "loss": 0.5} == said["last_statistics"].values
    assert "rank 1 in crash (/home/u/train.py:12)" == said["stacks"].summary


def test_each_part_is_taken_from_the_newest_look_that_has_it() -> None:
    older = Exam(reason="asked", stacks=[STACK], statistics={"step": 3.0})
    (finding,) = with_exams(
        older, Exam(reason="last_breath", flight=FLIGHT), Exam(reason="death", statistics={"step": 21.0})
    )
    said = {proof.kind: proof for proof in finding.evidence}
    assert {"process_exit", "last_collectives", "last_statistics", "stacks"} == said.keys()
    assert 21.0 == said["last_statistics"].values["step"]


def test_the_newest_copy_counts_whoever_brought_it_and_its_age_is_said() -> None:
    older = msgspec.structs.replace(FLIGHT, calls=[], taken_ns=2 * SECOND)
    (finding,) = with_exams(Exam(reason="last_breath", flight=FLIGHT), Exam(reason="death", flight=older))
    (calls,) = [proof for proof in finding.evidence if proof.kind == "last_collectives"]
    assert "number 40 of group default_pg, not over; as of 0.5 s before its end was seen" in calls.summary
    assert 0.5 == calls.values["age_s"]


def test_victims_leave_no_last_doings() -> None:
    (finding,) = with_exams(Exam(reason="death", flight=FLIGHT))
    assert 1 == len([proof for proof in finding.evidence if proof.kind == "last_collectives"])


def left(status: int) -> Farewell:
    return Farewell(kind="exit", text=f"os._exit({status})", where="train.py:31 in give_up")


@pytest.mark.parametrize("code", [3, None], ids=["status known", "reaped by its parent"])
def test_a_rank_that_called_os_exit_says_where(code: int | None) -> None:
    (finding,) = judge(ended(1, 10, code=code, said=left(3)), ended(0, 10.2, code=1, said=raised(LOST)))
    assert (1,) == finding.ranks
    assert "os._exit called at train.py:31 in give_up" in finding.summary
    assert finding.facts["is_exception"] is False
    assert finding.facts["is_status_known"] is True


@pytest.mark.parametrize("code", [0, None])
def test_a_rank_that_left_content_by_os_exit_raises_nothing(code: int | None) -> None:
    assert [] == judge(ended(0, 10, code=code, said=left(0)), ended(1, 10.1, code=0, said=END))


QUIET = Farewell(kind="exit", text="os._exit(0)", where="train.py:38 in leave")


def test_a_rank_that_left_without_an_error_leads_over_the_peer_that_lost_it() -> None:
    (finding,) = judge(
        replaced(ended(1, 10.0, code=0, said=QUIET), last_step=20), ended(0, 10.3, code=1, said=raised(LOST))
    )
    assert (1,) == finding.ranks
    assert "exit code 0, os._exit called at train.py:38" in finding.summary
    assert "rank_dead" == rank_causes(finding)[0].cause
    assert rank_causes(finding)[0].confidence > 0.9


def test_a_rank_that_was_done_long_ago_or_is_further_is_not_why_a_connection_was_lost() -> None:
    lost = ended(0, 100.0, code=1, said=raised(LOST))
    done = replaced(ended(1, 10.0, code=0, said=END), last_step=5)
    assert (0,) == judge(done, lost, now_s=200.0)[0].ranks
    further = replaced(ended(1, 99.0, code=0, said=END), last_step=30)
    assert (0,) == judge(further, lost, now_s=200.0)[0].ranks


def test_ranks_that_are_done_at_different_times_are_no_deaths() -> None:
    assert [] == judge(ended(1, 10.0, code=0, said=QUIET), ended(0, 40.0, code=0, said=END))


def test_a_rank_that_failed_by_itself_is_not_excused_by_one_that_left() -> None:
    (finding,) = judge(ended(1, 10.0, code=0, said=QUIET), ended(0, 10.3, code=1, said=raised("ValueError: bad label")))
    assert (0,) == finding.ranks


def replaced(end: RankExit, last_step: int) -> RankExit:
    return RankExit(end.rank, end.at_ns, msgspec.structs.replace(end.exited, last_step=last_step))


GAVE_UP = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
)
BARRIER = "RuntimeError: [Rank 0]: Rank{} failed to pass monitoredBarrier in 5000 ms"
WATCHDOG = (
    "torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812)"
)


@pytest.mark.parametrize("text", [GAVE_UP, WATCHDOG, "torch.distributed.DistStoreError: wait timeout after 3000ms"])
def test_a_rank_whose_backend_gave_up_is_a_victim_of_the_one_that_is_left(text: str) -> None:
    (finding,) = judge(ended(0, 10.0, code=1, said=raised(text)), ended(1, 10.5, by=signal.SIGTERM))
    assert (1,) == finding.ranks
    assert finding.summary.startswith("Rank 0 waited for rank 1 in vain and ended with ")
    (cause, *_) = rank_causes(finding)
    assert ("rank_missing_from_collective", 0.65, (1,)) == (cause.cause, cause.confidence, cause.ranks)
    assert any(proof.kind == "missing" for proof in cause.evidence)


@pytest.mark.parametrize(("words", "expected"), [(" 1", (1,)), ("s 1, 3", (1, 3))])
def test_monitored_barrier_says_who_was_missing(words: str, expected: tuple[int, ...]) -> None:
    follows = "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
    (finding,) = judge(
        ended(2, 9.9, code=1, said=raised(follows)),
        ended(0, 10.0, code=1, said=raised(BARRIER.format(words))),
        *(ended(rank, 10.5, by=signal.SIGTERM) for rank in (1, 3)),
        ranks=4,
    )
    assert expected == finding.ranks
    assert ("rank_missing_from_collective", 0.85) == (rank_causes(finding)[0].cause, rank_causes(finding)[0].confidence)


def taken_at(seen: Examined, taken_ns: int) -> Examined:
    assert seen.exam.flight is not None
    flight = msgspec.structs.replace(seen.exam.flight, taken_ns=taken_ns)
    return replace(seen, exam=msgspec.structs.replace(seen.exam, flight=flight))


def test_recorders_say_who_was_missing() -> None:
    def seen(last: int, *, is_open: bool) -> tuple[Examined, ...]:
        made = [
            msgspec.structs.replace(LAST_CALL, sequence=number, record=number, is_retired=number < last or not is_open)
            for number in range(30, last + 1)
        ]
        flight = msgspec.structs.replace(FLIGHT, calls=made)
        return (Examined(20, 10 * SECOND, Exam(reason="death", flight=flight), 10 * SECOND),)

    exams = {rank: seen(40, is_open=True) for rank in (0, 1, 3)} | {2: seen(39, is_open=False)}
    exits = (
        ended(0, 10.0, code=1, said=raised(GAVE_UP)),
        *(ended(rank, 10.5, by=signal.SIGTERM) for rank in (1, 2, 3)),
    )
    (finding,) = judge(*exits, ranks=4, exams=exams)
    assert ((2,), 40) == (finding.ranks, finding.collective.sequence if finding.collective else None)
    assert "rank_missing_from_collective" == rank_causes(finding)[0].cause
    assert any(proof.kind == "last_collectives" and proof.values["rank"] == 2 for proof in finding.evidence)
    (unsure,) = judge(*exits, ranks=4)
    assert () == unsure.ranks
    assert "which of them was missing is not known" in unsure.summary
    assert rank_causes(unsure)[0].confidence < 0.5


def test_a_rank_that_died_or_left_explains_a_timeout_however_long_ago() -> None:
    gave_up = ended(0, 1000.0, code=1, said=raised(GAVE_UP))
    assert (1,) == judge(ended(1, 10.0, by=signal.SIGKILL), gave_up, now_s=2000.0)[0].ranks
    (finding,) = judge(replaced(ended(1, 10.0, code=0, said=QUIET), last_step=20), gave_up, now_s=2000.0)
    assert ((1,), "rank_dead") == (finding.ranks, rank_causes(finding)[0].cause)


@pytest.mark.parametrize("text", ["requests.exceptions.ReadTimeout: timed out", "TimeoutError: timed out"])
def test_a_timeout_that_is_not_the_backends_is_a_death_of_its_own(text: str) -> None:
    (finding,) = judge(ended(0, 10.0, code=1, said=raised(text)), ended(1, 10.5, by=signal.SIGTERM))
    assert ((0,), "script_error") == (finding.ranks, rank_causes(finding)[0].cause)


def test_an_error_of_the_rank_itself_that_the_watchdog_tells_is_its_own() -> None:
    text = "torch.distributed.DistBackendError: NCCL watchdog thread terminated with exception: CUDA error: an illegal memory access"
    (finding,) = judge(ended(0, 10.0, code=1, said=raised(text)), ended(1, 10.5, by=signal.SIGTERM))
    assert ((0,), "rank_dead") == (finding.ranks, rank_causes(finding)[0].cause)


OWN = ["/home/me/losses.py:12 in total: return terms[7]", "/home/me/train.py:41 in main: loss = total(terms)"]


def test_an_exception_of_the_script_is_a_warning_with_its_own_line_first() -> None:
    said = Farewell(kind="exception", text="KeyError: 7", where="/lib/x.py:3 in get", own=OWN)
    (finding,) = judge(ended(1, 10.0, code=1, said=said), ended(0, 10.2, code=1, said=raised(LOST)))
    assert ("warning", (1,), 21) == (finding.severity, finding.ranks, finding.first_step)
    assert finding.summary == "/home/me/losses.py:12 in total: rank 1 ended with KeyError: 7 at step 21."
    line = finding.evidence[0]
    assert ("script_line", "/home/me/losses.py", 12) == (line.kind, line.values["file"], line.values["line"])
    assert line.summary.startswith(OWN[0])
    assert line.summary.endswith("called from /home/me/train.py:41 in main; raised in /lib/x.py:3 in get")
    (cause, *_) = rank_causes(finding)
    assert ("script_error", 0.93) == (cause.cause, cause.confidence)
    assert "SIGKILL" not in cause.fix.do + cause.mechanism


def test_the_same_exception_on_all_ranks_is_one_finding_that_says_it_once() -> None:
    ends = [
        ended(rank, 10.0 + rank / 10, code=1, said=msgspec.structs.replace(raised(f"ValueError: rank {rank}"), own=OWN))
        for rank in range(4)
    ]
    (finding,) = judge(*ends, ranks=4)
    assert (0, 1, 2, 3) == finding.ranks
    assert 1 == sum(proof.kind == "script_line" for proof in finding.evidence)


def test_sys_exit_with_a_code_is_the_scripts_own_end() -> None:
    said = Farewell(kind="end", text="sys.exit(3)", where="train.py:9 in main", own=["train.py:9 in main: sys.exit(3)"])
    (finding,) = judge(ended(0, 10.0, code=3, said=said), ended(1, 10.5, by=signal.SIGTERM))
    assert ("warning", "script_error") == (finding.severity, rank_causes(finding)[0].cause)
    assert finding.summary == "train.py:9 in main: rank 0 ended with exit code 3 at step 20."
    (by_hand,) = judge(ended(0, 10.0, code=3, said=END), ended(1, 10.5, by=signal.SIGTERM))
    assert "script_error" == rank_causes(by_hand)[0].cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "out_of_memory"),
        ("MemoryError: ", "out_of_memory"),
        ("_ArrayMemoryError: Unable to allocate 1.00 TiB for an array", "out_of_memory"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory", "out_of_memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "out_of_memory"),
        ("RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. ", "out_of_memory"),
        ("RuntimeError: DataLoader worker (pid 77) is killed by signal: Segmentation fault. ", "stalled_data_loader"),
        ("RuntimeError: DataLoader worker (pid(s) 77) exited unexpectedly", "stalled_data_loader"),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", "rank_dead"),
        ("AcceleratorError: CUDA error: device-side assert triggered", "script_error"),
        ("KeyError: 'sample-17' (Caught KeyError in DataLoader worker process 0)", "script_error"),
        ("ValueError: the memory bank is out of memory slots", "script_error"),
    ],
)  # fmt: skip
def test_what_has_a_name_of_its_own_keeps_it(text: str, cause: str) -> None:
    (finding,) = judge(ended(0, 10.0, code=1, said=raised(text)), ended(1, 10.5, by=signal.SIGTERM))
    assert cause == rank_causes(finding)[0].cause
    assert ("warning" if cause == "script_error" else "critical") == finding.severity


def test_a_rank_that_the_kernel_ended_for_memory_is_out_of_memory() -> None:
    (finding,) = judge(ended(1, 10.0, by=signal.SIGKILL, out_of_memory=True), ended(0, 10.2, by=signal.SIGTERM))
    assert "out_of_memory" == rank_causes(finding)[0].cause


def test_a_crash_after_the_end_of_every_script_is_a_warning_that_says_so() -> None:
    (finding,) = judge(ended(0, 10.0, code=0, said=END), ended(1, 10.4, by=signal.SIGABRT, said=END))
    assert ("warning", (1,)) == (finding.severity, finding.ranks)
    assert "SIGABRT while Python shut down after the end of its script" in finding.summary


def test_a_crash_at_the_very_end_is_critical_if_it_kept_a_peer_from_its_own_end() -> None:
    crashed = ended(1, 10.0, by=signal.SIGABRT, said=END)
    (finding,) = judge(crashed, ended(0, 10.4, by=signal.SIGTERM))
    assert ("critical", (1,)) == (finding.severity, finding.ranks)
    (finding,) = judge(crashed, now_s=12.0, failing=frozenset({0}))
    assert "critical" == finding.severity


def test_after_a_crash_at_the_very_end_the_others_have_time_to_follow() -> None:
    crashed = ended(1, 10.0, by=signal.SIGABRT, said=END)
    assert not judge(crashed, now_s=12.0)
    (finding,) = judge(crashed, now_s=60.0)
    assert "critical" == finding.severity


@pytest.mark.parametrize(
    "end",
    [
        ended(1, 10.4, by=signal.SIGKILL, said=END),
        ended(1, 10.4, by=signal.SIGABRT, said=Farewell(kind="end", text="sys.exit(3)", where="")),
        ended(1, 10.4, by=signal.SIGABRT),
    ],
)
def test_a_kill_and_a_crash_before_the_end_are_deaths_as_ever(end: RankExit) -> None:
    (finding,) = judge(ended(0, 10.0, code=0, said=END), end)
    assert "critical" == finding.severity
