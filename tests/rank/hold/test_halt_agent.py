"""The rank's halt agent, with a sidecar that is the other end of a socket in the same process."""

import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from holter import patience
from holter.halting import rank_protocol
from holter.rank.hold import halt_agent
from holter.rank.hold.commit_register import LocalRegister
from holter.rank.hold.halt_agent import HaltAgent
from holter.rank.hold.halts import AgentParts, AgentSettings, Leaving, Position
from holter.records import Halting, Observation, Order

RUN = "/r"
DIRECTORY = "/r/checkpoints/.7.partial"
PATIENCE_S = 0.6
Patience = float | Callable[[rank_protocol.Rank], float]


def order(kind: str, halt: int = 1, **fields: Any) -> Order:
    usual = {"step": 7, "directory": DIRECTORY, "savers": (0, 1), "deadline_s": 30.0}
    return Order(halt=halt, kind=kind, **{**usual, **fields})


@dataclass
class Actions:
    """Remembers what was saved, and in which thread."""

    step: int = 5
    is_torn: bool = False
    poisoned_step: int | None = None
    failure: str = ""
    may_end: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    saved: list[tuple[Order, bool, str]] = field(default_factory=list)

    def position(self) -> Position:
        return Position(self.step, self.is_torn, self.poisoned_step)

    def save(self, order: Order, *, is_main_thread: bool) -> None:
        self.saved.append((order, is_main_thread, threading.current_thread().name))
        self.begun.set()
        assert self.may_end.wait(20)
        if self.failure:
            raise OSError(self.failure)


class Left(Leaving):
    """Ends nothing but says so."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.now = threading.Event()

    def leave(self, *, tells_agent: bool) -> None:  # noqa: ARG002
        self.is_leaving = True
        raise SystemExit(93)

    def leave_now(self, *, tells_agent: bool) -> None:  # noqa: ARG002
        self.is_leaving = True
        self.now.set()


class Signals:
    """Dies of nothing but says so."""

    def __init__(self) -> None:
        self.granted: list[float] = []
        self.died_of: list[int] = []

    def grant(self, seconds: float, /) -> None:
        self.granted.append(seconds)

    def die(self, number: int, /) -> None:
        self.died_of.append(number)


class Rank:
    """A halt agent and what stands around it."""

    def __init__(self, number: int, register: LocalRegister, patience_s: Patience, **settings: Any) -> None:
        self.actions, self.left, self.signals = Actions(), Left(), Signals()
        self.actions.may_end.set()
        self.sidecar, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sidecar.settimeout(20)
        arrive, self.signal_to = os.pipe()
        patience = patience_s if callable(patience_s) else lambda _: patience_s
        parts = AgentParts(
            actions=self.actions,
            register=lambda: register,
            leaving=self.left,
            signals=self.signals,
            signal_fd=arrive,
            patience_s=lambda rank: None if rank_protocol.patience_s(rank) is None else patience(rank),
        )
        usual = {"rank": number, "world_size": 2, "run_dir": RUN}
        self.agent = HaltAgent(AgentSettings(**{**usual, **settings}), parts, line)
        self.agent.start()
        self.outcome: Any = None
        self._thread: threading.Thread | None = None

    def say(self, said: Order | bytes) -> None:
        self.sidecar.send(said if isinstance(said, bytes) else msgspec.msgpack.encode(said))

    def hear(self) -> tuple[str, int, int]:
        """What the rank says next: state, halt, step."""
        observation = msgspec.msgpack.decode(self.sidecar.recv(1 << 20), type=Observation)
        assert isinstance(observation.body, Halting)
        self.why, self.is_torn = observation.body.why, observation.body.is_torn
        self.poisoned_step = observation.body.poisoned_step
        return observation.body.state, observation.body.halt, observation.step

    def states(self, num: int) -> list[str]:
        return [self.hear()[0] for _ in range(num)]

    def is_silent(self) -> bool:
        return not select.select([self.sidecar], [], [], 0.1)[0]

    def reach(self, call: Callable[..., None], *args: Any) -> None:
        """What the main thread does, in a thread of the test's."""

        def run() -> None:
            try:
                call(*args)
                self.outcome = "on"
            except SystemExit as end:
                self.outcome = end.code

        self._thread = threading.Thread(target=run, name="main", daemon=True)
        self._thread.start()

    def hold(self, step: int, why: str = "nonfinite") -> None:
        self.actions.step = step
        self.reach(self.agent.hold, step, why)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def wait(self) -> Any:
        """How it went on."""
        assert self._thread is not None
        self._thread.join(20)
        assert not self._thread.is_alive(), "it still stands"
        return self.outcome


