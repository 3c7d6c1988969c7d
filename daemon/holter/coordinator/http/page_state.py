"""Makes the page's picture of a run, and keeps what would be too dear to make anew each time."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holter.clock import rfc3339
from holter.coordinator.http import picture
from holter.coordinator.http.picture import Picture
from holter.coordinator.http.status import about, halt, headline
from holter.coordinator.http.timeline import Timeline
from holter.coordinator.incidents.tracker import cause_of
from holter.coordinator.run import Run
from holter.diagnosis import report
from holter.halting.vault.store import FOLDER, SEALED, Sealed, Vault
from holter.records import Diagnosis

ABOUT = ("run_id", "run_dir", "coordinator", "started_at", "world_size", "action", "findings", "blind", "warnings")
"""What the page shows of `/api/v1/status`."""
MAX_LINES = 16
"""Findings, and sentences of blindness, that are sent; thousands of lost sidecars are counted."""
MAX_NAMED = 64
"""Ranks in a card."""
MAX_CARDS, MAX_CHECKPOINTS = 100, 64
LOOK_NS = 3 * 10**9
"""Between two looks at what is dear to look at: the disk, and all ranks."""
CALLED_OFF_NS = 10 * 60 * 10**9
"""So long it is news that a halt was called off and the run went on."""
BLAME = {"info": 0, "warning": 1, "critical": 2}


class PageState:
    """One for a run, whoever looks at it."""

    def __init__(self, run: Run, now_ns: Callable[[], int], *, record: Mapping[str, Any] | None = None) -> None:
        self.timeline = Timeline()
        self._run = run
        self.now_ns = now_ns
        self._record = record
        """Of a run that is over: when it ended, and by which halt; None: it lives."""
        self._cards: dict[str, tuple[Diagnosis, dict[str, Any]]] = {}
        self._sealed: tuple[Sealed, ...] = ()
        self._seen: tuple[tuple[str, int], ...] = ()
        """Names and times of the sealed checkpoints that were read."""
        self._looked_ns = 0
        self._halt: tuple[Mapping[str, Any] | None, int] = (None, 0)
        """What was last said of a halt, and since when."""

    def look(self) -> None:
        """After each judgement: what is new goes to the timeline."""
        run, now_ns = self._run, self.now_ns()
        self.timeline.look_at_findings(run.judging.findings, now_ns)
        self.timeline.look_at_incidents(run.incidents.all())
        self.timeline.look_at_saves(run.saves.all(), self._sealed, now_ns)
        if now_ns - self._looked_ns > LOOK_NS:
            self._looked_ns = now_ns
            self._look_at_halt(halt(run), now_ns)
            run.disk.submit(self.read_vault)

    def paint(self) -> Picture:
        """The run as of now."""
        run, now_ns = self._run, self.now_ns()
        diagnoses = run.incidents.all()
        columns, hosts = picture.columns(run.roster, _blamed(diagnoses), now_ns)
        return Picture(
            now_ms=now_ns // 10**6,
            facts={
                "about": self._about(now_ns),
                "hosts": hosts,
                "incidents": [self._card(one) for one in diagnoses[-MAX_CARDS:]],
                "checkpoints": self._checkpoints(),
            },
            columns=columns,
            numbers=run.assembly.series(),
            arrivals=run.assembly.arrivals(),
            happenings=self.timeline.all(),
        )

    def read_vault(self) -> None:
        """In the disk's thread: manifests name every tensor, and a file server may hang."""
        folder = self._run.settings.run_dir / FOLDER
        with contextlib.suppress(OSError):
            seen = tuple(sorted(_stamp(path) for path in folder.iterdir() if SEALED.fullmatch(path.name)))
            if seen != self._seen:
                self._sealed, self._seen = tuple(Vault(self._run.settings.run_dir).all()), seen

    def _about(self, now_ns: int) -> dict[str, Any]:
        known = about(self._run, now_ns)
        shown = {name: known[name] for name in ABOUT if name in known}
        shown["halt"] = self._look_at_halt(known["halt"], now_ns)
        for name in ("findings", "blind"):
            if (more := len(shown[name]) - MAX_LINES) > 0:
                shown[name] = shown[name][:MAX_LINES]
                shown[f"{name}_left_out"] = more
        front = (
            member.progress.step for member in self._run.roster.members.values() if member.progress.step is not None
        )
        shown |= {"step": max(front, default=None), "num_ranks": len(self._run.roster.members), "is_live": True}
        return shown if self._record is None else shown | {"is_live": False} | dict(self._record)

    def _look_at_halt(self, told: Mapping[str, Any] | None, now_ns: int) -> Mapping[str, Any] | None:
        """As the page shows it: with the time since which it is so, and no longer than it is news."""
        self.timeline.look_at_halt(told, now_ns)
        if told != self._halt[0]:
            self._halt = told, now_ns
        since_ns = self._halt[1]
        if told is None or (told["outcome"] == "called_off" and now_ns - since_ns > CALLED_OFF_NS):
            return None
        return {**told, "since": rfc3339(since_ns)}

    def _card(self, diagnosis: Diagnosis) -> dict[str, Any]:
        """An incident in a few lines; the same object as long as the diagnosis is."""
        known = self._cards.get(diagnosis.id)
        if known is None or known[0] is not diagnosis:
            known = self._cards[diagnosis.id] = (diagnosis, _card(diagnosis))
        return known[1]

    def _checkpoints(self) -> list[dict[str, Any]]:
        """Newest first."""
        book, run_dir = self._run.saves, self._run.settings.run_dir
        own = [
            {
                "step": save.step,
                "path": save.path,
                "by": save.framework or "script",
                "at": save.saved_at,
                "verdict": save.verdict,
                "why": save.why,
                "incident": save.incident,
                "is_gone": book.is_gone(save),
            }
            for save in book.all()
        ]
        found = sorted((*own, *(_kept(one, run_dir) for one in self._sealed)), key=lambda one: (one["at"], one["step"]))
        return found[: -MAX_CHECKPOINTS - 1 : -1]


def _blamed(diagnoses: list[Diagnosis]) -> dict[int, int]:
    """Rank -> how badly an open incident's leading cause names it."""
    found: dict[int, int] = {}
    for diagnosis in diagnoses:
        if diagnosis.closed_at is None and diagnosis.causes:
            for rank in diagnosis.causes[0].ranks:
                found[rank] = max(found.get(rank, 0), BLAME[diagnosis.severity])
    return found


def _card(diagnosis: Diagnosis) -> dict[str, Any]:
    leading = diagnosis.causes[0] if diagnosis.causes else None
    return headline(diagnosis) | {
        "line": report.headline(diagnosis) if leading else cause_of(diagnosis),
        "confidence": leading.confidence if leading else 0.0,
        "ranks": list(leading.ranks[:MAX_NAMED]) if leading else [],
        "do": leading.fix.do if leading else "",
        "directive": diagnosis.action.directive,
        # A reader that has the whole of it open fetches it again when this changes.
        "size": len(msgspec.json.encode(diagnosis)),
    }


def _kept(sealed: Sealed, run_dir: Path) -> dict[str, Any]:
    state = sealed.state
    return {
        "step": sealed.manifest.step,
        "path": str(state.relative_to(run_dir) if state.is_relative_to(run_dir) else state),
        "by": "halt",
        "at": sealed.manifest.sealed_at,
        "verdict": sealed.verdict,
        "why": sealed.why,
        "incident": "",
        "is_gone": False,
    }


def _stamp(path: Path) -> tuple[str, int]:
    return path.name, path.stat().st_mtime_ns
