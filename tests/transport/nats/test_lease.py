"""Who may give orders: the lease's law, also played out by a model with clocks that pause, and takeovers at any moment."""

import random
from dataclasses import dataclass, field

import pytest

from holter.transport.nats.lease import (
    LEASE_S,
    LOOK_S,
    RENEW_S,
    TRUST_S,
    Lease,
    Sighting,
    decide,
    look,
    next_token,
    standing,
)


def held(holder: str = "a", token: int = 1, state: str = "held") -> Lease:
    return Lease(token=token, holder=holder, state=state)


def watch(lease: Lease | None, seconds: float, *, step_s: float = LOOK_S, seen: Sighting | None = None) -> Sighting:
    """Looks at one revision all the time."""
    seen = seen or Sighting()
    now_s = seen.looked_s or 0.0
    for _ in range(int(seconds / step_s) + 1):
        seen = look(seen, 1 if lease else 0, lease, now_s)
        now_s += step_s
    return seen


def test_nobody_holds_it_so_it_is_taken_with_the_first_token():
    seen = watch(None, 0.0)
    assert "take" == decide(seen, "b")[0]
    assert 1 == next_token(seen)


def test_before_the_first_look_nothing_is_taken():
    assert ("wait", "nobody has looked yet") == decide(Sighting(), "b")


def test_what_is_renewed_is_waited_for():
    seen, now_s = Sighting(), 0.0
    for revision in range(1, 100):
        seen = look(seen, revision, held(), now_s)
        assert "wait" == decide(seen, "b")[0]
        now_s += RENEW_S


def test_what_is_not_renewed_is_taken_after_its_time_and_the_reason_names_who_had_it():
    assert "wait" == decide(watch(held(), LEASE_S - 2 * LOOK_S), "b")[0]
    decision, why = decide(watch(held(), LEASE_S + 2 * LOOK_S), "b")
    assert "take" == decision
    assert why.startswith("a has not renewed it for ")


def test_a_pause_of_ones_own_is_nobodys_silence():
    seen = look(watch(held(), 0.4), 1, held(), 1000.0)
    assert "wait" == decide(seen, "b")[0]


def test_given_up_is_taken_at_once_and_the_end_of_the_run_ends_who_waited():
    assert "take" == decide(watch(held(state="released"), 0.0), "b")[0]
    before = watch(held(), 0.4)
    assert ("over", "the run has ended") == decide(look(before, 2, held(state="ended"), 1.0), "b")
    assert "take" == decide(watch(held(state="ended"), 0.0), "b")[0], (
        "an earlier life of the run ended, and this is the next one"
    )


def test_its_own_lease_whose_answer_was_lost_is_taken_again_with_a_higher_token():
    seen = look(Sighting(), 7, held("b", token=7), 0.0)
    assert "take" == decide(seen, "b")[0]
    assert 8 == next_token(seen)


def test_what_cannot_be_read_is_taken_with_a_token_above_all_that_were():
    seen = look(Sighting(), 41, None, 0.0)
    assert "take" == decide(seen, "b")[0]
    assert 42 == next_token(seen)


def test_the_holder_trusts_it_for_less_time_than_others_wait():
    assert TRUST_S < LEASE_S
    assert "valid" == standing(10.0, 10.0 + TRUST_S - 0.01, is_taken=False)
    assert "suspended" == standing(10.0, 10.0 + TRUST_S, is_taken=False)
    assert "lost" == standing(10.0, 10.0, is_taken=True)


@dataclass
class Store:
    """The bucket: one key, compare and set."""

    revision: int = 0
    lease: Lease | None = None
    is_up: bool = True

    def write(self, lease: Lease, last: int) -> int | None:
        if last != self.revision:
            return None
        self.revision, self.lease = self.revision + 1, lease
        return self.revision


@dataclass
class Node:
    """A coordinator of the model: runs when it is let, acts as the keeper does."""

    name: str
    store: Store
    seen: Sighting = field(default_factory=Sighting)
    token: int = 0
    revision: int = 0
    asked_s: float = 0.0
    is_lost: bool = False
    next_s: float = 0.0

    def turn(self, now_s: float) -> None:
        if now_s < self.next_s or not self.store.is_up or self.is_lost:
            return
        if not self.token:
            self.next_s = now_s + LOOK_S
            self.seen = look(self.seen, self.store.revision, self.store.lease, now_s)
            if decide(self.seen, self.name)[0] == "take":
                token = next_token(self.seen)
                revision = self.store.write(Lease(token=token, holder=self.name), self.seen.revision)
                if revision is not None:
                    self.token, self.revision, self.asked_s = token, revision, now_s
            return
        self.next_s = now_s + RENEW_S
        revision = self.store.write(Lease(token=self.token, holder=self.name), self.revision)
        if revision is None:
            self.is_lost = True
        else:
            self.revision, self.asked_s = revision, now_s

    def may_order(self, now_s: float) -> bool:
        return self.token > 0 and "valid" == standing(self.asked_s, now_s, is_taken=self.is_lost)


@pytest.mark.parametrize("seed", range(40))
def test_two_never_believe_in_it_at_once_whoever_pauses_and_whatever_is_down(seed):
    """Random pauses of nodes and of the store; those that lost it begin again under another name."""
    dice = random.Random(seed)  # noqa: S311 - a model
    store = Store()
    nodes = [Node(f"n{number}", store) for number in range(3)]
    paused_until = dict.fromkeys(range(3), 0.0)
    down_until, now_s, tokens, num_takeovers = 0.0, 0.0, [], 0
    while now_s < 200.0:
        now_s += 0.05
        if dice.random() < 0.004:
            paused_until[dice.randrange(3)] = now_s + dice.uniform(0.1, 8.0)
        if dice.random() < 0.002:
            down_until = now_s + dice.uniform(0.1, 6.0)
        store.is_up = now_s >= down_until
        for number, node in enumerate(nodes):
            if now_s >= paused_until[number]:
                node.turn(now_s)
                if node.is_lost:
                    nodes[number] = Node(f"{node.name}'", store)
        believers = [node for node in nodes if node.may_order(now_s)]
        assert len(believers) <= 1, (now_s, believers)
        if store.lease is not None and (not tokens or tokens[-1] != store.lease.token):
            tokens.append(store.lease.token)
            num_takeovers += 1
    assert sorted(set(tokens)) == tokens, "tokens only grow"
    assert num_takeovers >= 2
