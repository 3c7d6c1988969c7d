"""What travels of a recorder's copy: little, once, and the same on all ranks."""

import msgspec
import pytest

from holter.flight import BLOCK_CALLS
from holter.records import Attached, Call, Flight, Observation, StepDone
from holter.sidecar.recorder import MAX_STEP_CALLS, MAX_STEPS, TrafficLog, chosen_calls

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


def done(step: int, at_s: float, seconds: float = 0.1, data_s: float = 0.0) -> Observation:
    body = StepDone(
        seconds=seconds,
        phase_seconds={"data": data_s, "forward": 0.01},
        micro_steps=1,
        loss=None,
        gradient_norm=None,
        learning_rate=None,
        batch=0,
        roots={},
        nonfinite=[],
        overhead_ratio=0.0,
        check_interval=1,
    )
    return Observation(rank=0, step=step, at_ns=START + round(at_s * SECOND), body=body)


def call(sequence: int, at_s: float, group: str = "0", **more: object) -> Call:
    return Call(
        group, sequence, "all_reduce", ((4,),), ("float32",), START + round(at_s * SECOND), is_retired=True, **more
    )


def flight(calls: list[Call], taken_s: float) -> Flight:
    return Flight(groups=[], calls=calls, taken_ns=START + round(taken_s * SECOND))


def run(num_steps: int, per_step: int, lag_s: float = 0.0) -> tuple[TrafficLog, list[Call]]:
    """A tenth of a second a step."""
    log, calls = TrafficLog(), []
    for step in range(num_steps):
        begin = step * 0.1
        calls += [call(step * per_step + i, begin + lag_s + 0.08 * (i + 1) / (per_step + 1)) for i in range(per_step)]
        log.learn(done(step, begin + 0.099))
    return log, calls


def test_a_call_belongs_to_the_step_that_ended_next_after_it():
    log = TrafficLog()
    log.learn(done(7, 1.0, data_s=0.25))
    log.learn(done(8, 2.0))
    traffic = log.take(flight([call(1, 0.5), call(2, 0.9), call(3, 1.5), call(4, 2.5)], 3.0), 11, 22)
    assert (7, 0.25, [("0", 1, 0), ("0", 2, 400_000)], {"0": 2}) == msgspec.structs.astuple(traffic.steps[0])
    assert (8, 0.0, [("0", 3, 1_000_000)], {"0": 3}) == msgspec.structs.astuple(traffic.steps[1])
    assert START + SECOND // 2 == traffic.base_ns
    assert (11, 22) == (traffic.clock_offset_ns, traffic.clock_error_ns)


def test_a_step_is_told_once_and_one_that_has_not_ended_later():
    log = TrafficLog()
    log.learn(done(0, 1.0))
    calls = [call(1, 0.5), call(2, 1.5)]
    assert [0] == [step.step for step in log.take(flight(calls, 1.6)).steps]
    assert log.take(flight(calls, 2.9)) is None
    log.learn(done(1, 2.0))
    assert [1] == [step.step for step in log.take(flight(calls, 4.0)).steps]


def test_a_step_that_ended_after_the_copy_waits_for_the_next_copy():
    log = TrafficLog()
    log.learn(done(0, 1.0))
    assert log.take(flight([call(1, 0.5)], 0.9)) is None
    assert [0] == [step.step for step in log.take(flight([call(1, 0.5), call(2, 0.95)], 2.0)).steps]


def test_arrivals_travel_at_most_once_a_second():
    log = TrafficLog()
    log.learn(done(0, 1.0))
    assert log.take(flight([call(1, 0.5)], 1.1)) is not None
    log.learn(done(1, 1.2))
    assert log.take(flight([call(1, 0.5), call(2, 1.15)], 1.3)) is None
    assert [1] == [step.step for step in log.take(flight([call(1, 0.5), call(2, 1.15)], 2.2)).steps]


def test_steps_told_together_are_taken_apart():
    log = TrafficLog()
    log.learn(done(0, 2.0, seconds=1.0))
    log.learn(done(1, 2.0, seconds=1.0))
    traffic = log.take(flight([call(1, 0.5), call(2, 1.5)], 3.0))
    assert [(0, 1), (1, 2)] == [(step.step, step.calls[0][1]) for step in traffic.steps]


