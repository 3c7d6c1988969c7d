"""Said once, in order, with an end."""

from pathlib import Path
from typing import Any

import msgspec
from tests.diagnosis.test_report import bad_batch, diagnose

from holter.coordinator.http.timeline import MAX_HAPPENINGS, Timeline
from holter.halting.vault.store import ScriptSave
from holter.records import Finding, TableRequest

SECOND_NS = 10**9


def finding(detector: str = "loss_spike", first_step: int = 3, **more: Any) -> Finding:
    return Finding(
        detector=detector,
        severity="warning",
        first_step=first_step,
        detected_step=first_step,
        ranks=(1,),
        summary="it rose",
        **more,
    )


def texts(timeline: Timeline) -> list[str]:
    return [one.text for one in timeline.all()]


def test_a_finding_comes_and_goes() -> None:
    timeline = Timeline()
    for second in range(5):
        timeline.look_at_findings([finding()], second * SECOND_NS)
    timeline.look_at_findings([], 9 * SECOND_NS)
    assert ["loss_spike: it rose", "loss_spike is no longer found"] == texts(timeline)
    assert ["1970-01-01T00:00:00Z", "1970-01-01T00:00:09Z"] == [one.at for one in timeline.all()]
    assert [1, 2] == [one.number for one in timeline.all()]


def test_thousands_of_findings_that_stand_are_said_once() -> None:
    timeline = Timeline()
    for second in range(3):
        timeline.look_at_findings([finding(first_step=step) for step in range(3000)], second * SECOND_NS)
    assert 3000 == timeline.all()[-1].number


def test_a_finding_that_waits_for_evidence_is_no_verdict() -> None:
    timeline = Timeline()
    timeline.look_at_findings([finding(needs=(TableRequest("parameters", 3, (1,)),))], 0)
    assert [] == texts(timeline)


def test_an_incident_is_opened_explained_otherwise_and_closed() -> None:
    timeline, opened = Timeline(), diagnose(bad_batch())
    cause = msgspec.structs.replace(opened.causes[0], cause="unstable_layer")
    other = msgspec.structs.replace(opened, causes=(cause,))
    for diagnosis in (opened, opened, msgspec.structs.replace(opened, closed_at="2026-11-15T11:00:00Z")):
        timeline.look_at_incidents([diagnosis])
    said = timeline.all()
    assert ["opened", "closed"] == [one.text.partition(":")[0] for one in said]
    assert {opened.id} == {one.incident for one in said}
    assert [opened.opened_at, "2026-11-15T11:00:00Z"] == [one.at for one in said]
    timeline.look_at_incidents([other])
    assert timeline.all()[-1].text.startswith("is now explained otherwise")


def test_a_verdict_on_a_checkpoint_that_changes_is_said_again() -> None:
    timeline = Timeline()
    save = ScriptSave(
        step=20, path="/c/20", framework="dcp", saved_at="t", seconds=1.0, verdict="unknown", why="looked at"
    )
    timeline.look_at_saves([save], [], 0)
    timeline.look_at_saves([save], [], 0)
    timeline.look_at_saves([msgspec.structs.replace(save, verdict="poisoned", why="NaN")], [], 5 * SECOND_NS)
    assert [("info", "t"), ("critical", "1970-01-01T00:00:05Z")] == [(one.severity, one.at) for one in timeline.all()]


def test_a_halt_is_followed_on_its_course() -> None:
    timeline = Timeline()
    for course in ("preparing", "preparing", "committed", "done"):
        timeline.look_at_halt({"number": 1, "course": course, "step": 40, "reason": "asked"}, 0)
    timeline.look_at_halt(None, 0)
    timeline.look_at_halt({"course": "called off", "outcome": "failed", "text": ""}, 0)
    assert "halt: failed" == texts(timeline).pop(), "one that has no number"
    assert ["preparing", "committed", "done"] == [text.split()[2].rstrip(",") for text in texts(timeline)[:-1]]


def test_what_became_of_a_halt_is_said_with_the_reason() -> None:
    timeline = Timeline()
    timeline.look_at_halt({"course": "asked for", "outcome": None, "text": ""}, 0)
    for _ in range(2):
        timeline.look_at_halt({"course": "called off", "outcome": "failed", "text": "rank 3 does not answer"}, 0)
    timeline.look_at_halt({"course": "called off", "outcome": "called_off", "text": "it came too late"}, 0)
    assert [
        ("warning", "halt: asked for"),
        ("critical", "halt: failed, rank 3 does not answer"),
        ("warning", "halt: called off, it came too late"),
    ] == [(one.severity, one.text) for one in timeline.all()]


def test_a_night_of_flapping_is_bounded_and_goes_on_counting() -> None:
    timeline = Timeline()
    for number in range(MAX_HAPPENINGS):
        timeline.look_at_findings([finding(first_step=number)], number)
    assert MAX_HAPPENINGS == len(timeline.all())
    assert 2 * MAX_HAPPENINGS - 1 == timeline.all()[-1].number


def test_what_is_noted_stands(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.note("halt", f"asked for by {tmp_path.name}", 0, "warning")
    assert [("halt", "warning")] == [(one.kind, one.severity) for one in timeline.all()]
