"""What has been read of the current step's gradients: each value is read once, and whoever asks again is given the same answer.

    a rank's own    end of backward        norm, names of those that are not finite; on a single rank nothing changes them afterwards
    reduced         end of DDP's backward  fingerprints, before anything clips them
    as applied      before the optimizer   the guard; fingerprints of what the optimizer is given

A gradient has the same value at two moments if its memory is the same, torch counted no write to it, and no collective was called in between: torch
does not count what a collective writes. Nor does it count what is written to `.data`, or what `torch._foreach` functions write to DTensors. DTensors
are taken to be unchanged while an optimizer's step is looked at, before it is applied; and where ranks are compared, a value as applied is never
taken from an earlier moment. An answer that a device still owes is shared too: all who asked get it when it is there.
"""

import array
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from holter.rank.mesh import GROUPS
from holter.rank.models import applied_to, gradients_of
from holter.rank.publish.step_log import OwedAnswer
from holter_kernels import SeenTensors

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.publish.step_log import OpenStep

OnTable = Callable[[Any], None]
_address, _version = torch.Tensor.data_ptr, operator.attrgetter("_version")
_layout = operator.attrgetter("layout")
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_DENSE = frozenset({torch.strided})
MAX_KEPT = 8
"""Number of lists of gradients whose answers are kept at a time: there may be several models and optimizers."""


def are_plain(tensors: Sequence[Any]) -> bool:
    """Whether all of these are torch's own dense tensors: none is missing, sparse, or wraps another. Native loops: this is asked of every list."""
    if type(tensors) is SeenTensors:
        return True
    return PLAIN.issuperset(map(type, tensors)) and _DENSE.issuperset(map(_layout, tensors))


class GradientMark(NamedTuple):
    """Identifies the values of some gradients at one moment, by memory and versions; equal marks mean equal values."""

    addresses: bytes
    """Address of each gradient, 8 bytes each; the versions likewise."""
    versions: bytes
    num_collectives: int
    has_memory: bool
    """Whether every one of them has memory."""

    @staticmethod
    def of(gradients: Any) -> "GradientMark | None":
        """Mark the gradients as they are now; None for DTensors and other wrappers, and in groups that do not count their collectives."""
        if (number := num_collectives()) is None:
            return None
        if type(gradients) is SeenTensors:
            return GradientMark(gradients.addresses, gradients.versions, number, has_memory=True)
        if not set(map(type, gradients)) <= PLAIN:
            return None
        addresses = list(map(_address, gradients))
        versions = array.array("Q", map(_version, gradients)).tobytes()
        return GradientMark(array.array("Q", addresses).tobytes(), versions, number, 0 not in addresses)

    @staticmethod
    def within(moment: int, gradients: Any) -> "GradientMark | None":
        """Mark gradients, DTensors too, during a moment in which nobody writes to them; None if one has no memory of its own."""
        parts: list[Any] = [g if type(g) in PLAIN else getattr(g, "_local_tensor", None) for g in gradients]
        if not set(map(type, parts)) <= PLAIN:
            return None
        addresses = list(map(_address, parts))
        has_memory = all(address or not part.numel() for address, part in zip(addresses, parts, strict=True))
        versions = array.array("Q", [moment]) * len(parts)
        return GradientMark(array.array("Q", addresses).tobytes(), versions.tobytes(), -1, has_memory)


def num_collectives() -> int | None:
    """Return how many collectives this rank has called in all its groups; None if a custom group does not count them.

    The number never decreases while the groups are the same.
    """
    if not GROUPS:
        return 0
    number = 0
    try:
        for group in list(GROUPS):
            number += group._get_sequence_number_for_group()  # noqa: SLF001
    except RuntimeError:
        return None
    return number


class TableRows:
    """Some rows of a table of statistics; its columns are attributes, as in the table."""

    def __init__(self, table: Any, places: np.ndarray) -> None:
        self._table, self._places = table, places

    def __getattr__(self, name: str) -> Any:
        """Return a column, or all columns as `rows`; it is kept, because some callers ask row by row."""
        column = self.__dict__[name] = getattr(self._table, name)[self._places]
        return column

    def __len__(self) -> int:
        return len(self._places)


