"""What a person reads: the rank, the step and the tensor are there, in every format, and nothing of the script's names is believed."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.diagnosis import explain, headline, to_fragment, to_html, to_markdown, to_text
from holter.diagnosis.report import (
    MAX_BLOCK_LINES,
    Block,
    block_of,
    block_to_html,
    block_to_markdown,
    block_to_text,
)
from holter.faults.hangs.stacks import merged
from holter.records import Collective, Diagnosis, Directive, Evidence, Finding, Frame

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
    assert (
        headline(diagnose(bad_batch()))
        == "critical: Non-finite input (nonfinite_input) on rank 1 at step 30 (confidence 0.93)"
    )


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
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name in {"src", "href"} or name.startswith("on")]
        self.tags.append(tag)


def test_html_escapes_names_and_fetches_nothing() -> None:
    page = to_html(diagnose(bad_batch("<script>alert(1)</script>")))
    parser = Tags()
    parser.feed(page)
    assert "script" not in parser.tags
    assert "&lt;script&gt;" in page
    assert "prefers-color-scheme: dark" in page
    assert "url(" not in page


def test_what_stands_between_backticks_is_code_and_still_escaped() -> None:
    page = to_html(diagnose(bad_batch("`<b>x</b>`")))
    assert "<code>&lt;b&gt;x&lt;/b&gt;</code>" in page
    assert "<code>torch.isfinite(x).all()</code>" in page
    assert "<b>x" not in page


def test_a_fragment_says_the_same_without_style_script_or_frame() -> None:
    diagnosis = diagnose(bad_batch("<script>alert(1)</script>"))
    fragment, page = to_fragment(diagnosis), to_html(diagnosis)
    parser = Tags()
    parser.feed(fragment)
    assert not {"script", "style", "html", "body", "h1"} & set(parser.tags)
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
    assert (
        headline(diagnosis)
        == "critical: Silent data corruption (silent_data_corruption) on ranks 0, 1 at step 12 (confidence 0.60)"
    )


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
    parts = {"do", "changes", "does_not_fix", "expect", "verify", "otherwise", "alternatives", "prevent", "roll_back"}
    assert set(record["causes"][0]["fix"]) == parts
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


SITE = "/opt/venv/lib/python3.11/site-packages/"
MODULE = Frame("<module>", "/home/me/train.py", 88)
WAITING = [Frame("all_reduce", SITE + "torch/distributed/distributed_c10d.py", 2900), Frame("main", "/home/me/train.py", 61)]  # fmt: skip
SPINNING = [Frame("spin", "/home/me/train.py", 31), Frame("main", "/home/me/train.py", 64)]
TREE = merged({0: [*WAITING, MODULE], 1: [*SPINNING, MODULE], 2: [*WAITING, MODULE]})
CALLS = ["  811  all_reduce float32 [100]   over", "  812  all_reduce float32 [100]   it waits here"]


def hang(tree: Any = TREE, calls: Any = CALLS, said: str = "last collectives of rank 0") -> Diagnosis:
    finding = Finding(
        detector="dead_rank",
        severity="critical",
        first_step=812,
        detected_step=812,
        ranks=(1,),
        summary="Rank 1 does not move on.",
        collective=Collective(group="default_pg", sequence=812, operation="all_reduce"),
        evidence=(
            Evidence(kind="stacks", summary="ranks 0,2 in all_reduce; rank 1 in spin", values={"tree": tree}),
            Evidence(kind="last_collectives", summary=said, values={"rank": 0, "calls": calls}),
        ),
    )
    made = explain(
        finding,
        (),
        incident_id="20261115T101500-1",
        run_id="run-7",
        opened_at="2026-11-15T10:15:00Z",
        detected_after_s=2.1,
        directive=Directive(directive="notify", reason="the action is set to notify"),
    )
    cause = msgspec.structs.replace(made.causes[0], collective=finding.collective)
    return msgspec.structs.replace(made, causes=(cause, *made.causes[1:]))


def test_the_collective_stands_under_where() -> None:
    text = to_text(hang())
    assert "  Collective  all_reduce #812 of default_pg" in text
    assert text.index("Where") < text.index("all_reduce #812") < text.index("What to do")


@pytest.mark.parametrize("render", [to_text, to_markdown, to_html])
def test_every_line_is_there_in_its_place(render: Any) -> None:
    text = render(hang())
    for line in (*TREE, *CALLS):
        assert line.replace("<module>", "&lt;module&gt;" if render is to_html else "<module>") in text
    assert 1 == text.count("ast collectives of rank 0"), "said once, above its block"
    assert 1 == text.count("anks 0,2 in all_reduce; rank 1 in spin"), "said among the proofs"


def test_the_terminal_keeps_its_width_and_the_branch() -> None:
    long = "│    " + "very_long_function_name " * 6 + "(train.py:1)"
    text = to_text(hang([*TREE, long]), width=80)
    assert max(map(len, text.splitlines())) <= 80
    folded = block_to_text(Block("", ("├─ rank 1 " + "x" * 90,)), 60, "")
    assert folded[0].startswith("├─ rank 1 ")
    assert all(line.startswith("│      ") for line in folded[1:])


@given(st.lists(st.text(max_size=300), max_size=5), st.integers(1, 120))
def test_folding_ends_and_loses_nothing_but_spaces(lines: list[str], width: int) -> None:
    made = block_of(Evidence(kind="stacks", summary="", values={"tree": lines}))
    if made is None:
        return
    folded = "".join(block_to_text(made, width, "  "))
    kept = set("".join(made.lines)) - set(" │├└─")
    assert kept <= set(folded)
    assert not set(folded) & set("\x1b\r\n\t\x07")


HOSTILE = [
    "</pre><script>alert(1)</script>",
    "\x1b[2Jgone",
    "```",
    "````text",
    "a\nb",
    "<img src=x onerror=y>",
    "\u202eevil",
]


def test_what_a_rank_said_stays_text() -> None:
    hostile = hang(HOSTILE, HOSTILE, said="</pre><script>x</script>")
    page = to_html(hostile)
    parser = Tags()
    parser.feed(page)
    assert not {"script", "img"} & set(parser.tags)
    assert 2 == parser.tags.count("pre") == page.count("</pre>")
    for text in (page, to_text(hostile), to_markdown(hostile)):
        assert not set("\x1b\u202e") & set(text)


def test_no_line_ends_its_fence() -> None:
    lines = block_to_markdown(Block("", tuple(HOSTILE[2:4])))
    assert ["`````text", "```", "````text", "`````"] == lines
    assert ["```text", "x", "```"] == block_to_markdown(Block("", ("x",)))


def test_a_very_long_block_is_cut_and_says_so() -> None:
    made = block_of(Evidence(kind="stacks", summary="", values={"tree": [str(n) for n in range(5000)]}))
    assert made is not None
    assert MAX_BLOCK_LINES + 1 == len(made.lines)
    assert f"... and {5000 - MAX_BLOCK_LINES} more lines" == made.lines[-1]


@pytest.mark.parametrize("values", [{}, {"tree": []}, {"tree": "text"}, {"tree": None}])
def test_evidence_without_lines_has_no_block(values: dict[str, Any]) -> None:
    assert block_of(Evidence(kind="stacks", summary="x", values=values)) is None


def test_records_become_lines() -> None:
    made = block_of(
        Evidence(kind="last_collectives", summary="x", values={"calls": [{"sequence": 3, "operation": "barrier"}]})
    )
    assert made == Block("X:", ("sequence 3  operation barrier",))
    assert "<pre" in block_to_html(made)


COLUMNS = [
    {"ranks": "ranks 0,2", "activity": "collective", "frames": ["<module> (train.py:88)", "all_reduce (c10d.py:29)"]},
    {"ranks": "rank 1", "activity": "", "frames": ["<module> (train.py:88)", "<b>spin</b> (train.py:31)"]},
]


def test_stacks_stand_side_by_side_where_there_is_room() -> None:
    evidence = Evidence(kind="stacks", summary="", values={"tree": TREE, "columns": COLUMNS})
    made = block_of(evidence)
    assert made is not None
    page = block_to_html(made)
    assert "<h4>ranks 0,2 (collective)</h4>" in page
    assert (
        '<span class="common">&lt;module&gt; (train.py:88)\n</span>&lt;b&gt;spin&lt;/b&gt; (train.py:31)</pre>' in page
    )
    assert page.index("rank 1</h4>") < page.index("As one tree")
    assert list(made.lines) == TREE, "the terminal has the tree"


@pytest.mark.parametrize("said", [None, 7, "x", [], [7], [{"frames": 7}], COLUMNS[:1]])
def test_without_two_columns_the_tree_stands_alone(said: Any) -> None:
    made = block_of(Evidence(kind="stacks", summary="", values={"tree": TREE, "columns": said}))
    assert made is not None
    assert "As one tree" not in block_to_html(made)
