"""Three runs of one project, each with something changed and the same fault: the third says stop, and what the attempts taught."""

from pathlib import Path

import msgspec
from tests.coordinator.conftest import attached, done

from holter.cli.parts.earlier import earlier_runs
from holter.coordinator.identity import RunSettings
from holter.coordinator.run import Run
from holter.files import read_json
from holter.records import Attached, Diagnosis, Nonfinite
from holter.transport import wire

S = 10**9


def ran(runs: Path, name: str, lr: str, now_ns: int) -> Diagnosis:
    """One run whose batch holds a NaN at its second step, as its incident is written down."""
    run_dir = runs / name
    run = Run(RunSettings(run_dir, name, "http://127.0.0.1:1", earlier=earlier_runs(run_dir, "")))
    run.intake.connect(
        wire.Hello(run_id=name, rank=0, world_size=1, host="h", rank_pid=1, sidecar_pid=2, metrics_address=""), now_ns
    )
    first = attached(0, 1)
    assert isinstance(first.body, Attached)
    first = msgspec.structs.replace(first, body=msgspec.structs.replace(first.body, command=["train.py", "--lr", lr]))
    bad = Nonfinite(where="input", name="x", nans=1, infs=0, numel=4)
    said = [first, done(0, 0), done(0, 1, nonfinite=[bad])]
    run.intake.hear(0, wire.Report(heartbeat=None, observations=said, dropped=0), now_ns)
    run.judge(now_ns, is_final=True)
    run.intake.end(now_ns)
    run.close(5.0)
    (path,) = run_dir.glob("incidents/*/diagnosis.json")
    found = read_json(path, Diagnosis)
    assert found is not None
    return found


def test_strikes_survive_new_run_directories(tmp_path: Path) -> None:
    runs = tmp_path / "shop" / "holter-runs"
    runs.mkdir(parents=True, mode=0o700)
    first, second, third = (
        ran(runs, name, lr, at * 1000 * S)
        for at, (name, lr) in enumerate((("a", "0.1"), ("b", "0.05"), ("c", "0.01")), start=1)
    )
    assert [1, 2, 3] == [first.strikes, second.strikes, third.strikes]
    assert () == first.seen_before
    assert "in a, step 1" in second.seen_before[0]
    doubt = " ".join(evidence.summary for evidence in third.causes[0].evidence if evidence.kind == "strikes")
    assert "Stop: " in doubt
    assert "All of them changed --lr" in doubt


def test_the_same_thing_started_again_is_no_strike(tmp_path: Path) -> None:
    runs = tmp_path / "shop" / "holter-runs"
    runs.mkdir(parents=True, mode=0o700)
    found = [ran(runs, name, "0.1", at * 1000 * S) for at, name in enumerate("abc", start=1)]
    assert [1, 1, 1] == [one.strikes for one in found]
    assert found[0].causes[0].cause == found[2].causes[0].cause
    assert "in a, step 1; " in found[2].seen_before[0]
