"""On the device of the tests: a NaN is left out by every rank, the job is halted as of that step, and resumes with the same bits."""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.resuming import HALT, halt_json, results, same_bits

LOOP = Path(__file__).parent / "scripts" / "resumable_loop.py"
AT, EVERY = 5, 2

pytestmark = pytest.mark.job


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["--kind", "ddp", "--fused", "--is-ahead"], id="ddp-fused-ahead"),
        pytest.param(["--kind", "ddp", "--fused"], id="ddp-fused-synchronous", marks=pytest.mark.release),
        pytest.param(["--kind", "ddp", "--is-ahead"], id="ddp-foreach", marks=pytest.mark.release),
        pytest.param(["--kind", "fsdp", "--is-ahead"], id="fsdp-foreach", marks=pytest.mark.release),
        pytest.param(["--kind", "fsdp", "--fused", "--is-ahead"], id="fsdp-fused", marks=pytest.mark.release),
    ],
)
def test_the_step_before_the_nan_is_what_is_kept_and_it_resumes_with_the_same_bits(
    how: list[str], jobs: Any, device_environment: dict[str, str], tmp_path: Path
) -> None:
    def run(name: str, *arguments: object) -> Any:
        words = ["--out", tmp_path / name, "--device", "cuda", "--steps", "9", *how]
        return jobs.run(LOOP, *words, *arguments, env={**HALT, **device_environment})

    ended = run("faulted", "--fault", "nan", "--at", AT)
    halt = halt_json(ended.run_dir)
    kept = tuple(halt[key] for key in ("step", "checkpoint", "verdict"))
    assert (AT, f"checkpoints/{AT}/state", "healthy") == kept, halt
    reference, resumed = run("reference"), run("resumed", "--resume", ended.run_dir / halt["checkpoint"])
    assert (0, 0) == (reference.code, resumed.code), resumed.stderr[-3000:]
    same_bits(results(tmp_path / "reference", 2), results(tmp_path / "resumed", 2), str(AT * EVERY))
