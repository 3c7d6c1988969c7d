"""The page in a real browser: a live run, an incident that appears, the halt; with 2, 16 and 4,096 ranks, by mouse, keyboard and without script."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.e2e.simulated import TOKEN

from holter.halting import halt_record

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIMULATED = Path(__file__).parent / "simulated.py"
FAULTS = Path(__file__).parents[1] / "corpus" / "scripts"
HOSTILE = '"><img src=x onerror=alert(1)><script>alert(1)</script>-'
TURNED = f"\u202e{HOSTILE}"
"""With a mark that would turn the rest of the line around; it is not shown."""
PICTURES = os.environ.get("PAGE_PICTURES", "")
"""A directory: what the tests saw is left there to be looked at."""
USABLE_S = 10.0
"""For 4,096 ranks to be on the screen, on a busy machine; alone it takes under one."""
LONG_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; `make system` installs it"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]
expect.set_options(timeout=20_000)


@dataclass
class Simulated:
    """A simulated run in a process of its own."""

    run_dir: Path
    options: tuple[str, ...]
    address: str = ""
    _process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, str(SIMULATED), str(self.run_dir), *self.options]
        port = ["--port", str(urlsplit(self.address).port)] if self.address else []
        self._process = subprocess.Popen(
            [*command, *port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the simulated run did not start"
        return self

    def tell(self, line: str) -> None:
        """`simulated.told` says what it understands."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def __exit__(self, *_: object) -> None:
        """As its standard input ends, it does."""
        assert self._process is not None
        try:
            self._process.communicate(timeout=20)
        finally:
            self._process.kill()


@dataclass
class Visit:
    """Opens pages, and remembers what a page must not do."""

    browser: Browser
    sins: list[str] = field(default_factory=list)
    _contexts: list[Any] = field(default_factory=list)

    def __call__(self, address: str, path: str = "/", *, width: int = 1400, **context: Any) -> Page:
        made = self.browser.new_context(viewport={"width": width, "height": 1000}, **context)
        self._contexts.append(made)
        page = made.new_page()
        page.on("pageerror", lambda error: self.sins.append(f"raised {error}"))
        page.on("dialog", lambda dialog: self.sins.append(f"opened a dialog: {dialog.message}"))
        page.on("console", lambda said: self.sins.append(said.text) if said.type == "error" else None)
        host = urlsplit(address).netloc
        page.on("request", lambda asked: self.sins.append(asked.url) if _is_foreign(asked.url, host) else None)
        page.goto(address + path)
        return page

    def close(self) -> list[str]:
        for context in self._contexts:
            context.close()
        # Answers that a test asks for (401, 409) and a coordinator that is stopped are no errors of the page.
        return [sin for sin in self.sins if "Failed to load resource" not in sin]


def _is_foreign(url: str, host: str) -> bool:
    return urlsplit(url).scheme not in {"data", "blob"} and urlsplit(url).netloc != host


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield made
        made.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    made = Visit(browser)
    yield made
    assert [] == made.close()


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """Sixteen ranks on hosts with bad manners, one of them fed a NaN."""
    options = ("--ranks", "16", "--step-s", "0.2", "--fault", "nan", "--fault-step", "8", "--hosts", TURNED)
    with Simulated(tmp_path_factory.mktemp("few") / "sixteen", options) as made:
        yield made


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    options = ("--ranks", "4096", "--step-s", "1", "--fault", "nan", "--fault-step", "3")
    with Simulated(tmp_path_factory.mktemp("many") / "four-thousand", options) as made:
        yield made


def picture(page: Page, name: str, *, is_whole: bool = True) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=is_whole)


def is_accessible(page: Page) -> list[str]:
    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"]})
    assert len(found.response["passes"]) > 10, "it looked at something"
    return [f"{one['id']}: {one['nodes'][0]['html'][:160]}" for one in found.response["violations"]]