class GradientAnswer:
    """One reading of gradients, and the callers that wait for it."""

    def __init__(self, mark: GradientMark | None, *, has_histogram: bool) -> None:
        self.mark = mark
        self.has_histogram = has_histogram
        self.reading: Any = None
        """The reading of the pass itself; None until it has begun."""
        self.table: Any = None
        """The table of statistics; None while a device owes it."""
        self._waiting: list[tuple[OnTable, np.ndarray | None]] = []

    def places(self, mark: GradientMark, likely: np.ndarray) -> np.ndarray | None:
        """Return the rows of these gradients, unchanged since, among those that were read; None if not all are there. `likely` is tried first."""
        if self.mark is None or mark.num_collectives != self.mark.num_collectives or not mark.has_memory:
            return None
        mine, theirs = ((_words(one.addresses), _words(one.versions)) for one in (self.mark, mark))
        found = likely
        if (
            len(likely) != len(theirs[0])
            or likely.max(initial=-1) >= len(mine[0])
            or (mine[0][likely] != theirs[0]).any()
        ):
            rows = {address: row for row, address in enumerate(mine[0].tolist())}
            found = np.array([rows.get(address, -1) for address in theirs[0].tolist()], np.intp)
        return found if (found >= 0).all() and (mine[1][found] == theirs[1]).all() else None

    def ask(self, then: OnTable, places: np.ndarray | None) -> None:
        """Call `then` with the rows at these places (None: all rows), now or when they are there."""
        if self.table is None:
            self._waiting.append((then, places))
        else:
            then(self.table if places is None else TableRows(self.table, places))

    def learn(self, table: Any) -> None:
        """Take the table, and hand it to all callers that wait for it."""
        self.table = table
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for then, places in waiting:
            self.ask(then, places)


class GradientAnswers:
    """Readings of the gradients of one step, valid until the next backward pass begins or the step is over."""

    def __init__(self) -> None:
        self._answers: list[GradientAnswer] = []
        self._held: tuple[Any, list[Any], Sequence[Any]] = (None, [], [])
        """An optimizer, its parameters, and their gradients."""
        self._moment = 0
        """Number of times that an optimizer was held so far."""
        self._likely = np.zeros(0, np.intp)
        """Rows at which the gradients of the last question stood: an optimizer with several groups orders the model's parameters differently."""

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Hold an optimizer's gradients until `let_go`, for all that ask: a gradient that nobody holds gets a new Python object each time.

        None of the script's code runs until then.
        """
        parameters = applied_to(optimizer)
        self._moment += 1
        self._held = optimizer, parameters, gradients_of(parameters)

    def let_go(self) -> None:
        """Let go of the held gradients, which are about to be applied."""
        self._held = None, [], []

    def applied_by(self, optimizer: torch.optim.Optimizer) -> Sequence[Any]:
        """Return the gradient of each parameter that this optimizer holds, None where there is none."""
        return self._held[2] if self._held[0] is optimizer else gradients_of(applied_to(optimizer))

    def held_of(self, parameters: list[Any]) -> Sequence[Any]:
        """Return the gradient of each of these parameters, None where there is none."""
        held = self._held[1]
        is_held = len(held) == len(parameters) and all(map(operator.is_, held, parameters))
        return self._held[2] if is_held else gradients_of(parameters)

    def clear(self) -> None:
        """Forget all answers, because a backward pass begins or the step is over: the gradients will change."""
        self._answers.clear()

    def find(self, gradients: Sequence[Any]) -> GradientAnswer | None:
        """Return an answer that covers all of these gradients as they are now, perhaps among others; None if there is none."""
        mark = self._mark(gradients) if self._answers else None
        found = self._find(mark, needs_histogram=False) if mark is not None else None
        return found[0] if found is not None else None

    def read(  # noqa: PLR0913 - a reading, named
        self,
        context: "Context",
        name: str,
        gradients: Sequence[Any],
        then: OnTable,
        *,
        step: "OpenStep | None" = None,
        histogram: str = "off",
    ) -> GradientAnswer | None:
        """Call `then` with a table of these gradients as they are now, from an earlier reading or a new one; None if they cannot be read."""
        mark = context.guard.attempt(self._mark, gradients)
        found = self._find(mark, needs_histogram=histogram != "off") if mark is not None and self._answers else None
        if found is not None:
            answer, places = found
            answer.ask(OwedAnswer(context.guard, step, then), places)
            return answer
        answer = GradientAnswer(mark, has_histogram=histogram != "off")
        answer.reading = context.read(name, gradients, answer.learn, step=step, histogram=histogram)
        if answer.reading is None:
            return None
        if answer.table is not None:
            context.guard.attempt(then, answer.table)
        else:
            answer.ask(OwedAnswer(context.guard, None, then), None)
        if mark is not None:
            self._answers = [*self._answers[1 - MAX_KEPT :], answer]
        return answer

    def _mark(self, gradients: Sequence[Any]) -> GradientMark | None:
        mark = GradientMark.of(gradients)
        return GradientMark.within(self._moment, gradients) if mark is None and self._held[0] is not None else mark

    def _find(self, mark: GradientMark, *, needs_histogram: bool) -> tuple[GradientAnswer, np.ndarray | None] | None:
        for answer in reversed(self._answers):
            if needs_histogram and not answer.has_histogram:
                continue
            if answer.mark == mark and mark.has_memory:
                return answer, None
            if (places := answer.places(mark, self._likely)) is not None:
                self._likely = places
                return answer, places
        return None


def _words(words: bytes) -> np.ndarray:
    return np.frombuffer(words, np.uint64)
