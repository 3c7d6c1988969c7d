"""The doctor's checks on the device of the tests: each is well where all is, and fails once its defect is put back."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from holter.config import Settings
from holter.rank.doctor import cost, environment, holding, kernels, subjects, training, two_devices
from holter.rank.doctor.cost import StepTime
from holter.rank.doctor.jobs import EndedJob
from holter.rank.doctor.subjects import GptShape, small_loop, worn
from holter.rank.hooks.step import StepProbe
from holter.rank.undo import snapshots
from holter_kernels import devices, passes
from holter_kernels.layout import FORMATS


def quiet(_: str) -> None:
    """Nobody waits."""


def patch(owner, name, value):
    """In the process of one test alone."""
    setattr(owner, name, value)


@pytest.mark.device
def test_the_environment_tells_what_is_there() -> None:
    found = environment.look(quiet)
    assert "ok" == found.outcome
    assert {"torch", "triton", "compiler", "cache", "recorder", "device_0"} <= found.numbers.keys()


@pytest.mark.device
def test_a_missing_compiler_and_a_cache_that_cannot_be_written_are_failures(tmp_path) -> None:
    from triton import knobs  # noqa: PLC0415

    (tmp_path / "file").write_text("")
    knobs.cache.dir = str(tmp_path / "file" / "cache")
    patch(environment.shutil, "which", lambda _: None)
    found = environment.look(quiet)
    assert "failed" == found.outcome
    assert "C compiler" in found.says
    assert "cannot be written" in found.details[0]


@pytest.mark.device
def test_every_variant_is_run_and_one_that_falls_back_is_a_failure() -> None:
    every = list(kernels.variants())
    assert {variant.dtype for variant in every} == set(FORMATS)
    patch(kernels, "variants", lambda: every[:3])
    assert "skipped" == kernels.compile_all(quiet).outcome  # interpreted: nothing is compiled here
    devices._triton_failed.append("no compiler")
    found = kernels.compile_all(quiet)
    assert ("failed", True) == (found.outcome, "no compiler" in found.says)


@pytest.mark.device
def test_registers_that_spill_are_a_failure() -> None:
    class Kernel:
        n_regs, n_spills = 80, 0

    patch(kernels, "_in_cache", lambda _: iter([Kernel]))
    times = [(0.5, next(kernels.variants()))]
    assert "ok" == kernels._compiled(times).outcome
    Kernel.n_spills = 16
    assert "spills 16" in kernels._compiled(times).says


SOME = ("any bits, float32", "NaN, Inf and subnormals, bfloat16", "misaligned by 1, float16", "DTensor, float32")


@pytest.mark.device
def test_numbers_agree_and_a_kernel_that_miscounts_is_found() -> None:
    cases = kernels.cases
    patch(kernels, "cases", lambda: (case for case in cases() if case.name in SOME))
    found = kernels.agree(quiet)
    assert ("ok", len(SOME)) == (found.outcome, found.numbers["cases"])
    poll = passes.Reading.poll

    def miscount(self):
        is_new, table = self._table is None, poll(self)
        if is_new and table is not None:
            table.rows["zeros"] += 1
        return table

    patch(passes.Reading, "poll", miscount)
    found = kernels.agree(quiet)
    assert ("failed", len(SOME)) == (found.outcome, found.numbers["wrong"])
    assert "zeros" in found.says


@pytest.mark.device
@pytest.mark.release
def test_all_numbers_agree() -> None:
    found = kernels.agree(quiet)
    assert "ok" == found.outcome, found
    assert found.numbers["cases"] >= 100


@pytest.mark.device
def test_a_tensor_that_is_left_out_is_found() -> None:
    case = kernels.ReadingCase("meta", torch.empty(3, device="meta"), torch.zeros(3))
    assert kernels._disagreement(case)


def short(**more: float) -> None:
    """Few steps: the device's kernels are interpreted."""
    for name, value in {"WARM_STEPS": 2, "WATCHED_STEPS": 1, "NUM_TRIALS": 1, **more}.items():
        patch(training, name, value)


