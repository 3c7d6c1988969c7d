"""What the page shows of a run: bounded, with the checkpoints of halts, and who is to blame."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.diagnosis.test_report import bad_batch, diagnose

from holter import clock
from holter.coordinator.halt.driver import Outcome
from holter.coordinator.http.page_state import CALLED_OFF_NS, MAX_LINES, PageState
from holter.coordinator.identity import RunSettings
from holter.coordinator.run import Run
from holter.halting.vault import manifest
from holter.halting.vault.manifest import Manifest
from holter.transport.wire import Hello


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(RunSettings(tmp_path, "run-1", "http://127.0.0.1:1"))
    for rank in range(40):
        hello = Hello(
            run_id="", rank=rank, world_size=40, host="h", rank_pid=rank + 1, sidecar_pid=1, metrics_address=""
        )
        made.intake.connect(hello, clock.wall_ns())
    yield made
    made.disk.close(5.0)


def seal(run_dir: Path, name: str, step: int, sealed_at: str) -> None:
    folder = run_dir / "checkpoints" / name
    (folder / "state").mkdir(parents=True)
    made = Manifest(
        run_id="run-1",
        step=step,
        framework="accelerate",
        world_size=2,
        verdict="healthy",
        why="every tensor was read back",
        files={},
        tensors=[],
        sealed_at=sealed_at,
    )
    (folder / manifest.NAME).write_bytes(manifest.encode(manifest.signed(made)))


def test_checkpoints_of_halts_are_shown_newest_first_and_told_in_the_timeline(run: Run, tmp_path: Path) -> None:
    page_state = PageState(run, clock.wall_ns)
    seal(tmp_path, "30", 30, "2026-11-15T10:00:00Z")
    page_state.read_vault()
    seal(tmp_path, "40", 40, "2026-11-15T11:00:00Z")
    page_state.read_vault()
    page_state.look()
    shown = page_state.paint().facts["checkpoints"]
    assert [(40, "halt", "checkpoints/40/state"), (30, "halt", "checkpoints/30/state")] == [
        (one["step"], one["by"], one["path"]) for one in shown
    ]
    assert ["a halt kept step 30 (30)", "a halt kept step 40 (40)"] == [
        one.text.partition(":")[0] for one in page_state.timeline.all()
    ]


def test_the_vault_is_looked_at_by_the_disks_own_thread(run: Run, tmp_path: Path) -> None:
    page_state = PageState(run, clock.wall_ns)
    seal(tmp_path, "30", 30, "2026-11-15T10:00:00Z")
    page_state.look()
    assert run.disk.close(5.0)
    assert 1 == len(page_state.paint().facts["checkpoints"])


def test_thousands_of_blind_spots_are_a_few_lines_and_a_number(run: Run) -> None:
    for rank in range(40):
        run.intake.disconnect(rank, rank + 1, clock.wall_ns(), is_closed=True)
    about = PageState(run, clock.wall_ns).paint().facts["about"]
    assert (MAX_LINES, 40 - MAX_LINES) == (len(about["blind"]), about["blind_left_out"])


def test_an_open_incident_names_its_ranks_and_a_closed_one_does_not(run: Run) -> None:
    page_state, opened = PageState(run, clock.wall_ns), diagnose(bad_batch())
    run.incidents.recall([opened])
    before = page_state.paint()
    assert [1] == [rank for rank, blame in enumerate(before.columns["blame"]) if blame == 2]
    assert before.facts["incidents"] == page_state.paint().facts["incidents"]
    run.incidents.recall([msgspec.structs.replace(opened, closed_at="2026-11-15T12:00:00Z")])
    after = page_state.paint()
    assert {0} == set(after.columns["blame"])
    assert {"incidents", "columns"} <= set(after.since(before))


def test_a_better_explanation_makes_another_card(run: Run) -> None:
    page_state, opened = PageState(run, clock.wall_ns), diagnose(bad_batch())
    run.incidents.recall([opened])
    (card,) = page_state.paint().facts["incidents"]
    cause = msgspec.structs.replace(opened.causes[0], mechanism=opened.causes[0].mechanism + " And more.")
    run.incidents.recall([msgspec.structs.replace(opened, causes=(cause,))])
    (other,) = page_state.paint().facts["incidents"]
    assert card["size"] != other["size"], "who has it open fetches it again"
    assert card["line"] == other["line"]


@pytest.mark.parametrize(("name", "is_cleared"), [("called_off", True), ("failed", False)])
def test_a_halt_that_was_called_off_is_news_for_a_while_and_one_that_failed_stands(
    run: Run, name: str, *, is_cleared: bool
) -> None:
    now_ns = clock.wall_ns()
    page_state = PageState(run, lambda: now_ns)
    assert page_state.paint().facts["about"]["halt"] is None
    run.halts.outcome = Outcome(name, "rank 3 does not answer", is_halted=False)
    page_state.look()
    now_ns += CALLED_OFF_NS
    shown = page_state.paint().facts["about"]["halt"]
    assert (name, "rank 3 does not answer") == (shown["outcome"], shown["text"])
    assert clock.rfc3339(now_ns - CALLED_OFF_NS) == shown["since"]
    now_ns += 1
    assert is_cleared == (page_state.paint().facts["about"]["halt"] is None)
    assert 1 == sum(one.kind == "halt" for one in page_state.timeline.all())
