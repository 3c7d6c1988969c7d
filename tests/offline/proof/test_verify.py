"""Two records, one verdict: what came back, what is new, what was long enough, what else changed."""

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holter.cli import main
from holter.clock import rfc3339
from holter.coordinator.disk import Disk
from holter.coordinator.recovery.journal import Journal
from holter.diagnosis.explain import explain
from holter.offline.proof import PastFault, RunRecord, verify
from holter.offline.proof.changes import options_of, settings_differ
from holter.records import Directive, Finding, FirstStep, Observation, StepDone


def curve(num: int, level=1.0, seed: int = 1, noise: float = 0.03):
    rng = random.Random(seed)  # noqa: S311 - noise
    return tuple((step, (level(step) if callable(level) else level) + rng.gauss(0, noise)) for step in range(num))


def fault(cause: str = "loss_divergence", step: int = 40, **more) -> PastFault:
    values = {"id": "i-1", "severity": "critical", "symptom": "It rose.", "detected_step": step + 2} | more
    return PastFault(cause=cause, first_step=step, **values)


def record(name: str, num: int = 200, faults=(), loss=None, **more) -> RunRecord:
    series = {"loss": curve(num) if loss is None else loss}
    values = {"name": name, "watched_by": "holter", "first_step": 0, "last_step": num - 1, "series": series} | more
    return RunRecord(faults=tuple(faults), **values)


RISEN = curve(60, lambda step: 1.0 if step < 40 else 1.0 + 0.3 * (step - 39))
BEFORE = record("before", 60, [fault()], RISEN)


def test_a_fault_that_stays_away_for_a_hundred_steps_is_fixed():
    found = verify(BEFORE, record("after", 141))
    assert ("fixed", 100, 0) == (found.verdict, found.num_quiet_steps, found.num_more_steps)


def test_a_run_that_is_too_short_is_undecided_and_says_how_many_steps_would_decide():
    found = verify(BEFORE, record("after", 100))
    assert ("undecided", 41) == (found.verdict, found.num_more_steps)
    assert "41 more steps" in found.reason
    never = verify(BEFORE, record("after", 30))
    assert ("undecided", 111) == (never.verdict, never.num_more_steps)


def test_what_appeared_at_once_needs_ten_times_as_long_and_no_hundred_steps():
    early = record("before", 20, [fault("gradient_sync_bypassed", 2)])
    assert "fixed" == verify(early, record("after", 30)).verdict
    assert "undecided" == verify(early, record("after", 20)).verdict


@pytest.mark.parametrize(
    "back",
    [
        fault(step=90),
        fault("nonfinite_forward", 45),
        fault("learning_rate_too_high", 45),
        fault(step=40, ranks=(3,)),
    ],
)
def test_a_fault_that_comes_back_later_elsewhere_or_under_another_name_is_not_fixed(back):
    found = verify(BEFORE, record("after", 300, [back], curve(300, lambda step: 1.0 if step < 290 else 2.0)))
    assert ("not_fixed", back.cause) == (found.verdict, found.came_back.cause)


def test_another_fault_as_grave_at_a_step_that_was_reached_before_is_worse_and_a_later_one_is_only_said():
    assert "worse" == verify(BEFORE, record("after", 300, [fault("script_error", 20)])).verdict
    later = verify(BEFORE, record("after", 300, [fault("script_error", 250)]))
    assert "fixed" == later.verdict
    assert any("script_error at step 250" in one for one in later.remarks)
    lesser = verify(BEFORE, record("after", 300, [fault("slow_input", 20, severity="warning")]))
    assert "fixed" == lesser.verdict


def test_a_curve_that_is_what_it_was_is_not_fixed_though_nobody_names_it():
    still = record("before", 200, [fault("loss_plateau", 20, severity="warning")])
    assert "not_fixed" == verify(still, record("after", 200, loss=curve(200, seed=9))).verdict
    falling = curve(200, lambda step: 0.2 + math.exp(-step / 40), seed=9)
    assert "fixed" == verify(still, record("after", 200, loss=falling)).verdict


def test_a_divergence_that_is_a_high_plateau_now_is_not_fixed():
    """An epsilon took the NaN away, and the model is dead all the same."""
    lost = record(
        "before", 200, [fault("nonfinite_forward", 40)], curve(200, lambda step: 1.1 if step < 40 else math.nan)
    )
    dead = record(
        "after",
        200,
        [fault("zero_gradients", 120, severity="warning")],
        curve(200, lambda step: 1.1 if step < 40 else 9.0, noise=0.5),
    )
    assert "not_fixed" == verify(lost, dead).verdict
    noisy = record("after", 200, loss=curve(200, lambda step: 1.1 - 0.004 * step, noise=0.3))
    assert "fixed" == verify(lost, noisy).verdict


def test_a_higher_curve_where_the_fault_showed_is_worse():
    hotter = curve(200, lambda step: 1.0 if step < 20 else 50.0 * (step - 19))
    assert "worse" == verify(BEFORE, record("after", 200, [fault(step=20)], hotter)).verdict


def test_silence_that_says_nothing_is_undecided():
    apart = record("before", 100, [fault("buffer_divergence", 10)])
    log = record("after", 400, watched_by="log")
    assert "a log does not show buffer_divergence" in verify(apart, log).reason
    blind = record("after", 400, blind=("rank 0: compiled model",))
    assert "undecided" == verify(apart, blind).verdict
    overfitted = record("before", 100, [fault("overfitting", 10)], series={"evaluation": curve(100)}, watched_by="log")
    assert "no evaluation" in verify(overfitted, log).reason