@pytest.mark.device
@pytest.mark.slow
def test_a_loop_under_a_monitor_does_not_wait() -> None:
    short()
    found = training.never_waits(quiet)
    assert "ok" == found.outcome, found


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.parametrize("way", ["item", "synchronize"])
def test_a_hook_that_waits_is_found(way) -> None:
    short(BUSY_S=0.5)
    before = StepProbe.end_open_step

    def wait(self):
        before(self)
        # .item() is what torch's debug mode knows; of events and streams it says nothing.
        torch.ones(1, device="cuda").item() if way == "item" else torch.cuda.current_stream().synchronize()

    patch(StepProbe, "end_open_step", wait)
    found = training.never_waits(quiet)
    assert "failed" == found.outcome


@pytest.mark.device
@pytest.mark.slow
def test_a_gradient_that_is_kept_and_pinned_memory_that_leaks_are_found() -> None:
    patch(training, "GROWTH_STEPS", 1)
    kept: list[torch.Tensor] = []
    pinned = iter(range(0, 10_000, 512))
    patch(training, "_pinned_bytes", lambda: next(pinned))
    before = StepProbe.end_open_step

    def keep(self):
        before(self)
        kept.append(torch.ones(1000, device="cuda"))

    patch(StepProbe, "end_open_step", keep)
    found = training.holds_nothing(quiet)
    assert "failed" == found.outcome
    assert found.numbers["grown_bytes"] > 0
    assert found.numbers["grown_pinned_bytes"] == 512
    assert any("pinned memory grows" in line for line in found.details)


@pytest.mark.device
@pytest.mark.slow
def test_a_captured_step_trains_as_without_and_one_that_is_changed_is_found() -> None:
    short()
    assert "ok" == training.captures(quiet).outcome
    replayed, number = training._replayed, iter(range(2))
    patch(training, "_replayed", lambda: [tensor + next(number) for tensor in replayed()[:1]])
    assert "other weights under holter" in training.captures(quiet).says


@pytest.mark.device
@pytest.mark.slow
def test_what_does_not_work_without_holter_is_skipped() -> None:
    def fail():
        raise RuntimeError("no graphs here")

    patch(training, "_replayed", fail)
    patch(training, "_compiled_steps", fail)
    for check in (training.captures, training.compiles):
        found = check(quiet)
        assert ("skipped", True) == (found.outcome, "no graphs here" in found.says)


@pytest.mark.device
@pytest.mark.slow
def test_a_snapshot_is_restored_behind_queued_work_and_one_that_is_overwritten_is_found() -> None:
    patch(holding, "NUM_STEPS", 3)
    patch(holding, "BUSY_S", 0.2)
    assert "ok" == holding.restores(quiet).outcome
    # As it was: what is queued is not waited for, and overwrites what was restored.
    beside = snapshots.beside_training
    patch(holding, "BUSY_S", 4.0)  # on a busy machine too the restore comes before that is over
    patch(snapshots, "beside_training", lambda there, **_: beside(there, is_hung=True))
    assert "are not those of step 2" in holding.restores(quiet).says


@pytest.mark.device
def test_steps_that_take_longer_are_found_and_noise_is_not() -> None:
    patch(cost, "_is_interpreted", lambda: False)
    shape = GptShape(layers=1, width=8, heads=1, vocabulary=8, length=8, batch=1)
    plain = StepTime(0.100, 0.095)
    judge = lambda wall: cost._judge([(plain, StepTime(wall, 0.1))] * 3, shape, []).outcome  # noqa: E731
    assert ["ok", "failed"] == [judge(0.102), judge(0.12)]
    short_steps = [(StepTime(0.005, 0.004), StepTime(0.0055, 0.004))] * 3
    assert "ok" == cost._judge(short_steps, shape, []).outcome


