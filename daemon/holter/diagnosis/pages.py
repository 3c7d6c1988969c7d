"""The pages of `holter explain NAME`: a detector's is its module's docstring, a cause's is its entry in the catalogue."""

import dataclasses
import sys
import textwrap
from typing import Any, cast

from holter.faults import CAUSES, DETECTORS
from holter.faults.family import CauseEntry, Detector, DetectorEntry

WIDTH = 100
FIX_PARTS = (
    ("do", "Do"),
    ("changes", "What that changes"),
    ("does_not_fix", "What it does not fix"),
    ("expect", "What to expect"),
    ("verify", "How to verify"),
    ("otherwise", "If it does not help"),
)
ON_TRIAL = "It was tried on made-up windows only, never on a real job: it reports, and halts nothing."


def names() -> tuple[str, ...]:
    """Everything that has a page: detectors, then causes."""
    return (*DETECTORS, *CAUSES)


def page(name: str) -> str | None:
    """The page of a detector or a cause, both where a name is both; None if there is none of that name."""
    found = [_detector_page(DETECTORS[name])] if name in DETECTORS else []
    found += [_cause_page(CAUSES[name])] if name in CAUSES else []
    return "\n".join(found) or None


def _detector_page(entry: DetectorEntry) -> str:
    detector = entry.detector
    text = (sys.modules[type(detector).__module__].__doc__ or "").strip()
    causes = [cause.cause for cause in CAUSES.values() if any(row.detector == detector.name for row in cause.rows)]
    settings = [f"    {detector.name}.{key} = {value}" for key, value in _settings(detector).items()]
    on_trial = ["", "On trial", indented(ON_TRIAL)] if entry.tried_on != "jobs" else []
    return "\n".join(
        [
            f"{detector.name} (detector)",
            "",
            text,
            *on_trial,
            "",
            "Causes it can lead to",
            indented(", ".join(causes)),
            "",
            "Settings",
            *settings,
            "",
        ]
    )


def _settings(detector: Detector) -> dict[str, object]:
    return {field.name: getattr(detector, field.name) for field in dataclasses.fields(cast("Any", detector))}


def _cause_page(entry: CauseEntry) -> str:
    seen_by = dict.fromkeys(row.detector for row in entry.rows)
    sections = [
        ("What happened", entry.happened),
        ("How it comes about", entry.mechanism),
        ("What would refute it", entry.would_refute),
        *((title, getattr(entry.fix, key)) for key, title in FIX_PARTS),
        ("Seen by", ", ".join(seen_by)),
    ]
    return "\n".join(
        [f"{entry.cause} (cause)", "", *("\n".join([title, indented(text), ""]) for title, text in sections)]
    )


def indented(text: str) -> str:
    """A paragraph of a page."""
    return textwrap.fill(
        text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
