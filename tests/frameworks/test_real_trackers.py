"""What scripts log is read from the trackers' own packages, offline, whichever way they log."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.conftest import ROOT

SCRIPT = Path(__file__).parent / "scripts" / "logs_with.py"


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize(
    ("library", "how"),
    [
        *(("wandb", "module"), ("wandb", "run"), ("mlflow", "module"), ("mlflow", "client")),
        *(("tensorboard", "scalar"), ("tensorboard", "scalars"), ("trackio", "module"), ("trackio", "run")),
    ],
)
def test_its_series_are_read(library: str, how: str, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (make frameworks)")
    offline = {
        "PYTHONPATH": str(ROOT),
        "WANDB_SILENT": "true",
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    ran = subprocess.run(
        [sys.executable, SCRIPT, library, how],
        cwd=tmp_path,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    lines = [line.removeprefix("heard ") for line in ran.stdout.splitlines() if line.startswith("heard ")]
    assert lines, ran.stderr[-3000:]
    # `add_scalars` writes each under its group, and each by a writer of its own.
    losses = [value for said in json.loads(lines[0]) for name, value in said.items() if name == "log.loss"]
    assert [1.5, 1.25, 1.0] == losses
