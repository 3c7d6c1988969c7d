"""Judge the cases and count: `python -m tests.offline.cases.score FOLDER`."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.offline.cases.expected import Expected, load

from holter import offline

SHARE = 0.05
"""How far off an onset may be, of the run's steps."""


@dataclass(frozen=True)
class Score:
    """What was found of a case."""

    name: str
    expected: Expected | None
    found: tuple[str, ...]
    first_step: int
    ranks: tuple[int, ...]

    @property
    def is_cause_right(self) -> bool:
        """The first cause of the first diagnosis is one of those; for a healthy run: there is none."""
        if self.expected is None:
            return not self.found
        return bool(self.found) and self.found[0] in self.expected.causes and self.expected.ranks in {None, self.ranks}

    @property
    def is_onset_right(self) -> bool:
        """It began when it really did, or there is no such moment."""
        if self.expected is None or self.expected.onset is None:
            return True
        allowed = max(1.0, SHARE * self.expected.span)
        return bool(self.found) and abs(self.first_step - self.expected.onset) <= allowed


def score(folder: Path, expected: Expected | None) -> Score:
    """One case, judged."""
    found = offline.judge(offline.read([folder]), run_id=folder.name, now_ns=0)
    first = found[0] if found else None
    return Score(
        folder.name,
        expected,
        tuple(one.causes[0].cause for one in found),
        first.first_step if first else -1,
        first.causes[0].ranks if first else (),
    )


def main(folder: Path) -> None:
    """A line for each that is not right, and the count."""
    scores = [score(folder / name, expected) for name, expected in load().items() if (folder / name).exists()]
    for one in scores:
        if not (one.is_cause_right and one.is_onset_right):
            print(one)
    faulty = [one for one in scores if one.expected is not None]
    healthy = [one for one in scores if one.expected is None]
    onsets = [one for one in faulty if one.expected and one.expected.onset is not None]
    print(f"cause right: {sum(one.is_cause_right for one in faulty)} of {len(faulty)}")
    print(f"onset right: {sum(one.is_onset_right for one in onsets)} of {len(onsets)}")
    print(f"healthy and silent: {sum(one.is_cause_right for one in healthy)} of {len(healthy)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
