"""What a sidecar knows of its rank."""

import math

from holter.page import PageHeartbeat
from holter.records import Nonfinite, Observation, OnDevice, Phase, SightLost, StepDone
from holter.sidecar.state import RankState


def done(
    step: int, *, loss: float | None = 1.0, seconds: float = 0.25, nonfinite: tuple[Nonfinite, ...] = ()
) -> Observation:
    body = StepDone(
        seconds=seconds,
        phase_seconds={},
        micro_steps=1,
        loss=loss,
        gradient_norm=2.0,
        learning_rate=0.1,
        batch=0,
        roots={},
        nonfinite=list(nonfinite),
        overhead_ratio=0.004,
        check_interval=1,
    )
    return Observation(rank=1, step=step, at_ns=5, body=body)


def test_the_last_of_everything():
    state = RankState(1, "host")
    state.learn(done(6))
    state.learn_heartbeat(PageHeartbeat(step=7, phase=Phase.BACKWARD, micro_step=0, at_ns=2_500_000_000))
    seen = state.snapshot(dropped=3)
    assert (1, "host", 7, Phase.BACKWARD) == (seen.rank, seen.hostname, seen.step, seen.phase)
    assert (2.5, 1.0, 2.0, 0.004, 3) == (
        seen.last_progress_s,
        seen.loss,
        seen.gradient_norm,
        seen.overhead_ratio,
        seen.dropped,
    )


def test_a_step_without_a_loss_keeps_the_last():
    state = RankState(1, "host")
    state.learn(done(0, loss=3.0))
    state.learn(done(1, loss=None))
    assert 3.0 == state.loss


def test_nonfinite_values_are_counted_by_place():
    state = RankState(1, "host")
    bad = Nonfinite(where="gradient", name="w", nans=1, infs=0, numel=4)
    state.learn(done(0, nonfinite=(bad, bad)))
    state.learn(done(1, nonfinite=(bad,)))
    assert {"gradient": 3} == state.snapshot(0).nonfinite


def test_other_observations_change_nothing():
    state = RankState(1, "host")
    state.learn(Observation(rank=1, step=9, at_ns=5, body=SightLost(what="x", dropped=1)))
    assert 0 == state.step


def test_the_line_is_one_line_for_a_person():
    state = RankState(1, "host")
    state.learn(done(41, loss=0.12345))
    state.learn_heartbeat(PageHeartbeat(step=42, phase=Phase.FORWARD, micro_step=0, at_ns=1))
    assert " holter  step 42 · forward · loss 0.1235 · 250 ms a step · overhead 0.4%" == state.line()
    state.learn(done(42, loss=math.nan, seconds=2.0))
    assert "loss is not finite · 2.0 s a step" in state.line()


def test_the_device_is_shown_once_the_rank_has_said_it():
    state = RankState(1, "host")
    assert "" == state.snapshot(0).gpu_uuid
    state.learn(Observation(rank=1, step=0, at_ns=5, body=OnDevice(uuid="GPU-1")))
    assert ("GPU-1", 0) == (state.snapshot(0).gpu_uuid, state.snapshot(0).step)


def test_the_last_statistics_are_of_the_last_step_and_none_are_made_up():
    state = RankState(1, "host")
    assert {} == state.statistics()
    state.learn(done(41, loss=0.5))
    state.learn(done(42, loss=None))
    said = state.statistics()
    assert (42.0, 0.5) == (said["step"], said["loss"])
    assert set(said) <= {"step", "loss", "gradient_norm", "seconds", "learning_rate"}