def test_without_a_fault_there_is_none_to_fix_and_one_that_nobody_named_is_measured():
    assert "undecided" == verify(record("before"), record("after", loss=curve(200, seed=2))).verdict
    unnamed = record("before", 200, loss=curve(200, lambda step: 1.0 if step < 50 else 40.0))
    found = verify(unnamed, record("after", 200))
    assert ("fixed", "loss_divergence") == (found.verdict, found.fault.cause)
    assert 40 <= found.fault.first_step <= 55


def test_two_changes_are_said_and_what_differs_between_any_two_runs_is_none():
    old = {
        "command: --lr": "0.1",
        "command: --output_dir": "a",
        "environment: NCCL_DEBUG": "INFO",
        "version: torch": "2.13",
    }
    new = {
        "command: --lr": "0.10",
        "command: --output_dir": "b",
        "environment: NCCL_DEBUG": "WARN",
        "version: torch": "2.14",
    }
    assert ["NCCL_DEBUG", "torch"] == [one.name for one in settings_differ(old, new)]
    found = verify(
        msgspec.structs.replace(BEFORE, settings=old), msgspec.structs.replace(record("after"), settings=new)
    )
    assert any("2 things changed" in one for one in found.remarks)


def test_other_batches_at_the_same_steps_are_a_change():
    before = msgspec.structs.replace(BEFORE, batches={step: step + 1 for step in range(60)})
    after = msgspec.structs.replace(record("after"), batches={step: 7 * step + 3 for step in range(60)})
    assert ["data"] == [one.kind for one in verify(before, after).changes]
    assert () == verify(before, msgspec.structs.replace(after, batches=before.batches)).changes


def test_a_command_is_read_by_its_options():
    words = ["train.py", "--lr", "0.1", "--fp16", "--seed=3", "model=gpt", "data.txt", "--shift", "-1"]
    expected = {
        "--lr": "0.1",
        "--fp16": "true",
        "--seed": "3",
        "model": "gpt",
        "argument 1": "data.txt",
        "--shift": "-1",
    }
    assert {f"command: {name}": value for name, value in expected.items()} == options_of(words)


def log(path, losses) -> str:
    path.write_text("\n".join(f"step {step} loss {value}" for step, value in enumerate(losses)), encoding="utf-8")
    return str(path)


@pytest.fixture
def logs(tmp_path):
    bad = [value for _, value in curve(60, lambda step: 2 - step / 60)] + [math.nan] * 20
    before = log(tmp_path / "before.log", bad)
    return before, lambda num: log(
        tmp_path / "after.log", [value for _, value in curve(num, lambda step: 1 + math.exp(-step / 50))]
    )


def test_exit_codes_and_json(logs, capsys):
    before, after = logs
    for num, code, verdict in ((300, 0, "fixed"), (90, 3, "undecided")):
        assert code == main(["verify", before, after(num), "--json"])
        assert verdict == json.loads(capsys.readouterr().out)["verdict"]
    again = shutil.copy(before, f"{before}.again")
    assert 1 == main(["verify", before, again])
    assert capsys.readouterr().out.startswith("not fixed: nonfinite")


@pytest.mark.parametrize(
    "words", [["verify"], ["verify", "nowhere", "nowhere"], ["verify", ".", "x", "y", "z"], ["verify", ".", "i-1", "."]]
)
def test_wrong_use_is_one_sentence(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert 2 == main(words)
    said = capsys.readouterr().err
    assert said.startswith("holter: ")
    assert 1 == said.count("\n")


def test_the_library_says_the_same_as_the_page_of_agents_shows(logs, monkeypatch):
    before, after = logs
    page = (Path(__file__).resolve().parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    assert '"before.log"' in code
    monkeypatch.chdir(Path(before).parent)
    after(300)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fixed\n" == done.stdout


def seen(step: int, body) -> Observation:
    return Observation(rank=0, at_ns=0, step=step, body=body)


def done(loss: float) -> StepDone:
    return StepDone(seconds=0.1, phase_seconds={}, micro_steps=1, loss=loss, gradient_norm=1.0, learning_rate=0.1, batch=0, roots={}, nonfinite=[], overhead_ratio=0.0, check_interval=1)  # fmt: skip


def test_a_resumed_run_that_fails_within_its_first_second_is_not_fixed(tmp_path, capsys):
    """The incident says when it opened in whole seconds, and so before its own life began."""
    begun_ns, again_ns = 1_000 * 10**9, 2_000 * 10**9 + 700_000_000
    kept, disk = Journal(tmp_path / "journal"), Disk()
    for at_ns, completed, steps in ((begun_ns, 0, 40), (again_ns, 40, 1)):
        kept.append(at_ns, seen(0, FirstStep(completed=completed)))
        for step in range(steps):
            kept.append(at_ns + step, seen(step, done(1.0)))
    kept.flush(disk, is_now=True)
    assert disk.close(5.0)
    for number, at_ns, step in ((1, begun_ns, 40), (2, again_ns, 0)):
        finding = Finding(detector="slow_rank", severity="warning", first_step=step, detected_step=step, ranks=(0,), summary="Late.", facts={"is_in_data": True})  # fmt: skip
        made = explain(finding, incident_id=f"i-{number}", run_id="r", opened_at=rfc3339(at_ns // 10**9 * 10**9), detected_after_s=0.1, directive=Directive(directive="halt", reason="a test"))  # fmt: skip
        folder = tmp_path / "incidents" / f"i-{number}"
        folder.mkdir(parents=True)
        (folder / "diagnosis.json").write_bytes(msgspec.json.encode(made))
    (tmp_path / "run.json").write_text(
        json.dumps({"run_id": "r", "started_at": "2026-11-18T10:00:00Z", "coordinator": ""})
    )

    assert 1 == main(["verify", str(tmp_path), str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ("not_fixed", "i-1", "i-2") == (found["verdict"], found["fault"]["id"], found["came_back"]["id"])
    assert [] == found["gone_faults"]
