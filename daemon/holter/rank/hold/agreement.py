"""How ranks that each apply a part of a step agree before it whether all parts are finite.

    rank 0                 the root: knows when everybody has spoken, and answers
    ├── 1 … 16             each hands on one word for itself and all behind it
    │   └── 17 … 272       of 16,000 ranks the last are four levels down
    words go up            the first step that is not finite there, or none
    answers go down        the first of all of them

A round is a step and, where several optimizers make one step, the turn in it. Words may come in any order, and those of rounds that somebody
never speaks in are forgotten. Nothing here waits or sends: what a word leads to is returned.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FAN_OUT = 16
KEPT_ROUNDS = 64
"""How many unanswered rounds are kept: ranks are a step apart at most, and a rank further behind is no longer waited for."""


class Round(NamedTuple):
    """What is agreed on; later rounds are greater."""

    step: int
    turn: int


class Word(NamedTuple):
    """The word of one rank and all behind it, or the answer."""

    round: Round
    bad_step: int | None
    """The first step known not to be finite: this one, or one before of which a device answered late. None: all is well."""


class Sending(NamedTuple):
    """To be sent to a neighbour in the tree."""

    to: int
    word: Word


@dataclass(frozen=True)
class Tree:
    """Where a rank stands."""

    rank: int
    world_size: int
    fan_out: int = FAN_OUT

    @cached_property
    def parent(self) -> int | None:
        """None: the root."""
        return (self.rank - 1) // self.fan_out if self.rank else None

    @cached_property
    def children(self) -> range:
        """Those who speak through this rank."""
        first = self.rank * self.fan_out + 1
        return range(min(first, self.world_size), min(first + self.fan_out, self.world_size))


class AgreementRounds:
    """One rank's view: who has spoken in which round, and what was answered last."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._said: dict[Round, dict[int, int | None]] = {}
        self.answer: Word | None = None
        """The newest. Before the first one nobody knows whether all ranks are there."""

    def hear(self, sender: int, word: Word) -> list[Sending]:
        """Our own word, a child's, or the parent's answer."""
        if sender == self._tree.parent:
            return self._answer(word)
        said = self._said.setdefault(word.round, {})
        said[sender] = word.bad_step
        if len(said) <= len(self._tree.children):
            if len(self._said) > KEPT_ROUNDS:
                del self._said[min(self._said)]
            return []
        del self._said[word.round]
        whole = Word(word.round, min((bad for bad in said.values() if bad is not None), default=None))
        parent = self._tree.parent
        return self._answer(whole) if parent is None else [Sending(parent, whole)]

    def answered(self, asked: Round) -> Word | None:
        """The answer of this round and no other."""
        return self.answer if self.answer is not None and self.answer.round == asked else None

    def awaited(self, asked: Round) -> list[int]:
        """Whom this rank waits for: children who have not spoken, else whoever answers."""
        said = self._said.get(asked)
        missing = [child for child in self._tree.children if said is not None and child not in said]
        return missing or ([] if self._tree.parent is None else [self._tree.parent])

    def _answer(self, word: Word) -> list[Sending]:
        if self.answer is None or word.round > self.answer.round:
            self.answer = word
        return [Sending(child, word) for child in self._tree.children]