@pytest.fixture
def ranks() -> Iterator[Callable[..., list[Rank]]]:
    made: list[Rank] = []

    def make(num: int = 1, patience_s: Patience = 20.0, **settings: Any) -> list[Rank]:
        register = LocalRegister()
        made.extend(Rank(number, register, patience_s, **settings) for number in range(num))
        return made

    yield make
    for rank in made:
        rank.actions.may_end.set()
        rank.sidecar.close()


def test_an_agreed_halt_from_its_order_to_the_exit_code(ranks):
    (rank,) = ranks()
    assert not rank.agent.is_due(6)
    rank.say(order("prepare"))
    assert rank.hear() == ("willing", 1, 5)
    rank.say(order("prepare"))
    assert rank.hear() == ("willing", 1, 5), "told twice is once"
    assert not rank.agent.is_due(6)
    assert rank.agent.is_due(7)
    rank.hold(7, "agreed")
    assert (rank.hear(), rank.why) == (("held", 1, 7), "agreed")
    rank.say(order("commit"))
    assert rank.states(2) == ["saving", "saved"]
    assert rank.actions.saved == [(order("commit"), True, "main")]
    assert rank.outcome is None, "it waits for the word to leave"
    rank.say(order("leave"))
    assert rank.wait() == 93


def test_a_step_already_reached_is_not_promised(ranks):
    (rank,) = ranks()
    rank.agent.is_due(7)
    rank.say(order("prepare"))
    assert rank.hear()[0] == "unwilling"
    assert not rank.agent.is_due(8)
    rank.hold(7, "agreed")
    assert rank.wait() == "on"


def test_rounds_that_a_scaler_skips_count_towards_the_step_that_was_agreed(ranks):
    (rank,) = ranks()
    rank.say(order("prepare"))
    assert rank.hear() == ("willing", 1, 5)
    assert rank.agent.is_due(5 + 2)
    rank.reach(rank.agent.hold, 5, "agreed", 1)
    assert rank.wait() == "on", "that is another round"
    rank.reach(rank.agent.hold, 5, "agreed", 2)
    assert (rank.hear(), rank.why) == (("held", 0, 5), "agreed")
    rank.say(order("abort"))
    rank.say(order("commit", halt=2, step=5))
    assert rank.states(2) == ["saving", "saved"]
    rank.say(order("leave", halt=2, step=5))
    assert rank.wait() == 93


def test_bad_numbers_are_held_once_and_the_coordinator_may_let_them_pass(ranks):
    (rank,) = ranks()
    assert rank.agent.is_wanted()
    rank.hold(7)
    assert (rank.hear(), rank.why) == (("held", 0, 7), "nonfinite")
    rank.say(order("abort"))
    assert rank.hear()[0] == "released"
    assert rank.wait() == "on"
    assert not rank.agent.is_wanted(), "the weights have them now"
    rank.hold(7)
    assert rank.wait() == "on", "another optimizer of the same step"
    assert rank.is_silent()


@pytest.mark.parametrize("is_torn", [False, True])
def test_one_that_stands_says_whether_its_weights_are_partly_new(ranks, is_torn):
    rank = ranks(1)[0]
    rank.actions.is_torn, rank.actions.poisoned_step = is_torn, 5 if is_torn else None
    rank.hold(7)
    assert ("held", 0, 7) == rank.hear()
    assert (is_torn, rank.actions.poisoned_step) == (rank.is_torn, rank.poisoned_step)


