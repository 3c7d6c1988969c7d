"""Blocks of fixed width: nothing that a rank said gets out of them, and nothing is lost."""

from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.diagnosis import explain, to_html, to_markdown, to_text
from holter.diagnosis.blocks import MAX_LINES, Block, block
from holter.diagnosis.blocks import to_html as block_to_html
from holter.diagnosis.blocks import to_markdown as block_to_markdown
from holter.diagnosis.blocks import to_text as block_to_text
from holter.faults.hangs.stacks import merged
from holter.records import Collective, Diagnosis, Directive, Evidence, Finding, Frame

SITE = "/opt/venv/lib/python3.11/site-packages/"
MODULE = Frame("<module>", "/home/me/train.py", 88)
WAITING = [Frame("all_reduce", SITE + "torch/distributed/distributed_c10d.py", 2900), Frame("main", "/home/me/train.py", 61)]  # fmt: skip
SPINNING = [Frame("spin", "/home/me/train.py", 31), Frame("main", "/home/me/train.py", 64)]
TREE = merged({0: [*WAITING, MODULE], 1: [*SPINNING, MODULE], 2: [*WAITING, MODULE]})
CALLS = ["  811  all_reduce float32 [100]   over", "  812  all_reduce float32 [100]   it waits here"]


def diagnosis(tree: Any = TREE, calls: Any = CALLS, said: str = "last collectives of rank 0") -> Diagnosis:
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
    text = to_text(diagnosis())
    assert "  Collective  all_reduce #812 of default_pg" in text
    assert text.index("Where") < text.index("all_reduce #812") < text.index("What to do")


@pytest.mark.parametrize("render", [to_text, to_markdown, to_html])
def test_every_line_is_there_in_its_place(render: Any) -> None:
    text = render(diagnosis())
    for line in (*TREE, *CALLS):
        assert line.replace("<module>", "&lt;module&gt;" if render is to_html else "<module>") in text
    assert 1 == text.count("ast collectives of rank 0"), "said once, above its block"
    assert 1 == text.count("anks 0,2 in all_reduce; rank 1 in spin"), "said among the proofs"


def test_the_terminal_keeps_its_width_and_the_branch() -> None:
    long = "│    " + "very_long_function_name " * 6 + "(train.py:1)"
    text = to_text(diagnosis([*TREE, long]), width=80)
    assert max(map(len, text.splitlines())) <= 80
    folded = block_to_text(Block("", ("├─ rank 1 " + "x" * 90,)), 60, "")
    assert folded[0].startswith("├─ rank 1 ")
    assert all(line.startswith("│      ") for line in folded[1:])


@given(st.lists(st.text(max_size=300), max_size=5), st.integers(1, 120))
def test_folding_ends_and_loses_nothing_but_spaces(lines: list[str], width: int) -> None:
    made = block(Evidence(kind="stacks", summary="", values={"tree": lines}))
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


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name in {"src", "href"} or name.startswith("on")]
        self.tags.append(tag)


def test_what_a_rank_said_stays_text() -> None:
    hostile = diagnosis(HOSTILE, HOSTILE, said="</pre><script>x</script>")
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
    made = block(Evidence(kind="stacks", summary="", values={"tree": [str(n) for n in range(5000)]}))
    assert made is not None
    assert MAX_LINES + 1 == len(made.lines)
    assert f"... and {5000 - MAX_LINES} more lines" == made.lines[-1]


@pytest.mark.parametrize("values", [{}, {"tree": []}, {"tree": "text"}, {"tree": None}])
def test_evidence_without_lines_has_no_block(values: dict[str, Any]) -> None:
    assert block(Evidence(kind="stacks", summary="x", values=values)) is None


def test_records_become_lines() -> None:
    made = block(
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
    made = block(evidence)
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
    made = block(Evidence(kind="stacks", summary="", values={"tree": TREE, "columns": said}))
    assert made is not None
    assert "As one tree" not in block_to_html(made)
