"""How ranks that each apply a part of a step agree before it whether all parts are finite.

    rank 0                 the root: knows when every rank has sent its word, and answers
    ├── 1 … 16             each passes on one word for itself and all ranks below it
    │   └── 17 … 272       with 16,000 ranks the last are four levels down
    words go up            the first step that is not finite in that part of the tree, or none
    answers go down        the first of all of these steps

A round is a step and, if several optimizers make one step, the turn within it. Words may come in any order. A round in which a rank never
sends its word is forgotten. Nothing here waits or sends: the functions return what is to be sent.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FAN_OUT = 16
KEPT_ROUNDS = 64
"""Number of unanswered rounds that are kept: ranks are at most one step apart, and a rank further behind is no longer waited for."""


class Round(NamedTuple):
    """One agreement: the step, and the turn of the optimizer in it. Later rounds compare as greater."""

    step: int
    turn: int


class Word(NamedTuple):
    """What is sent up for one rank and all ranks below it, or the answer that is sent down for all."""

    round: Round
    bad_step: int | None
    """The first step that is known not to be finite: this one, or an earlier one about which a device answered late. None if all are finite."""


class Sending(NamedTuple):
    """A word that is to be sent to a neighbour in the tree."""

    to: int
    word: Word


@dataclass(frozen=True)
class Tree:
    """A rank's place in the tree."""

    rank: int
    world_size: int
    fan_out: int = FAN_OUT

    @cached_property
    def parent(self) -> int | None:
        """The rank to which this one sends its word; None for the root."""
        return (self.rank - 1) // self.fan_out if self.rank else None

    @cached_property
    def children(self) -> range:
        """The ranks that send their words to this one."""
        first = self.rank * self.fan_out + 1
        return range(min(first, self.world_size), min(first + self.fan_out, self.world_size))


class AgreementRounds:
    """One rank's view of the rounds: which words have come, and which answer came last."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._said: dict[Round, dict[int, int | None]] = {}
        self.answer: Word | None = None
        """The newest answer. None before the first one, when nobody knows yet whether all ranks take part."""

    def hear(self, sender: int, word: Word) -> list[Sending]:
        """Take in our own word, a child's word, or the parent's answer; return what is to be sent because of it."""
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
        """Return the answer if it is that of this round, else None."""
        return self.answer if self.answer is not None and self.answer.round == asked else None

    def awaited(self, asked: Round) -> list[int]:
        """Return the ranks that this one waits for: children whose word is missing, else the parent, who answers."""
        said = self._said.get(asked)
        missing = [child for child in self._tree.children if said is not None and child not in said]
        return missing or ([] if self._tree.parent is None else [self._tree.parent])

    def _answer(self, word: Word) -> list[Sending]:
        if self.answer is None or word.round > self.answer.round:
            self.answer = word
        return [Sending(child, word) for child in self._tree.children]
