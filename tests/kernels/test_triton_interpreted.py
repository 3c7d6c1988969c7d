"""The GPU kernels' source, run by Triton's interpreter on CPU tensors; in processes of their own, since it is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.release) for name in ("random_bits", "magnitudes")),
        *("shards", "fingerprints_alone", "mixed_list", "many_segments", "wrong_is_noticed"),
    ],
)
def test_interpreted(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("triton_interpreted.py")
    run = subprocess.run([sys.executable, script, name], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