def test_nobody_decides_and_training_goes_on(ranks):
    rank = ranks(patience_s=PATIENCE_S)[0]
    began = time.monotonic()
    rank.hold(7)
    assert rank.wait() == "on"
    assert rank.states(2) == ["held", "released"]
    assert time.monotonic() - began > PATIENCE_S


def test_ranks_that_stand_before_a_step_do_not_part(ranks, monkeypatch):
    """One hears commit, the other has lost its sidecar: it finds the order in the register."""
    monkeypatch.setattr(halt_agent, "ORPHAN_S", 20.0)
    one, other = ranks(2)
    for rank in (one, other):
        rank.hold(7)
        rank.hear()
    other.sidecar.close()
    one.say(order("commit"))
    assert one.states(2) == ["saving", "saved"]
    one.say(order("leave"))
    assert one.wait() == 93
    while not other.actions.saved:
        time.sleep(0.01)
    assert other.actions.saved == one.actions.saved


def test_nobody_is_waited_for_where_the_sidecar_was_lost_before(ranks, monkeypatch):
    monkeypatch.setattr(halt_agent, "ORPHAN_S", 0.2)
    (rank,) = ranks(patience_s=rank_protocol.patience_s)
    rank.sidecar.close()
    rank.until(lambda: not rank.agent._rank.has_sidecar)
    began = time.monotonic()
    rank.hold(7)
    assert rank.wait() == "on"
    assert time.monotonic() - began < patience.HOLD_S


def test_an_abort_in_the_register_binds_one_that_hears_commit(ranks):
    one, other = ranks(2)
    for rank in (one, other):
        rank.hold(7)
        rank.hear()
    one.say(order("abort"))
    assert one.wait() == "on"
    other.say(order("commit"))
    assert other.wait() == "on"
    assert not one.actions.saved
    assert not other.actions.saved


@pytest.mark.slow
def test_a_peer_that_went_on_is_noticed_without_a_word(ranks):
    one, other = ranks(2)
    for rank in (one, other):
        rank.hold(7)
        rank.hear()
    one.sidecar.close()
    assert one.wait() == "on"
    assert other.wait() == "on"


@pytest.mark.parametrize("is_called_off", [True, False])
def test_a_rescue_saves_while_the_main_thread_is_elsewhere(ranks, is_called_off):
    (rank,) = ranks()
    rank.actions.may_end.clear()
    rank.say(order("rescue", savers=(0,), lost=(1,)))
    assert rank.hear()[0] == "saving"
    assert rank.agent.is_due(5), "a hang that resolves now does not touch what is being saved"
    rank.hold(5, "agreed")
    rank.actions.may_end.set()
    assert rank.hear()[0] == "saved"
    assert [(is_main, name) for _, is_main, name in rank.actions.saved] == [(False, "holter-rescue")]
    if is_called_off:
        # Its random states were set back: it must not train on with them.
        rank.say(order("abort"))
    rank.say(order("leave"))
    assert rank.wait() == 93
    assert rank.agent.is_due(6)


def test_a_main_thread_that_is_blocked_leaves_past_the_interpreter(ranks):
    (rank,) = ranks()
    rank.say(order("rescue", savers=(0,), lost=(1,)))
    assert rank.states(2) == ["saving", "saved"]
    assert not rank.left.now.is_set()
    rank.say(order("leave"))
    assert rank.left.now.wait(20)


def test_a_save_that_hangs_is_left_behind(ranks):
    (rank,) = ranks()
    rank.actions.may_end.clear()
    rank.hold(7)
    rank.hear()
    rank.say(order("commit"))
    assert rank.hear()[0] == "saving"
    assert rank.actions.begun.wait(20)
    rank.say(order("leave"))
    assert rank.left.now.wait(20)


