"""Steps of a host's ranks, joined by its agent: nothing is lost, and the window is the one that single records give."""

import math
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.coordinator.disk import Disk
from holter.coordinator.recovery import journal
from holter.coordinator.recovery.journal import Journal
from holter.coordinator.window.assembly import Assembly
from holter.faults import Window
from holter.records import Attached, Nonfinite, Observation, StepDone, StepsDone
from holter.records.joined import Told, apart, join, kind, split

NAMES = st.sampled_from(["gradients", "gradients@dp#0", "gradients@dp#4", "parameters_after@own", "x#03", "x#", "#"])
REPEATED = 6
"""A connection broke, and its records are said twice."""
FLOATS = st.floats(width=64)


@st.composite
def steps(draw: st.DrawFn) -> StepDone:
    optional = st.none() | FLOATS
    return StepDone(
        seconds=draw(FLOATS),
        phase_seconds=draw(st.dictionaries(st.sampled_from(["data", "forward"]), FLOATS)),
        micro_steps=draw(st.sampled_from([1, 4])),
        loss=draw(optional),
        gradient_norm=draw(optional),
        learning_rate=draw(optional),
        batch=draw(st.integers(0, 2**64 - 1)),
        roots=draw(st.dictionaries(NAMES, st.integers(0, 2**64 - 1))),
        nonfinite=[],
        overhead_ratio=draw(FLOATS),
        check_interval=draw(st.sampled_from([1, 2])),
        numbers=draw(st.dictionaries(st.sampled_from(["clip.norm", "loss_scale"]), FLOATS)),
    )


def words(told: Told) -> bytes:
    """To the bit: NaN is not equal to itself, and 0.0 is to -0.0."""
    return msgspec.msgpack.encode(told)


@given(st.lists(steps(), min_size=1, max_size=8))
def test_what_was_joined_comes_apart_as_it_was(said: list[StepDone]) -> None:
    by_kind: dict[object, list[Told]] = {}
    for rank, done in enumerate(said):
        by_kind.setdefault(kind(done), []).append((rank, 1000 + rank, done))
    for parts in by_kind.values():
        joined = msgspec.msgpack.decode(msgspec.msgpack.encode(join(parts)), type=StepsDone)
        assert joined.is_sound
        assert list(map(words, parts)) == list(map(words, apart(joined)))


def test_what_is_not_finite_is_not_joined() -> None:
    bad = Nonfinite(name="w", where="gradient", nans=1, infs=0, numel=4)
    assert kind(step(0, 0, nonfinite=[bad])) is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gradients@dp#12", ("gradients@dp", 12)),
        ("gradients", ("gradients", -1)),
        ("x#03", ("x#03", -1)),
        ("x#" + "9" * 5000, ("x#" + "9" * 5000, -1)),
    ],
)
def test_only_numbers_that_can_be_written_again_are_subgroups(name: str, parts: tuple[str, int]) -> None:
    assert parts == split(name)


def step(rank: int, number: int, **changed: object) -> StepDone:
    made = StepDone(
        seconds=0.5 + rank / 64,
        phase_seconds={"data": 0.1},
        micro_steps=1,
        loss=2.0 - number / 10 + rank / 7,
        gradient_norm=0.7,
        learning_rate=1e-3,
        batch=number * 100 + rank,
        roots={
            f"parameters_before@dp#{rank % 4}": 5000 + number,
            f"gradients@dp#{rank % 4}": 9000 + number,
            f"parameters_after@dp#{rank % 4}": 5001 + number,
            "parameters_after@own": 77 + rank,
            "state_before@own": 7 * number + rank,
            "state_after@own": 7 * (number + 1) + rank + (rank == 3 and number == 4),
        },
        nonfinite=[],
        overhead_ratio=0.004,
        check_interval=1,
        numbers={"batch.x.max": float(rank), "memory.host_bytes": 1e9 + rank * 1e-3},
    )
    return msgspec.structs.replace(made, **changed)


def faulty(rank: int, number: int, case: int) -> StepDone:
    """Healthy, or one of the things that the window must show alike."""
    done = step(rank, number)
    if case == 1 and rank == 5 and number >= 3:
        roots = done.roots | {"gradients@dp#1": 1}
        return msgspec.structs.replace(done, roots=roots)
    if case == 2 and rank == 2:
        return msgspec.structs.replace(done, roots=done.roots | {"parameters_before@dp#2": 4}, loss=math.nan)
    if case == 3 and rank % 3 == 0:
        return msgspec.structs.replace(done, loss=None, numbers={"clip.norm": math.inf if rank else -0.0})
    if case == 4:
        return msgspec.structs.replace(done, batch=7, seconds=0.5, numbers={"x": 1e308 * (1 + rank % 2)})
    return done


def told(world: int, number: int, case: int, generator: random.Random) -> list[tuple[int, StepDone]]:
    ranks = [rank for rank in range(world) if not (case == 5 and rank == world - 1 and number > 2)]
    generator.shuffle(ranks)
    return [(rank, faulty(rank, number, case)) for rank in ranks]


def window_of(world: int, case: int, *, host: int) -> Window:
    """The window after ten steps; `host`: how many ranks' steps are joined in one record, 0: none."""
    generator, assembly = random.Random(case), Assembly(world)  # noqa: S311 - no secret
    for rank in range(world):
        about = Attached(pid=rank, host=f"h{rank // 8}", world_size=world, local_rank=rank % 8, command=[], versions={})
        assembly.add(Observation(rank=rank, step=0, at_ns=0, body=about), 0)
    for number in range(10):
        groups: dict[object, list[Told]] = {}
        for rank, done in told(world, number, case, generator):
            if host:
                groups.setdefault((rank // host, kind(done)), []).append((rank, number, done))
            else:
                said = Observation(rank=rank, step=number, at_ns=number, body=done)
                for _ in range(2 if case == REPEATED else 1):
                    assembly.add(said, number)
        for parts in groups.values():
            said = Observation(rank=parts[0][0], step=number, at_ns=number, body=join(parts))
            for _ in range(2 if case == REPEATED else 1):
                assembly.add(said, number)
    return assembly.window(100)


@pytest.mark.parametrize("case", range(7))
def test_the_window_is_the_same(case: int) -> None:
    assert repr(window_of(16, case, host=0)) == repr(window_of(16, case, host=8))


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_journal_of_joined_steps_gives_the_same_window(is_joined: bool, tmp_path: Path) -> None:  # noqa: FBT001
    disk, kept = Disk(), Journal(tmp_path)
    straight, again = Assembly(4), Assembly(4)
    for number in range(5):
        said = [(rank, 10 + rank, step(rank, number)) for rank in range(4)]
        for rank, at_ns, done in said:
            straight.add(Observation(rank=rank, step=number, at_ns=at_ns, body=done), number)
        kept.append(number, Observation(rank=0, step=number, at_ns=10, body=join(said)))
    torn = msgspec.structs.replace(join(said), loss=[1.0, 2.0])
    kept.append(9, Observation(rank=0, step=4, at_ns=10, body=torn))
    kept.flush(disk, is_now=True)
    disk.close(10.0)
    damage: list[str] = []
    for entry in journal.read(tmp_path, damage, is_joined=is_joined):
        again.add(entry.observation, entry.received_ns)
    assert ["0001.msgpack: 0 places damaged, 1 entries could not be read; all others were"] == damage
    assert repr(straight.window(100)) == repr(again.window(100))
