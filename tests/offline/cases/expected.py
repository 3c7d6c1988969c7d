"""What each case is, written down with the case (`record.py`) before it was ever judged, and kept beside the archive as expected.json.

A healthy run has no answer (None): not a word is allowed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).with_name("expected.json")


@dataclass(frozen=True)
class Expected:
    """The answer to a case."""

    causes: tuple[str, ...]
    """Any of them may be first: a log alone does not always decide."""
    onset: float | None = None
    """In the steps that the log itself counts; None: there is none to name."""
    span: float = 300
    """Steps of the whole run: an onset may be off by a twentieth of it."""
    ranks: tuple[int, ...] | None = None


def save(cases: dict[str, Expected | None]) -> None:
    """Keep the answers."""
    known = {name: asdict(one) if one else None for name, one in cases.items()}
    FILE.write_text(json.dumps(known, indent=1) + "\n")


def load() -> dict[str, Expected | None]:
    """The answers again."""
    return {
        name: Expected(tuple(one["causes"]), one["onset"], one["span"], None if one["ranks"] is None else tuple(one["ranks"])) if one else None
        for name, one in json.loads(FILE.read_text()).items()
    }  # fmt: skip
