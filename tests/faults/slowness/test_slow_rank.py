"""A rank that is late at nearly every step is named, and why; jitter, bursts, turns and unequal work are not.

Jobs are simulated: ranks compute, enter collectives one after the other and leave them together, by clocks that differ.
"""

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from holter.coordinator.window.arrivals import ArrivalBook
from holter.diagnosis import rank_causes, top_cause
from holter.faults.slowness.slow_rank import SlowRank
from holter.faults.window import Note, Spread, StepNumbers, Window
from holter.records import Census, Component, Device, Finding, StepCalls, TensorEntry, Traffic
from made_up import changed_window, made_window

Delay = Callable[[random.Random, int, int, int], float]
"""(random, rank, step, place of the collective in the step) -> seconds"""


def numbers(finding: Finding) -> dict[str, Any]:
    """All that its evidence says in numbers."""
    return {name: value for proof in reversed(finding.evidence) for name, value in proof.values.items()}


def never(_rng: random.Random, _rank: int, _step: int, _place: int) -> float:
    return 0.0


def simulate(
    delay: Delay = never,
    *,
    ranks: int = 2,
    steps: int = 60,
    calls: int = 3,
    step_s: float = 0.06,
    noise_s: float = 0.001,
    data: Callable[[int, int], float] = lambda _rank, _step: 0.001,
    seed: int = 0,
    **fields: Any,
) -> Window:
    """A window of such a job; what the data loader takes comes before the first collective."""
    rng = random.Random(seed)  # noqa: S311 - a simulation
    offsets = [rng.randrange(-(10**9), 10**9) for _ in range(ranks)]
    book, released, series = ArrivalBook(), 10.0, []
    for step in range(steps):
        began = released
        times: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
        for place in range(calls):
            entered = []
            for rank in range(ranks):
                took = step_s / calls + abs(rng.gauss(0, noise_s)) + delay(rng, rank, step, place)
                entered.append(released + took + (data(rank, step) if place == 0 else 0.0))
                local_us = round(entered[-1] * 1e6) - offsets[rank]
                times[rank].append(("0", step * calls + place, local_us))
            released = max(entered)
        for rank in range(ranks):
            told = StepCalls(step, data(rank, step), times[rank])
            traffic = Traffic(base_ns=0, steps=[told], clock_offset_ns=offsets[rank] * 1000, clock_error_ns=100_000)
            book.add(rank, traffic, round(released * 1e9))
        seconds = released - began
        numbers = {"seconds": Spread(seconds, seconds, seconds, 0, 0, ranks)} | fields.get("numbers", {})
        series.append(StepNumbers(step, round(released * 1e9), numbers))
    known = {name: value for name, value in fields.items() if name != "numbers"}
    return made_window(
        now_ns=round(released * 1e9),
        world_size=ranks,
        attached=frozenset(range(ranks)),
        series=tuple(series),
        arrivals=book.arrivals(),
        **known,
    )


def judge(window: Window) -> list[Finding]:
    return list(SlowRank().judge(window))


def named(window: Window, every: int) -> dict[int, Finding]:
    """Judged as a run is, every few steps: how many steps there were -> what was found first."""
    for end in [*range(30, len(window.calls.arrivals), every), len(window.calls.arrivals)]:
        seen = changed_window(window, series=window.series[:end], arrivals=window.calls.arrivals[:end])
        for finding in judge(seen):
            return {end: finding}
    return {}


def late(culprit: int, seconds: float = 0.05, place: int = 1, since: int = 0) -> Delay:
    return lambda _, rank, step, at: seconds if (rank, at) == (culprit, place) and step >= since else 0.0


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_50_ms_in_one_rank_are_named_wherever_in_the_step(ranks: int, place: int) -> None:
    (finding,) = judge(simulate(late(1, place=place), ranks=ranks))
    assert (finding.severity, finding.ranks) == ("warning", (1,))
    assert top_cause(finding) == "slow_compute"
    assert 0.045 < numbers(finding)["lag_s"] < 0.055
    assert 0.045 < numbers(finding)["lost_s"] < 0.055
    assert finding.first_step <= 4


