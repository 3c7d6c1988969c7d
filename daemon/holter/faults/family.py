"""What a family of faults declares: its detectors, the causes that can be named, and what can follow from what.

To add a detector, add its file and, in the family's `causes.py`, its causes and its line in `FAMILY`; nothing else names it.
The slugs of causes are public. Each cause is also a page (`holter explain nonfinite_input`), so write it for somebody who
was just woken and has no code at hand.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict, cast

from holter.faults.window import Window
from holter.records import Basis, Finding, Fix


@dataclass(frozen=True)
class Row:
    """One line of the differential.

    If the facts match, this detector's finding has the entry's cause, with this confidence and on this basis. A fact is True
    (seen), False (looked for and not seen) or None (nobody looked).
    """

    detector: str
    confidence: float
    basis: Basis
    seen: tuple[str, ...] = ()
    """Facts that must be True."""
    absent: tuple[str, ...] = ()
    """Facts that must be False."""
    unknown: tuple[str, ...] = ()
    """Facts that must be None."""
    unless: tuple[str, ...] = ()
    """Facts that must not be True."""
    names: Literal["culprits", "everyone"] = "culprits"
    """Which ranks the cause names: the finding's culprits, or every rank that was compared."""
    tensors: Literal["finding", "parameters", "gradients"] = "finding"
    """Which tensors the cause names: the finding's own, or the parameters or gradients that differ."""
    missing: str = ""
    """The evidence that would settle it; required if the confidence is below 0.70."""

    def fits(self, finding: Finding) -> bool:
        """Whether this row fits this finding."""
        facts = finding.facts
        return (
            finding.detector == self.detector
            and all(facts.get(name) is True for name in self.seen)
            and all(facts.get(name) is False for name in self.absent)
            and all(facts.get(name) is None for name in self.unknown)
            and not any(facts.get(name) is True for name in self.unless)
        )


@dataclass(frozen=True)
class Damage:
    """What a cause does to weights and optimizer state, and so to a checkpoint that holds them."""

    begins: Literal["with the step", "before the step"]
    """Whether the state before the step in which it was found is still good ("with the step") or not."""
    verdict: Literal["poisoned", "suspect"]
    """`poisoned`: the numbers are certainly bad. `suspect`: they may be bad, and nobody knows how bad."""
    why: str
    """Why, as the start of a sentence that ends with the step."""


@dataclass(frozen=True, kw_only=True)
class CauseEntry:
    """One cause, and everything that is declared about it."""

    cause: str
    """The cause's slug."""
    happened: str
    """What happened, in one sentence."""
    mechanism: str
    """How it comes about."""
    would_refute: str
    """One sentence: which observation would disprove it."""
    refuting_fact: str
    """The fact that says whether that observation was made."""
    is_refuted_by: bool
    """The value of that fact which disproves the cause."""
    rows: tuple[Row, ...]
    """How it is recognised. Of the rows that fit a finding, the one with the highest confidence counts."""
    fix: Fix
    damage: Damage | None = None
    """What it does to a checkpoint; None if it spoils no numbers, as a slow rank, a plateau, a dead peer or a layer
    that learns nothing."""
    is_hang: bool = False
    """Whether ranks wait for each other: it is over when they move on, and until then no rank reaches an agreed step."""
    is_death: bool = False
    """Whether a process ended by itself and the survivors wait for it."""
    keeps_severity: bool = False
    """Whether its consequences leave its severity as it is: peers that wait for a script that has ended itself are no
    hang."""
    passes_after_steps: int | None = None
    """Number of steps without it after which it is over, leaving nothing behind; None if it stays until the run ends."""
    is_measured_against_the_past: bool = False
    """It may seem to be gone only because its beginning was forgotten, so it passes only while the step at which it
    began is remembered."""


class Detector(Protocol):
    """The interface of every detector."""

    @property
    def name(self) -> str:
        """The fault it detects; also its file, metric label, alert and page."""

    def judge(self, window: Window) -> Iterator[Finding]:
        """Yield what is wrong in this window. Pure: the same window gives the same findings."""


class EngineFacts(TypedDict, total=False):
    """The facts of a finding that the engine itself reads, whichever detector states them.

    All other facts are True (seen), False (looked for and not seen) or None (nobody looked), and only the rows of causes and the
    lines of consequences read them.
    """

    first_class: str
    """The class of tensors in which ranks differed first."""
    compared_ranks: list[int]
    """Every rank that was compared, if no particular rank is at fault."""
    parameter_tensors: list[str]
    """Names of the parameters that differ."""
    gradient_tensors: list[str]
    """Names of the gradients that differ."""
    series: list[str]
    """Names of the series that the detector looked at: they are drawn first."""
    late_ranks: list[int]
    """Ranks whose lag is drawn."""
    overdue_at_ns: int
    """When a deadline passed."""
    began_at_ns: int | None
    """When it began, if the detector knows that better than by the step's report; the time until detection is counted
    from then."""
    is_beyond_return: bool
    """Whether it can no longer pass by itself, whatever its cause."""
    is_running: bool
    """Whether the job continues in spite of it: nothing hangs."""


