"""Orders and answers pass through the sidecar; what the rank left of its step is written down, and a lost rank is ended."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holter.page import PageIdentity
from holter.records import Halting, Observation, Order
from holter.sidecar.orders import Orders
from holter.sidecar.process import Process, started_ticks


class Page:
    """As much of a page's reader as is asked for here."""

    def __init__(self, pid: int) -> None:
        self.identity = PageIdentity(rank=1, world_size=2, pid=pid, started_ticks=started_ticks(pid), ring_bytes=4096)

    def rewinds(self) -> list[tuple[int, bytes]]:
        return [(6, b"six"), (7, b"seven")]


class Beside:
    """A process, its sidecar's relay, and both ends of the line."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(["sleep", "60"])
        self.told: list[Observation] = []
        self.is_heard = True
        self.rank, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.rank.setblocking(False)
        held = Process(self.process.pid, started_ticks(self.process.pid))
        self.orders = Orders(Page(self.process.pid), held, self.told.append, lambda: self.is_heard)
        self.orders.run_dir = str(directory)
        self.orders.listen(asyncio.get_running_loop(), os.dup(theirs.fileno()))
        theirs.close()
        self.partial = directory / "checkpoints" / ".7.partial"

    def order(self, kind: str, **fields: Any) -> Order:
        usual = {"halt": 1, "step": 7, "directory": str(self.partial), "savers": (0, 1), "deadline_s": 30.0}
        return Order(kind=kind, **{**usual, **fields})

    async def next_order(self) -> Order:
        said = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.rank, 1 << 16), 10)
        return msgspec.msgpack.decode(said, type=Order)

    async def answer(self, state: str, rank: int = 1) -> None:
        heard = len(self.told)
        body = Halting(state=state, halt=1, why="because")
        self.rank.send(msgspec.msgpack.encode(Observation(rank=rank, step=7, at_ns=1, body=body)))
        for _ in range(100):
            await asyncio.sleep(0.01)
            if len(self.told) > heard:
                return


@pytest.fixture
async def beside(tmp_path: Path) -> AsyncIterator[Beside]:
    made = Beside(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    made.rank.close()
    await made.orders.close()


async def test_orders_go_down_and_answers_come_up(beside):
    order = beside.order("prepare")
    beside.orders.hear(order)
    assert await beside.next_order() == order
    await beside.answer("held")
    assert [("held", 7, "because")] == [(said.body.state, said.step, said.body.why) for said in beside.told]
    assert beside.orders.is_standing, "it is not overdue"
    await beside.answer("released")
    assert not beside.orders.is_standing
    beside.rank.send(b"\xff")
    await beside.answer("held", rank=0)
    assert len(beside.told) == 2, "neither garbage nor another rank's words"


@pytest.mark.parametrize("kind", ["commit", "rescue"])
async def test_how_the_step_began_is_written_before_anybody_needs_it(beside, kind):
    beside.orders.hear(beside.order(kind))
    await beside.orders.close()
    (path,) = (beside.partial / "ranks").iterdir()
    assert path.name == "1.msgpack"
    assert [[6, b"six"], [7, b"seven"]] == msgspec.msgpack.decode(path.read_bytes())


async def test_how_the_step_of_a_snapshot_began_is_the_ranks_to_write(beside):
    order = beside.order("rescue", snapshot=4)
    beside.orders.hear(order)
    assert await beside.next_order() == order
    await beside.orders.close()
    assert not (beside.partial / "ranks").exists()


async def test_a_rank_that_is_gone_is_written_down_all_the_same(beside):
    beside.rank.close()
    beside.process.kill()
    beside.process.wait()
    beside.orders.hear(beside.order("rescue", savers=(0,), lost=(1,)))
    await beside.orders.close()
    assert (beside.partial / "ranks" / "1.msgpack").exists()


async def test_a_lost_rank_is_ended_when_the_others_leave_and_only_then(beside):
    beside.process.send_signal(signal.SIGSTOP)
    beside.orders.hear(beside.order("rescue", savers=(0,), lost=(1,)))
    beside.orders.hear(beside.order("leave", savers=(0, 1)))
    await asyncio.sleep(0.2)
    assert beside.process.poll() is None
    beside.orders.hear(beside.order("leave", savers=(0,), lost=(1,)))
    assert beside.process.wait(timeout=10) == -signal.SIGKILL


async def test_what_cannot_be_written_is_said_for_a_rank_that_cannot_say_it(beside):
    beside.partial.parent.mkdir()
    beside.partial.write_text("a file where a directory should be")
    beside.orders.hear(beside.order("rescue", savers=(0,), lost=(1,)))
    await beside.orders.close()
    ((state, why),) = [(said.body.state, said.body.why) for said in beside.told]
    assert state == "failed"
    assert "random states" in why


async def test_nonsense_is_not_passed_on(beside, tmp_path):
    beside.orders.hear(beside.order("rescue", directory=str(tmp_path / "elsewhere")))
    beside.orders.hear(beside.order("rescue", directory="/tmp/checkpoints/.7.partial"))  # noqa: S108
    order = beside.order("abort")
    beside.orders.hear(order)
    assert await beside.next_order() == order
    assert [] == list(tmp_path.rglob("*.msgpack"))


async def test_a_dying_rank_is_told_at_once_that_nobody_listens(beside):
    beside.is_heard = False
    await beside.answer("held")
    await beside.answer("dying")
    assert (await beside.next_order()).kind == "abort"


async def test_somebody_new_on_the_line_hears_where_the_rank_stands(beside):
    beside.orders.repeat()
    await beside.answer("held")
    beside.orders.repeat()
    assert ["held", "held"] == [said.body.state for said in beside.told]
    await beside.answer("released")
    beside.orders.repeat()
    assert ["released", "released"] == [said.body.state for said in beside.told[2:]]


async def test_nothing_is_saved_where_the_coordinators_own_directory_is_not_known(beside):
    beside.orders.run_dir = ""
    beside.orders.hear(beside.order("commit"))
    beside.orders.hear(beside.order("prepare"))
    assert "prepare" == (await beside.next_order()).kind
    assert not beside.partial.exists()
