"""`holter halt` against a real coordinator, whose ranks are simulated and answer orders over their real uplinks."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.coordinator.conftest import HALT_TOKEN, RUN_ID, TOKEN, Running, SimulatedRank, eventually, run_coordinator
from tests.halting.vault.test_store import write

from holter.cli import main
from holter.cli.halt import _from_files
from holter.cli.parts.run_reader import RunReader
from holter.coordinator.service import Limits
from holter.halting import halt_record
from holter.halting.halt_record import HaltRecord
from holter.records import Order

__all__ = ["run_coordinator"]

MODEL = {0: {"model.bin": b"weights", "random_states_0.pkl": b"r0"}, 1: {"random_states_1.pkl": b"r1"}}


def obey(rank: SimulatedRank, order: Order) -> None:
    """As a rank does that trains and comes to the step at once."""
    match order.kind:
        case "prepare":
            rank.halting("willing", order.step - 1, order.halt)
            rank.halting("held", order.step, order.halt)
        case "commit" if [one.kind for one in rank.orders].count("commit") == 1:
            rank.halting("saving", order.step, order.halt)
            write(Path(order.directory), rank.rank, MODEL[rank.rank])
            rank.halting("saved", order.step, order.halt)
        case "abort":
            rank.halting("released", order.step, order.halt)


def obey_at_the_second_try(rank: SimulatedRank, order: Order) -> None:
    """The first order comes too late for rank 1."""
    if (rank.rank, order.halt, order.kind) == (1, 1, "prepare"):
        rank.halting("unwilling", order.step + 1, order.halt)
    else:
        obey(rank, order)


async def training(run_coordinator: Any, tmp_path: Path, does: Any = obey, **options: Any) -> Running:
    """Two ranks that have done three steps."""
    running: Running = await run_coordinator(**options)
    for rank in range(2):
        made = running.rank(rank, obey=does)
        made.attach()
        for step in range(3):
            made.step(step)
    members = running.coordinator.watched.roster.members
    await eventually(lambda: len(members) == 2 and all(one.progress.heartbeat is not None for one in members.values()))
    await eventually((tmp_path / "run.json").exists)
    await eventually((tmp_path / "coordinator.json").exists)
    return running


async def halt(*arguments: object) -> int:
    return await asyncio.to_thread(main, ["halt", *map(str, arguments)])


def kinds(running: Running) -> list[list[str]]:
    """What each rank was ordered, repetitions aside."""
    return [list(dict.fromkeys(order.kind for order in rank.orders)) for rank in running.ranks]


async def test_a_run_is_halted_and_its_checkpoint_named(
    run_coordinator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await training(run_coordinator, tmp_path)
    assert 0 == await halt(tmp_path, "--reason", "wrong data", "--wait-s", 30)
    said = capsys.readouterr()
    step = running.ranks[0].orders[0].step
    assert f"halted after {step} steps; checkpoint checkpoints/{step}, verified, healthy\n" == said.out
    assert f"step {step}" in said.err
    await eventually(lambda: [["prepare", "commit", "leave"]] * 2 == kinds(running))
    halt_json = json.loads((tmp_path / "halt.json").read_text())
    assert ("requested", step, f"checkpoints/{step}/state") == (
        halt_json["cause"],
        halt_json["step"],
        halt_json["checkpoint"],
    )
    assert "wrong data" in running.ranks[0].orders[0].reason
    # Once more: it is said that there is nothing left to do.
    assert 1 == await halt(tmp_path)
    assert "the run is halted already\n" == capsys.readouterr().out


async def test_one_that_came_too_late_is_waited_for_until_another_try_succeeds(
    run_coordinator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await training(run_coordinator, tmp_path, obey_at_the_second_try)
    assert 0 == await halt(tmp_path, "--json", "--wait-s", 30)
    found = json.loads(capsys.readouterr().out)
    assert ("completed", "done", 2) == (found["outcome"], found["course"], found["number"])
    assert ["prepare", "abort", "commit", "leave"] == kinds(running)[0]
    assert {"called_off": 1, "completed": 1} == running.coordinator.watched.halts.outcomes


async def test_where_nothing_can_be_saved_the_run_goes_on_and_the_next_answer_is_not_the_last_one(
    run_coordinator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    running = await training(run_coordinator, tmp_path)
    assert 1 == await halt(tmp_path, "--wait-s", 30)
    assert capsys.readouterr().out.startswith("the run is not halted: nothing can be saved below")
    assert [[], []] == kinds(running), "nobody was disturbed"
    assert not (tmp_path / "halt.json").exists()
    (tmp_path / "checkpoints").unlink()
    assert 0 == await halt(tmp_path, "--wait-s", 30)
    assert "verified, healthy" in capsys.readouterr().out


async def test_who_does_not_wait_is_told_how_to_look_and_a_second_one_that_it_is_under_way(
    run_coordinator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await training(run_coordinator, tmp_path, None)
    assert 0 == await halt(tmp_path, "--no-wait")
    assert "asked for; `holter status` shows how it goes\n" == capsys.readouterr().out
    assert 1 == await halt(tmp_path, "--json")
    refused = {"outcome": "refused", "text": "a halt is under way already"}
    assert refused == json.loads(capsys.readouterr().out)
    await eventually(lambda: [["prepare"]] * 2 == kinds(running))
    _, status = await running.get("/api/v1/status")
    assert ("preparing", "requested", None) == (
        status["halt"]["course"],
        status["halt"]["cause"],
        status["halt"]["outcome"],
    )


async def test_one_that_takes_too_long_is_not_waited_for(
    run_coordinator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await training(run_coordinator, tmp_path, None)
    assert 1 == await halt(tmp_path, "--wait-s", 1)
    assert "not halted within 1 s; it may still be\n" == capsys.readouterr().out


async def test_a_coordinator_that_has_ended_meanwhile_is_known_by_its_files(
    run_coordinator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(rank: SimulatedRank, order: Order) -> None:
        obey(rank, order)
        if order.kind == "leave" and [one.kind for one in rank.orders].count("leave") == 1:
            endings.append(asyncio.ensure_future(rank.end(order.step, 93)))

    endings: list[Any] = []
    running = await training(run_coordinator, tmp_path, leave, limits=Limits(settle_s=0.1, hold_s=1.0))
    assert 0 == await halt(tmp_path, "--wait-s", 30)
    assert capsys.readouterr().out.startswith("halted after ")
    await asyncio.wait_for(running.task, 20.0)
    assert 2 == await halt(tmp_path)
    assert "no coordinator answers for" in capsys.readouterr().err
    await asyncio.gather(*endings)


@pytest.mark.parametrize(
    ("checkpoint", "verdict", "code", "outcome"),
    [
        ("checkpoints/30/state", "healthy", 0, "completed"),
        (None, "incomplete", 0, "incomplete"),
        ("", "", 1, "ended"),
    ],
)
def test_a_coordinator_that_is_gone_before_it_answered_has_left_a_stone_or_not(
    tmp_path: Path, checkpoint: str | None, verdict: Any, code: int, outcome: str
) -> None:
    if verdict:
        halt_json = HaltRecord(
            cause="requested",
            ranks=[],
            step=30,
            checkpoint=checkpoint,
            verdict=verdict,
            incident=None,
            at="2026-01-01T00:00:00Z",
            why="",
            framework="",
            run_id=RUN_ID,
        )
        halt_record.write(tmp_path, halt_json)
    found = _from_files(RunReader(tmp_path, "", {}), {"number": 1})
    assert (code, outcome) == (found[0], found[1]["outcome"])
    assert verdict in found[1]["text"]


async def test_without_the_token_nothing_is_asked(
    run_coordinator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await training(run_coordinator, tmp_path)
    address = f"127.0.0.1:{running.port}"
    assert 2 == await halt(address)
    assert "which token?" in capsys.readouterr().err
    shown = tmp_path / "token"
    monkeypatch.setenv("HOLTER_HALT_TOKEN_FILE", str(shown))
    # Who may report may not halt.
    shown.write_text(TOKEN)
    assert 1 == await halt(address)
    assert "wrong token" in capsys.readouterr().out
    assert not running.coordinator.watched.halts.is_asked
    shown.write_text(HALT_TOKEN)
    assert 0 == await halt(address, "--wait-s", 30)
    assert "verified, healthy" in capsys.readouterr().out


async def test_the_request_is_answered_by_the_coordinators_own_ask(run_coordinator: Any, tmp_path: Path) -> None:
    running = await training(run_coordinator, tmp_path, None)
    url, headers = f"http://127.0.0.1:{running.port}/api/v1/halt", {"Authorization": f"Bearer {HALT_TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(url, json={"reason": "wrong data", "by": "me"}) as answer:
            assert 202 == answer.status
        async with session.post(url, json={"reason": "wrong data", "by": "another"}) as answer:
            assert (409, {"error": "a halt is under way already"}) == (answer.status, await answer.json())
    await eventually(lambda: running.ranks[0].orders)
    assert "asked for by me from 127.0.0.1: wrong data" == running.ranks[0].orders[0].reason
