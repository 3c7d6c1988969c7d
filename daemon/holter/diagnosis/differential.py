"""Differential diagnosis: which causes fit what a detector saw, and what it looked for and did not see.

`ROWS` is the whole of it, to be read line by line. A fact is True (seen), False (looked for, not seen) or None (nobody looked).

    a row fits when   every fact in `seen` is True, in `absent` is False, in `unknown` is None, and no fact in `unless` is True

Of the rows that fit, the surest of each cause counts. A confidence under 0.70 must say which evidence is missing.
"""

from dataclasses import dataclass
from typing import Literal

from holter.diagnosis.causes import BY_NAME, CauseEntry
from holter.records import Basis, Cause, Evidence, Finding

CAPS: dict[Basis, float] = {"observation": 0.95, "documented": 0.85, "inference": 0.70}
"""No confidence exceeds what its basis allows."""
NEGLIGIBLE = 0.20
"""An alternative below this is not worth a reader's time; a leading cause is named however unsure."""
SURE = 0.70
"""Below this a diagnosis says which evidence is missing."""


@dataclass(frozen=True)
class Row:
    """One line of the differential."""

    cause: str
    detector: str
    confidence: float
    basis: Basis
    seen: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    names: Literal["culprits", "everyone"] = "culprits"
    """Whom the cause is laid to: the finding's culprits, or every rank that was compared."""
    tensors: Literal["finding", "parameters", "gradients"] = "finding"
    missing: str = ""
    """What would settle it."""

    def fits(self, finding: Finding) -> bool:
        """Whether this row speaks of this finding."""
        facts = finding.facts
        return (
            finding.detector == self.detector
            and all(facts.get(name) is True for name in self.seen)
            and all(facts.get(name) is False for name in self.absent)
            and all(facts.get(name) is None for name in self.unknown)
            and not any(facts.get(name) is True for name in self.unless)
        )


_NO_LOCAL_VIEW = (
    "gradients from before the reduction: the framework did not show them, so the rank that made the NaN is not known"
)
_NO_REPLAY = "a replay of the step's batch, to name the module"
_NO_TIE_BREAK = (
    "something to tell the sound side from the damaged one: the ranks' own history across this step, a third replica, or a "
    "checkpoint with fingerprints; without it all ranks that differ are named"
)
_NO_TABLES = "the ranks' tables of fingerprints, to tell all tensors from a few"
_NO_GRADIENTS = "a comparison of the reduced gradients"
_NO_PARAMETERS = "a comparison of the parameters at the start"
_NO_STATE = "the optimizers' learning rates, step counts and states, compared between ranks"
_FEW_GRADIENTS = "why only some gradients differ: parameters outside the reducer, a clip that not all ranks apply, and a faulty collective look alike here"

