"""Faults: one folder per family, with its detectors, the causes that they lead to, and what only they share.

    <family>/<detector>.py   judges a window of what the ranks reported: a frozen dataclass that keeps nothing between two calls, so
                             that a recorded run can be judged again; its fields are its thresholds, its docstring is its page
    <family>/causes.py       what can be named: how it is recognised, and what to do about it; and FAMILY, the list of the causes, of
                             the detectors, and of what can follow from what

`ALL` is the one list of detectors, `CAUSES` that of causes.
"""

from holter.faults.data.causes import FAMILY as DATA
from holter.faults.devices.causes import FAMILY as DEVICES
from holter.faults.experts.causes import FAMILY as EXPERTS
from holter.faults.family import CauseEntry, Consequence, Detector, DetectorEntry
from holter.faults.frozen.causes import FAMILY as FROZEN
from holter.faults.hangs.causes import FAMILY as HANGS
from holter.faults.learning.causes import FAMILY as LEARNING
from holter.faults.logged.causes import FAMILY as LOGGED
from holter.faults.memory.causes import FAMILY as MEMORY
from holter.faults.model.causes import FAMILY as MODEL
from holter.faults.numerics.causes import FAMILY as NUMERICS
from holter.faults.precision.causes import FAMILY as PRECISION
from holter.faults.replicas.causes import FAMILY as REPLICAS
from holter.faults.slowness.causes import FAMILY as SLOWNESS
from holter.faults.window import ClassHistory, ExamKey, RankExit, StepView, TableKey, Window

FAMILIES = (
    NUMERICS,
    FROZEN,
    LEARNING,
    PRECISION,
    REPLICAS,
    EXPERTS,
    DATA,
    MODEL,
    LOGGED,
    MEMORY,
    DEVICES,
    HANGS,
    SLOWNESS,
)

DETECTORS: dict[str, DetectorEntry] = {entry.detector.name: entry for family in FAMILIES for entry in family.detectors}
"""Name of a detector -> what its family declares of it."""
ALL: tuple[Detector, ...] = tuple(entry.detector for entry in DETECTORS.values())
CAUSES: dict[str, CauseEntry] = {entry.cause: entry for family in FAMILIES for entry in family.causes}
"""Slug of a cause -> the cause; all causes that can be named."""
BRINGS_ABOUT: tuple[Consequence, ...] = tuple(line for family in FAMILIES for line in family.brings_about)

__all__ = [
    "ALL",
    "BRINGS_ABOUT",
    "CAUSES",
    "DETECTORS",
    "CauseEntry",
    "ClassHistory",
    "Detector",
    "ExamKey",
    "RankExit",
    "StepView",
    "TableKey",
    "Window",
]
