"""What is to blame, in words short enough for a label, an alert and a pager's one line."""

from collections.abc import Sequence

from holter.exporters.snapshot import IncidentInfo
from holter.records import Collective, Diagnosis

MAX_NAMES = 4
"""Ranks or tensors named; the rest are counted."""
MAX_NAME = 120
"""Characters of a name that a script chose."""


def alert_name(name: str) -> str:
    """`nonfinite_input` is `HolterNonfiniteInput` on a pager."""
    return "Holter" + "".join(word.capitalize() for word in name.split("_"))


def incident_info(diagnosis: Diagnosis, address: str) -> IncidentInfo:
    """The leading cause of an incident; `address` is the coordinator's."""
    leading = diagnosis.causes[0] if diagnosis.causes else None
    return IncidentInfo(
        incident=diagnosis.id,
        cause=leading.cause if leading else "unknown",
        severity=diagnosis.severity,
        ranks=_some([str(rank) for rank in leading.ranks]) if leading else "",
        tensors=_some(leading.tensors or leading.modules) if leading else "",
        collective=_call(leading.collective) if leading else "",
        step=str(diagnosis.first_step) if diagnosis.first_step >= 0 else "",
        url=f"{address}/#incident={diagnosis.id}",
    )


def describe(info: IncidentInfo, run_id: str) -> str:
    """What an alert says of an incident; the rules of Prometheus say the same, in its templates."""
    where = (("Rank", info.ranks), ("Tensor", info.tensors), ("Collective", info.collective), ("Since step", info.step))
    said = "".join(f" {word} {value}." for word, value in where if value)
    return (
        f"Run {run_id}: {info.cause}.{said} Diagnosis: {info.url} (incident {info.incident}); what to do: holter explain "
        f"{info.cause}."
    )


def clipped(name: str) -> str:
    """A long name's end, which tells it from its siblings."""
    return name if len(name) <= MAX_NAME else "…" + name[1 - MAX_NAME :]


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    named = ", ".join(clipped(name) for name in names[:MAX_NAMES])
    return f"{named} and {more:,} more" if more > 0 else named


def _call(collective: Collective | None) -> str:
    if collective is None:
        return ""
    return (
        f"{clipped(collective.operation)} #{collective.sequence} of {clipped(collective.group) or 'the default group'}"
    )