def test_it_says_how_late_how_often_and_what_the_job_loses() -> None:
    (finding,) = judge(simulate(late(1), ranks=4))
    assert finding.summary.startswith("Rank 1 comes 50 ms late to collectives, step after step; the job loses")
    kinds = [evidence.kind for evidence in finding.evidence]
    assert kinds == ["arrival_lag", "lost_time", "data_wait"]
    assert re.search(r"in (\d+) of \1 steps that were compared \(\d+ to 58\)", finding.evidence[0].summary)
    assert "of group 0; this lag is known to" in finding.evidence[0].summary
    lag = finding.evidence[0].values
    assert 0 < lag["error_s"] < 0.002
    assert lag["rank"] == 1
    assert lag["num_late"] == lag["num_steps"] >= 20
    assert lag["lag_s"] > lag["limit_s"] > lag["spread_s"]
    (cause, *_) = rank_causes(finding)
    assert (cause.confidence, cause.basis) == (0.90, "observation")


def test_where_it_began_is_found() -> None:
    (finding,) = judge(simulate(late(2, since=40), ranks=4, steps=120))
    assert 38 <= finding.first_step <= 42


def test_batches_that_come_late_are_slow_input() -> None:
    window = simulate(data=lambda rank, _: 0.051 if rank == 1 else 0.001)
    (finding,) = judge(window)
    assert finding.ranks == (1,)
    assert finding.facts["is_in_data"]
    assert top_cause(finding) == "slow_input"


def test_two_slow_ranks_are_named_together() -> None:
    delay: Delay = lambda _, rank, __, place: 0.05 if rank in (1, 4) and place == 1 else 0.0  # noqa: E731
    (finding,) = judge(simulate(delay, ranks=6))
    assert finding.ranks == (1, 4)
    assert numbers(finding)["lost_s"] > 0.04


def test_a_slow_rank_stays_named_while_it_is_late_and_not_when_it_is_well_again() -> None:
    def recovering(_: random.Random, rank: int, step: int, place: int) -> float:
        return 0.05 if (rank, place) == (1, 1) and step < 80 else 0.0

    assert judge(simulate(recovering, steps=85))
    assert judge(simulate(recovering, steps=120)) == []


def test_less_than_half_of_the_old_lag_is_not_forgotten_at_once() -> None:
    def milder(rng: random.Random, rank: int, step: int, place: int) -> float:
        lag = 0.05 if step < 60 else 0.016
        return lag + rng.random() * 0.002 if (rank, place) == (1, 1) else 0.0

    assert judge(simulate(milder, steps=100))
    alone = simulate(lambda rng, rank, _, place: milder(rng, rank, 60, place))
    assert judge(alone) == []


def device(*reasons: str, clock: float = 1980.0) -> Device:
    return Device(
        uuid="GPU-1", throttled_by=list(reasons), clock_mhz=clock, clock_limit_mhz=1980.0, temperature_c=88.0, power_w=500.0
    )  # fmt: skip


def test_a_device_held_down_is_a_slow_device() -> None:
    notes = (Note(0, 0, 0, device()), Note(1, 0, 0, device("thermal", clock=1200.0)), Note(2, 0, 0, device()))
    (finding,) = judge(simulate(late(1), ranks=3, notes=notes))
    assert (finding.facts["is_device_throttled"], top_cause(finding)) == (True, "slow_device")
    assert any("held down by thermal" in evidence.summary for evidence in finding.evidence)


@pytest.mark.parametrize("own", [(), ("power",)])
def test_a_power_cap_on_all_devices_is_no_reason(own: tuple[str, ...]) -> None:
    notes = tuple(Note(rank, 0, 0, device(*(own if rank == 1 else ("power",)))) for rank in range(4))
    (finding,) = judge(simulate(late(1), ranks=4, notes=notes))
    assert (finding.facts["is_device_throttled"], top_cause(finding)) == (False, "slow_compute")