def test_the_word_to_leave_may_overtake_the_save(ranks):
    (rank,) = ranks()
    rank.actions.may_end.clear()
    do = rank.agent._do

    def do_and_hear(action: rank_protocol.Action) -> None:
        do(action)
        if isinstance(action, rank_protocol.SaveState):
            # The main thread has not looked yet.
            rank.agent._obey(order("leave"))

    rank.agent._do = do_and_hear
    rank.hold(7)
    rank.hear()
    rank.say(order("commit"))
    assert rank.wait() == 93
    assert not rank.actions.saved


def test_a_save_that_fails_says_why(ranks):
    (rank,) = ranks()
    rank.actions.failure = "no space left"
    rank.hold(7)
    rank.hear()
    rank.say(order("commit"))
    assert rank.states(2) == ["saving", "failed"]
    assert rank.why == "no space left"
    rank.say(order("leave"))
    assert rank.wait() == 93


def test_a_bound_rank_leaves_though_nobody_says_so(ranks):
    rank = ranks(patience_s=lambda rank: PATIENCE_S if rank.is_bound else 20.0)[0]
    rank.hold(7)
    rank.hear()
    rank.say(order("commit"))
    assert rank.wait() == 93


@pytest.mark.release
@pytest.mark.slow
def test_ctrl_c_works_at_any_moment(ranks):
    (rank,) = ranks()

    def interrupt() -> None:
        rank.hear()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        rank.agent.hold(7, "nonfinite")
    rank.agent.hold(8, "nonfinite")
    assert not rank.agent.is_due(9)


NONSENSE = [
    b"\xff\x00 nothing",
    b"",
    order("commit"),
    order("leave"),
    order("abort", step=0),
    order("prepare", halt=-3),
    order("prepare", step=-1),
    order("prepare", step=2**60),
    order("prepare", deadline_s=float("nan")),
    order("rescue", directory="/etc"),
    order("rescue", directory="/r/checkpoints/../../etc/.7.partial"),
    order("rescue", directory="/other/checkpoints/.7.partial"),
    order("rescue", directory="checkpoints/.7.partial"),
    order("rescue", savers=(0, 99)),
    order("rescue", savers=(0, 0)),
    order("rescue", deadline_s=float("inf")),
    order("rescue", savers=(0,), snapshot=-2),
    order("rescue", savers=(0,), snapshot=8),
]


def test_nonsense_is_not_obeyed(ranks):
    (rank,) = ranks()
    chance = random.Random(3)  # noqa: S311
    for said in [each for each in NONSENSE if each != b""] + [chance.randbytes(200) for _ in range(50)]:
        rank.say(said)
    # The last is heard after all others.
    rank.say(order("prepare", halt=50, step=40))
    while rank.hear()[:2] != ("willing", 50):
        pass
    assert not rank.actions.saved
    assert not rank.left.is_leaving
    assert not any(rank.agent.is_due(step) for step in range(40))
    assert rank.agent.num_refused >= len(NONSENSE) - 4


def test_a_run_directory_that_is_not_known_yet_is_not_held_against_an_order(ranks):
    rank = ranks(run_dir="")[0]
    rank.say(order("rescue", directory="/anything", savers=(0,)))
    rank.say(order("rescue", halt=2, directory="/other/checkpoints/.7.partial", savers=(0,)))
    assert rank.hear()[:2] == ("saving", 2)


def test_an_exception_waits_for_an_answer_and_goes_on_dying(ranks):
    (rank,) = ranks()
    rank.reach(rank.agent.linger, "RuntimeError: Connection closed by peer")
    assert (rank.hear(), rank.why) == (("dying", 0, 5), "RuntimeError: Connection closed by peer")
    rank.say(order("abort"))
    assert rank.wait() == "on"


def test_an_exception_may_be_asked_to_save_first(ranks):
    (rank,) = ranks()
    rank.reach(rank.agent.linger, "RuntimeError")
    rank.hear()
    rank.say(order("rescue", savers=(0,), lost=(1,)))
    assert rank.states(2) == ["saving", "saved"]
    rank.say(order("leave"))
    assert rank.left.now.wait(20)


