"""What the page is told of many ranks: small, and whoever applies the changes to what it had sees what is."""

import math
import random

import msgspec
import pytest

from holter.coordinator.http.page_state import COLUMNS, STATES, Columns, Picture, joined, rank_columns, rounded
from holter.coordinator.http.timeline import Happening
from holter.coordinator.roster import Roster
from holter.faults.window import Spread, StepNumbers
from holter.records import Exited, Observation, Phase, StepDone
from holter.transport.wire import Heartbeat, Hello

NOW_NS = 1_700_000_000 * 10**9


def roster(num: int, world_size: int = 0) -> Roster:
    made = Roster(world_size or num)
    for rank in range(num):
        hello = Hello(
            run_id="r",
            rank=rank,
            world_size=world_size or num,
            host=f"node-{rank // 8}",
            rank_pid=rank + 1,
            sidecar_pid=1,
            metrics_address="",
        )
        made.connect(hello)
        made.beat(rank, Heartbeat(100, Phase.FORWARD, 0, NOW_NS), NOW_NS)
    return made


def step_done(seconds: float) -> StepDone:
    return StepDone(
        seconds=seconds,
        phase_seconds={},
        micro_steps=1,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=1e-3,
        batch=1,
        roots={},
        nonfinite=[],
        overhead_ratio=0.0,
        check_interval=1,
    )


def exited(rank: int, code: int | None, number: int | None = None) -> Observation:
    body = Exited(
        pid=1, exit_code=code, signal=number, out_of_memory=False, last_step=1, last_phase=Phase.DATA, farewell=None
    )
    return Observation(rank=rank, step=1, at_ns=NOW_NS, body=body)


def picture(made: Columns, **more: object) -> Picture:
    whole = {"now_ms": 1, "facts": {}, "numbers": (), "arrivals": (), "happenings": ()}
    return Picture(columns=made, **(whole | more))  # type: ignore[arg-type]


def numbers(step: int, value: float = 1.0, bad: int = 0) -> StepNumbers:
    return StepNumbers(step, 0, {"loss": Spread(value, value - 1, value + 1, 3, 4, 8, bad)})


def applied(before: Columns, told: dict[str, object]) -> Columns:
    """As the page does it."""
    now = {name: list(column) for name, column in before.items()}
    for name, change in told.items():
        if isinstance(change, list):
            now[name] = change
        else:
            for rank, value in zip(change["at"], change["to"], strict=True):  # type: ignore[index]
                now[name][rank] = value
    return now


def test_every_rank_has_a_place_those_that_never_came_too() -> None:
    known = roster(3, world_size=5)
    known.observe(Observation(rank=1, step=98, at_ns=NOW_NS, body=step_done(0.5)), NOW_NS)
    known.observe(exited(2, None, number=9), NOW_NS)
    known.members[0].numbers.lag_s = 0.0312
    made, hosts = rank_columns(known, {1: 2}, NOW_NS)
    assert set(COLUMNS) == set(made)
    assert ["running", "running", "died", "absent", "absent"] == [STATES[place] for place in made["state"]]
    assert [0, 2, 0, 0, 0] == made["blame"]
    assert [0, 1, 0, -1, -1] == made["behind"]
    assert [-1, 500, -1, -1, -1] == made["pace"]
    assert 31 == made["lag"][0]
    assert (["node-0"], [0, 0, 0, -1, -1]) == (hosts, made["host"])


