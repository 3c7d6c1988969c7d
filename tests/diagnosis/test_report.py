"""What a person reads: the rank, the step and the tensor are there, in every format, and nothing of the script's names is believed."""

import json
from collections.abc import Callable
from html.parser import HTMLParser

import msgspec
import pytest

from holter.diagnosis import explain, headline, to_fragment, to_html, to_markdown, to_text
from holter.records import Diagnosis, Directive, Evidence, Finding

NOTIFY = Directive(directive="notify", reason="the action is set to notify")


def bad_batch(tensor: str = "batch['x']") -> Finding:
    return Finding(
        detector="nonfinite_values",
        severity="critical",
        first_step=30,
        detected_step=30,
        ranks=(1,),
        tensors=(tensor,),
        summary="Step 30 was applied to the weights with NaN in its gradients.",
        facts={
            "has_nonfinite_input": True,
            "has_nonfinite_loss": True,
            "has_nonfinite_gradient": True,
            "is_local_view": True,
        },
        evidence=(Evidence(kind="nonfinite", summary=f"rank 1, step 30: batch {tensor} held 3 NaN in 512 values"),),
    )


DEATH = Finding(
    detector="dead_rank",
    severity="critical",
    first_step=35,
    detected_step=35,
    ranks=(1,),
    summary="Rank 1 ended with ValueError.",
)
TIE = Finding(
    detector="replica_divergence",
    severity="critical",
    first_step=12,
    detected_step=12,
    ranks=(0, 1),
    summary="Parameters differ.",
    facts={
        "compared_ranks": [0, 1],
        "parameter_tensors": ["b.weight"],
        "parameters_differ": True,
        "parameters_differ_at_first": False,
        "gradients_differ": False,
        "parameters_differ_in_all_tensors": False,
    },
)


def diagnose(leading: Finding, *consequences: Finding, strikes: int = 1) -> Diagnosis:
    return explain(
        leading,
        consequences,
        incident_id="20261115T101500-1",
        run_id="run-7",
        opened_at="2026-11-15T10:15:00Z",
        detected_after_s=0.84,
        directive=NOTIFY,
        strikes=strikes,
    )


def test_the_headline_is_one_line() -> None:
    assert headline(diagnose(bad_batch())) == "critical: nonfinite_input on rank 1 at step 30 (confidence 0.93)"


def test_many_ranks_do_not_make_it_long() -> None:
    assert len(headline(diagnose(msgspec.structs.replace(bad_batch(), ranks=tuple(range(4096)))))) < 160


@pytest.mark.parametrize("render", [to_text, to_markdown, to_html])
def test_every_format_names_cause_rank_step_tensor_fix_and_consequence(render: object) -> None:
    assert callable(render)
    text = render(diagnose(bad_batch("x.weight"), DEATH))
    for part in (
        "nonfinite_input",
        "rank 1",
        "step 30",
        "x.weight",
        "held 3 NaN in 512 values",
        "Load this step",
        "Rank 1 ended with ValueError",
    ):
        assert part in " ".join(text.split())


def test_the_terminal_report_keeps_its_width_and_uses_no_control_codes() -> None:
    text = to_text(diagnose(bad_batch(), DEATH), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "\x1b[1;31mcritical" in to_text(diagnose(bad_batch()), color=True)


def test_a_name_cannot_move_the_cursor() -> None:
    assert "\x1b" not in to_text(diagnose(bad_batch("\x1b[2Jx")))


def test_what_to_do_comes_before_why() -> None:
    text = to_text(diagnose(bad_batch()))
    assert text.index("What to do") < text.index("Why we think so") < text.index("What would refute it")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name in {"src", "href"} or name.startswith("on")]
        self.tags.add(tag)


def test_html_escapes_names_and_fetches_nothing() -> None:
    page = to_html(diagnose(bad_batch("<script>alert(1)</script>")))
    parser = Tags()
    parser.feed(page)
    assert "script" not in parser.tags
    assert "&lt;script&gt;" in page
    assert "prefers-color-scheme: dark" in page
    assert "url(" not in page