def is_not_accused(window: Window) -> bool:
    (finding,) = judge(window)
    assert "not enough evidence" in finding.summary
    assert finding.facts["has_other_work"] is True
    (cause, *_) = rank_causes(finding)
    assert any(evidence.kind == "missing" for evidence in cause.evidence)
    return (finding.severity, finding.ranks, cause.ranks) == ("info", (), ()) and cause.confidence < 0.5


@pytest.mark.parametrize("name", ["batch.num_samples", "micro_steps"])
def test_a_rank_with_more_to_do_is_not_accused(name: str) -> None:
    assert is_not_accused(simulate(late(1), numbers={name: Spread(12, 8, 16, 0, 1, 2)}))


@pytest.mark.parametrize("name", ["batch.num_samples", "micro_steps"])
def test_a_rank_with_less_to_do_that_is_late_is_slow(name: str) -> None:
    (finding,) = judge(simulate(late(1), numbers={name: Spread(12, 8, 16, 1, 0, 2)}))
    assert finding.ranks == (1,)


def census(*names: str) -> Census:
    return Census(
        model=0,
        wrapper="PipelineStage",
        is_replicated=False,
        optimizers=["AdamW"],
        components=[Component("", "Stage", "", True)],
        backward_order=[],
        part=0,
        parts=1,
        entries=[TensorEntry(name, (8, 8), "float32", True, False, 0) for name in names],
    )


def test_a_pipeline_stage_is_not_accused() -> None:
    stages = {rank: census(f"layer{rank}") for rank in range(4)}
    assert is_not_accused(simulate(late(0), ranks=4, census=stages))
    assert is_not_accused(simulate(late(1), ranks=2, census={0: stages[0], 1: stages[1]}))


def test_equal_models_are_comparable_work() -> None:
    (finding,) = judge(simulate(late(1), ranks=4, census=dict.fromkeys(range(4), census("layer"))))
    assert (finding.ranks, finding.facts["has_other_work"]) == ((1,), False)


def heavy_tail(rng: random.Random, _rank: int, _step: int, _place: int) -> float:
    return 0.004 * rng.paretovariate(1.5)


def exponential(rng: random.Random, _rank: int, _step: int, _place: int) -> float:
    return rng.expovariate(1 / 0.03)


def lengths(rng: random.Random, _rank: int, _step: int, _place: int) -> float:
    return rng.choice((0.0, 0.02, 0.04, 0.08, 0.16))


def logs(_: random.Random, rank: int, step: int, place: int) -> float:
    return 0.2 if rank == 0 and place == 0 and step % 10 == 0 else 0.0


def saves(_: random.Random, rank: int, step: int, place: int) -> float:
    return 3.0 if rank == 0 and place == 0 and step % 25 == 0 else 0.0


def evaluates(_: random.Random, rank: int, step: int, place: int) -> float:
    return 1.0 if rank == 0 and place == 0 and step % 5 == 0 else 0.0


def first_steps(rng: random.Random, rank: int, step: int, place: int) -> float:
    return 20.0 * rng.random() if step < 5 and place == 0 and rank == 1 else 0.0


def in_turns(_: random.Random, rank: int, step: int, place: int) -> float:
    return 0.05 if place == 1 and step % 2 == rank % 2 else 0.0


def in_long_turns(_: random.Random, rank: int, step: int, place: int) -> float:
    return 0.05 if place == 1 and step // 10 % 2 == rank % 2 else 0.0


