"""PyTorch Lightning: a NaN is held before the weights have it, and what is saved goes on to the bits of a run without it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.resuming import HALT, halt_json

SCRIPT = Path(__file__).parent / "scripts" / "resumable_lightning.py"
STEPS, AT = 24, 10
pytestmark = [
    pytest.mark.job,
    pytest.mark.release,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="lightning is not installed (make frameworks)"
    ),
]


@pytest.mark.parametrize("clip", [(), ("--clip", "1.0")], ids=["", "clip"])
def test_a_nan_is_halted_and_resumed_bit_for_bit(clip: tuple[str, ...], nursery: Any, tmp_path: Path) -> None:
    def run(name: str, *words: object, action: str) -> Any:
        (tmp_path / name).mkdir()
        words = (SCRIPT, tmp_path / name / "out", STEPS, *clip, *words)
        return nursery.run(tmp_path / name, [str(word) for word in words], env=HALT | {"HOLTER_ACTION": action})

    halted = run("halted", "--nan", AT, action="halt")
    assert 93 == halted.code, halted.stderr[-3000:]
    halt = halt_json(halted.run_dir)
    assert ("nonfinite_input", [1], AT, "healthy") == tuple(halt[key] for key in ("cause", "ranks", "step", "verdict"))
    resumed = run("resumed", "--resume", halted.run_dir / halt["checkpoint"], action="notify")
    whole = run("whole", action="notify")
    assert (0, 0) == (resumed.code, whole.code), resumed.stderr[-3000:] + whole.stderr[-3000:]
    for rank in (0, 1):
        one, other = (torch.load(tmp_path / name / f"out-{rank}.pt") for name in ("whole", "resumed"))
        assert [] == [name for name in one if not torch.equal(one[name], other[name])]
