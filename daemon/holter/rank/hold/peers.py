"""The circle of ranks that apply shards of one model: before a step, each learns whether all of it is finite.

    main thread     says its word, and waits for the answer: never longer than two seconds, never before the first answer has come
    our thread      joins (`joining`), then hands words up and answers down (`agreement`), also while the main thread is busy

No collective of ours: the script's own sequence is as it was, and a rank that does not step keeps nobody. Whoever misses the
deadline goes on without an answer, and one that comes too late is dropped. After three misses in a row it is said who was waited for and the
circle is over; so it is, in silence, when a connection ends, because others find out why. Steps before the first answer are not agreed on: from the
first step of a job until all ranks have met, 0.05 s later with 8 ranks on one host.

Costs, about, from the word to the answer when all ranks arrive together: 70 us with 2 ranks, 0.5 ms with 8, of which 15 to 35 us are the main
thread's own; medians of 2,800 rounds between processes on one host whose two cores were busy with other work too. A level of the tree adds
two trips of the network. The wait is counted as waiting, not as ours; it is mostly for the slowest host to arrive, which the next
collective would wait for too. A host that runs ahead of its device waits for the other hosts here, never for a device.
"""

import atexit
import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from holter import clock
from holter.rank.hold.agreement import AgreementRounds, Round, Sending, Word
from holter.rank.hold.peer_connections import PeerAddress, PeerJoin, job_store
from holter.threads import without_signals

WAIT_S = 2.0
MAX_MISSES = 3
"""In a row."""
JOIN_S = 2.0
"""So long the end of the interpreter waits for our thread."""
_WORD = struct.Struct("!qqq")
_FINE = -1


class ShardPeers:
    """One rank's place in it; joins when it is first asked."""

    def __init__(self, seat: PeerAddress, store: Callable[[], Any] = job_store, wait_s: float = WAIT_S) -> None:
        self.waited_s = 0.0
        """In all, for answers."""
        self.is_over = False
        self.loss = ""
        """What is to be said about its end, if it is not another's to say."""
        self._seat = seat
        self._wait_s = wait_s
        self._rounds = AgreementRounds(seat.tree)
        self._round = Round(-1, 0)
        self._num_misses = 0
        self._links: dict[int, socket.socket] = {}
        self._stop = threading.Event()
        self._joining = PeerJoin(seat, store, self._stop)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether an answer has come: from then on all ranks are known to speak."""
        return self._rounds.answer is not None

    def agree(self, step: int, bad_step: int | None) -> int | None:
        """The first step that is not finite, of those that any rank has named before this one is applied; None: none is known."""
        with self._changed:
            if self.is_over:
                return bad_step
            if self._thread is None:
                self._begin()
            self._round = Round(step, self._round.turn + 1 if step == self._round.step else 0)
            self._hear(self._seat.tree.rank, Word(self._round, bad_step))
            # Our own needs no answer, and the others get theirs without us.
            if bad_step is not None or not self.has_begun:
                return bad_step
            return self._wait()

    def leave(self) -> None:
        """For good: nobody is to wait for this rank any more."""
        self._stop.set()
        with self._changed:
            self._end()

    def _wait(self) -> int | None:
        asked, began = self._round, clock.monotonic_s()
        self._changed.wait_for(lambda: self.is_over or self._rounds.answered(asked) is not None, self._wait_s)
        self.waited_s += clock.monotonic_s() - began
        answer = self._rounds.answered(asked)
        if answer is not None:
            self._num_misses = 0
            return answer.bad_step
        self._num_misses += 1
        if self._num_misses == MAX_MISSES and not self.is_over:
            whom = _ranks(self._rounds.awaited(asked))
            self.loss = f"no word of {whom} within {self._wait_s:.0f} s, at {MAX_MISSES} steps in a row"
            self._end()
        return None

    def _begin(self) -> None:
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._finish)
        self._thread = threading.Thread(target=self._run, name="holter-circle", daemon=True)
        with without_signals():
            self._thread.start()

    def _run(self) -> None:
        try:
            links = self._joining.join()
            with self._changed:
                self._links = links
            with contextlib.suppress(OSError):
                self._listen(links)
        except ConnectionResetError:
            # Whoever gave up has said why.
            pass
        except Exception as error:  # noqa: BLE001  a store and peers are other processes'
            self.loss = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._end()
            self._close()

    def _listen(self, links: dict[int, socket.socket]) -> None:
        ranks = {link.fileno(): rank for rank, link in links.items()}
        heard = {rank: bytearray() for rank in links}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while not self.is_over:
            for descriptor, _ in poll.poll():
                rank = ranks[descriptor]
                said = links[rank].recv(4096)
                if not said:
                    return
                heard[rank] += said
                with self._changed:
                    for word in _words(heard[rank]):
                        self._hear(rank, word)

    def _hear(self, sender: int, word: Word) -> None:
        before = self._rounds.answer
        for sending in self._rounds.hear(sender, word):
            self._send(sending)
        if self._rounds.answer is not before:
            self._changed.notify_all()

    def _send(self, sending: Sending) -> None:
        link = self._links.get(sending.to)
        if link is None:
            return
        (step, turn), bad_step = sending.word
        try:
            is_sent = link.send(_WORD.pack(step, turn, _FINE if bad_step is None else bad_step)) == _WORD.size
        except OSError:
            is_sent = False
        if not is_sent:
            self._end()

    def _end(self) -> None:
        """Wakes everybody, here and at the other ends; our thread closes what it listened to."""
        self.is_over = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()

    def _close(self) -> None:
        for each in self._joining.sockets:
            with contextlib.suppress(OSError):
                each.close()

    def _forget(self) -> None:
        """In a forked child: its ends are closed and nothing is said, for they are the rank's connections; who held the lock is not here."""
        self._close()
        self.is_over, self._links, self._thread, self._changed = True, {}, None, threading.Condition()

    def _finish(self) -> None:
        self.leave()
        if self._thread is not None:
            self._thread.join(JOIN_S)


def _words(heard: bytearray) -> list[Word]:
    """All that are whole; what is left over stays."""
    num_bytes = len(heard) - len(heard) % _WORD.size
    words = [
        Word(Round(step, turn), None if bad_step == _FINE else bad_step)
        for step, turn, bad_step in _WORD.iter_unpack(heard[:num_bytes])
    ]
    del heard[:num_bytes]
    return words


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
