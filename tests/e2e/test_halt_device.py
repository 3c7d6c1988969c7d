"""A NaN on the device of the tests, in jobs of two ranks: the device leaves the step out, every rank stands before it, and the resumed run has the same bits."""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.resuming import HALT, halt_json, results, same_bits

LOOP = Path(__file__).parent / "scripts" / "resumable_loop.py"
AT, EVERY, RANKS = 6, 2, 2

pytestmark = pytest.mark.job


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("ddp", ["--fused", "--is-ahead"], "nonfinite_input"), id="ddp-fused-ahead"),
        pytest.param(("ddp", ["--fused"], "nonfinite_input"), id="ddp-fused", marks=pytest.mark.release),
    ],
)
def test_a_nan_is_halted_and_the_resumed_run_has_the_same_bits(
    case: tuple[str, list[str], str], jobs: Any, device_environment: dict[str, str], tmp_path: Path
) -> None:
    kind, how, cause = case

    def run(name: str, *arguments: object) -> Any:
        words = ["--out", tmp_path / name, "--device", "cuda", "--kind", kind, "--steps", 10, *how, *arguments]
        return jobs.run(LOOP, *words, ranks=RANKS, by="scheduler", env={**HALT, **device_environment})

    ended = run("faulted", "--fault", "nan", "--at", AT)
    assert ended.code == 93, ended.stderr[-3000:]
    halt = halt_json(ended.run_dir)
    assert (AT, "healthy", cause, [1]) == tuple(halt[key] for key in ("step", "verdict", "cause", "ranks")), halt["why"]
    resumed, reference = run("resumed", "--resume", ended.run_dir / halt["checkpoint"]), run("reference")
    assert (0, 0) == (resumed.code, reference.code), resumed.stderr[-3000:]
    same_bits(results(tmp_path / "reference", RANKS), results(tmp_path / "resumed", RANKS), str(AT * EVERY))
