"""Fires on updates that are rounded away, rounded off or lost; quiet on warm-up, stochastic rounding, master copies and fp32."""

import math

import msgspec
import pytest

from holter.diagnosis import top_cause
from holter.faults.learning.still_weights import StillWeights
from holter.faults.window import Note, Spread, StepNumbers
from holter.records import Census, Finding, ModuleVitals, Named, TensorEntry, Vitals
from made_up import made_window


def module(name: str, changed: float, *, dtype: str = "bfloat16", numel: int = 4096, rate: float = 1e-5, ratio: float = 1e-5, zeros: float = 0.0) -> ModuleVitals:  # fmt: skip
    return ModuleVitals(name, dtype, numel, 6.4, 0.5, zeros, 0.0, 0.1, ratio, changed, rate)


def vitals(*modules: ModuleVitals, unchanged: tuple[str, ...] = (), rounded: tuple[str, ...] = ()) -> Vitals:
    return Vitals(
        view="replicated",
        modules=list(modules),
        num_trainable=4,
        unchanged=Named(len(unchanged), list(unchanged)),
        rounded=Named(len(rounded), list(rounded)),
    )


def census(optimizer: str = "AdamW", dtype: str = "bfloat16", *, held: int = 0, foreign: int = 0) -> Census:
    return Census(
        model=0,
        wrapper="",
        is_replicated=True,
        optimizers=[optimizer],
        num_held=[4],
        num_foreign=[foreign],
        num_foreign_with_gradient=[foreign],
        backward_order=[],
        part=0,
        parts=1,
        entries=[TensorEntry("fc.weight", (64, 64), dtype, True, False, held)],
    )


def judge(*said: Vitals, known: Census | None = None, peak: float = 1e-5, only: int | None = None) -> list[Finding]:
    notes = [Note(rank, s, 0, v) for s, v in enumerate(said) for rank in ((0, 1) if only is None else (only,))]
    if only is not None:
        notes += [Note(1 - only, step, 0, vitals(module("fc", 1.0))) for step in range(len(said))]
    known = known or census()
    rate = StepNumbers(0, 0, {"learning_rate": Spread(peak, peak, peak, 0, 1, 2)})
    window = made_window(notes=tuple(notes), census={0: known, 1: known}, series=(rate,)
    )  # fmt: skip
    return list(StillWeights().judge(window))


AWAY = vitals(module("encoder", 0.012), module("block", 0.01), module("head", 0.03, numel=256))


def test_bf16_weights_whose_updates_are_rounded_away_are_found() -> None:
    (finding,) = judge(*[AWAY] * 12)
    assert (finding.severity, finding.first_step, finding.detected_step, finding.ranks) == ("warning", 0, 8, (0, 1))
    assert finding.modules == ("encoder", "block", "head")
    assert top_cause(finding) == "rounded_away_updates"
    assert "changes 1.16% of the elements" in finding.evidence[0].summary


def test_it_takes_eight_steps() -> None:
    assert judge(*[AWAY] * 8) == []


def test_fp32_is_healthy() -> None:
    assert judge(*[vitals(module("fc", 0.98, dtype="float32"))] * 12) == []
    assert judge(*[vitals(module("fc", 0.02, dtype="float32"))] * 12) == []


def test_a_rate_too_small_for_fp32_is_told_from_the_start_on_and_not_once_all_is_learned() -> None:
    still = vitals(module("fc", 0.02, dtype="float32", rate=1e-10))
    (finding,) = judge(*[still] * 30, peak=1e-10)
    assert "rounded_away_updates" == top_cause(finding)
    warm = [vitals(module("fc", 0.02, dtype="float32", rate=1e-11 * min(10, step + 1))) for step in range(30)]
    assert judge(*warm, peak=1e-10)
    kept_back = module("body", 0.0, dtype="float32", rate=0.0, numel=10**6)
    assert judge(*[vitals(kept_back, module("head", 0.9, dtype="float32", rate=1e-3))] * 40, peak=1e-3) == []
    rising = [vitals(module("fc", 0.02, dtype="float32", rate=1e-11 * (step + 1))) for step in range(60)]
    assert judge(*rising, peak=6e-10) == []
    learned = [vitals(module("fc", 0.9, dtype="float32", rate=1e-3))] * 12
    assert judge(*learned, *[vitals(module("fc", 0.02, dtype="float32", rate=1e-3))] * 40) == []


def test_bf16_where_a_good_part_moves_is_healthy() -> None:
    some = vitals(module("embedding", 0.03), module("attention", 0.2), module("value", 0.6), module("head", 0.8))
    assert judge(*[some] * 12, known=census("SGD")) == []


def test_a_learning_rate_on_its_way_up_or_at_its_end_is_waited_for() -> None:
    rising = [vitals(module("fc", 0.01, rate=1e-7 * (step + 1))) for step in range(12)]
    assert judge(*rising) == []
    assert judge(*[vitals(module("fc", 0.01, rate=1e-6))] * 12, peak=1e-3) == []


def test_stochastic_rounding_makes_rare_changes_large() -> None:
    # 4 % of 4096 elements move by 2.4e-4: a norm of 3.1e-3, five times that of 1e-5 for all.
    rare = vitals(module("fc", 0.04, ratio=3.1e-3 / 6.4))
    assert judge(*[rare] * 12) == []