def busy_machine(rng: random.Random, rank: int, step: int, _place: int) -> float:
    """Somebody else's process sits on one rank's core for a second, now and then."""
    is_held = (step // 12) % 5 == rank
    return rng.expovariate(1 / 0.02) if is_held else rng.expovariate(1 / 0.004)


def all_slow(_: random.Random, _rank: int, _step: int, _place: int) -> float:
    return 0.05


HEALTHY: Mapping[str, Delay] = {
    call.__name__: call
    for call in (
        never, heavy_tail, exponential, lengths, logs, saves, evaluates, first_steps, in_turns, in_long_turns, busy_machine, all_slow,
    )
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize(
    ("ranks", "calls"), [(2, 1), *(pytest.param(*more, marks=pytest.mark.release) for more in ((2, 8), (10, 2)))]
)
def test_equal_ranks_are_never_named(name: str, ranks: int, calls: int) -> None:
    """Judged as a run is, every few steps."""
    window = simulate(HEALTHY[name], ranks=ranks, calls=calls, steps=200)
    assert named(window, every=5) == {}


@pytest.mark.parametrize("name", ["heavy_tail", "exponential", "logs", "saves"])
def test_a_slow_rank_is_found_in_the_midst_of_jitter(name: str) -> None:
    healthy = HEALTHY[name]
    slow = late(1, 0.2)
    window = simulate(lambda rng, *place: healthy(rng, *place) + slow(rng, *place), ranks=4, steps=100)
    (finding,) = judge(window)
    assert finding.ranks == (1,)


class Wandering:
    """Noise that remembers `memory` of the step before, with deviation `noise_s`, of each rank by itself."""

    def __init__(self, memory: float, noise_s: float, forgetful_s: float = 0.0) -> None:
        self.memory, self.noise_s, self.forgetful_s = memory, noise_s, forgetful_s
        self.level_s: dict[int, float] = {}

    def __call__(self, rng: random.Random, rank: int, _step: int, place: int) -> float:
        if place:
            return 0.0
        before = self.level_s.get(rank, rng.gauss(0, self.noise_s))
        fresh = rng.gauss(0, self.noise_s * math.sqrt(1 - self.memory**2))
        self.level_s[rank] = self.memory * before + fresh
        return max(-0.08, self.level_s[rank] + rng.gauss(0, self.forgetful_s))


class Drift:
    """Ranks become slower and faster again, over many seconds, each in its own time."""

    def __init__(self, seconds: float, period: int) -> None:
        self.seconds, self.period = seconds, period
        self.phase: dict[int, float] = {}

    def __call__(self, rng: random.Random, rank: int, step: int, place: int) -> float:
        phase = self.phase.setdefault(rank, rng.random())
        wave = (1 + math.sin(2 * math.pi * (phase + step / self.period))) / 2
        return 0.0 if place else self.seconds * wave + abs(rng.gauss(0, 0.005))


class Neighbour:
    """Somebody else's process takes the core of one rank for 3 to 5 s, now and then."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.victim, self.until, self.again = 0, 0, 0

    def __call__(self, rng: random.Random, rank: int, step: int, place: int) -> float:
        if step >= self.again:
            self.victim = rng.randrange(2)
            self.until = step + int(rng.uniform(3, 5) / (0.1 + self.seconds))
            self.again = self.until + rng.randrange(10, 150)
        is_held = rank == self.victim and step < self.until and not place
        return rng.expovariate(1 / 0.004) + (self.seconds * rng.uniform(0.6, 1.4) if is_held else 0.0)


WANDERING: Mapping[str, Callable[[], Delay]] = {
    "half is remembered": lambda: Wandering(0.5, 0.03),
    "four fifths are remembered": lambda: Wandering(0.8, 0.03),
    "nearly all is remembered": lambda: Wandering(0.95, 0.03),
    "nearly all of a large one": lambda: Wandering(0.95, 0.06),
    "hidden under noise that forgets": lambda: Wandering(0.95, 0.03, 0.02),
    "drift of seconds": lambda: Drift(0.06, 100),
    "neighbour": lambda: Neighbour(0.05),
    "greedy neighbour": lambda: Neighbour(0.08),
}


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("name", WANDERING)
@pytest.mark.parametrize("ranks", [2, 4])
def test_noise_that_remembers_is_no_slowness(name: str, ranks: int) -> None:
    for seed in range(60260, 60270):
        window = simulate(WANDERING[name](), ranks=ranks, calls=1, steps=300, step_s=0.1, seed=seed)
        assert named(window, every=20) == {}, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "noise_s", "steps", "step_s"),
    [
        (0.0, 0.002, 100, 0.03),
        (0.0, 0.01, 100, 0.03),
        (0.0, 0.02, 150, 0.1),
        (0.5, 0.01, 150, 0.1),
        (0.5, 0.02, 250, 0.15),
        (0.8, 0.01, 250, 0.1),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_50_ms_are_named_before_a_short_job_ends(
    memory: float, noise_s: float, steps: int, step_s: float, ranks: int
) -> None:
    for seed in range(30260, 30268):
        noise, slow = Wandering(memory, noise_s), late(1, place=0)
        window = simulate(
            lambda rng, *place: noise(rng, *place) + slow(rng, *place),  # noqa: B023 - used in this turn only
            ranks=ranks, calls=1, steps=steps, step_s=step_s, seed=seed,
        )  # fmt: skip
        ((_, finding),) = named(window, every=10).items()
        assert finding.ranks == (1,), f"seed {seed}"


def test_a_lag_that_wanders_must_last_longer() -> None:
    steady = simulate(late(1, place=0), ranks=4, calls=1, steps=200, step_s=0.1)
    noise = Wandering(0.0, 0.02)
    wandering = simulate(
        lambda rng, *place: noise(rng, *place) + late(1, place=0)(rng, *place), ranks=4, calls=1, steps=200, step_s=0.1
    )
    ((soon, _),), ((later, _),) = named(steady, every=1).items(), named(wandering, every=1).items()
    assert 50 <= soon < 60
    assert later >= 80


def test_on_a_host_under_pressure_more_is_asked_for() -> None:
    window = simulate(late(1, 0.033), steps=80)
    assert judge(window)
    pressed = [
        replace(one, latest=tuple(replace(arrival, pressure=0.95) for arrival in one.latest))
        for one in window.calls.arrivals
    ]
    assert judge(changed_window(window, arrivals=tuple(pressed))) == []
    worse = simulate(late(1), steps=80)
    pressed = [
        replace(one, latest=tuple(replace(arrival, pressure=0.95) for arrival in one.latest))
        for one in worse.calls.arrivals
    ]
    (finding,) = judge(changed_window(worse, arrivals=tuple(pressed)))
    assert "tasks wait for a processor of its host 95% of the time" in finding.evidence[0].summary


def test_clocks_that_are_not_known_well_name_nobody() -> None:
    window = simulate(late(1, 0.03), steps=80)
    assert judge(window)
    blurred = [
        type(one)(**{**{name: getattr(one, name) for name in one.__dataclass_fields__}, "error_s": 0.011})
        for one in window.calls.arrivals
    ]
    fields = {name: getattr(window, name) for name in ("now_ns", "world_size", "attached", "series")}
    assert judge(made_window(**fields, arrivals=tuple(blurred))) == []


def test_a_lag_that_is_small_against_the_step_is_not_worth_a_word() -> None:
    assert judge(simulate(late(1, 0.04), step_s=1.0)) == []
    assert judge(simulate(late(1, 0.1), step_s=1.0))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("step_s", [0.28, 0.5, 0.8])
def test_50_ms_are_named_in_longer_steps_too(ranks: int, step_s: float) -> None:
    (finding,) = judge(simulate(late(1), ranks=ranks, step_s=step_s, noise_s=0.005, steps=100))
    assert ((1,), "warning") == (finding.ranks, finding.severity)


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [0.3, 1.0])
@pytest.mark.parametrize("name", ["heavy_tail", "exponential", "lengths", "busy_machine", "all_slow"])
def test_equal_ranks_with_longer_steps_and_as_much_more_noise_are_never_named(name: str, step_s: float) -> None:
    noise = step_s / 0.06 / 4
    for ranks in (2, 4):
        window = simulate(lambda *at: noise * HEALTHY[name](*at), ranks=ranks, steps=200, step_s=step_s)
        assert named(window, every=20) == {}


@pytest.mark.parametrize("settings", [{"min_steps": 11}, {"min_share_latest": 0.5}, {"min_lag_s": -1.0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="slow_rank"):
        SlowRank(**settings)
