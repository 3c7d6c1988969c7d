"""Makes the card of a run from what its coordinator knows."""

import socket
from dataclasses import replace

import holter
from holter import clock
from holter.coordinator.http.pages import snapshot
from holter.coordinator.judge import cause_of
from holter.coordinator.run import Run
from holter.exporters.prometheus import expose, families
from holter.exporters.run_card import MAX_INCIDENTS, CardIncident, RunCard
from holter.faults.shared.wording import ranks_text
from holter.records import Diagnosis
from holter.records.titles import titled


def card_of(run: Run, *, is_over: bool = False) -> RunCard:
    """Return the card as of now."""
    standing = run.incidents.standing()
    # Incidents of this life and earlier ones, as the run's own page shows them.
    known = run.incidents.all()
    here = [member.progress.heartbeat.step for member in run.roster.members.values() if member.progress.heartbeat]
    return RunCard(
        run_id=run.settings.run_id,
        run_dir=str(run.settings.run_dir),
        page=run.settings.address,
        host=socket.gethostname(),
        state=_state(run, is_over=is_over),
        started_at=run.intake.introductions.started_at,
        updated_at=clock.rfc3339(clock.wall_ns()),
        world_size=run.roster.world_size,
        ranks=len(run.roster.members),
        connected=run.roster.num_connected,
        steps=run.checkpoints.base_step + max(here, default=0),
        incidents=[_line(one) for one in known[-MAX_INCIDENTS:]],
        num_incidents=len(known),
        num_open=len(standing),
        is_critical=any(one.severity == "critical" for one in standing),
        blind=len(run.blind()),
        dropped=run.roster.dropped,
        metrics=_metrics(run),
    )


def _metrics(run: Run) -> str:
    """Return the metrics without those on the coordinator itself, and only the causes that occurred."""
    whole = snapshot(run)
    came_up = {cause: number for cause, number in whole.incidents.items() if number}
    job = replace(whole.job, modules=(), exponents=())
    small = replace(whole, detectors=(), detector_s={}, detector_failures={}, webhook={}, incidents=came_up, job=job)
    body, _ = expose(families(run.settings.run_id, holter.__version__, [], small), "")
    return body.decode()


def _state(run: Run, *, is_over: bool) -> str:
    if run.halts.is_done:
        return "halted"
    if is_over:
        return "ended"
    return "halting" if run.halts.is_busy else "running"


def _line(one: Diagnosis) -> CardIncident:
    cause = cause_of(one)
    ranks = one.causes[0].ranks if one.causes else ()
    return CardIncident(
        id=one.id,
        severity=one.severity,
        cause=cause,
        title=titled(cause),
        ranks=ranks_text(ranks) if ranks else "",
        step=one.first_step,
        is_open=one.closed_at is None,
    )
