"""The content of `/api/v1/status`, as plain data. Pure."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from holter.clock import rfc3339
from holter.coordinator.judge import cause_of
from holter.coordinator.roster import Member
from holter.coordinator.run import Run
from holter.records import Census, Diagnosis, TensorEntry
from holter.records.rank import IGNORED, OWN, is_ignored
from holter.records.titles import titled


def status(run: Run, now_ns: int, limit: int | None = None) -> dict[str, Any]:
    """Return the run as of now, with all its ranks or the first few."""
    first = sorted(run.roster.members)[:limit]
    return about(run, now_ns) | {"ranks": [rank_status(run.roster.members[rank], now_ns) for rank in first]}


def about(run: Run, now_ns: int) -> dict[str, Any]:
    """Return the run without its ranks, which may be thousands."""
    return {
        "schema": 1,
        "run_id": run.settings.run_id,
        "run_dir": str(run.settings.run_dir),
        "coordinator": run.settings.address,
        "started_at": run.intake.introductions.started_at,
        "now": rfc3339(now_ns),
        "world_size": run.roster.world_size,
        "findings": [
            {
                "detector": found.detector,
                "severity": found.severity,
                "summary": found.summary,
                "waits": bool(found.needs),
            }
            for found in run.judging.findings
        ],
        "incidents": [headline(diagnosis) for diagnosis in run.incidents.all()],
        "detectors": {
            detector.name: {
                "seconds": run.judging.runner.seconds.get(detector.name),
                "failures": run.judging.runner.failures.get(detector.name, 0),
            }
            for detector in run.judging.runner.detectors
        },
        "action": run.settings.action,
        "halt": halt(run),
        "goodput": msgspec.to_builtins(run.intake.wall_time.goodput(now_ns)),
        "compared": coverage(run.assembly.censuses()),
        "blind": run.blind(),
        "warnings": run.warnings(),
    }


def coverage(censuses: Iterable[Census]) -> list[dict[str, Any]]:
    """List what is compared over which axis, and what is not compared: a line for each kind, equal ones once."""
    counts: dict[tuple[str, str], int] = {}
    for census in censuses:
        own: dict[tuple[str, str], int] = {}
        for entry in census.entries:
            key = "buffers" if entry.is_buffer else "parameters", _over(entry)
            own[key] = own.get(key, 0) + 1
        # Stages of a pipeline hold different tensors: take the largest number of a kind that one rank has.
        counts = {key: max(counts.get(key, 0), own.get(key, 0)) for key in counts.keys() | own.keys()}
    return [
        {"what": what, "over": over, "num_tensors": number} for (what, over), number in sorted(counts.items()) if number
    ]


def _over(entry: TensorEntry) -> str:
    if entry.axis == OWN:
        return "own history"
    if entry.axis == IGNORED:
        return "all ranks, if it began equal: a wrapper ignores it"
    if is_ignored(entry.axis):
        return f"axis {entry.axis.partition(':')[2]}, if it began equal: no wrapper reduces over it"
    if entry.axis:
        return f"axis {entry.axis}"
    return "all ranks" if entry.is_replicated else "not compared"


def halt(run: Run) -> dict[str, Any] | None:
    """Return the halt that is in progress, or the result of the last one; None if there was none."""
    attempt, outcome = run.halts.attempt, run.halts.outcome
    if attempt is None and run.halts.is_asked:
        return {"course": "asked for", "outcome": None, "text": ""}
    if attempt is None:
        return None if outcome is None else {"course": "called off", "outcome": outcome.name, "text": outcome.text}
    return {
        "number": attempt.halt.order.halt if attempt.halt is not None else 0,
        "course": attempt.course,
        "step": attempt.plan.kept_step,
        "cause": attempt.wish.cause,
        "title": titled(attempt.wish.cause),
        "reason": attempt.wish.reason,
        "savers": attempt.plan.savers,
        "lost": attempt.plan.lost,
        "outcome": outcome.name if outcome is not None and run.halts.is_done else None,
        "text": outcome.text if outcome is not None and run.halts.is_done else "",
        "checkpoint": outcome.checkpoint if outcome is not None and run.halts.is_done else None,
    }


def headline(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return an incident in a line."""
    return {
        "id": diagnosis.id,
        "severity": diagnosis.severity,
        "cause": cause_of(diagnosis),
        "symptom": diagnosis.symptom,
        "first_step": diagnosis.first_step,
        "opened_at": diagnosis.opened_at,
        "closed_at": diagnosis.closed_at,
    }


def rank_status(member: Member, now_ns: int) -> dict[str, Any]:
    """Return the state of one rank."""
    progress_ns = member.progress.moved_ns
    read = {"loss": member.numbers.loss, "gradient_norm": member.numbers.gradient_norm}
    return {
        "rank": member.hello.rank,
        "host": member.hello.host,
        "num_divided": member.numbers.num_divided,
        "pid": member.hello.rank_pid,
        "sidecar": member.state,
        "exited": member.exited is not None,
        "step": member.progress.step,
        "phase": None if member.progress.phase is None else member.progress.phase.name.lower(),
        "last_progress_at": None if progress_ns is None else rfc3339(progress_ns),
        "last_progress_age_s": None if progress_ns is None else round(max(0, now_ns - progress_ns) / 1e9, 1),
        **read,
        # JSON has no NaN: null means that nobody read the value, unless it is named here.
        "not_finite": [name for name, value in read.items() if value is not None and not math.isfinite(value)],
        "overhead_ratio": member.numbers.overhead_ratio,
        "dropped": member.dropped,
        "metrics_address": member.hello.metrics_address,
    }


def rank_details(member: Member, now_ns: int) -> dict[str, Any]:
    """Return one rank with the details that are too long for the list of all."""
    ended = member.exited
    return rank_status(member, now_ns) | {
        "step_s": member.numbers.step_s,
        "collective_lag_s": member.numbers.lag_s,
        "gpu_uuid": member.gpu_uuid,
        "nonfinite": dict(member.numbers.nonfinite),
        "sight_lost": member.sight_lost,
        "sidecar_pid": member.hello.sidecar_pid,
        "exit": None if ended is None else {"code": ended.exit_code, "signal": ended.signal, "step": ended.last_step},
    }
