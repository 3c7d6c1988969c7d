"""What a family of faults declares: its detectors, the causes that can be named, and what can follow from what.

Whoever adds a detector adds its file and, in the family's `causes.py`, its causes and its line in `FAMILY`; nothing else names it.
The slugs of causes are public. Each cause is also a page (`holter explain nonfinite_input`), so it is written for somebody who was just
woken and has no code at hand.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict, cast

from holter.faults.window import Window
from holter.records import Basis, Finding, Fix


@dataclass(frozen=True)
class Row:
    """One line of the differential: if the facts are so, this detector's finding has the entry's cause, with this confidence and on this basis.

    A fact is True (seen), False (looked for and not seen) or None (nobody looked).
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
    """Facts of which none may be True."""
    names: Literal["culprits", "everyone"] = "culprits"
    """Which ranks the cause names: the finding's culprits, or every rank that was compared."""
    tensors: Literal["finding", "parameters", "gradients"] = "finding"
    """Which tensors the cause names: the finding's own, or the parameters or gradients that differ."""
    missing: str = ""
    """The evidence that would settle it; needed where the confidence is below 0.70."""

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
    """Whether the state before the step at which it was found is still good."""
    verdict: Literal["poisoned", "suspect"]
    """`poisoned`: the numbers are bad for certain. `suspect`: the incident speaks against them, and nobody knows how much is left of them."""
    why: str
    """The start of a sentence that goes on with the step."""


@dataclass(frozen=True, kw_only=True)
class CauseEntry:
    """One cause, and everything that is declared about it."""

    cause: str
    """Its slug."""
    happened: str
    """One sentence."""
    mechanism: str
    """How it comes about."""
    would_refute: str
    """One sentence: which observation would disprove it."""
    refuting_fact: str
    """The fact that tells whether that observation was made."""
    is_refuted_by: bool
    """The value of that fact which refutes."""
    rows: tuple[Row, ...]
    """How it is recognised. Of the rows that fit a finding, the surest counts."""
    fix: Fix
    damage: Damage | None = None
    """What it does to a checkpoint; None: a slow rank, a plateau, a dead peer or a layer that learns nothing spoils no number."""
    is_hang: bool = False
    """Ranks wait for each other: it is over when they move on, and no rank reaches an agreed step meanwhile."""
    is_death: bool = False
    """A process ended by itself: the survivors wait for it."""
    keeps_severity: bool = False
    """What it brings about does not make it graver: peers that wait for a script that has ended itself are no hang."""
    passes_after_steps: int | None = None
    """It leaves nothing behind, and is over after so many steps without it; None: it stays until the run ends."""
    is_measured_against_the_past: bool = False
    """It can be missing only because its beginning was forgotten: it passes only while the step at which it began is remembered."""


class Detector(Protocol):
    """What every detector is."""

    @property
    def name(self) -> str:
        """The fault it sees: also its file, its metric label, its alert and its page."""

    def judge(self, window: Window) -> Iterator[Finding]:
        """What is wrong in this window. Pure: the same window gives the same findings."""


class EngineFacts(TypedDict, total=False):
    """The facts of a finding that the engine reads itself, whichever detector states them.

    All other facts are True (seen), False (looked for and not seen) or None (nobody looked), and only the rows of causes and the lines
    of consequences read them.
    """

    first_class: str
    """The class of tensors in which ranks differed first."""
    compared_ranks: list[int]
    """Every rank that was compared, where the fault is nobody's in particular."""
    parameter_tensors: list[str]
    """Parameters that differ."""
    gradient_tensors: list[str]
    """Gradients that differ."""
    series: list[str]
    """Series that the detector looked at: they are drawn first."""
    late_ranks: list[int]
    """Ranks whose lag is drawn."""
    overdue_at_ns: int
    """When a deadline passed."""
    began_at_ns: int | None
    """When it began, where the detector knows better than the step's report tells: how long the detection took is counted from then."""
    is_beyond_return: bool
    """It does not pass any more, whatever its cause."""
    is_running: bool
    """The job goes on in spite of it: nothing hangs."""


def engine_facts(finding: Finding) -> EngineFacts:
    """The facts that the engine may ask for by name."""
    return cast("EngineFacts", finding.facts)