def engine_facts(finding: Finding) -> EngineFacts:
    """Return the finding's facts that the engine may ask for by name."""
    return cast("EngineFacts", finding.facts)


class Stage(enum.IntEnum):
    """Where in a run, and in a step, a fault begins; of two faults in one step, the earlier can have caused the later."""

    # How the job was set up: these hold before its first step.
    MODEL_BUILT = enum.auto()
    OPTIMIZER_BUILT = enum.auto()
    INITIALISED = enum.auto()
    CONVERTED = enum.auto()
    """Dtypes and buffers were converted."""
    LOADED = enum.auto()
    # One step, from its beginning to its end.
    FED = enum.auto()
    RATE_SET = enum.auto()
    WEIGHTS_BEFORE = enum.auto()
    CAST = enum.auto()
    """The weights were copied into another dtype."""
    FORWARD = enum.auto()
    CLEARED = enum.auto()
    """Gradients of the step before were set to zero, or its step was skipped."""
    BACKWARD = enum.auto()
    REDUCTION = enum.auto()
    REDUCED = enum.auto()
    """The gradients as the reduction left them, until they are clipped."""
    GIVEN = enum.auto()
    """The gradients as the optimizer gets them."""
    WEIGHTS_AFTER = enum.auto()
    # What a script logs, and what a curve shows.
    LOGGED = enum.auto()
    CURVE = enum.auto()
    # A rank that is late, stands still, or has ended.
    LATE = enum.auto()
    STANDSTILL = enum.auto()
    UNKNOWN = enum.auto()
    """The detector's findings determine the stage themselves, by the class of tensors that differed first."""


STAGE_OF_CLASS = {
    "parameters_before": Stage.WEIGHTS_BEFORE,
    "gradients_reduced": Stage.REDUCED,
    "gradients": Stage.GIVEN,
    "hyperparameters": Stage.GIVEN,
    "parameters_after": Stage.WEIGHTS_AFTER,
    "optimizer_state": Stage.WEIGHTS_AFTER,
}
"""Class of tensors in which ranks differed first -> the stage of a finding that names it."""

Group = Literal["curves", "weights", "logged"]
"""Detectors whose findings follow from the same faults: symptoms in a curve, weights that do not move, what a script logs."""


@dataclass(frozen=True)
class DetectorEntry:
    """One detector in the list of its family."""

    detector: Detector
    stage: Stage
    """Where its fault begins."""
    group: Group | None = None
    """Name by which a `Consequence` may refer to several detectors at once."""
    incident_per: Literal["cause", "event", "run"] = "cause"
    """When a second finding opens another incident: if its cause differs; if cause or ranks differ; or never, as a
    better opinion on the first."""
    tried_on: Literal["jobs", "made-up windows"] = "jobs"
    """What it was tried on. A detector that was never tried on a real job is on trial: it reports, and halts nothing."""
    sees_damage: bool = False
    """Whether what it finds has been applied to the weights, whatever caused it and whatever leads the incident."""
    sees_ends: bool = False
    """Whether its findings begin when a process ended, not when a step was reported."""


@dataclass(frozen=True)
class Consequence:
    """A line saying that findings of certain detectors may be caused by the leader's finding.

    Time decides as well: a cause does not come after its effect. Only a leader that was wrong from the start can explain what is
    dated before it was noticed (`whenever`).
    """

    leader: str
    """Name of a detector."""
    after: tuple[str, ...] = ()
    """Detectors whose findings can follow, at the same moment or later."""
    groups: tuple[Group, ...] = ()
    """Groups of detectors whose findings can follow."""
    if_leader_is: tuple[str, ...] = ()
    """The leader's cause must be one of these; empty: any."""
    unless_leader_has: tuple[str, ...] = ()
    """None of these facts of the leader may be True."""
    unless_follower_is: tuple[str, ...] = ()
    """The follower's own cause must not be one of these."""
    unless_follower_has: tuple[str, ...] = ()
    """None of these facts of the follower may be True."""
    on_a_shared_rank: bool = False
    """Whether both must name the same rank."""
    whenever: bool = False
    """Whether it also explains findings that are dated before the leader."""


@dataclass(frozen=True)
class Family:
    """What one folder of `faults` declares."""

    detectors: tuple[DetectorEntry, ...]
    """Its detectors; within one stage, those that begin earlier come first."""
    causes: tuple[CauseEntry, ...]
    """Its causes; of two equally likely ones, the first is named first."""
    brings_about: tuple[Consequence, ...] = ()
    """What its detectors' findings can lead to, in other families too."""


NOT_BY_A_NUMBER = ("is_killed", "is_out_of_memory")
"""Facts of an end that no bad number explains: a NaN makes nobody kill a process, and no kernel run out of memory."""
NOT_BY_A_SCRIPT = ("rank_suspended", "host_unreachable")
"""Causes that no call of a script and no batch explains: a script stops no process and no host."""