def test_a_run_moves_before_ones_eyes_and_an_incident_appears_by_itself(visit: Visit, tmp_path: Path) -> None:
    options = ("--ranks", "2", "--step-s", "0.2", "--fault", "nan", "--fault-step", "100000")
    with Simulated(tmp_path / "two", options) as run:
        page = visit(run.address)
        expect(page.locator("#line")).to_have_text("live")
        expect(page.locator("#verdict")).to_contain_text("No open incident")
        expect(page.locator("#facts")).to_contain_text("2 of 2 ranks")
        expect(page.locator("#facts")).to_contain_text(re.compile(r"\b(1[2-9]|[2-9]\d) steps"))
        picture(page, "2-healthy")
        run.tell("fault")
        expect(page.locator("#announced")).to_contain_text(
            "New incident: critical: Non-finite input (nonfinite_input) on rank 1"
        )
        expect(page.locator("#verdict")).to_contain_text("(nonfinite_input) on rank 1 at step")
        expect(page).to_have_title("(1) holter two")
        expect(page.locator("#legend")).to_contain_text("named by a critical incident 1")
        expect(page.locator("#charts figure:visible")).to_have_count(4)
        expect(page.locator("#charts .cross").first).to_be_attached()
        expect(page.locator("#timeline")).to_contain_text("opened: critical: Non-finite input (nonfinite_input)")
        expect(page.locator("#checkpoints")).to_contain_text("poisoned")
        picture(page, "2-incident")


def test_an_incident_has_an_address_and_is_shown_in_full(visit: Visit, few: Simulated) -> None:
    page = visit(few.address)
    page.get_by_role("link", name="The diagnosis in full").click()
    article = page.locator("#incident")
    for heading in ("Where", "What to do", "Why we think so", "What it looked like", "What would refute it"):
        expect(article.get_by_role("heading", name=heading, exact=True)).to_be_visible()
    expect(article.locator("svg .line.c0").first).to_be_visible()
    expect(article).to_be_focused()
    expect(page.locator("#overview")).to_be_hidden()
    again = visit(few.address, f"/{urlsplit(page.url).fragment and '#' + urlsplit(page.url).fragment}")
    expect(again.locator("#incident h2")).to_contain_text("(nonfinite_input) on rank 10")
    picture(again, "16-incident")
    again.get_by_role("link", name="All of the run").click()
    expect(again.locator("#overview")).to_be_visible()
    missing = visit(few.address, "/#incident=other")
    expect(missing.locator("#incident")).to_contain_text("There is no incident other")


def test_nothing_that_a_rank_says_becomes_markup(visit: Visit, few: Simulated) -> None:
    page = visit(few.address)
    expect(page.locator("#worst")).to_contain_text(f"rank 10 on \ufffd{HOSTILE}0001")
    page.locator("#worst button").first.click()
    expect(page.locator("#rank")).to_contain_text(f"\ufffd{HOSTILE}0001")
    page.get_by_role("button", name="Table").click()
    expect(page.locator("#table tbody tr")).to_have_count(16)
    expect(page.locator("#table")).to_contain_text(f"\ufffd{HOSTILE}0000")
    assert 0 == page.locator("img[onerror], script:not([src])").count()


def test_the_keyboard_reaches_everything(visit: Visit, few: Simulated) -> None:
    page = visit(few.address)
    grid = page.locator("#grid")
    expect(page.locator("#legend li").first).to_be_visible()
    grid.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    cell = page.locator(f"#{grid.get_attribute('aria-activedescendant')}")
    expect(cell).to_contain_text("rank 14 on")
    page.keyboard.press("Enter")
    expect(page.locator("#rank-title")).to_have_text("Rank 14")
    expect(page.locator("#rank")).to_be_focused()
    expect(page.locator("#rank dl")).to_contain_text("Step time")
    page.keyboard.press("Escape")
    expect(page.locator("#rank")).to_be_hidden()
    expect(grid).to_be_focused()
    page.locator("#charts svg").first.focus()
    page.keyboard.press("Home")
    expect(page.locator("#charts output").first).to_contain_text("step 0: mean")
    page.get_by_role("button", name="Table").press("Enter")
    page.locator("[data-sort=blame]").press("Enter")
    page.locator("[data-sort=blame]").press("Enter")
    expect(page.locator("#table tbody tr").first).to_contain_text("critical")
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Incident")
    page.get_by_label("Only").fill("12")
    expect(page.locator("#table tbody tr")).to_have_count(1)
    picture(page, "16-table")


