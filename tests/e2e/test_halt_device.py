"""A NaN on the device of the tests, in real jobs: it does not reach the weights, every rank stands before its step, and the resumed run has the same bits."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.e2e.resuming import HALT, halt_json, results, same_bits

LOOP = Path(__file__).parent / "scripts" / "resumable_loop.py"
AT, EVERY = 6, 2

pytestmark = pytest.mark.job


class Case(NamedTuple):
    """How a job trains, where its NaN comes from, and what it is called."""

    kind: str
    how: str
    where: str
    cause: str

    @property
    def num_ranks(self) -> int:
        """A NaN comes from the last of them."""
        return 1 if self.kind == "alone" else 2

    @property
    def culprits(self) -> list[int]:
        """Who is named; what a script writes into reduced gradients it writes on every replica."""
        return [0, 1] if (self.kind, self.where) == ("ddp", "gradient") else [self.num_ranks - 1]


FAST = Case("ddp", "--by fused --is-ahead", "batch", "nonfinite_input")
CASES = [
    Case("ddp", "--by fused", "batch", "nonfinite_input"),
    Case("ddp", "--by fused --is-ahead", "layer", "nonfinite_forward"),
    Case("ddp", "--by fused --is-ahead", "label", "nonfinite_input"),
    Case("ddp", "--by fused --is-ahead --optimizer sgd", "batch", "nonfinite_input"),
    Case("ddp", "--by foreach", "batch", "nonfinite_input"),
    Case("ddp", "--by foreach --is-ahead", "layer", "nonfinite_forward"),
    Case("ddp", "--by fused --is-ahead --closure", "batch", "nonfinite_input"),
    Case("ddp", "--by foreach --closure", "batch", "nonfinite_input"),
    Case("ddp", "--by fused --is-ahead --scaler unscaled", "gradient", "nonfinite_backward"),
    Case("ddp", "--by foreach --scaler unscaled", "gradient", "nonfinite_backward"),
    Case("fsdp", "--by fused --is-ahead", "batch", "nonfinite_input"),
    Case("fsdp", "--by fused", "layer", "nonfinite_forward"),
    Case("fsdp", "--by foreach --is-ahead", "gradient", "nonfinite_backward"),
    Case("alone", "--by fused --is-ahead", "layer", "nonfinite_forward"),
    Case("alone", "--by foreach", "layer", "nonfinite_forward"),
    Case("alone", "--by fused --optimizer sgd", "layer", "nonfinite_forward"),
    Case("alone", "--by fused --closure", "layer", "nonfinite_forward"),
]


def name_of(case: Case) -> str:
    return "-".join(
        [case.kind, *case.how.replace("--by", "").replace("--optimizer", "").replace("--", "").split(), case.where]
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(FAST, id=name_of(FAST))]
    + [pytest.param(case, id=name_of(case), marks=pytest.mark.release) for case in CASES],
)
def test_a_nan_is_halted_and_the_resumed_run_has_the_same_bits(
    case: Case, jobs: Any, device_environment: dict[str, str], tmp_path: Path
) -> None:
    halted_and_resumed(case, jobs, "cuda", device_environment, tmp_path)


@pytest.mark.release
@pytest.mark.parametrize("how", ["--by fused --is-ahead", "--by foreach"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_so_it_is_on_the_device_of_another_maker(
    kind: str, how: str, jobs: Any, npu_environment: dict[str, str], tmp_path: Path
) -> None:
    halted_and_resumed(Case(kind, how, "layer", "nonfinite_forward"), jobs, "npu", npu_environment, tmp_path)


@pytest.mark.release
def test_so_it_is_on_a_device_without_streams(jobs: Any, bare_environment: dict[str, str], tmp_path: Path) -> None:
    case = Case("alone", "--by foreach", "layer", "nonfinite_forward")
    halted_and_resumed(case, jobs, "bare", bare_environment, tmp_path)


def halted_and_resumed(case: Case, jobs: Any, device: str, environment: dict[str, str], tmp_path: Path) -> None:
    """One job with the fault, one that goes on from its checkpoint, one that never met the fault."""
    ranks, faulty = case.num_ranks, case.num_ranks - 1

    def run(name: str, *arguments: object) -> Any:
        words = ["--out", tmp_path / name, "--device", device, "--kind", case.kind, "--steps", 10, *case.how.split()]
        return jobs.run(LOOP, *words, *arguments, ranks=ranks, by="scheduler", env={**HALT, **environment})

    ended = run("faulted", "--fault", "nan", "--where", case.where, "--at", AT, "--rank", faulty)
    assert ended.code == 93, ended.stderr[-3000:]
    halt = halt_json(ended.run_dir)
    assert (AT, case.cause, case.culprits) == tuple(halt[key] for key in ("step", "cause", "ranks")), halt["why"]
    assert halt["verdict"] == "healthy", halt["why"]
    resumed, reference = run("resumed", "--resume", ended.run_dir / halt["checkpoint"]), run("reference")
    assert (0, 0) == (resumed.code, reference.code), resumed.stderr[-3000:]
    same_bits(results(tmp_path / "reference", ranks), results(tmp_path / "resumed", ranks), str(AT * EVERY))


@pytest.mark.release
def test_a_scaler_that_unscales_itself_leaves_a_bad_step_out_and_nothing_is_halted(
    jobs: Any, device_environment: dict[str, str], tmp_path: Path
) -> None:
    def run(name: str, env: dict[str, str]) -> Any:
        words = ["--out", tmp_path / name, "--device", "cuda", "--kind", "alone", "--by", "fused", "--scaler", "whole"]
        fault = ["--fault", "nan", "--where", "batch", "--at", AT, "--rank", 0, "--steps", 10]
        return jobs.run(LOOP, *words, *fault, ranks=1, by="scheduler", env={**env, **device_environment})

    assert [0, 0] == [run("worn", HALT).code, run("plain", {"HOLTER": "0"}).code]
    assert results(tmp_path / "worn", 1) == results(tmp_path / "plain", 1)