def test_messages_between_two_ranks_are_not_told():
    log = TrafficLog()
    log.learn(done(0, 1.0))
    assert log.take(flight([call(1, 0.5, is_p2p=True)], 2.0)) is None


@pytest.mark.parametrize("per_step", [1, 3, 16, 17, 40, 200])
def test_a_step_tells_sixteen_calls_at_most_and_half_of_that_at_least(per_step):
    log, calls = run(1, per_step)
    (step,) = log.take(flight(calls, 100.0)).steps
    assert min(per_step, MAX_STEP_CALLS // 2) <= len(step.calls) <= MAX_STEP_CALLS


def test_ranks_that_tell_at_different_rates_tell_the_same_calls():
    fast, calls = run(500, 40)
    slow, late = run(500, 40, lag_s=0.01)
    often = [fast.take(flight(calls[: n * 400], n * 1.0 + 0.05)) for n in range(1, 51)]
    once = slow.take(flight(late, 60.0))
    assert len(once.steps) <= MAX_STEPS
    told_often = {
        (step.step, group, sequence) for traffic in often for step in traffic.steps for group, sequence, _ in step.calls
    }
    told_once = {(step.step, group, sequence) for step in once.steps for group, sequence, _ in step.calls}
    assert len(told_once) > 300
    assert told_once <= told_often


def test_every_group_has_its_share():
    calls = [call(i, i * 1e-3, group="world") for i in range(100)] + [call(7, 0.2, group="pair")]
    chosen = chosen_calls(calls)
    assert {"world", "pair"} == {call.group for call in chosen}
    assert len(chosen) <= MAX_STEP_CALLS
    assert chosen == sorted(chosen, key=lambda call: call.created_ns)


def test_more_groups_than_room_are_chosen_alike():
    mine = [call(5, 0.1, group=f"g{i}") for i in range(40)]
    theirs = [call(5, 0.1, group=f"g{i}") for i in range(20, 60)]
    chosen = [{call.group for call in chosen_calls(calls)} for calls in (mine, theirs)]
    assert [MAX_STEP_CALLS, MAX_STEP_CALLS] == [len(groups) for groups in chosen]
    assert chosen[0] & chosen[1]


def test_a_message_of_many_short_steps_stays_small():
    log, calls = run(400, 20)
    assert len(msgspec.msgpack.encode(log.take(flight(calls, 100.0)))) < 20_000


def test_each_block_of_calls_is_told_once():
    log = TrafficLog()
    calls = [call(n, n * 1e-3) for n in range(3 * BLOCK_CALLS)]
    first = log.take(flight(calls[: 2 * BLOCK_CALLS], 1.0))
    again = log.take(flight(calls, 1.1))
    told = [block.block for traffic in (first, again) for block in traffic.blocks]
    assert told == sorted(set(told))
    assert len(told) >= 2
    assert log.take(flight(calls, 5.0)) is None


def test_what_is_no_step_is_no_news():
    log = TrafficLog()
    body = Attached(pid=1, host="h", world_size=1, local_rank=0, command=[], versions={})
    log.learn(Observation(rank=0, step=0, at_ns=START, body=body))
    assert log.take(flight([call(1, -1.0)], 2.0)) is None


def test_the_last_numbers_of_a_step_are_told_however_few_of_its_calls_are():
    log, calls = run(num_steps=3, per_step=100)
    told = log.take(flight(calls, 5.0)).steps
    assert [{"0": 99}, {"0": 199}, {"0": 299}] == [step.lasts for step in told]
    assert all(len(step.calls) <= MAX_STEP_CALLS for step in told)


def test_last_numbers_are_of_as_many_groups_as_calls_are_told_of():
    log = TrafficLog()
    log.learn(done(0, 1.0))
    (told,) = log.take(flight([call(5, 0.5, group=f"g{number}") for number in range(100)], 2.0)).steps
    assert MAX_STEP_CALLS == len(told.lasts)
    assert {group for group, _, _ in told.calls} == told.lasts.keys()