class Stage(enum.IntEnum):
    """Where in a run, and in a step, a fault begins: of two in one step the earlier can have brought about the later."""

    # How the job was set up: true before its first step.
    MODEL_BUILT = enum.auto()
    OPTIMIZER_BUILT = enum.auto()
    INITIALISED = enum.auto()
    CONVERTED = enum.auto()
    """Dtypes and buffers."""
    LOADED = enum.auto()
    # One step, from its beginning to its end.
    FED = enum.auto()
    RATE_SET = enum.auto()
    WEIGHTS_BEFORE = enum.auto()
    CAST = enum.auto()
    """Copies of the weights in another dtype."""
    FORWARD = enum.auto()
    CLEARED = enum.auto()
    """Gradients of the step before are set to zero, or its step is skipped."""
    BACKWARD = enum.auto()
    REDUCTION = enum.auto()
    REDUCED = enum.auto()
    """What the reduction left, until it is clipped."""
    GIVEN = enum.auto()
    """What the optimizer gets."""
    WEIGHTS_AFTER = enum.auto()
    # What a script says of itself, and what a curve shows.
    LOGGED = enum.auto()
    CURVE = enum.auto()
    # A rank that is late, does not go on, or is no more.
    LATE = enum.auto()
    STANDSTILL = enum.auto()
    UNKNOWN = enum.auto()
    """Its findings tell the stage themselves, by the class of tensors that differed first."""


STAGE_OF_CLASS = {
    "parameters_before": Stage.WEIGHTS_BEFORE,
    "gradients_reduced": Stage.REDUCED,
    "gradients": Stage.GIVEN,
    "hyperparameters": Stage.GIVEN,
    "parameters_after": Stage.WEIGHTS_AFTER,
    "optimizer_state": Stage.WEIGHTS_AFTER,
}
"""Where a finding begins that names the class of tensors in which ranks differed first."""

Group = Literal["curves", "weights", "logged"]
"""Detectors that follow from the same things: symptoms in a curve, weights that do not move, what a script says of itself."""


@dataclass(frozen=True)
class DetectorEntry:
    """One detector in the list of its family."""

    detector: Detector
    stage: Stage
    """Where its fault begins."""
    group: Group | None = None
    """A `Consequence` may name the group instead of the detector."""
    incident_per: Literal["cause", "event", "run"] = "cause"
    """When a second finding is another incident: if its cause differs; if cause or ranks differ; never, it is a better opinion on the first."""
    tried_on: Literal["jobs", "made-up windows"] = "jobs"
    """What it was tried on. One that never saw a real job is on trial: it reports, and halts nothing."""
    sees_damage: bool = False
    """What it finds was applied to the weights, whatever led to it and whatever leads the incident."""
    sees_ends: bool = False
    """Its findings begin when a process ended, not when a step was reported."""


@dataclass(frozen=True)
class Consequence:
    """Findings of `after` may be the leader's doing.

    Time decides as well: a cause does not come after its effect. Only what is wrong from the start explains what was dated before it
    was noticed (`whenever`).
    """

    leader: str
    """A detector."""
    after: tuple[str, ...] = ()
    """Detectors whose findings, at the same moment or later, can follow."""
    groups: tuple[Group, ...] = ()
    """Groups of such detectors."""
    if_leader_is: tuple[str, ...] = ()
    """Only if the leader's cause is one of these; empty: any."""
    unless_leader_has: tuple[str, ...] = ()
    """It does not follow if one of these facts of the leader is True."""
    unless_follower_is: tuple[str, ...] = ()
    """It does not follow if its own cause is one of these."""
    unless_follower_has: tuple[str, ...] = ()
    """It does not follow if one of these facts of its own is True."""
    on_a_shared_rank: bool = False
    """Only if both name the same rank."""
    whenever: bool = False
    """Also what is dated before the leader."""


@dataclass(frozen=True)
class Family:
    """A folder of `faults`."""

    detectors: tuple[DetectorEntry, ...]
    """In one stage, those that begin earlier come first."""
    causes: tuple[CauseEntry, ...]
    """Of two that are equally likely, the one that comes first is named first."""
    brings_about: tuple[Consequence, ...] = ()
    """What its detectors' findings can lead to, in other families too."""


NOT_BY_A_NUMBER = ("is_killed", "is_out_of_memory")
"""Facts of an end that no number explains: nobody kills a process, and no kernel runs out of memory, over a NaN."""
NOT_BY_A_SCRIPT = ("rank_suspended", "host_unreachable")
"""Causes that no call of a script and no batch explains: it stops no process and no host."""
