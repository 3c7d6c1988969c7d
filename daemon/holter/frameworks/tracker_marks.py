"""Writes incidents into the tracker that the script uses, on rank 0.

wandb gets an alert and a summary, MLflow tags, TensorBoard a text, trackio an alert.

    script logs ──▶ `seen`: which tracker it uses                    training thread, a dictionary look-up
    run_dir/incidents/*/diagnosis.json ──▶ a thread ──▶ tracker      errors and waits of the tracker affect nobody

The diagnoses are read from the run directory, so that incidents of a hanging rank are told, too; if the coordinator
writes on another host there are none. Each incident is written once, and again when another cause is named, a halt
keeps a checkpoint, or it is over.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holter.files import read_json
from holter.rank.guard import Guard
from holter.records import Diagnosis
from holter.records.titles import titled
from holter.threads import without_signals

LOOK_S = 0.5
"""Seconds between two looks at the incidents."""
MAX_TEXT = 2000
_LEVELS = {"critical": "ERROR", "warning": "WARN", "info": "INFO"}
Mark = tuple[str, str, str, int, int]
"""(title, text, level, step, number of the incident)."""


class TrackerMarks:
    """Notes which trackers rank 0 uses, and writes incidents to them."""

    def __init__(self, run_dir: str, guard: Guard) -> None:
        self._folder = Path(run_dir) / "incidents"
        self._guard = guard
        self._sinks: dict[tuple[str, int], Callable[[], Any]] = {}
        """(library, identity) -> a function that returns the tracker's own object, or None once it is gone."""
        self._told: dict[tuple[str, int], dict[str, object]] = {}
        self._is_started = False

    def seen(self, library: str, owner: Any) -> None:
        """Note that the script has logged with a library.

        `owner` is a run or writer; None if the library itself is called.
        """
        if owner is None:
            run = getattr(sys.modules.get(library), "active_run", lambda: None)()
            owner = getattr(run, "info", None)
            if owner is None:
                return
            name = str(owner.run_id)
            self._sinks.setdefault((library, hash(name)), lambda: name)
        elif (library, id(owner)) not in self._sinks:
            self._sinks[library, id(owner)] = weakref.ref(owner)
        if not self._is_started:
            self._is_started = True
            with without_signals():
                threading.Thread(target=self._run, name="holter-trackers", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._guard.attempt(self._look)
            pause.wait(LOOK_S)

    def _look(self) -> None:
        for number, path in enumerate(sorted(self._folder.glob("*/diagnosis.json")), start=1):
            diagnosis = read_json(path, Diagnosis)
            if diagnosis is None:
                continue
            essence = (diagnosis.severity, titled(_cause(diagnosis)), diagnosis.action.checkpoint, diagnosis.closed_at)
            for key, sink in list(self._sinks.items()):
                told = self._told.setdefault(key, {})
                tracker = sink()
                if tracker is not None and told.get(diagnosis.id) != essence:
                    # Marked before it is written, so that a failing write is not repeated.
                    told[diagnosis.id] = essence
                    self._guard.attempt(_WRITERS[key[0]], tracker, mark_of(diagnosis, number))


def mark_of(diagnosis: Diagnosis, number: int) -> Mark:
    """Return what a tracker is told of an incident."""
    over = "over: " if diagnosis.closed_at is not None else ""
    ranks = diagnosis.causes[0].ranks if diagnosis.causes else ()
    who = f" on rank {', '.join(map(str, ranks[:4]))}{' and more' if len(ranks) > 4 else ''}" if ranks else ""  # noqa: PLR2004
    title = f"holter: {over}{diagnosis.severity}: {titled(_cause(diagnosis))}{who} at step {diagnosis.first_step}"
    lines = [diagnosis.symptom]
    if diagnosis.causes and diagnosis.causes[0].fix.do:
        lines.append(f"Do first: {diagnosis.causes[0].fix.do}")
    if diagnosis.action.exit_code is not None:
        lines.append(f"Halted; go on from {diagnosis.action.checkpoint or 'no checkpoint, none was kept'}.")
    level = "INFO" if over else _LEVELS[diagnosis.severity]
    return title, "\n\n".join(lines)[:MAX_TEXT], level, max(0, diagnosis.detected_step), number


def _cause(diagnosis: Diagnosis) -> str:
    return diagnosis.causes[0].cause if diagnosis.causes else "unknown"


def _to_wandb(run: Any, mark: Mark) -> None:
    title, text, level, _, number = mark
    run.summary.update({"holter/incidents": number, "holter/last_incident": title})
    run.alert(title=title, text=text, level=level)


def _to_mlflow(run_id: str, mark: Mark) -> None:
    title, text, _, _, number = mark
    client = sys.modules["mlflow"].MlflowClient()
    client.set_tag(run_id, f"holter.incident.{number}", f"{title}\n{text}")
    client.set_tag(run_id, "holter.last_incident", title)


def _to_board(writer: Any, mark: Mark) -> None:
    title, text, _, step, number = mark
    writer.add_text(f"holter/incident {number}", f"**{title}**\n\n{text}", step)
    writer.flush()


def _to_trackio(run: Any, mark: Mark) -> None:
    title, text, level, _, _ = mark
    # It accepts only its own type, and merely warns about any other.
    run.alert(title=title, text=text, level=sys.modules["trackio"].AlertLevel(level.lower()))


_WRITERS: dict[str, Callable[[Any, Mark], None]] = {
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
    "torch": _to_board,
    "tensorboardX": _to_board,
    "trackio": _to_trackio,
}
"""Functions that write an incident, by library."""
LIBRARIES = frozenset(_WRITERS)
