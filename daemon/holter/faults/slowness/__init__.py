"""Ranks that the others wait for. Lateness itself breaks nothing, so that nothing follows from it."""

from holter.faults.family import DetectorEntry, Family, Stage
from holter.faults.slowness.causes import CAUSES
from holter.faults.slowness.slow_rank import SlowRank

FAMILY = Family(
    detectors=(DetectorEntry(SlowRank(), Stage.LATE),),
    causes=CAUSES,
)  # fmt: skip