@pytest.mark.parametrize("how", ["no sidecar", "not halting", "silence"])
def test_an_exception_waits_for_nobody_who_is_not_there(ranks, how):
    rank = ranks(patience_s=PATIENCE_S, is_halting=how != "not halting")[0]
    if how == "no sidecar":
        rank.sidecar.close()
        time.sleep(0.3)
    rank.reach(rank.agent.linger, "RuntimeError")
    assert rank.wait() == "on"


def signalled(rank: Rank, number: int = signal.SIGTERM) -> None:
    os.write(rank.signal_to, bytes([number]))


def until(is_there: Callable[[], object]) -> None:
    for _ in range(2000):
        if is_there():
            return
        time.sleep(0.01)
    raise AssertionError("waited twenty seconds")


def test_sigterm_waits_for_an_answer_and_has_its_way(ranks):
    (rank,) = ranks()
    signalled(rank)
    assert rank.hear()[0] == "terminated"
    assert not rank.signals.died_of
    assert rank.signals.granted[-1] > 0, "should the agent fail, the signal still ends the process"
    rank.say(order("abort"))
    until(lambda: rank.signals.died_of)
    assert rank.signals.died_of[0] == signal.SIGTERM


@pytest.mark.parametrize("how", ["no sidecar", "silence"])
def test_sigterm_waits_for_nobody_who_is_not_there(ranks, how):
    rank = ranks(patience_s=PATIENCE_S)[0]
    if how == "no sidecar":
        rank.sidecar.close()
        time.sleep(0.3)
    signalled(rank)
    until(lambda: rank.signals.died_of)


def test_sigterm_does_not_cut_off_a_save(ranks):
    (rank,) = ranks()
    rank.actions.may_end.clear()
    rank.say(order("rescue", savers=(0,), lost=(1,)))
    rank.hear()
    signalled(rank)
    until(lambda: rank.signals.granted)
    rank.actions.may_end.set()
    assert rank.hear()[0] == "saved"
    rank.say(order("leave"))
    assert rank.left.now.wait(20)
    assert not rank.signals.died_of


def test_a_mapped_signal_asks_for_a_halt_and_training_goes_on_meanwhile(ranks):
    (rank,) = ranks(halt_signals=frozenset({signal.SIGUSR1, signal.SIGTERM}))
    signalled(rank, signal.SIGUSR1)
    assert (rank.hear()[0], rank.why) == ("asking", "SIGUSR1")
    signalled(rank)
    assert (rank.hear()[0], rank.why) == ("asking", "SIGTERM")
    rank.say(order("prepare"))
    assert rank.hear()[0] == "willing"
    rank.hold(7, "agreed")
    rank.hear()
    rank.say(order("commit"))
    rank.states(2)
    rank.say(order("leave"))
    assert rank.wait() == 93
    assert not rank.signals.died_of


@pytest.mark.slow
def test_what_is_promised_is_kept_however_the_threads_meet(ranks):
    """Orders for the very next steps, while the main thread takes steps as fast as it can."""
    (rank,) = ranks()
    held: list[int] = []
    promised: list[int] = []
    is_over = threading.Event()

    def train() -> None:
        step = 0
        while not is_over.is_set():
            rank.actions.step = step
            if rank.agent.is_due(step):
                held.append(step)
                rank.agent.hold(step, "agreed")
            step += 1
            time.sleep(0)

    def answer() -> None:
        while True:
            said, halt, _ = rank.hear()
            if said == "willing":
                promised.append(steps[halt])
                said, *_ = rank.hear()
                assert said == "held"
            rank.say(order("abort", halt=halt, step=steps[halt]))
            if said == "held":
                assert rank.hear()[0] == "released"
            return

    steps: dict[int, int] = {}
    rank.reach(train)
    for halt in range(1, 400):
        steps[halt] = rank.actions.step + halt % 4
        rank.say(order("prepare", halt=halt, step=steps[halt]))
        answer()
    is_over.set()
    assert rank.wait() == "on"
    assert promised
    assert set(promised) <= set(held)