def test_master_copies_are_healthy() -> None:
    assert judge(*[AWAY] * 12, known=census(held=-1)) == []
    assert judge(*[AWAY] * 12, known=census(foreign=4)) == []


def test_what_was_not_looked_at_says_nothing() -> None:
    assert judge(*[vitals(module("fc", math.nan))] * 12) == []


def test_weights_that_lose_their_low_bits_are_a_round_trip() -> None:
    (finding,) = judge(*[vitals(module("fc", 1.0, dtype="float32"), rounded=("fc.weight",))] * 3, only=1)
    assert (finding.ranks, finding.tensors, finding.severity) == ((1,), ("fc.weight",), "warning")
    assert top_cause(finding) == "precision_round_trip"
    assert judge(*[vitals(rounded=("fc.weight",))] * 2, vitals()) == []


def test_a_tensor_that_no_step_changes_is_a_lost_update() -> None:
    lost = vitals(module("fc", 0.5, dtype="float32", rate=1e-3), unchanged=("fc.weight", "fc.bias"))
    other = vitals(module("fc", 0.5, dtype="float32", rate=1e-3), unchanged=("fc.weight",))
    (finding,) = judge(lost, other, lost)
    assert finding.tensors == ("fc.weight",)
    assert top_cause(finding) == "lost_update"
    assert "no bit of fc.weight changed at 3 checked steps" in finding.evidence[0].summary
    assert judge(lost, vitals(), lost, lost) == []


def test_a_narrow_tensor_under_adam_is_not_lost() -> None:
    assert judge(*[vitals(module("norm", 0.4), unchanged=("norm.weight",))] * 5) == []


def test_a_threshold_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"still_weights\.max_changed must be between 0 and 1, got 2"):
        StillWeights(max_changed=2)


def rateless(*names: str) -> Vitals:
    return Vitals(view="replicated", modules=[], num_trainable=4, without_rate=Named(len(names), list(names)))


def test_a_group_whose_rate_stays_at_zero_is_found_and_explained() -> None:
    (finding,) = judge(*[rateless("encoder.weight")] * 20)
    assert (0, 16) == (finding.first_step, finding.detected_step)
    assert ("encoder.weight",) == finding.tensors
    assert "1 of 4 trained tensors" in finding.evidence[0].summary
    assert "lost_update" == top_cause(finding)


def test_a_schedule_that_never_leaves_zero_is_said_to_be_one() -> None:
    (finding,) = judge(*[rateless("a", "b", "c", "d")] * 20)
    assert "every trained tensor" in finding.summary


def test_a_warm_up_that_begins_at_zero_and_a_rate_that_comes_back_are_silent() -> None:
    assert [] == judge(rateless("a", "b", "c", "d"), *[rateless()] * 30)
    assert [] == judge(*[rateless("a")] * 15, rateless(), *[rateless("a")] * 15)


def unheld(count: int, *, num_held: int = 9, is_at_rest: bool | None = None) -> Vitals:
    names = Named(count, [f"fc{number}.weight" for number in range(count)])
    return Vitals(view="replicated", modules=[], num_trainable=num_held, unheld=names, is_unheld_at_rest=is_at_rest)


def test_a_tensor_with_a_gradient_that_no_optimizer_holds_is_found() -> None:
    (finding,) = judge(*[unheld(1)] * 30)
    assert (("fc0.weight",), "lost_update") == (finding.tensors, top_cause(finding))
    assert "in no optimizer that stepped; 9 others were" in finding.evidence[0].summary


def test_a_layer_behind_the_beginning_was_forgotten_a_backbone_is_left_out_on_purpose() -> None:
    names = [f"{part}.{what}" for part in ("fc", "body", "head") for what in ("weight", "bias")]
    entries = [TensorEntry(name, (4,), "float32", True, False, 0) for name in names]
    known = msgspec.structs.replace(census(), entries=entries)

    def without(part: str) -> Vitals:
        names = Named(2, [f"{part}.weight", f"{part}.bias"])
        return Vitals(view="replicated", modules=[], num_trainable=4, unheld=names)

    (finding,) = judge(*[without("head")] * 30, known=known)
    assert ("head.weight", "head.bias") == finding.tensors
    assert judge(*[without("fc")] * 30, known=known) == []


def test_an_optimizer_that_is_never_stepped_is_found_however_much_it_holds() -> None:
    (finding,) = judge(*[unheld(9, is_at_rest=True)] * 30)
    assert "the optimizer that holds them is never stepped" in finding.summary


def test_a_whole_model_that_was_wrapped_to_be_trained_is_in_no_optimizer() -> None:
    whole = msgspec.structs.replace(unheld(12, num_held=2), is_unheld_wrapped=True)
    (finding,) = judge(*[whole] * 30)
    assert "no optimizer holds anything of this model" in finding.summary


def test_a_head_that_is_trained_alone_and_an_optimizer_that_begins_late_are_silent() -> None:
    assert judge(*[unheld(12, num_held=2)] * 30) == []
    assert judge(*[unheld(1)] * 20, *[unheld(0)] * 20) == []