def test_every_measure_has_a_legend_that_counts_all_ranks(visit: Visit, few: Simulated) -> None:
    page = visit(few.address)
    expect(page.locator("#legend")).to_contain_text("running")
    shown = {}
    for measure in ("phase", "behind", "lag", "pace", "still"):
        page.locator("#measure").select_option(measure)
        shown[measure] = page.locator("#legend li").all_inner_texts()
    assert {16} == {sum(int(text.rpartition(" ")[2]) for text in texts) for texts in shown.values()}
    assert ["10 to 50 ms"] == [text.rpartition(" ")[0] for text in shown["lag"] if text.endswith(" 1")]


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.release), "dark"])
def test_it_can_be_used_by_everyone(visit: Visit, few: Simulated, scheme: str) -> None:
    page = visit(few.address, color_scheme=scheme, reduced_motion="reduce")
    expect(page.locator("#verdict")).to_contain_text("nonfinite_input")
    expect(page.locator("#charts figure:visible")).to_have_count(4)
    picture(page, f"16-{scheme}")
    assert [] == is_accessible(page)
    page.get_by_role("link", name="The diagnosis in full").click()
    expect(page.locator("#incident svg").first).to_be_visible()
    page.locator("#halt-open").click()
    picture(page, f"halt-{scheme}", is_whole=False)
    assert [] == is_accessible(page)


