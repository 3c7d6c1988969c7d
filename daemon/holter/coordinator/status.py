"""What `/api/v1/status` says, as plain data. Pure."""

from typing import Any

from holter.clock import rfc3339
from holter.coordinator.casebook import cause_of
from holter.coordinator.judging import DIAGNOSIS
from holter.coordinator.roster import Member
from holter.coordinator.ward import Ward
from holter.exporters import CoordinatorSnapshot
from holter.records import Diagnosis


def status(ward: Ward, now_ns: int) -> dict[str, Any]:
    """The run as of now."""
    return {
        "schema": 1,
        "run_id": ward.settings.run_id,
        "run_dir": str(ward.settings.run_dir),
        "coordinator": ward.settings.address,
        "started_at": ward.introductions.started_at,
        "now": rfc3339(now_ns),
        "world_size": ward.roster.world_size,
        "ranks": [_rank(member, now_ns) for _, member in sorted(ward.roster.members.items())],
        "findings": [
            {
                "detector": found.detector,
                "severity": found.severity,
                "summary": found.summary,
                "waits": bool(found.needs),
            }
            for found in ward.findings
        ],
        "incidents": [headline(diagnosis) for diagnosis in ward.incidents.all()],
        "detectors": {
            detector.name: {
                "seconds": ward.bench.seconds.get(detector.name),
                "failures": ward.bench.failures.get(detector.name, 0),
            }
            for detector in ward.bench.detectors
        },
        "blind": ward.blind(),
        "warnings": ward.warnings(),
    }


def headline(diagnosis: Diagnosis) -> dict[str, Any]:
    """An incident in a line."""
    return {
        "id": diagnosis.id,
        "severity": diagnosis.severity,
        "cause": cause_of(diagnosis),
        "symptom": diagnosis.symptom,
        "first_step": diagnosis.first_step,
        "opened_at": diagnosis.opened_at,
        "closed_at": diagnosis.closed_at,
    }


def snapshot(ward: Ward) -> CoordinatorSnapshot:
    """For the exporter."""
    return CoordinatorSnapshot(
        detectors=(*(detector.name for detector in ward.bench.detectors), DIAGNOSIS),
        detector_s=ward.bench.seconds,
        detector_failures=ward.bench.failures,
        findings=tuple((found.detector, found.severity) for found in ward.findings),
        open_incidents=tuple(ward.incidents.open()),
        incidents=ward.incidents.by_cause(),
    )


def _rank(member: Member, now_ns: int) -> dict[str, Any]:
    progress_ns = member.last_progress_ns
    return {
        "rank": member.hello.rank,
        "host": member.hello.host,
        "pid": member.hello.rank_pid,
        "sidecar": member.state,
        "exited": member.exited is not None,
        "step": member.step,
        "phase": None if member.phase is None else member.phase.name.lower(),
        "last_progress_at": None if progress_ns is None else rfc3339(progress_ns),
        "last_progress_age_s": None if progress_ns is None else round(max(0, now_ns - progress_ns) / 1e9, 1),
        "loss": member.loss,
        "gradient_norm": member.gradient_norm,
        "overhead_ratio": member.overhead_ratio,
        "dropped": member.dropped,
        "metrics_address": member.hello.metrics_address,
    }
