"""Where the time of real jobs went: each kind of loss is seen, in about the seconds that it took, and the parts are the wall time."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from holter import cli
from holter.files import read_json
from holter.records.goodput import GOODPUT, Goodput

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.job


def spent(run_dir: Path) -> Goodput:
    """As it was written down."""
    found = read_json(run_dir / GOODPUT, Goodput)
    assert found is not None
    assert found.wall_s == pytest.approx(sum(found.parts.values()), rel=0.01)
    return found


def looped_s(out: Path) -> float:
    """What the loop took by the script's own watch."""
    return max(float(json.loads(path.read_text())["loop_s"]) for path in out.parent.glob(f"{out.name}-*.json"))


def test_a_stalled_loader_a_save_a_late_rank_and_the_start_have_their_seconds(nursery: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    naps = ["--nap", "3", "--save", "2", "--late", "0.1", "--setup", "1"]
    began_s = time.monotonic()
    ended = nursery.run(tmp_path, [str(SCRIPTS / "time_spent.py"), "--out", str(out), *naps], env={})
    outside_s = time.monotonic() - began_s
    assert ended.code == 0, ended.stderr[-3000:]
    found = spent(ended.run_dir)
    parts = found.parts
    assert found.wall_s <= outside_s + 0.5, "not longer than the job itself"
    assert 3.0 <= parts["data"] <= 3.0 + 0.25 * found.wall_s
    assert 2.0 <= parts["checkpoint"] <= 2.0 + 0.25 * found.wall_s
    assert 0.7 <= parts["stragglers"], "14 steps of 0.1 s, told of those that were compared"
    assert parts["start"] >= 1.0
    assert parts["hung"] == parts["held"] == parts["redone"] == parts["down"] == 0.0
    # What is left of the loop when its losses are taken away.
    of_loop = sum(parts[name] for name in ("progress", "compile", "data", "stragglers", "checkpoint"))
    assert of_loop == pytest.approx(looped_s(out), abs=1.5)
    (closing,) = [line for line in ended.holter_lines if "made progress (" in line]
    assert f"{found.ratio:.0%}".replace("%", " %") in closing


@pytest.mark.timeout(300)
def test_a_hang_that_ends_is_hung_live_and_afterwards(nursery: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    script = [str(SCRIPTS / "time_spent.py"), "--out", str(out), "--hang", "20"]
    job = nursery.start(tmp_path, script, env={"HOLTER_ACTION": "notify"})
    seen: list[dict[str, float]] = []

    def is_hung(_: Path) -> bool:
        """The status says so while it hangs; then the job goes on by itself."""
        if not seen and (job.run_dir / "coordinator.json").exists():
            url = f"http://{job.coordinator()}/api/v1/status"
            parts = json.loads(urllib.request.urlopen(url, timeout=9).read())["goodput"]["parts"]
            seen.extend([parts] if parts["hung"] > 1 else [])
        return False

    ended = job.wait(is_hung)
    assert ended.code == 0, ended.stderr[-3000:]
    assert seen, "while it hung"
    found = spent(ended.run_dir)
    assert 17.0 <= found.parts["hung"] <= 22.0
    assert found.parts["progress"] < 20.0
    assert cli.main(["status", str(ended.run_dir), "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)["goodput"]
    assert told["parts"]["hung"] == found.parts["hung"]


@pytest.mark.timeout(300)
def test_a_halt_is_held_and_what_lies_between_two_lives_is_down(nursery: Any, tmp_path: Path) -> None:
    script = [str(SCRIPTS / "resumable.py"), "--out", str(tmp_path / "out")]
    first = nursery.run(tmp_path, [*script, "--fault", "nan"], env={"HOLTER_ACTION": "halt"})
    assert first.code == 93, first.stderr[-3000:]
    before = spent(first.run_dir)
    assert before.parts["held"] > 0.05, "at least the save"
    assert 30 <= before.lives[0].steps <= 31
    time.sleep(3)
    state = first.run_dir / "checkpoints" / "30" / "state"
    env = {"HOLTER_ACTION": "halt", "HOLTER_RESUME": "1", "HOLTER_RUN_DIR": str(first.run_dir)}
    (tmp_path / "again").mkdir()
    again = nursery.run(tmp_path / "again", [*script, "--resume", str(state), "--completed", "30"], env=env)
    assert again.code == 0, again.stderr[-3000:]
    found = spent(first.run_dir)
    assert 2 == len(found.lives)
    assert found.parts["down"] >= 3.0
    assert 30 == found.lives[1].base_step
    assert found.lives[1].steps == 10
    assert found.parts["redone"] < 2.0, "at most the step that was held and thrown away"