def test_a_narrow_screen_scrolls_in_one_direction_only(visit: Visit, few: Simulated) -> None:
    page = visit(few.address, width=400)
    expect(page.locator("#legend li").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    picture(page, "16-narrow")


def test_without_script_there_is_the_plain_table(visit: Visit, few: Simulated, wait_for: Callable[..., None]) -> None:
    wait_for(
        lambda: list(few.run_dir.glob("incidents/*/diagnosis.json")), 60, "the incident, for this page stands still"
    )
    page = visit(few.address, java_script_enabled=False)
    incidents, ranks = page.locator("noscript table").all()
    expect(incidents).to_contain_text("nonfinite_input")
    expect(ranks.locator("tr")).to_have_count(1 + 16)
    expect(page.locator("#app")).to_be_hidden()
    expect(page.locator("noscript tr").last).to_contain_text(f"{HOSTILE}0001")
    expect(page.locator("noscript tr").last).to_be_visible()
    incidents.get_by_role("link", name="in full").first.click()
    expect(page.locator("h2")).to_contain_text("(nonfinite_input) on rank 10")
    assert [] == is_accessible(visit(few.address, "/plain"))


def test_a_halt_needs_the_word_and_the_token(visit: Visit, tmp_path: Path) -> None:
    with Simulated(tmp_path / "halted", ("--ranks", "4", "--step-s", "0.2")) as run:
        page = visit(run.address)
        kept = "sessionStorage.getItem('holter-token')"
        page.locator("#halt-open").click()
        go = page.locator("#halt-go")
        expect(page.locator("#halt-reason")).to_be_focused()
        page.get_by_label("Reason").fill("refuse this one")
        page.get_by_label("Your name").fill("somebody")
        page.get_by_label("Token (").fill("a guess")
        expect(go).to_be_disabled()
        page.get_by_label("to confirm").fill("halt")
        picture(page, "halt-filled", is_whole=False)
        go.click()
        expect(page.locator("#halt-answer")).to_contain_text("wrong token")
        page.get_by_label("Token (").fill(TOKEN)
        expect(go).to_be_disabled()
        page.get_by_label("to confirm").fill("halt")
        go.click()
        expect(page.locator("#halt-answer")).to_contain_text("a save is under way")
        assert page.evaluate(kept) is None
        page.get_by_label("Reason").fill("<b>wrong</b> data set")
        page.get_by_label("Keep the token").check()
        page.get_by_label("to confirm").fill("halt")
        go.click()
        expect(page.locator("#halt-answer")).to_contain_text("Accepted")
        assert TOKEN == page.evaluate(kept)
        page.get_by_role("button", name="Let it run").click()
        expect(page.locator("#timeline")).to_contain_text("asked for by somebody from 127.0.0.1: <b>wrong</b> data set")
        expect(page.locator("#halt-token")).to_have_value("")


def test_a_coordinator_that_comes_back_is_found_again(visit: Visit, tmp_path: Path) -> None:
    run = Simulated(tmp_path / "again", ("--ranks", "4", "--step-s", "0.2"))
    with run:
        page = visit(run.address)
        expect(page.locator("#line")).to_have_text("live")
    expect(page.locator("#line")).to_contain_text("ended")
    with run:
        expect(page.locator("#line")).to_have_text("live", timeout=LONG_MS)
        expect(page.locator("#facts")).to_contain_text("4 of 4 ranks")


def test_a_run_that_is_over_is_looked_at_again(visit: Visit, tmp_path: Path) -> None:
    run_dir = tmp_path / "past"
    with Simulated(run_dir, ("--ranks", "4", "--step-s", "0.05", "--fault", "ending")) as run:
        expect(visit(run.address).locator("#charts figure:visible")).to_have_count(4)
    halt = halt_record.HaltRecord(
        cause="asked by me", ranks=[], step=7, checkpoint="checkpoints/7/state", verdict="healthy", at="", why="kept"
    )
    halt_record.write(run_dir, halt)
    command = [sys.executable, "-m", "holter.cli", "page", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        page = visit(process.stdout.readline().split(": ")[1].split("/   ")[0])
        expect(page.locator("#line")).to_have_text("record of a run that has ended")
        expect(page.locator("#halting")).to_contain_text("The run is halted, step 7")
        expect(page.locator("#halting")).to_contain_text("checkpoints/7/state (healthy)")
        expect(page.locator("#legend")).to_contain_text("ended 4")
        expect(page.locator("#charts figure:visible")).to_have_count(4)
        expect(page.locator("#halt-open")).to_be_hidden()
        picture(page, "past")
        process.send_signal(signal.SIGINT)
        assert 0 == process.wait(20)


def test_a_page_opened_after_the_end_shows_what_ended_the_run(visit: Visit, tmp_path: Path) -> None:
    options = ("--ranks", "4", "--step-s", "0.1", "--fault", "nan", "--fault-step", "5", "--linger-s", "120")
    with Simulated(tmp_path / "over", options) as run:
        first = visit(run.address)
        expect(first.locator("#verdict")).to_contain_text("(nonfinite_input) on rank 2")
        run.tell("end")
        expect(first.locator("#line")).to_have_text("the coordinator has ended: every rank has ended")
        page = visit(run.address)
        expect(page.locator("#verdict")).to_contain_text("(nonfinite_input) on rank 2")
        expect(page.locator("#verdict")).to_contain_text("The coordinator has ended")
        expect(page.locator("#line")).to_have_text("the coordinator has ended: every rank has ended")
        expect(page.locator("#legend")).to_contain_text("ended 3")
        expect(page.locator("#halt-open")).to_be_hidden()
        page.get_by_role("button", name="Table").click()
        expect(page.locator("#table tbody tr")).to_have_count(4)
        picture(page, "4-over")
        page.get_by_role("link", name="The diagnosis in full").click()
        expect(page.locator("#incident h2")).to_contain_text("(nonfinite_input) on rank 2")


def test_a_page_that_was_told_nothing_says_so_and_can_be_used(visit: Visit, few: Simulated) -> None:
    page = visit(few.address, "/web/icon.svg")
    page.route("**/api/v1/events", lambda route: route.fulfill(status=503))
    page.goto(few.address)
    expect(page.locator("#verdict")).to_contain_text("Not live: the coordinator cannot be reached")
    expect(page.locator("#verdict > div")).to_have_class("is-warning")
    page.get_by_role("button", name="Table").click()
    expect(page.locator("#worst")).to_have_text("Nothing is known yet.")
    page.unroute("**/api/v1/events")
    expect(page.locator("#line")).to_have_text("live")
    expect(page.locator("#table tbody tr")).to_have_count(16)


@pytest.mark.release
def test_a_job_that_hangs_is_seen_to_stand_longer_and_longer(visit: Visit, tmp_path: Path) -> None:
    with Simulated(tmp_path / "hangs", ("--ranks", "2", "--step-s", "0.2")) as run:
        page = visit(run.address)
        expect(page.locator("#verdict > div")).to_have_class("is-fine")
        run.tell("hang")
        page.locator("#measure").select_option("still")
        expect(page.locator("#legend")).to_have_text(re.compile("5 s or more 2"))
        page.get_by_role("button", name="Table").click()
        stands = page.locator("#table tbody tr").first.locator("td").last
        expect(stands).to_have_text(re.compile(r"^1[4-9] s$"))
        expect(page.locator("#verdict")).to_contain_text("no rank has moved for 3", timeout=LONG_MS)
        expect(page.locator("#verdict > div")).to_have_class("is-info")
        expect(page.locator("#worst")).to_contain_text("standing still, in")
        expect(page.locator("#worst")).to_contain_text("has not moved for 3")
        late = visit(run.address)
        expect(late.locator("#verdict")).to_contain_text(re.compile(r"no rank has moved for [34]\d s"))
        expect(late.locator("#legend")).to_have_text("standing still 2")
        picture(late, "2-stands")


def test_what_is_not_seen_is_not_called_fine(visit: Visit, tmp_path: Path) -> None:
    with Simulated(tmp_path / "unseen", ("--ranks", "4", "--step-s", "0.2")) as run:
        page = visit(run.address)
        verdict = page.locator("#verdict > div")
        expect(verdict).to_have_class("is-fine")
        run.tell("lose")
        expect(verdict).to_have_class("is-warning")
        expect(verdict).to_contain_text("not everything is seen")
        expect(verdict).to_contain_text("rank 2")
        picture(page, "4-blind")
        run.kill()
        expect(verdict).to_contain_text("Not live since")
        expect(verdict).to_have_class("is-warning")
        expect(page).to_have_title("not live: holter unseen")
        picture(page, "4-lost")


def test_what_became_of_a_halt_is_said_with_the_reason(visit: Visit, tmp_path: Path) -> None:
    why = "the run is not halted: rank 3 does not answer <b>"
    with Simulated(tmp_path / "refused", ("--ranks", "4", "--step-s", "0.2")) as run:
        page = visit(run.address)
        halting = page.locator("#halting")
        expect(page.locator("#line")).to_have_text("live")
        expect(halting).to_be_hidden()
        run.tell(f"failed {why}")
        expect(halting).to_contain_text("The halt failed")
        expect(halting).to_contain_text(why)
        expect(halting).to_have_class("is-critical")
        expect(page.locator("#timeline")).to_contain_text(f"halt: failed, {why}")
        picture(page, "4-halt-failed")
        assert [] == is_accessible(page)
        run.tell("called_off it came too late")
        expect(halting).to_have_class("is-warning")
        expect(halting).to_contain_text("the run goes on")


def test_the_verdict_says_from_where_to_resume(visit: Visit, few: Simulated) -> None:
    page = visit(few.address)
    expect(page.locator("#checkpoints")).to_contain_text("poisoned")
    expect(page.locator("#verdict")).to_contain_text("Last healthy checkpoint: none is known.")
    kept = {"step": 40, "path": "checkpoints/40/state", "by": "halt", "at": "", "why": "", "incident": ""}
    said = page.evaluate(
        """async (checkpoints) => {
          const { state } = await import("./web/stream.js"), { verdict } = await import("./web/verdict.js");
          state.checkpoints = checkpoints;
          verdict();
          return document.getElementById("verdict").innerText;
        }""",
        [kept | {"verdict": "healthy", "is_gone": True, "step": 60}, kept | {"verdict": "healthy", "is_gone": False}],
    )
    assert "Last healthy checkpoint: step 40, checkpoints/40/state" in said


def test_findings_that_were_left_out_are_counted(visit: Visit, few: Simulated) -> None:
    page = visit(few.address)
    expect(page.locator("#line")).to_have_text("live")
    found = {"severity": "info", "detector": "slow_rank", "summary": "slow"}
    said = page.evaluate(
        """async (findings) => {
          const { state } = await import("./web/stream.js"), { verdict } = await import("./web/verdict.js"), { notes } = await import("./web/lists.js");
          state.incidents = [];
          Object.assign(state.about, { findings, findings_left_out: 9, blind: [] });
          verdict();
          notes();
          return document.getElementById("verdict").innerText + document.getElementById("notes").innerText;
        }""",
        [found] * 16,
    )
    assert "25 findings stand" in said
    assert "and 9 more" in said


def test_charts_share_a_cursor_and_a_stretch_of_steps(visit: Visit, few: Simulated) -> None:
    page = visit(few.address)
    loss, pace = (page.locator("#charts figure", has_text=title) for title in ("Loss", "Step time"))
    expect(loss.locator(".line").first).to_be_attached()
    loss.scroll_into_view_if_needed()
    plot = loss.locator("svg").bounding_box()
    assert plot is not None
    middle = plot["y"] + plot["height"] / 2
    page.mouse.move(plot["x"] + plot["width"] / 2, middle)
    step = re.compile(r"step ([\d,]+): mean")
    assert step.search(loss.locator("output").inner_text())[1] == step.search(pace.locator("output").inner_text())[1]  # type: ignore[index]
    expect(page.locator("#all-steps")).to_be_hidden()
    page.mouse.down()
    page.mouse.move(plot["x"] + plot["width"] * 0.8, middle)
    page.mouse.up()
    expect(page.locator("#all-steps")).to_be_visible()
    picture(page, "zoomed")
    page.locator("#all-steps").click()
    expect(page.locator("#all-steps")).to_be_hidden()


def test_the_head_says_where_the_time_went_and_what_was_started(visit: Visit, few: Simulated) -> None:
    page = visit(few.address)
    expect(page.locator("#goodput")).to_contain_text("made progress")
    expect(page.locator("#goodput .time-spent span").first).to_be_attached()
    expect(page.locator("#command")).not_to_be_empty()


def test_words_at_incidents_that_began_close_together_do_not_lie_on_each_other(visit: Visit, few: Simulated) -> None:
    page = visit(few.address)
    expect(page.locator("#charts figure:visible")).to_have_count(4)
    marked = page.evaluate(
        """async () => {
          const { state } = await import("./web/stream.js"), { draw } = await import("./web/charts.js");
          const [first] = state.incidents;
          state.incidents = [["warning", 3], ["critical", 4], ["warning", 5]].map(([severity, step]) => ({ ...first, severity, first_step: step }));
          draw();
          const plot = document.querySelector("#charts svg");
          return [plot.querySelectorAll(".mark").length, [...plot.querySelectorAll(".marked")].map((one) => one.textContent)];
        }"""
    )
    assert [3, ["incident, step 4"]] == marked


@pytest.mark.release
def test_four_thousand_ranks_are_usable(visit: Visit, many: Simulated) -> None:
    began_s = time.monotonic()
    page = visit(many.address)
    expect(page.locator("#legend")).to_contain_text(re.compile("running 4,09[56]"), timeout=LONG_MS)
    assert time.monotonic() - began_s < USABLE_S
    expect(page.locator("#legend")).to_contain_text("4,095", timeout=LONG_MS)
    expect(page.locator("#verdict")).to_contain_text("rank 2560")
    page.locator("#measure").select_option("phase")
    began_s = time.monotonic()
    page.locator("#grid").focus()
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#rank-title")).to_contain_text("Rank")
    page.get_by_role("button", name="Table").click()
    page.get_by_label("Only").fill("node-0320")
    expect(page.locator("#table tbody tr")).to_have_count(8)
    assert time.monotonic() - began_s < USABLE_S
    page.get_by_role("button", name="Grid").click()
    picture(page, "4096-light")
    dark = visit(many.address, color_scheme="dark")
    expect(dark.locator("#legend")).to_contain_text("4,095")
    picture(dark, "4096-dark")


@pytest.mark.job
def test_a_real_job_that_hangs_is_explained_with_stacks_side_by_side(
    visit: Visit, forks: Any, wait_for: Callable[..., None]
) -> None:
    job = forks.start(
        FAULTS / "process_faults.py", "spin", "--steps", "4000", "--at", "60", env={"HOLTER_ACTION": "notify"}
    )
    page = visit(f"http://{job.coordinator()}")
    expect(page.locator("#facts")).to_contain_text("2 of 2 ranks", timeout=LONG_MS)
    expect(page.locator("#verdict")).to_contain_text("(rank_stuck_in_python) on rank 1", timeout=LONG_MS)
    page.get_by_role("link", name="The diagnosis in full").click()
    columns = page.locator("#incident .columns > div")
    expect(columns).to_have_count(2)
    expect(columns.filter(has_text="rank 1")).to_contain_text("spin")
    expect(columns.filter(has_text="rank 0")).to_contain_text("backward")
    picture(page, "real-hang")
    job.end()
    wait_for(lambda: job.has_ended, 30, "the end of the job")
    expect(page.locator("#line")).to_contain_text("the coordinator has ended: every rank", timeout=LONG_MS)
