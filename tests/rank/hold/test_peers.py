"""Ranks that agree over real connections and a real store: one thread each, as many as a test needs."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest
import torch.distributed as dist

from holter import clock
from holter.rank.hold import peers
from holter.rank.hold.agreement import Tree
from holter.rank.hold.peers import MAX_MISSES, PeerAddress, PeerConnector, ShardPeers, own_address

PATIENCE_S = 60.0
Ask = Callable[[int, dict[int, int]], list[int | None]]


class Ranks:
    """Of one job, all in this process; each has its own thread to ask in."""

    def __init__(self, store: dist.Store, world_size: int, *, fan_out: int = 16, wait_s: float = 60.0) -> None:
        # One connection to the store for all: torch takes five seconds to let the twentieth of a process in.
        self.members = [
            ShardPeers(PeerAddress(Tree(rank, world_size, fan_out), "127.0.0.1", life=3), lambda: store, wait_s)
            for rank in range(world_size)
        ]
        self._threads = ThreadPoolExecutor(world_size)

    def ask(self, step: int, bad: dict[int, int] | None = None, silent: int | None = None) -> list[int | None]:
        """All before the same step, at once."""
        speaking = [(rank, member) for rank, member in enumerate(self.members) if rank != silent]
        return list(self._threads.map(lambda one: one[1].agree(step, (bad or {}).get(one[0])), speaking))

    def meet(self) -> int:
        """Step until all know that all are there; the next step."""
        step, until_s = 0, clock.monotonic_s() + PATIENCE_S
        while not all(member.has_begun for member in self.members):
            assert clock.monotonic_s() < until_s, [member.loss for member in self.members]
            assert {None} == set(self.ask(step))
            step += 1
            threading.Event().wait(0.01)
        return step

    def end(self) -> None:
        for member in self.members:
            member._finish()
        self._threads.shutdown()


@pytest.fixture(scope="module")
def server() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def store(server: dist.Store, request: pytest.FixtureRequest) -> dist.Store:
    """A part of the server's that is this test's own."""
    return dist.PrefixStore(request.node.name, server)


@pytest.fixture
def ranks(store: dist.Store) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def start(world_size: int, **how: float) -> Ranks:
        made.append(Ranks(store, world_size, **how))
        return made[-1]

    yield start
    for each in made:
        each.end()


def until(is_there: Callable[[], object], what: str) -> None:
    deadline = clock.monotonic_s() + PATIENCE_S
    while not is_there():
        assert clock.monotonic_s() < deadline, f"waited for {what}"
        threading.Event().wait(0.01)


def test_what_one_rank_finds_all_learn_before_the_same_step_and_no_other(ranks):
    job = ranks(5)
    step = job.meet()
    assert [None] * 5 == job.ask(step)
    assert [step + 1] * 5 == job.ask(step + 1, bad={3: step + 1})
    assert [None] * 5 == job.ask(step + 2)
    assert all(member.waited_s > 0 for member in job.members)
    assert {""} == {member.loss for member in job.members}


def test_of_a_step_that_a_device_answered_late_all_learn_which_it_was(ranks):
    job = ranks(3)
    step = job.meet()
    # Those who have one themselves do not wait for the others'.
    assert [step - 2, step - 1, step - 2] == job.ask(step, bad={1: step - 1, 2: step - 2})
    assert [None] * 3 == job.ask(step + 1)


def test_several_optimizers_of_one_step_are_agreed_on_by_themselves(ranks):
    job = ranks(3)
    step = job.meet()
    assert [None] * 3 == job.ask(step)
    assert [step] * 3 == job.ask(step, bad={2: step})
    assert [None] * 3 == job.ask(step + 1)


def test_forty_ranks_four_levels_deep(ranks):
    job = ranks(40, fan_out=3)
    step = job.meet()
    for bad_rank in (0, 39, 12):
        assert [step] * 40 == job.ask(step, bad={bad_rank: step})
        assert [None] * 40 == job.ask(step + 1)
        step += 2


@pytest.mark.slow
def test_whoever_is_not_answered_in_time_goes_on_and_after_three_steps_says_for_whom_it_waited(ranks):
    job = ranks(5, fan_out=2, wait_s=1.0)
    step = job.meet()
    # One that comes back in time is waited for again.
    assert [None] * 4 == job.ask(step, silent=4)
    until(lambda: job.members[0]._num_misses == 1, "a miss")
    assert [step + 1] * 5 == job.ask(step + 1, bad={1: step + 1})
    assert 0 == job.members[0]._num_misses
    for later in range(MAX_MISSES):
        assert [None] * 4 == job.ask(step + 2 + later, silent=4)
    losses = {rank: member.loss for rank, member in enumerate(job.members) if member.loss}
    assert losses
    expected = {0: "no word of rank 1 ", 1: "no word of rank 4 ", 2: "no word of rank 0 ", 3: "no word of rank 1 "}
    for rank, loss in losses.items():
        assert loss.startswith(expected[rank])
    until(lambda: all(member.is_over for member in job.members), "the end of the agreement")
    began = clock.monotonic_s()
    assert [step + 9, None, None, None, None] == job.ask(step + 9, bad={0: step + 9})
    assert clock.monotonic_s() - began < 30


def test_a_rank_that_ends_ends_the_agreement_at_once_and_in_silence(ranks):
    job = ranks(5, fan_out=2)
    step = job.meet()
    job.members[3].leave()
    until(lambda: all(member.is_over for member in job.members), "the end of the agreement")
    assert [None, None, None, None, step] == job.ask(step, bad={4: step})
    assert {""} == {member.loss for member in job.members}


def test_whoever_waits_when_a_rank_ends_goes_on(ranks):
    job = ranks(3)
    step = job.meet()
    with ThreadPoolExecutor(1) as asking:
        waiting = asking.submit(job.ask, step, None, 2)
        until(lambda: job.members[0]._rounds.awaited(job.members[0]._round) == [2], "two of three words")
        job.members[2].leave()
        assert [None, None] == waiting.result(timeout=30)


def test_steps_before_all_have_met_are_not_waited_for(ranks):
    job = ranks(3)
    for step in range(50):
        assert [None, None] == job.ask(step, silent=2)
    assert [49, None] == job.ask(50, bad={0: 49}, silent=2)
    assert [0.0, 0.0] == [member.waited_s for member in job.members[:2]]


def test_a_stranger_is_turned_away_and_keeps_nobody_waiting(store):
    secret = b"s" * 32
    places = [PeerAddress(Tree(rank, 2), "127.0.0.1") for rank in range(2)]
    root = PeerConnector(places[0], store.clone, threading.Event(), patience_s=PATIENCE_S)
    with ThreadPoolExecutor(2) as joiners:
        first = joiners.submit(root.connect)
        until(lambda: store.check(["holter/shards/0/address/0"]), "the root's address")
        host, port = store.get("holter/shards/0/address/0").decode().split()
        assert "127.0.0.1" == host
        with (
            closing(socket.create_connection((host, int(port)))),
            closing(socket.create_connection((host, int(port)))) as wrong,
            closing(socket.create_connection((host, int(port)))) as unexpected,
        ):
            wrong.sendall(peers._HELLO.pack(peers._MAGIC, secret, 1))
            unexpected.sendall(peers._HELLO.pack(peers._MAGIC, store.get("holter/shards/0/secret"), 0))
            for stranger in (wrong, unexpected):
                stranger.settimeout(30)
                assert b"" == stranger.recv(1)
            assert not first.done()
            other = PeerConnector(places[1], store.clone, threading.Event(), patience_s=PATIENCE_S)
            links = [first.result(30) for first in (first, joiners.submit(other.connect))]
            # The one that said nothing was still waiting to be let in.
            assert 3 == root.num_turned_away
    assert [[1], [0]] == [list(each) for each in links]
    for each in (root, other):
        for opened in each.sockets:
            opened.close()


def test_ranks_that_do_not_come_are_named(store):
    alone = PeerConnector(PeerAddress(Tree(0, 4), "127.0.0.1"), store.clone, threading.Event(), patience_s=0.5)
    with pytest.raises(TimeoutError, match=r"ranks 1, 2, 3 did not come within 0 s"):
        alone.connect()
    for opened in alone.sockets:
        opened.close()


def test_a_join_that_is_told_to_stop_stops(store):
    member = ShardPeers(PeerAddress(Tree(1, 4), "127.0.0.1"), store.clone)
    assert member.agree(0, None) is None
    member._finish()
    assert not member._thread.is_alive()
    assert "" == member.loss


def test_a_lost_store_is_said():
    def broken() -> dist.Store:
        raise RuntimeError("no store")

    member = ShardPeers(PeerAddress(Tree(1, 4), "127.0.0.1"), broken)
    member.agree(0, None)
    until(lambda: member.is_over, "the end")
    assert "RuntimeError: no store" == member.loss


def test_a_forked_child_lets_go_of_the_connections_and_harms_nobody(ranks):
    job = ranks(2)
    step = job.meet()
    links = {descriptor for member in job.members for link in member._links.values() for descriptor in [link.fileno()]}
    is_held, is_done = threading.Event(), threading.Event()

    def hold() -> None:
        with job.members[0]._changed:
            is_held.set()
            is_done.wait(PATIENCE_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(PATIENCE_S)
    child = os.fork()
    if not child:
        # No assertion: the child of a test must not run the rest of it. A lock that nobody will let go of would keep it for ever.
        signal.alarm(30)
        open_ones = sum(os.path.exists(f"/proc/self/fd/{descriptor}") for descriptor in links)  # noqa: PTH110
        for member in job.members:
            member._finish()
        os._exit(open_ones)
    is_done.set()
    holder.join()
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert [step, step] == job.ask(step, bad={1: step})


def test_the_address_is_the_interface_that_reaches_the_master():
    assert ("127.0.0.1", "127.0.0.1") == own_address("127.0.0.1")
    host, told = own_address("127.0.1.1")
    # As a host that knows its own name as loopback: the others are told the name.
    assert ("0.0.0.0", "127.0.1.1") == (host, told)  # noqa: S104