@pytest.mark.device
def test_the_largest_shape_is_a_gpt_of_350_million() -> None:
    assert 340e6 < cost.SHAPES[-1].num_parameters < 370e6


def test_the_cost_is_that_of_the_default_settings():
    assert (Settings.overhead_budget, Settings.overhead_floor_s) == (cost.BUDGET, cost.FLOOR_S)
    assert Settings.guard_wait_s == subjects.GUARD_WAIT_S


def job(tmp_path, *, halt=None, named=(), code=93) -> EndedJob:
    """One that left this."""
    if halt is not None:
        (tmp_path / "halt.json").write_text(json.dumps(halt))
    for number, (cause, rank) in enumerate(named):
        at = tmp_path / "incidents" / str(number)
        at.mkdir(parents=True)
        (at / "diagnosis.json").write_text(json.dumps({"causes": [{"cause": cause, "ranks": [rank]}]}))
    return EndedJob(code, tmp_path, ["the last line"])


def test_a_nan_that_was_held_is_well_and_one_that_was_applied_is_not(tmp_path):
    held = {"step": holding.NAN_STEP, "verdict": "healthy"}
    good = job(tmp_path, halt=held)
    assert [] == holding.find_poison(good)
    assert holding.find_poison(dataclasses.replace(good, code=0))
    assert holding.find_poison(job(tmp_path, halt=held | {"step": holding.NAN_STEP + 1}))
    assert holding.find_poison(job(tmp_path, halt=held | {"verdict": "poisoned"}))
    (tmp_path / "halt.json").unlink()
    assert "no halt" in holding.find_poison(good)[0]


def test_the_right_cause_of_the_wrong_rank_is_not_enough(tmp_path):
    causes = {"rank_dead"}
    for place, (named, expected) in enumerate(
        [([("rank_dead", 1)], "ok"), ([("rank_dead", 0)], "failed"), ([("other", 1)], "failed"), ([], "failed")]
    ):
        at = tmp_path / str(place)
        at.mkdir()
        assert expected == two_devices.judge_named(job(at, named=named), causes, "x").outcome


def test_a_rescue_counts_only_with_a_healthy_checkpoint(tmp_path):
    assert "failed" == two_devices.judge_rescue(job(tmp_path)).outcome
    assert "failed" == two_devices.judge_rescue(job(tmp_path, halt={"step": 5, "verdict": "incomplete"})).outcome
    assert "ok" == two_devices.judge_rescue(job(tmp_path, halt={"step": 5, "verdict": "healthy"})).outcome


@pytest.mark.parametrize(
    ("watched", "named", "code", "says"),
    [
        (1.0, [], 0, "the same bits, no alarm"),
        (1.5, [], 0, "1 of 1 tensors end with other bits"),
        (1.0, [("replica_divergence", 1)], 0, "a healthy job has an alarm: replica_divergence on rank 1"),
        (1.0, [], 1, "ended with 1 under holter"),
    ],
)
def test_shards_with_other_bits_an_alarm_or_another_end_are_found(watched, named, code, says, monkeypatch):
    def run(at, arguments, *, action, **_):
        at.mkdir()
        torch.save([torch.tensor([watched if action else 1.0])], arguments[arguments.index("--save") + 1])
        return dataclasses.replace(job(at, named=named if action else []), code=code if action else 0)

    monkeypatch.setattr(two_devices.jobs, "run", run)
    found = two_devices.shards(quiet)
    assert ("ok" if "no alarm" in says else "failed") == found.outcome
    assert says in " ".join([found.says, *found.details])


@pytest.mark.device
def test_the_loop_of_the_checks_trains() -> None:
    loop = small_loop()
    before = [parameter.detach().cpu() for parameter in loop.model.parameters()]
    with worn():
        loop.step()
    after = [parameter.detach().cpu() for parameter in loop.model.parameters()]
    assert not any(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
