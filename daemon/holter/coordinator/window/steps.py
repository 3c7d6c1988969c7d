"""The steps that are still remembered, each across all ranks, and whether the ranks agreed since the start of the run. Pure.

A healthy record costs a few dictionary operations, whatever the number of tensors; a view is made when somebody looks, and kept
until its step changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from holter.faults.window import ClassHistory, StepView
from holter.records import Nonfinite, StepDone

MAX_CLASSES = 16
"""Tensor classes believed of one record."""
_PLACES = {"input": 0, "loss": 1, "gradient": 2, "reduced_gradient": 3}
Agreement = tuple[str, bool]
"""(tensor class, are all ranks equal)"""


@dataclass
class StepLedger:
    """One step: what the ranks reported of it."""

    step: int
    first_seen_ns: int
    reported: set[int] = field(default_factory=set)
    roots: dict[str, dict[int, set[int]]] = field(default_factory=dict)
    nonfinite: dict[int, tuple[Nonfinite, ...]] = field(default_factory=dict)
    broke: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    batches: dict[int, int | set[int]] = field(default_factory=dict)
    """Signature -> the one rank that was fed it, or all of them: healthy ranks have one each."""
    _view: StepView | None = None

    def add(self, rank: int, done: StepDone, received_ns: int, *, tensor_limit: int) -> None:
        """One rank's record; a second one of the same rank takes the place of the first."""
        self._view = None
        self.first_seen_ns = min(self.first_seen_ns, received_ns)
        if rank in self.reported:
            self._forget(rank)
        self.reported.add(rank)
        for name, root in list(done.roots.items())[:MAX_CLASSES]:
            self.roots.setdefault(name, {}).setdefault(root, set()).add(rank)
        if done.nonfinite:
            earliest = sorted(done.nonfinite, key=lambda tensor: (_PLACES[tensor.where], tensor.order))
            self.nonfinite[rank] = tuple(earliest[:tensor_limit])
        if done.batch:
            self._add_batch(done.batch, rank)

    def compare_history(self, rank: int, before: int, left: int) -> None:
        """What the rank's parameters were before this step, and what the step before had left."""
        (self.kept if before == left else self.broke).add(rank)

    def verdicts(self, *, is_complete: bool) -> list[Agreement]:
        """The verdict on each class: a difference is certain at once, agreement only when no more ranks will report."""
        found = []
        for name, groups in sorted(self.roots.items()):
            if len(groups) > 1:
                found.append((name, False))
            elif is_complete and any(len(ranks) > 1 for ranks in groups.values()):
                found.append((name, True))
        return found

    def view(self, missing: tuple[int, ...]) -> StepView:
        """Frozen; the same object as long as nothing changed."""
        if self._view is None or self._view.missing != missing:
            self._view = StepView(
                step=self.step,
                first_seen_ns=self.first_seen_ns,
                num_reported=len(self.reported),
                missing=missing,
                roots={
                    name: {root: tuple(sorted(ranks)) for root, ranks in sorted(groups.items())}
                    for name, groups in sorted(self.roots.items())
                },
                nonfinite=tuple((rank, tensor) for rank, found in sorted(self.nonfinite.items()) for tensor in found),
                broke_history=tuple(sorted(self.broke)),
                kept_history=tuple(sorted(self.kept)),
                batches={
                    signature: (ranks,) if isinstance(ranks, int) else tuple(sorted(ranks))
                    for signature, ranks in sorted(self.batches.items())
                },
            )
        return self._view

    def _add_batch(self, signature: int, rank: int) -> None:
        known = self.batches.setdefault(signature, rank)
        if isinstance(known, set):
            known.add(rank)
        elif known != rank:
            self.batches[signature] = {known, rank}

    def _forget(self, rank: int) -> None:
        for name, groups in list(self.roots.items()):
            for root in [root for root, ranks in groups.items() if ranks == {rank}]:
                del groups[root]
            for ranks in groups.values():
                ranks.discard(rank)
            if not groups:
                del self.roots[name]
        self.nonfinite.pop(rank, None)
        self.broke.discard(rank)
        self.kept.discard(rank)
        for signature, known in list(self.batches.items()):
            others = ({known} if isinstance(known, int) else known) - {rank}
            if not others:
                del self.batches[signature]
            elif isinstance(known, set):
                self.batches[signature] = others


def extend_histories(histories: dict[str, ClassHistory], step: int, verdicts: Iterable[Agreement]) -> None:
    """Add the verdicts of one step; steps come in ascending order."""
    for name, is_equal in verdicts:
        known = histories.get(name) or ClassHistory(
            first_step=step,
            is_equal_at_first=is_equal,
            last_equal_step=None,
            first_unequal_step=None,
            num_equal=0,
            num_unequal=0,
        )
        histories[name] = _history_after(known, step, is_equal=is_equal)


def _history_after(known: ClassHistory, step: int, *, is_equal: bool) -> ClassHistory:
    has_differed = known.first_unequal_step is not None
    if is_equal:
        last_equal = known.last_equal_step if has_differed else step
        return replace(known, last_equal_step=last_equal, num_equal=known.num_equal + 1)
    first_unequal = known.first_unequal_step if has_differed else step
    return replace(known, first_unequal_step=first_unequal, num_unequal=known.num_unequal + 1)
