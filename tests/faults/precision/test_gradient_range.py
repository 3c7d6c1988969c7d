"""Fires on gradients at the bottom of fp16; quiet on sparse ones, on bf16, and under a scaler."""

from holter.diagnosis import top_cause
from holter.faults.precision.gradient_range import GradientRange
from holter.faults.window import Note, Spread, StepNumbers
from holter.records import Finding, Inspection, ModuleVitals, Vitals
from made_up import made_window


def module(name: str, *, zeros: float, subnormals: float, absmax: float, dtype: str = "float16") -> ModuleVitals:
    return ModuleVitals(name, dtype, 4096, 1.0, 1e-4, zeros, subnormals, absmax, 0.0, 0.5, 1e-3)


def judge(*modules: ModuleVitals, num: int = 6, region: str = "", has_scaler: bool = False, loss: float = 1.0) -> list[Finding]:  # fmt: skip
    notes = [Note(r, s, 0, Vitals(view="local", modules=list(modules), num_trainable=4)) for s in range(num) for r in (0, 1)]  # fmt: skip
    if region:
        notes.append(Note(0, 2, 0, Inspection(reason="first", autocast_dtype=region, witnesses=[], num_modules=4)))
    scale = (StepNumbers(0, 0, {"loss_scale": Spread(1024.0, 1024.0, 1024.0, 0, 1, 2)}),) if has_scaler else ()
    losses = tuple(StepNumbers(s, 0, {"loss": Spread(loss, loss, loss, 0, 1, 2)}) for s in range(1, num))
    window = made_window(notes=tuple(notes), series=scale + losses)
    return list(GradientRange().judge(window))


LOST = module("layers.0", zeros=0.6, subnormals=0.39, absmax=4e-5)
SPARSE = module("layers.1", zeros=0.95, subnormals=0.0, absmax=0.1)


def test_gradients_below_the_range_are_found_in_their_modules() -> None:
    (finding,) = judge(LOST, SPARSE)
    assert (finding.severity, finding.modules, finding.ranks) == ("warning", ("layers.0",), (0, 1))
    assert top_cause(finding) == "gradient_underflow"
    assert "60% of its gradient values are zero and 39% subnormal" in finding.evidence[0].summary


def test_sparse_gradients_of_normal_size_are_healthy() -> None:
    assert judge(SPARSE, module("layers.2", zeros=0.5, subnormals=0.3, absmax=0.01)) == []


def test_a_few_steps_are_no_streak() -> None:
    assert judge(LOST, num=3) == []


def test_bf16_has_the_range_of_fp32() -> None:
    assert judge(module("layers.0", zeros=0.6, subnormals=0.0, absmax=4e-5, dtype="bfloat16")) == []


def test_an_fp16_region_without_a_scaler_loses_them_too() -> None:
    wide = module("layers.0", zeros=0.97, subnormals=0.0, absmax=3e-6, dtype="float32")
    (finding,) = judge(wide, region="float16")
    assert top_cause(finding) == "gradient_underflow"
    assert judge(wide, region="float16", has_scaler=True) == []
    assert judge(wide, region="bfloat16") == []


def test_gradients_that_are_all_gone_are_told_by_those_that_are_left_or_by_a_tiny_loss() -> None:
    gone = module("layers.0", zeros=1.0, subnormals=0.0, absmax=0.0, dtype="float32")
    left = module("head", zeros=0.5, subnormals=0.0, absmax=3e-6, dtype="float32")
    (finding,) = judge(gone, left, region="float16")
    assert (("layers.0",), "gradient_underflow") == (finding.modules, top_cause(finding))
    assert judge(gone, region="float16", loss=2e-6)
    assert judge(gone, region="float16") == []
    assert judge(gone, module("head", zeros=0.5, subnormals=0.0, absmax=0.1, dtype="float32"), region="float16") == []
    assert judge(gone, left, region="float16", has_scaler=True) == []