def test_a_fragment_says_the_same_without_style_script_or_frame() -> None:
    diagnosis = diagnose(bad_batch("<script>alert(1)</script>"))
    fragment, page = to_fragment(diagnosis), to_html(diagnosis)
    parser = Tags()
    parser.feed(fragment)
    assert not {"script", "style", "html", "body", "h1"} & parser.tags
    assert "style=" not in fragment
    assert "style=" not in page, "what a page that forbids inline styles could not show"
    for section in ("What to do", "Why we think so", "What would refute it"):
        assert f"<h3>{section}</h3>" in fragment
        assert f"<h2>{section}</h2>" in page


def test_markdown_does_not_let_names_become_tags() -> None:
    assert "\\<script>" in to_markdown(diagnose(bad_batch("<script>")))


def test_an_unsure_diagnosis_says_what_is_missing_and_that_both_are_named() -> None:
    diagnosis = diagnose(TIE)
    assert diagnosis.causes[0].confidence < 0.70
    text = " ".join(to_text(diagnosis).split())
    assert "Missing evidence" in text
    assert "all ranks that differ are named" in text
    assert headline(diagnosis) == "critical: silent_data_corruption on ranks 0, 1 at step 12 (confidence 0.60)"


def test_the_third_strike_puts_the_alternatives_first_and_says_so() -> None:
    facts = TIE.facts | {
        "gradients_differ": None,
        "parameters_differ_at_first": None,
        "own_history_broke_on_some": True,
    }
    unsure = msgspec.structs.replace(TIE, facts=facts)
    twice, thrice = diagnose(unsure, strikes=2), diagnose(unsure, strikes=3)
    assert thrice.causes[-1].cause == twice.causes[0].cause
    assert thrice.causes[0].cause == twice.causes[1].cause
    assert "the assumption may be wrong" in " ".join(to_text(thrice).split())
    assert "assumption" not in to_text(twice)


def test_the_third_strike_of_a_cause_without_alternative_is_said_too() -> None:
    assert "no alternative fits" in " ".join(to_text(diagnose(DEATH, strikes=3)).split())


@pytest.mark.parametrize("render", [to_text, to_markdown, to_html])
def test_a_report_of_a_halt_says_how_to_go_on(render: Callable[[Diagnosis], str]) -> None:
    found = diagnose(bad_batch())
    assert "holter resume" not in render(found)
    halted = Directive(directive="halt", reason="halted after 30 steps", checkpoint="checkpoints/30", exit_code=93)
    assert "holter resume" in render(msgspec.structs.replace(found, action=halted))


def test_the_record_is_the_public_json() -> None:
    record = json.loads(msgspec.json.encode(diagnose(bad_batch(), DEATH)))
    assert record["schema"] == 1
    assert record["causes"][0]["ranks"] == [1]
    assert record["causes"][0]["evidence"][-1]["kind"] == "consequence"
    assert set(record["causes"][0]["fix"]) == {"do", "changes", "does_not_fix", "expect", "verify", "otherwise"}
    assert record["closed_at"] is None


@pytest.mark.parametrize("render", [to_text, to_markdown, to_html, to_fragment])
def test_no_name_moves_a_cursor_or_turns_the_writing(render: object) -> None:
    assert callable(render)
    text = render(diagnose(bad_batch("\x1b[2J\u202eevil\x07")))
    assert "evil" in text
    assert not set("\x1b\x07\u202e") & set(text)


def test_no_name_is_a_link_or_a_picture_in_a_ticket() -> None:
    text = to_markdown(diagnose(bad_batch("![seen](http://x.example/1.png)")))
    assert r"![seen\](http" in text
    assert "](" not in text.replace(r"\](", "")


@pytest.mark.parametrize("render", [to_text, to_markdown, to_html, to_fragment])
def test_what_is_over_is_said_to_be_before_anything_is_asked_for(render: object) -> None:
    assert callable(render)
    text = render(msgspec.structs.replace(diagnose(bad_batch()), closed_at="2026-11-15T11:00:00Z"))
    assert text.index("It is over") < text.index("2026-11-15T11:00:00Z") < text.index("What to do")
    assert "It is over" not in render(diagnose(bad_batch()))