ROWS: tuple[Row, ...] = (
    # nonfinite_values: where was it first, before the reduction?
    Row("nonfinite_input", "nonfinite_values", 0.93, "observation", seen=("has_nonfinite_input", "has_nonfinite_loss")),
    Row("nonfinite_input", "nonfinite_values", 0.85, "observation", seen=("has_nonfinite_input",), absent=("has_nonfinite_loss",)),
    Row("nonfinite_input", "nonfinite_values", 0.60, "inference", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input", "is_origin_input_finite"), missing="the batch as the model got it: it was finite as it came, but a replay met a module whose input was not"),
    Row("nonfinite_forward", "nonfinite_values", 0.95, "observation", seen=("has_nonfinite_loss", "has_origin_module", "is_origin_input_finite"), absent=("has_nonfinite_input",)),
    Row("nonfinite_forward", "nonfinite_values", 0.85, "documented", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input",), unless=("has_origin_module",)),
    Row("nonfinite_forward", "nonfinite_values", 0.50, "inference", seen=("has_nonfinite_loss",), absent=("has_nonfinite_input",), missing=_NO_REPLAY + " that starts from finite inputs"),
    Row("nonfinite_backward", "nonfinite_values", 0.93, "observation", seen=("has_nonfinite_gradient", "is_local_view"), absent=("has_nonfinite_input", "has_nonfinite_loss")),
    Row("nonfinite_backward", "nonfinite_values", 0.60, "inference", absent=("has_nonfinite_input", "has_nonfinite_loss"), unless=("is_local_view",), missing=_NO_LOCAL_VIEW),
    Row("nonfinite_backward", "nonfinite_values", 0.15, "inference", missing=_NO_REPLAY),
    # replica_divergence: equal at first? do the reduced gradients agree? all tensors or a few? whose history broke?
    # Different from the start.
    Row("unsynced_initialisation", "replica_divergence", 0.95, "observation", seen=("parameters_differ_at_first",), absent=("gradients_differ",), unless=("own_history_broke_on_some",), names="everyone", tensors="parameters"),
    Row("unsynced_initialisation", "replica_divergence", 0.85, "documented", seen=("parameters_differ_at_first", "gradients_differ"), unless=("own_history_broke_on_some",), names="everyone", tensors="parameters"),
    Row("unsynced_initialisation", "replica_divergence", 0.80, "documented", seen=("parameters_differ_at_first",), unknown=("gradients_differ",), unless=("own_history_broke_on_some",), names="everyone", tensors="parameters"),
    Row("unsynced_initialisation", "replica_divergence", 0.40, "inference", seen=("parameters_differ_at_first",), names="everyone", tensors="parameters", missing=_NO_TIE_BREAK),
    Row("unsynced_initialisation", "replica_divergence", 0.40, "inference", seen=("parameters_differ",), unknown=("parameters_differ_at_first",), unless=("gradients_differ",), names="everyone", tensors="parameters", missing=_NO_PARAMETERS),
    # Gradients that nobody reduced. Parameters that differ as well are what it leads to.
    Row("gradient_sync_bypassed", "replica_divergence", 0.95, "observation", seen=("gradients_differ_always", "gradients_differ_in_all_tensors", "gradients_differ_repeatedly"), absent=("parameters_differ_at_first",), names="everyone", tensors="gradients"),
    Row("gradient_sync_bypassed", "replica_divergence", 0.90, "observation", seen=("gradients_differ_always", "gradients_differ_in_all_tensors"), names="everyone", tensors="gradients"),
    Row("gradient_sync_bypassed", "replica_divergence", 0.65, "inference", seen=("gradients_differ_always",), unknown=("gradients_differ_in_all_tensors",), names="everyone", tensors="gradients", missing=_NO_TABLES),
    Row("gradient_sync_bypassed", "replica_divergence", 0.40, "inference", seen=("gradients_differ",), names="everyone", tensors="gradients", missing=_FEW_GRADIENTS),
    # Weights that changed by themselves.
    Row("silent_data_corruption", "replica_divergence", 0.93, "observation", seen=("own_history_broke_on_some",), absent=("gradients_differ", "parameters_differ_in_all_tensors"), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.85, "documented", seen=("own_history_broke_on_some",), unless=("gradients_differ", "parameters_differ_in_all_tensors"), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.80, "documented", seen=("own_history_broke_on_some",), absent=("gradients_differ",), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.75, "documented", seen=("own_history_broke_on_some",), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.80, "documented", seen=("is_culprit_known",), absent=("parameters_differ_at_first", "gradients_differ", "parameters_differ_in_all_tensors"), unless=("parameters_parted_within_a_step",), tensors="parameters"),
    Row("silent_data_corruption", "replica_divergence", 0.60, "inference", absent=("parameters_differ_at_first", "gradients_differ", "parameters_differ_in_all_tensors"), unless=("parameters_parted_within_a_step",), tensors="parameters", missing=_NO_TIE_BREAK),
    Row("silent_data_corruption", "replica_divergence", 0.50, "inference", seen=("parameters_parted_within_a_step",), absent=("parameters_differ_at_first", "gradients_differ"), tensors="parameters", missing=_NO_STATE),
    Row("silent_data_corruption", "replica_divergence", 0.45, "inference", seen=("parameters_differ",), absent=("parameters_differ_at_first",), unless=("gradients_differ",), tensors="parameters", missing=_NO_GRADIENTS + ", and " + _NO_TABLES),
    Row("silent_data_corruption", "replica_divergence", 0.45, "inference", seen=("gradients_differ",), absent=("gradients_differ_always",), missing="the collective's result on each rank: gradients differed at some steps and agreed at others"),
    Row("silent_data_corruption", "replica_divergence", 0.10, "inference", missing=_NO_TIE_BREAK),
    # dead_rank: how did the first one end?
    Row("rank_dead", "dead_rank", 0.95, "observation", seen=("is_signal",), unless=("is_terminated",)),
    Row("rank_dead", "dead_rank", 0.90, "observation", seen=("is_terminated",)),
    Row("rank_dead", "dead_rank", 0.93, "observation", seen=("is_exception",), unless=("is_connection_lost",)),
    Row("rank_dead", "dead_rank", 0.93, "observation", seen=("is_status_known",), absent=("is_signal", "is_exception")),
    Row("rank_dead", "dead_rank", 0.85, "observation", seen=("is_order_clear",), absent=("is_status_known",)),
    Row("rank_dead", "dead_rank", 0.60, "inference", absent=("is_status_known",), unless=("is_order_clear",), missing="exit codes: all ranks ended at once without last words, so the job may have been stopped from outside"),
    Row("rank_dead", "dead_rank", 0.55, "inference", missing="the end of the peer that closed the connection: no rank was seen to die before this one complained"),
)  # fmt: skip
"""Read a line as: this cause, from this detector, so sure, on this basis, if these were seen, those looked for in vain, these not looked for, unless those."""


def rank_causes(finding: Finding) -> tuple[Cause, ...]:
    """Every cause that fits, the surest first; never empty for a finding of a detector in `ROWS`."""
    best: dict[str, Row] = {}
    for row in ROWS:
        if row.fits(finding) and (row.cause not in best or _sureness(row) > _sureness(best[row.cause])):
            best[row.cause] = row
    ranked = sorted(best.values(), key=_sureness, reverse=True)
    return tuple(_cause(row, finding) for place, row in enumerate(ranked) if place == 0 or _sureness(row) >= NEGLIGIBLE)


def top_cause(finding: Finding) -> str:
    """The slug of the likeliest cause; empty if none fits."""
    causes = rank_causes(finding)
    return causes[0].cause if causes else ""


def _sureness(row: Row) -> float:
    return min(row.confidence, CAPS[row.basis])


def _cause(row: Row, finding: Finding) -> Cause:
    entry = BY_NAME[row.cause]
    confidence = _sureness(row)
    tensors = _tensors(row, finding)
    gap = (Evidence(kind="missing", summary=row.missing),) if confidence < SURE else ()
    return Cause(
        cause=row.cause,
        confidence=confidence,
        basis=row.basis,
        ranks=tuple(finding.facts.get("compared_ranks", finding.ranks)) if row.names == "everyone" else finding.ranks,
        tensors=tensors,
        modules=finding.modules if row.tensors == "finding" else _modules(tensors),
        mechanism=entry.mechanism,
        evidence=(*finding.evidence, *gap),
        would_refute=f"{entry.would_refute} {_looked(entry, finding)}",
        fix=entry.fix,
    )


def _tensors(row: Row, finding: Finding) -> tuple[str, ...]:
    if row.tensors == "finding":
        return finding.tensors
    return tuple(finding.facts.get("parameter_tensors" if row.tensors == "parameters" else "gradient_tensors", ()))


def _modules(tensors: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(module for name in tensors if (module := name.rpartition(".")[0])))


def _looked(entry: CauseEntry, finding: Finding) -> str:
    value = finding.facts.get(entry.refuting_fact)
    if value is None:
        return "This was not looked for."
    return (
        "This was seen, and speaks against it." if value is entry.is_refuted_by else "This was looked for and not seen."
    )
