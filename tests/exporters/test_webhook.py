"""What is told of an incident, and when."""

import msgspec

from holter.exporters.alert_text import MAX_NAME, RUNBOOKS, describe, incident_info
from holter.exporters.webhook import NEVER, Pager
from holter.records import Cause, Collective, Diagnosis, Directive, Fix

FIX = Fix(do="", changes="", does_not_fix="", expect="", verify="", otherwise="")
CAUSE = Cause(
    cause="nonfinite_input",
    confidence=0.93,
    basis="observation",
    ranks=(1,),
    tensors=("batch[0]",),
    modules=(),
    mechanism="",
    evidence=(),
    would_refute="",
    fix=FIX,
)
DIAGNOSIS = Diagnosis(
    id="20261115T101500-1",
    run_id="run-1",
    severity="critical",
    symptom="Rank 1 was fed a NaN.",
    first_step=30,
    detected_step=30,
    detected_after_s=0.1,
    opened_at="2026-11-15T10:15:00Z",
    causes=(CAUSE,),
    action=Directive(directive="notify", reason=""),
)
NOW = "2026-11-15T10:20:00Z"


def blamed(**changes: object) -> Diagnosis:
    return msgspec.structs.replace(DIAGNOSIS, causes=(msgspec.structs.replace(CAUSE, **changes),))


def test_an_incident_is_told_once_in_the_form_of_alertmanager() -> None:
    pager = Pager("http://node:1", RUNBOOKS)
    (message,) = pager.look([DIAGNOSIS], NOW)
    assert [] == pager.look([DIAGNOSIS], NOW)
    assert ("4", "firing", 0, "holter") == (
        *(message[key] for key in ("version", "status", "truncatedAlerts", "receiver")),
    )
    assert {"alertname": "HolterNonfiniteInput", "run_id": "run-1"} == message["groupLabels"]
    (alert,) = message["alerts"]
    assert ("firing", "2026-11-15T10:15:00Z", NEVER) == (alert["status"], alert["startsAt"], alert["endsAt"])
    assert ("critical", "20261115T101500-1") == (alert["labels"]["severity"], alert["labels"]["incident"])
    assert (
        "Run run-1: Non-finite input (nonfinite_input). Rank 1. Tensor batch[0]. Since step 30. Diagnosis: "
        "http://node:1/#incident=20261115T101500-1 (incident 20261115T101500-1); what to do: holter explain nonfinite_input."
    ) == alert["annotations"]["description"]
    assert f"{RUNBOOKS}/nonfinite_input.md" == alert["annotations"]["runbook_url"]
    assert message["commonAnnotations"] == alert["annotations"]


def test_a_better_diagnosis_is_no_news_and_another_cause_is() -> None:
    pager = Pager("http://node:1", RUNBOOKS)
    (first,) = pager.look([DIAGNOSIS], NOW)
    assert [] == pager.look([blamed(tensors=("batch[0]", "batch[1]"))], NOW)
    gone, now = pager.look([blamed(cause="nonfinite_forward")], NOW)
    assert ("resolved", "HolterNonfiniteInput", NOW) == (
        gone["status"],
        gone["groupLabels"]["alertname"],
        gone["alerts"][0]["endsAt"],
    )
    assert first["alerts"][0]["fingerprint"] == gone["alerts"][0]["fingerprint"] != now["alerts"][0]["fingerprint"]
    assert ("firing", "HolterNonfiniteForward") == (now["status"], now["groupLabels"]["alertname"])


def test_blame_that_moves_to_another_rank_is_told_again_as_the_same_alert() -> None:
    pager = Pager("http://node:1", RUNBOOKS)
    (first,) = pager.look([DIAGNOSIS], NOW)
    (again,) = pager.look([blamed(ranks=(0,))], NOW)
    assert ("firing", first["alerts"][0]["fingerprint"]) == (again["status"], again["alerts"][0]["fingerprint"])
    assert "Rank 0." in again["commonAnnotations"]["description"]
    assert [] == pager.look([blamed(ranks=(0,))], NOW)


def test_an_incident_that_closes_is_resolved_once() -> None:
    pager = Pager("http://node:1", RUNBOOKS)
    pager.look([DIAGNOSIS], NOW)
    (message,) = pager.look([], NOW)
    assert ("resolved", NOW) == (message["status"], message["alerts"][0]["endsAt"])
    assert [] == pager.look([], NOW)


def test_sixteen_thousand_ranks_and_endless_names_are_a_few_words() -> None:
    many = blamed(
        ranks=tuple(range(16_000)),
        tensors=(),
        modules=("x" * 5000,),
        collective=Collective(group="", sequence=3, operation="all_reduce"),
    )
    info = incident_info(many, "http://node:1")
    assert "0, 1, 2, 3 and 15,996 more" == info.ranks
    assert MAX_NAME == len(info.tensors)
    assert "all_reduce #3 of the default group" == info.collective
    assert "Tensor" not in describe(incident_info(blamed(tensors=()), ""), "r")
    assert "" == incident_info(msgspec.structs.replace(DIAGNOSIS, first_step=-1), "").step
