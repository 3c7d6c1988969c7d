"""What a phone shows, and what is new about an incident."""

import dataclasses

import msgspec
import pytest

from holter.exporters.incident_news import IncidentNews, NewsDesk
from holter.exporters.phone_text import MAX_SENTENCE, MAX_TITLE, clipped, digest, message
from holter.records import Cause, Diagnosis, Directive, Fix, Severity

FIX = Fix(do="Look at the shard that rank 1 read.", changes="", does_not_fix="", expect="", verify="", otherwise="")


def diagnosis(
    number: int = 1, severity: Severity = "critical", ranks: tuple[int, ...] = (1,), **changed: object
) -> Diagnosis:
    cause = Cause(
        cause="nonfinite_input",
        confidence=0.93,
        basis="observation",
        ranks=ranks,
        tensors=(),
        modules=(),
        mechanism="",
        evidence=(),
        would_refute="",
        fix=FIX,
    )
    one = Diagnosis(
        id=f"20261115T101500-{number}",
        run_id="gpt-7",
        severity=severity,
        symptom="Rank 1's batch of step 30 held 1 NaN in `x`.",
        first_step=30,
        detected_step=30,
        detected_after_s=0.8,
        opened_at="2026-11-15T10:15:00Z",
        causes=(cause,),
        action=Directive(directive="halt", reason=""),
    )
    return msgspec.structs.replace(one, **changed)


def test_it_says_what_who_since_when_what_to_do_first_and_where_to_read_on():
    told = message(IncidentNews("opened", diagnosis()), "https://head.example")
    assert "holter: critical: Non-finite input, rank 1, step 30" == told.title
    assert [
        "run gpt-7: Rank 1's batch of step 30 held 1 NaN in `x`.",
        "Do first: Look at the shard that rank 1 read.",
        "https://head.example/#incident=20261115T101500-1",
    ] == told.body.splitlines()
    assert "critical" == told.kind


def test_a_halt_says_from_where_to_go_on_and_the_end_that_it_is_over():
    halted = diagnosis(action=Directive(directive="halt", reason="", checkpoint="checkpoints/30", exit_code=93))
    assert "Halted; go on from checkpoints/30." in message(IncidentNews("updated", halted), "http://a").body
    over = message(IncidentNews("closed", diagnosis()), "http://a")
    assert ("over", "holter: over: Non-finite input, rank 1, step 30") == (over.kind, over.title)


def test_it_fits_on_a_phone_however_long_the_names_are():
    long = diagnosis(symptom="word " * 400 + "\x1b[2J", ranks=tuple(range(4096)))
    told = message(IncidentNews("opened", long), "http://a")
    assert len(told.title) <= MAX_TITLE
    assert all(len(line) <= MAX_SENTENCE for line in told.body.splitlines())
    assert "4096 ranks" in told.title
    assert "\x1b" not in told.body


@pytest.mark.parametrize(
    ("text", "length", "expected"), [("a b", 9, "a b"), ("aaa bbb ccc", 9, "aaa bbb…"), ("a" * 20, 5, "aaaa…")]
)
def test_what_is_left_out_is_left_out_at_a_word(text, length, expected):
    assert expected == clipped(text, length)


def test_many_at_once_are_one_message():
    told = [message(IncidentNews("opened", diagnosis(number, "warning")), "http://a") for number in range(8)]
    one = digest([*told, dataclasses.replace(told[0], kind="critical")], "http://a")
    assert "holter: 9 more messages about incidents" == one.title
    assert ("critical", "") == (one.kind, one.incident)
    assert 7 == len(one.body.splitlines())


def changes(desk: NewsDesk, standing: list[Diagnosis], known: list[Diagnosis] | None = None) -> list[str]:
    return [news.change for news in desk.look(standing, standing if known is None else known)]


def test_an_incident_is_told_once_again_when_it_is_another_and_when_it_is_over():
    desk, one = NewsDesk(), diagnosis()
    closed = diagnosis(closed_at="2026-11-15T10:20:00Z")
    assert [["opened"], []] == [changes(desk, [one]), changes(desk, [diagnosis(symptom="other words")])]
    assert [["updated"], []] == [changes(desk, [diagnosis(ranks=(0,))]), changes(desk, [diagnosis(ranks=(0,))])]
    halted = diagnosis(
        ranks=(0,), action=Directive(directive="halt", reason="", checkpoint="checkpoints/30", exit_code=93)
    )
    assert ["updated"] == changes(desk, [halted]), "with the checkpoint to go on from"
    assert [["closed"], []] == [changes(desk, [], [closed]), changes(desk, [], [closed])]


def test_one_that_is_open_but_not_settled_is_not_over():
    desk = NewsDesk()
    assert ["opened"] == changes(desk, [diagnosis()])
    assert [[], []] == [changes(desk, [], [diagnosis(ranks=(0,))]), changes(desk, [diagnosis()])]


def test_what_a_former_life_told_is_over_and_what_nobody_asked_for_is_not_told():
    desk = NewsDesk(("critical",))
    desk.remember([diagnosis(1), diagnosis(2, "warning")])
    assert [["closed"], []] == [changes(desk, [], []), changes(desk, [diagnosis(3, "warning")])]


def test_what_a_script_raises_calls_nobody_and_links_to_nothing():
    raised = diagnosis(symptom="ValueError in <module>: <!channel> @everyone <https://evil.example|ok>")
    told = message(IncidentNews("opened", raised), "http://a")
    assert "ValueError in (module): (!channel) (at)everyone (https://evil.example|ok)" in told.body
