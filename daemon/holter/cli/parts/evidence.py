"""Turn a run directory into the record that `holter verify`, `holter memory` and `holter mcp` compare."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from holter import clock
from holter.cli.parts.run_reader import locate
from holter.coordinator.recovery import journal
from holter.coordinator.recovery.journal import Entry
from holter.diagnosis.explain import WORST_FIRST
from holter.halting import halt_record
from holter.offline.proof.changes import options_of
from holter.offline.proof.record import LOSS, NORM, PastFault, Points, RunRecord, fault_of
from holter.records import Diagnosis, FirstStep, SightLost, StepDone

Life = Literal["all", "earlier", "last"]
"""Part of a run that was resumed in its own directory: everything, all but its last start, or the last start alone."""


def is_run_directory(path: Path) -> bool:
    """Whether holter wrote this directory."""
    return (path / "run.json").is_file() or (path / "incidents").is_dir() or (path / "journal").is_dir()


class _Steps:
    """Loss, norm and batches of each step of a run, as means over the ranks. Steps are counted from the run's own beginning."""

    def __init__(self, lifted_step: int = 0) -> None:
        self._lifted_step = lifted_step
        """Step of the halt that was lifted for a later life. Plain SGD counts no steps, so nothing else says where it
        resumes."""
        self.lives: list[tuple[int, int]] = []
        """For each start: when it began, and the completed steps before it."""
        self._sums: dict[str, dict[int, tuple[float, int]]] = {LOSS: {}, NORM: {}}
        self.batches: dict[int, int] = {}
        self.last = -1
        self.first = -1
        self.blind: dict[str, None] = {}

    def hear(self, entry: Entry, *, is_wanted: bool) -> None:
        """Take in one observation."""
        seen = entry.observation
        if isinstance(seen.body, FirstStep) and seen.rank == 0:
            unknown = self._lifted_step if self.lives else 0
            completed = seen.body.completed
            self.lives.append((entry.received_ns, unknown if completed is None else completed))
        if isinstance(seen.body, SightLost) and is_wanted:
            self.blind[f"rank {seen.rank}: {seen.body.what}"] = None
        if not isinstance(seen.body, StepDone) or not is_wanted:
            return
        step = seen.step + (self.lives[-1][1] if self.lives else 0)
        self.first = step if self.first < 0 else min(self.first, step)
        self.last = max(self.last, step)
        for name, value in ((LOSS, seen.body.loss), (NORM, seen.body.gradient_norm)):
            if value is not None:
                total, num = self._sums[name].get(step, (0.0, 0))
                self._sums[name][step] = (total + value, num + 1)
        if seen.rank == 0 and seen.body.batch:
            self.batches[step] = seen.body.batch

    def series(self) -> dict[str, Points]:
        """Return the means in the order of steps, for each name that has any."""
        made = {
            name: tuple((step, total / num) for step, (total, num) in sorted(sums.items()))
            for name, sums in self._sums.items()
        }
        return {name: points for name, points in made.items() if points}


def record_of_run(path: Path, life: Life = "all") -> RunRecord:
    """Make the record from the journal, run.json and the incidents. Raises UsageError."""
    found = locate(str(path))
    entries = list(journal.read(path / "journal")) if (path / "journal").is_dir() else []
    begins = [entry.received_ns for entry in entries if _is_start(entry)]
    since_ns = begins[-1] if len(begins) > 1 else None
    steps = _Steps(halt_record.base_step(path))
    for entry in entries:
        steps.hear(entry, is_wanted=_is_wanted(entry.received_ns, since_ns, life))
    faults = tuple(_faults(found.diagnoses(), steps.lives, since_ns, life))
    last = max([steps.last, *(fault.first_step for fault in faults)])
    return RunRecord(
        name=str(path), watched_by="holter", first_step=steps.first, last_step=last, series=steps.series(), faults=faults,
        settings=settings_of(found.identity), batches=steps.batches, blind=tuple(steps.blind),
    )  # fmt: skip


def _is_start(entry: Entry) -> bool:
    return isinstance(entry.observation.body, FirstStep) and entry.observation.rank == 0


def _is_wanted(at_ns: int, since_ns: int | None, life: Life) -> bool:
    if life == "all":
        return True
    if since_ns is None:
        return life == "earlier"
    return (at_ns >= since_ns) == (life == "last")


def _faults(
    diagnoses: Iterable[Diagnosis], lives: list[tuple[int, int]], since_ns: int | None, life: Life
) -> Iterator[PastFault]:
    """Yield the faults, most severe first, with steps counted as the run counts them."""
    for one in sorted(diagnoses, key=lambda one: (WORST_FIRST.index(one.severity), one.opened_at)):
        # An incident says when it opened in whole seconds; a life may begin and fail within one.
        opened_ns = int(clock.epoch_s(one.opened_at) * 1e9) + 10**9
        if one.causes and _is_wanted(opened_ns, since_ns, life):
            base = next((base for begun_ns, base in reversed(lives) if begun_ns <= opened_ns), 0)
            yield fault_of(one, base)


def settings_of(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return from run.json how the run was started: options, versions, environment and code."""
    command = [str(word) for word in identity.get("command") or []]
    made = options_of(command)
    for kind, field in (("version", "versions"), ("environment", "environment"), ("code", "code")):
        values = identity.get(field)
        made |= {f"{kind}: {name}": str(value) for name, value in values.items()} if isinstance(values, dict) else {}
    if identity.get("world_size"):
        made["world: ranks"] = str(identity["world_size"])
    if identity.get("framework"):
        made["world: framework"] = str(identity["framework"])
    return made
