"""Holds what was read of a run: numbers over time, errors, settings, code, dumps; and remarks on what could not be read.

Found
├── runs      LoggedRun: its series by name, each point with the line it was read from
├── errors    LoggedError: what a rank or the system said when something broke
├── configs   Config: settings by their full name, whatever file they stood in
├── code      Code: a script's text; it is parsed, never imported
├── tables    Shapes: the parameters of a model by name
├── samples   WrittenSample: what a model wrote
└── dumps     Flight Recorder dumps
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holter.offline.dumps import Dumps

MAX_POINTS = 60_000
"""Number of points of one series, above which every second one is dropped."""

Points = list[tuple[int, float]]
"""(step, value), ascending by step."""


class Series:
    """One number over time, with the line of the file on which each value stands; its length is bounded."""

    __slots__ = ("_skip", "_stride", "lines", "steps", "values")

    def __init__(self) -> None:
        self.steps, self.values, self.lines = array("q"), array("d"), array("q")
        self._stride = 1
        self._skip = 0

    def add(self, step: int, value: float, line: int) -> None:
        """Add a value; if there are very many, only some are kept, and all that are not finite."""
        self._skip += 1
        if self._skip % self._stride and math.isfinite(value):
            return
        self.steps.append(step)
        self.values.append(value)
        self.lines.append(line)
        if len(self.steps) >= MAX_POINTS:
            self._halve()

    def _halve(self) -> None:
        kept = [i for i in range(len(self.steps)) if i % 2 == 0 or not math.isfinite(self.values[i])][
            : MAX_POINTS // 2 + 64
        ]
        self.steps = array("q", (self.steps[i] for i in kept))
        self.values = array("d", (self.values[i] for i in kept))
        self.lines = array("q", (self.lines[i] for i in kept))
        self._stride *= 2

    def cut(self, step: int) -> None:
        """Drop everything from this step on, because the run was resumed there."""
        kept = [i for i, at in enumerate(self.steps) if at < step]
        self.steps = array("q", (self.steps[i] for i in kept))
        self.values = array("d", (self.values[i] for i in kept))
        self.lines = array("q", (self.lines[i] for i in kept))

    def count_by(self, ends: Sequence[int], numbers: Sequence[int]) -> None:
        """Renumber the steps: each gets the number that belongs to the last of the ascending `ends` that it has reached."""
        self.steps = array("q", (numbers[max(0, bisect_right(ends, step) - 1)] for step in self.steps))

    def __len__(self) -> int:
        return len(self.steps)

    def points(self) -> Points:
        """Return the points, ascending; of two values at one step the later counts."""
        return sorted(dict(zip(self.steps, self.values, strict=True)).items())

    def line_of(self, step: int) -> int:
        """Return the line with the value of this step, or of the first one after it; 0 if there is none."""
        later = [(at, i) for i, at in enumerate(self.steps) if at >= step]
        return self.lines[min(later)[1]] if later else 0


@dataclass
class LoggedRun:
    """The numbers of one run, of all its ranks."""

    file: str
    by_rank: dict[int, dict[str, Series]]
    """Rank -> name -> values. A file that names no ranks has only rank 0."""
    counted_by: str = "step"
    """Unit of its steps: `step`, `epoch`, or `log` if the file counts neither and its lines are counted."""
    number: int = 0
    """Number of this run within its file."""
    num_resumed: int = 0
    """How often the run went back to an earlier step and was resumed there."""
    steps_per_epoch: float = 0.0
    """Number of the run's steps in an epoch; 0 if unknown."""

    def names(self) -> list[str]:
        """Return the names of all series, in the order in which they came."""
        return list(dict.fromkeys(name for series in self.by_rank.values() for name in series))

    def points(self, name: str) -> Points:
        """Return the series of this name, as the mean over the ranks; empty if there is none."""
        per_rank = [known for series in self.by_rank.values() if (one := series.get(name)) and (known := one.points())]
        if len(per_rank) <= 1:
            return per_rank[0] if per_rank else []
        sums: dict[int, list[float]] = {}
        for points in per_rank:
            for step, value in points:
                sums.setdefault(step, []).append(value)
        return [(step, sum(values) / len(values)) for step, values in sorted(sums.items())]

    def line_of(self, name: str, step: int) -> int:
        """Return the line on which a value was read; 0 if unknown."""
        known = [series[name] for series in self.by_rank.values() if name in series]
        return min((line for one in known if (line := one.line_of(step))), default=0)

    @property
    def num_points(self) -> int:
        """Number of values in the longest series."""
        return max((len(one) for series in self.by_rank.values() for one in series.values()), default=0)


@dataclass(frozen=True)
class FrameAt:
    """One frame of a traceback."""

    file: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True)
class LoggedError:
    """An error, and what the log says about it; `kind` is the name of one of `errors.KINDS`, or `traceback`."""

    kind: str
    text: str
    file: str
    line: int
    rank: int | None = None
    step: int = -1
    """The last step that the log had reached; -1 if none."""
    frames: tuple[FrameAt, ...] = ()
    """Frames of the traceback, outermost first; empty if there is none."""
    values: Mapping[str, str] = field(default_factory=dict)
    num_times: int = 1
    num_rows_after: int = 0
    """Number of rows of numbers that follow the error in the file: a training that goes on has dealt with the error."""


@dataclass(frozen=True)
class Config:
    """Settings, flat: `optimizer.lr` -> `0.1`."""

    file: str
    values: Mapping[str, str]
    lines: Mapping[str, int] = field(default_factory=dict)
    kind: str = "settings"
    """`settings`, `environment`, `versions`, `deepspeed`, `accelerate` or `model`."""


@dataclass(frozen=True)
class Code:
    """A script as text."""

    file: str
    text: str


@dataclass(frozen=True)
class Shapes:
    """A model's parameters."""

    file: str
    entries: tuple[tuple[str, tuple[int, ...], str], ...]
    """(name, shape, class of the module that owns it or empty if unknown)"""
    basis: str = "observation"
    """`inference` if the shapes were derived from code."""


@dataclass(frozen=True)
class WrittenSample:
    """A text that a model wrote."""

    file: str
    line: int
    text: str


@dataclass
class Found:
    """Everything that was read."""

    runs: list[LoggedRun] = field(default_factory=list)
    errors: list[LoggedError] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)
    code: list[Code] = field(default_factory=list)
    tables: list[Shapes] = field(default_factory=list)
    samples: list[WrittenSample] = field(default_factory=list)
    dumps: Dumps | None = None
    task: str = ""
    symptoms: list[str] = field(default_factory=list)
    """What people say about the run, if there is a context package that has it."""
    constraints: object = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Files that a context package names but that do not exist."""
    remarks: list[str] = field(default_factory=list)
    """One sentence for each file that holds nothing of use."""
    failures: list[str] = field(default_factory=list)
    """One sentence for each file, or part of one, that cannot be used."""
    files: list[Path] = field(default_factory=list)
    named_ranks: set[int] = field(default_factory=set)
    """Ranks that have a file of their own, whatever the file holds."""
    num_bytes: int = 0

    def settings(self) -> Iterator[tuple[str, str, Config]]:
        """Yield (name, value, config that holds it) of every setting."""
        for config in self.configs:
            for name, value in config.values.items():
                yield name, value, config

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to judge."""
        is_something = (
            self.runs or self.errors or self.configs or self.code or self.tables or self.samples or self.dumps
        )
        return not (is_something or self.symptoms)
