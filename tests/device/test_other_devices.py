"""An accelerator that is no CUDA: read by torch's own operations, which is said once; every step is told, and faults are found as anywhere.

`npu` has streams as torch_npu and torch.xpu have them; `bare` shows none and has no float64, as torch.mps.
"""

import json
import warnings
from pathlib import Path

import fake_cuda
import pytest
import torch
from tests.rank.conftest import Worn

from holter.rank import accelerator
from holter.records import StepDone
from holter_kernels import summarize

SCRIPT = Path(__file__).resolve().parent / "scripts" / "other_device.py"
NUM_STEPS = 6
SOUND = ("healthy", "unknown")
"""Torch operations are slow: within a few steps the budget may not have let every tensor be looked at, and that is said."""


def trained(fault_at: int | None = None) -> tuple[Worn, list[torch.Tensor], list[str]]:
    """A rank that was worn for some steps, its weights, and what was warned of."""
    name = accelerator.kind()
    torch.manual_seed(0)
    worn = Worn()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)).to(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(NUM_STEPS):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            batch[0, 0] = float("nan") if step == fault_at else 0.0
            model(batch.to(name)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    fake_cuda.drain()
    return worn, [parameter.detach().cpu() for parameter in model.parameters()], [str(each.message) for each in said]


def every_step_is_told(name: str) -> None:
    worn, _, said = trained()
    worn.monitor.uninstall()
    assert name == accelerator.kind()
    assert list(range(NUM_STEPS)) == [observation.step for observation in worn.said(StepDone)]
    assert {} == worn.monitor.context.guard.failures
    assert 1 == sum(f"holter has no kernels for {name}" in sentence for sentence in said)


def a_nan_is_told(name: str) -> None:
    worn, _, _ = trained(fault_at=2)
    worn.monitor.uninstall()
    first = next(each for each in worn.said(StepDone) if each.body.nonfinite)
    assert (name, 2) == (accelerator.kind(), first.step)
    assert {} == worn.monitor.context.guard.failures


def rows_are_the_definition() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(1000),
        torch.randn(33, 7).bfloat16(),
        torch.arange(50),
        torch.tensor([1.0, float("nan"), 0.0]),
    ]
    there, here = summarize([tensor.to(accelerator.kind()) for tensor in tensors]), summarize(tensors)
    for field in ("fingerprint", "numel", "nans", "zeros", "subnormals", "min", "max"):
        assert getattr(here, field).tolist() == pytest.approx(getattr(there, field).tolist(), nan_ok=True), field
    # 1000 squares are added in float32, here by the host and there where there is no float64: an error of at most 1000 * 2^-24 of their sum.
    assert there.square_sum.tolist() == pytest.approx(here.square_sum.tolist(), rel=1000 * 2**-24)


def the_random_state_can_be_put_back() -> None:
    name = accelerator.kind()
    torch.ones(1, device=name)
    kept = [generator.get_state() for generator in accelerator.generators()]
    first = torch.rand(4, device=name).tolist()
    accelerator.set_generators(kept)
    assert 2 == len(kept)
    assert first == torch.rand(4, device=name).tolist()


@pytest.mark.device("npu")
def test_every_step_is_told() -> None:
    every_step_is_told("npu")


@pytest.mark.device("bare")
def test_every_step_is_told_without_streams() -> None:
    every_step_is_told("bare")


@pytest.mark.device("npu")
def test_a_nan_is_told() -> None:
    a_nan_is_told("npu")


@pytest.mark.device("bare")
def test_a_nan_is_told_without_streams() -> None:
    a_nan_is_told("bare")


@pytest.mark.device("npu")
def test_rows_are_the_definition() -> None:
    rows_are_the_definition()


@pytest.mark.device("bare")
def test_rows_are_the_definition_in_float32() -> None:
    rows_are_the_definition()


@pytest.mark.device("npu")
def test_the_random_state_can_be_put_back() -> None:
    the_random_state_can_be_put_back()


@pytest.mark.device("bare")
def test_the_random_state_can_be_put_back_by_functions_alone() -> None:
    the_random_state_can_be_put_back()


@pytest.mark.device("npu")
def test_what_holter_does_there_makes_nobody_wait() -> None:
    trained()
    fake_cuda.syncs()
    trained()
    assert {"copy to device", "copy to host"} == set(fake_cuda.syncs()), "the script's own, and no others"


@pytest.mark.device("npu")
def test_what_the_accelerator_tells_of_itself() -> None:
    held = torch.ones(1 << 20, device="npu")
    found = accelerator.memory()
    assert found is not None
    assert found.held >= held.nbytes
    assert found.total > found.reserved
    assert "" == accelerator.uuid()
    assert [] == accelerator.graph_classes()[1:]


@pytest.mark.device("bare")
def test_what_it_does_not_tell_is_not_told() -> None:
    torch.ones(1, device="bare")
    assert accelerator.memory() is None
    assert not accelerator.has_streams()


@pytest.mark.job
def test_a_nan_is_halted_where_another_maker_s_devices_train(jobs, npu_environment) -> None:
    ended = jobs.run(SCRIPT, "ddp", "--fault", "layer", "--steps", 26, env={**npu_environment, "HOLTER_ACTION": "halt"})
    cause = ended.diagnoses[0]["causes"][0]
    assert ("nonfinite_forward", [1]) == (cause["cause"], cause["ranks"])
    halt = json.loads((ended.run_dir / "halt.json").read_text())
    assert 20 == halt["step"]
    assert halt["verdict"] in SOUND, halt["why"]


@pytest.mark.job
@pytest.mark.release
@pytest.mark.parametrize("by", ["fused", "foreach"])
def test_a_nan_is_halted_on_cuda_where_there_is_no_triton(jobs, device_environment, by: str) -> None:
    env = {**device_environment, "HOLTER_ACTION": "halt", "PYTHONWARNINGS": "default"}
    ended = jobs.run(SCRIPT, "ddp", "--fault", "layer", "--steps", 26, "--without-triton", "--by", by, env=env)
    assert 2 == ended.stderr.count("Triton is not installed"), "once a rank"
    halt = json.loads((ended.run_dir / "halt.json").read_text())
    assert ("nonfinite_forward", [1], 20) == tuple(halt[key] for key in ("cause", "ranks", "step"))
    assert halt["verdict"] in SOUND, halt["why"]


@pytest.mark.job
@pytest.mark.release
@pytest.mark.parametrize("kind", ["alone", "ddp", "fsdp"])
@pytest.mark.parametrize("by", ["fused", "foreach", "single"])
def test_a_healthy_job_ends_with_the_same_bits(jobs, npu_environment, kind: str, by: str) -> None:
    ranks = 1 if kind == "alone" else 2
    ended = [jobs.run(SCRIPT, kind, "--by", by, ranks=ranks, env=npu_environment, attached=a) for a in (True, False)]
    assert [0, 0] == [end.code for end in ended], ended[0].stderr
    watched, alone = ([line for line in sorted(end.stdout.splitlines()) if line.startswith("{")] for end in ended)
    assert watched == alone
    assert [] == ended[0].diagnoses


@pytest.mark.job
@pytest.mark.release
def test_replicas_that_part_are_found(jobs, npu_environment) -> None:
    # Read by torch operations, a model this small costs more than its step: the budget would have it looked at seldom.
    env = {**npu_environment, "HOLTER_OVERHEAD_BUDGET": "1"}
    ended = jobs.run(SCRIPT, "ddp", "--fault", "diverge", "--steps", 90, env=env)
    cause = ended.diagnoses[0]["causes"][0]
    assert [1] == cause["ranks"], cause
    assert "4.weight" in cause["tensors"][0]