def test_when_it_last_moved_is_said_of_who_stands_and_of_nobody_else() -> None:
    known = roster(2)
    known.beat(1, Heartbeat(101, Phase.DATA, 0, NOW_NS), NOW_NS + 8 * 10**9)
    made, _ = rank_columns(known, {}, NOW_NS + 9 * 10**9)
    assert [NOW_NS // 10**9, 0] == made["since"]


@pytest.mark.parametrize("num_changed", [1, 40, 1000])
def test_who_applies_the_changes_sees_what_is(num_changed: int) -> None:
    chance = random.Random(num_changed)  # noqa: S311 - a test
    before, _ = rank_columns(roster(1000), {}, NOW_NS)
    after = {name: list(column) for name, column in before.items()}
    for rank in chance.sample(range(1000), num_changed):
        after["phase"][rank] = chance.randrange(8)
        after["pace"][rank] = chance.randrange(900)
    told = picture(after).since(picture(before))["columns"]
    assert after == applied(before, told)
    assert {"phase", "pace"} >= set(told)
    assert len(msgspec.json.encode(told)) <= 6 * 1000 + 80


def test_few_changes_are_told_by_their_places() -> None:
    before, _ = rank_columns(roster(1000), {}, NOW_NS)
    after = before | {"phase": [*before["phase"][:-1], 5]}
    assert {"phase": {"at": [999], "to": [5]}} == picture(after).since(picture(before))["columns"]


def test_nothing_is_told_when_only_time_passes() -> None:
    made, _ = rank_columns(roster(4), {}, NOW_NS)
    assert {} == picture(made, now_ms=2).since(picture(made))


def test_new_steps_are_added_and_steps_that_did_not_happen_are_taken_back() -> None:
    first, second = (numbers(1), numbers(2)), (numbers(1), numbers(2), numbers(3, 9.0))
    before = picture({}, numbers=first)
    assert {"loss": [[3, 9.0, 8.0, 10.0, 3, 4, 0]]} == picture({}, numbers=second).since(before)["more"]
    again = picture({}, numbers=first[:1]).since(before)
    assert [1] == [row[0] for row in again["series"]["loss"]]
    assert "more" not in again


def test_only_what_happened_since_is_told() -> None:
    told = tuple(Happening(number=n, at="", kind="finding", severity="info", text=str(n)) for n in range(1, 5))
    since = picture({}, happenings=told).since(picture({}, happenings=told[:2]))
    assert ["3", "4"] == [one.text for one in since["happened"]]


def test_joined_rows_keep_the_extremes_and_who_had_them() -> None:
    rows = [[step, 1.0, 0.0, 2.0, 7, 8, 0] for step in range(4000)]
    rows[1234] = [1234, None, None, None, -1, -1, 3]
    rows[2345] = [2345, 1.0, -50.0, 99.0, 1, 2, 0]
    found = joined(rows, 100)
    assert len(found) <= 100
    assert 3999 == found[-1][0]
    assert (-50.0, 1) == min((row[2], row[4]) for row in found)
    assert (99.0, 2) == max((row[3], row[5]) for row in found)
    assert 3 == sum(row[6] for row in found)


def test_a_stretch_without_a_finite_number_says_so() -> None:
    rows = [[step, None, None, None, -1, -1, 2] for step in range(20)]
    assert [[9, None, None, None, -1, -1, 20], [19, None, None, None, -1, -1, 20]] == joined(rows, 2)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, 0), (0.4, 0), (99.6, 100), (123.4, 120), (98765.0, 99000), (math.nan, -1), (-1.0, -1)]
)
def test_numbers_have_two_digits_that_tell(value: float, shown: int) -> None:
    assert shown == rounded(value)


def test_sixteen_thousand_ranks_that_all_move_on_stay_below_what_a_listener_may_get() -> None:
    known, chance = roster(16_000), random.Random(1)  # noqa: S311 - a test
    before, _ = rank_columns(known, {}, NOW_NS)
    for rank, member in known.members.items():
        member.progress.phase = Phase(chance.randrange(1, 5))
        member.progress.step = 100 + (rank % 2)
        member.numbers.step_s, member.numbers.lag_s = 1 + chance.random() / 50, 0.0
    after, _ = rank_columns(known, {}, NOW_NS)
    assert len(msgspec.json.encode(picture(after).since(picture(before)))) < 200_000
