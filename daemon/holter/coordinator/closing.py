"""The one line with which every run ends: how far it came, what was found, where to resume, and where to read more."""

import msgspec

from holter.coordinator.judge import cause_of
from holter.faults.shared.wording import ranks_text
from holter.halting.halt_record import HaltRecord
from holter.records import Diagnosis, Healthy
from holter.records.goodput import Goodput, in_words
from holter.records.titles import titled

MAX_NAMED = 3


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the line is made of."""

    run_dir: str
    steps: int
    """Completed steps, including those of earlier lives."""
    incidents: tuple[Diagnosis, ...] = ()
    """Incidents of this life."""
    halt: HaltRecord | None = None
    last_healthy: Healthy | None = None
    blind: tuple[str, ...] = ()
    goodput: Goodput | None = None


def closing_line(run: RunSummary) -> str:
    """Return the line: `ended after 400 steps · no incident · checkpoint out/step-400 (healthy) · holter report RUN`."""
    how = f"halted after {run.halt.step} steps" if run.halt is not None else f"ended after {run.steps} steps"
    used = in_words(run.goodput) if run.goodput is not None else ""
    parts = [how, used, _incidents(run), _checkpoint(run), f"holter report {run.run_dir}"]
    return " · ".join(filter(None, parts))


def _incidents(run: RunSummary) -> str:
    if not run.incidents:
        return f"no incident, but not all was seen: {run.blind[0]}" if run.blind else "no incident"
    named = ", ".join(_named(one) for one in run.incidents[:MAX_NAMED])
    more = f" and {len(run.incidents) - MAX_NAMED} more" if len(run.incidents) > MAX_NAMED else ""
    return f"{len(run.incidents)} incident{'s' * (len(run.incidents) > 1)}: {named}{more}"


def _named(one: Diagnosis) -> str:
    ranks = one.causes[0].ranks if one.causes else ()
    where = f" on {ranks_text(ranks)}" if ranks else ""
    over = ", over" if one.closed_at else ""
    return f"{titled(cause_of(one))}{where} at step {one.first_step} ({one.severity}{over})"


def _checkpoint(run: RunSummary) -> str:
    if run.halt is not None:
        step, path = run.halt.offered
        verdict = run.halt.verdict if path == run.halt.checkpoint else "healthy"
        return f"go on from step {step}: {path} ({verdict})" if path else "no checkpoint was kept"
    if run.last_healthy is not None:
        return f"last healthy checkpoint of step {run.last_healthy.step}: {run.last_healthy.path}"
    return "no healthy checkpoint is known" if run.incidents else ""
