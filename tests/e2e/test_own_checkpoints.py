"""The script's own checkpoints, in a run that is not halted: each has a verdict, and a poisoned one is said at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from holter import cli

SCRIPT = Path(__file__).parent / "scripts" / "saving.py"


@pytest.mark.job
def test_each_save_gets_a_verdict_and_the_last_healthy_one_is_named(forks: Any, capsys: Any) -> None:
    ended = forks.run(SCRIPT)
    assert ended.code == 0, ended.stderr[-2000:]
    assert 0 == cli.main(["checkpoint", "list", str(ended.run_dir), "--json"])
    told = json.loads(capsys.readouterr().out)
    verdicts = {Path(one["path"]).name: one["verdict"] for one in told}
    assert {
        "weights-10.pt": "healthy",
        "weights-20.pt": "healthy",
        "weights-30.pt": "poisoned",
        "weights-40.pt": "poisoned",
        "weights-50.pt": "poisoned",
        "weights-60.pt": "poisoned",
    } == verdicts
    warnings = [line for line in ended.holter_lines if "is poisoned" in line]
    assert warnings
    assert "weights-30.pt" in warnings[0]
    assert "the last healthy one is of step 20" in warnings[0]
    healthy = ended.alarms[0]["action"]["last_healthy"]
    assert (20, "weights-20.pt") == (healthy["step"], Path(healthy["path"]).name)
