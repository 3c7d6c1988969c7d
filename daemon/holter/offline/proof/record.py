"""Defines the record of what one run shows, whether holter watched it or a log did; `verify` compares two records.

A run directory and a log make the same record; `watched_by` says which it was, because a log cannot show everything that
holter sees.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from holter.offline import causes, naming
from holter.offline.found import Config, Found, LoggedRun
from holter.offline.judging import curves_of
from holter.records import Cause, Diagnosis, Severity

Points = tuple[tuple[int, float], ...]
"""(step, value), ascending by step."""
LOSS, NORM, EVALUATION, MEMORY = "loss", "gradient_norm", "evaluation", "memory"
SERIES_OF: dict[str, str] = {
    "overfitting": EVALUATION,
    "exploding_gradients": NORM,
    "vanishing_gradients": NORM,
    "imbalanced_gradients": NORM,
    "zero_gradients": NORM,
    "device_memory_leak": MEMORY,
    "host_memory_leak": MEMORY,
}
"""Cause -> curve in which it shows; the loss for causes that are not named here."""
IN_LOGS = frozenset(cause for cause, _ in causes.ROWS)
"""Causes that a log alone can show."""


class PastFault(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a diagnosis that are compared with another run."""

    id: str
    cause: str
    severity: Severity
    symptom: str
    first_step: int
    """First step with the fault; -1 if unknown."""
    detected_step: int
    ranks: tuple[int, ...] = ()
    place: str = ""
    """Module, tensor or collective, without numbers of layers."""
    fix: str = ""
    """What the diagnosis said to do."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one run."""

    name: str
    watched_by: Literal["holter", "log"]
    first_step: int
    last_step: int
    unit: Literal["step", "epoch", "log"] = "step"
    """Unit of the steps; see `LoggedRun.counted_by`."""
    series: Mapping[str, Points] = {}
    """Points by `loss`, `gradient_norm`, `evaluation` and `memory`."""
    faults: tuple[PastFault, ...] = ()
    """Faults of the run, the gravest first."""
    settings: Mapping[str, str] = {}
    """`config: lr` -> `0.1`; the word before the colon is its kind: config, command, environment, version, code, world."""
    batches: Mapping[int, int] = {}
    """Step -> fingerprint of rank 0's batch."""
    blind: tuple[str, ...] = ()
    """One sentence for each thing that could not be seen in the run."""

    @property
    def num_steps(self) -> int:
        """Number of steps that the run made; 0 if none is known."""
        return max(0, self.last_step - self.first_step + 1)


def fault_of(diagnosis: Diagnosis, base_step: int = 0) -> PastFault:
    """Make the record of a diagnosis; `base_step` is the number of steps completed before holter counted."""
    cause = named_cause(diagnosis)
    known = diagnosis.first_step >= 0
    return PastFault(
        id=diagnosis.id,
        cause=cause.cause,
        severity=diagnosis.severity,
        symptom=diagnosis.symptom,
        first_step=diagnosis.first_step + base_step if known else -1,
        detected_step=diagnosis.detected_step + base_step if known else -1,
        ranks=cause.ranks,
        place=place_of(cause),
        fix=cause.fix.do,
    )


def named_cause(diagnosis: Diagnosis) -> Cause:
    """Return the cause that the evidence led to; at three strikes it stands last, behind its alternatives."""
    is_in_doubt = any(evidence.kind == "strikes" for evidence in diagnosis.causes[0].evidence)
    return diagnosis.causes[-1] if is_in_doubt else diagnosis.causes[0]


def place_of(cause: Cause) -> str:
    """Return the place of a cause in a form that is the same in another run: `layers.*.mlp`, `all_reduce of default_pg`, `train.py:40`."""
    for names in (cause.modules, cause.tensors):
        if names:
            return ".".join("*" if part.isdigit() else part for part in names[0].split("."))
    if cause.collective:
        return f"{cause.collective.operation} of {cause.collective.group}"
    for evidence in cause.evidence:
        file = evidence.values.get("file")
        if evidence.kind in {"exception", "traceback", "frame"} and file:
            return f"{str(file).rpartition('/')[2]}:{evidence.values.get('line', '')}"
    return ""


def record_of_found(found: Found, diagnoses: Iterable[Diagnosis], name: str) -> RunRecord:
    """Make the record of a log, a table, or a folder with configs and code beside them; of several runs, the longest."""
    run = max(found.runs, key=lambda one: one.num_points, default=None)
    series = _series(run) if run else {}
    steps = [step for points in series.values() for step, _ in points]
    steps += [error.step for error in found.errors if error.step >= 0]
    unit = run.counted_by if run else "step"
    return RunRecord(
        name=name,
        watched_by="log",
        first_step=min(steps, default=0),
        last_step=max(steps, default=-1),
        unit="epoch" if unit == "epoch" else "log" if unit == "log" else "step",
        series=series,
        faults=tuple(fault_of(one) for one in diagnoses),
        settings=_settings(found),
        blind=tuple(found.failures),
    )


def _series(run: LoggedRun) -> dict[str, Points]:
    curves = curves_of(run)
    longest = max(curves.evaluations.values(), key=len, default=[])
    made = {LOSS: curves.loss, NORM: curves.norm, EVALUATION: longest, MEMORY: curves.memory}
    for name in run.names():
        if not made[LOSS] and naming.term_of_loss(name):
            made[LOSS] = run.points(name)
    return {name: tuple(points) for name, points in made.items() if points}


def _settings(found: Found) -> dict[str, str]:
    made = {f"{_kind(config)}: {name}": value for name, value, config in found.settings()}
    for code in found.code:
        made[f"code: {code.file.rpartition('/')[2]}"] = digest(code.text.encode())
    return made


def _kind(config: Config) -> str:
    return {"environment": "environment", "versions": "version"}.get(config.kind, "config")


def digest(content: bytes) -> str:
    """Return a short hash of a file's content."""
    return hashlib.sha256(content).hexdigest()[:12]
