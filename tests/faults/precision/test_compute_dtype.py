"""Fires when ranks compute in different precision, or in none of the region's; quiet on modules that are kept wide on purpose."""

import math
from dataclasses import replace

import msgspec

from holter.diagnosis import top_cause
from holter.faults import Window
from holter.faults.precision.compute_dtype import ComputeDtype
from holter.faults.window import Note, StepNumbers
from holter.records import Finding, Inspection, Witness


def inspection(region: str, **dtypes: str) -> Inspection:
    witnesses = [
        Witness(name, "LayerNorm" if "norm" in name else "Linear", 1, dtype, math.nan, math.nan, True, True, True)
        for name, dtype in dtypes.items()
    ]
    return Inspection(reason="first", autocast_dtype=region, witnesses=witnesses, num_modules=len(witnesses))


def judge(*of_ranks: Inspection) -> list[Finding]:
    notes = tuple(Note(rank, 2, 0, one) for rank, one in enumerate(of_ranks))
    ranks = frozenset(range(len(of_ranks)))
    return list(ComputeDtype().judge(Window(now_ns=0, world_size=len(ranks), attached=ranks, notes=notes)))


GOOD = inspection("bfloat16", fc1="bfloat16", norm="float32", fc2="bfloat16", head="float32")
WIDE = inspection("", fc1="float32", norm="float32", fc2="float32", head="float32")


def test_a_region_that_casts_is_healthy_even_with_a_head_kept_wide() -> None:
    assert judge(GOOD, GOOD) == []


def test_no_region_is_healthy() -> None:
    assert judge(WIDE, WIDE) == []


def test_the_minority_is_named() -> None:
    (finding,) = judge(GOOD, GOOD, WIDE, GOOD)
    assert (finding.severity, finding.ranks, finding.modules) == ("warning", (2,), ("fc1", "fc2"))
    assert top_cause(finding) == "autocast_not_applied"
    assert "bfloat16 on ranks 0, 1 and 3 and float32 on rank 2" in finding.summary


def test_a_rank_whose_passes_are_no_longer_what_they_were_is_named() -> None:
    late = msgspec.structs.replace(WIDE, reason="changed")
    notes = *(Note(rank, 2, 0, GOOD) for rank in (0, 1)), Note(1, 34, 0, late)
    series = tuple(StepNumbers(step, 0, {}) for step in range(40))
    window = Window(now_ns=0, world_size=2, attached=frozenset({0, 1}), notes=notes, series=series)
    (finding,) = ComputeDtype().judge(window)
    assert (34, (1,), ("fc1", "fc2")) == (finding.first_step, finding.ranks, finding.modules)
    assert not list(ComputeDtype().judge(replace(window, series=series[:36])))
    assert not list(ComputeDtype().judge(replace(window, notes=(*notes, Note(0, 34, 0, late)))))


def test_values_of_a_narrower_dtype_on_one_rank_are_a_round_trip() -> None:
    def told(*flags: bool | None) -> Inspection:
        witnesses = [
            msgspec.structs.replace(one, is_rounded=flag) for one, flag in zip(WIDE.witnesses, flags, strict=True)
        ]
        return msgspec.structs.replace(WIDE, witnesses=witnesses)

    sound = told(False, False, False, False)
    (finding,) = judge(sound, told(False, False, True, False))
    assert ((1,), ("fc2",), "precision_round_trip") == (finding.ranks, finding.modules, top_cause(finding))
    assert judge(told(False, True, False, False), told(False, True, False, False)) == [], "all alike"
    assert judge(sound, told(False, False, None, None)) == [], "too few values to tell"


def test_a_whole_that_rounds_and_inputs_that_are_rounded_count_where_no_single_module_does() -> None:
    def told(*, whole: bool, given: bool) -> Inspection:
        return msgspec.structs.replace(WIDE, rounded={"block": whole, "fc2 (input)": given})

    (finding,) = judge(told(whole=False, given=False), told(whole=True, given=True))
    assert ((1,), ("block",), "precision_round_trip") == (finding.ranks, finding.modules, top_cause(finding))
    (finding,) = judge(told(whole=False, given=False), told(whole=False, given=True))
    assert ((1,), ("fc2",)) == (finding.ranks, finding.modules)
    assert judge(told(whole=True, given=True), told(whole=True, given=True)) == [], "all alike"


def test_values_that_become_narrower_on_all_ranks_are_a_round_trip() -> None:
    def told(*, whole: bool, given: bool, reason: str = "first") -> Inspection:
        return msgspec.structs.replace(WIDE, reason=reason, rounded={"block": whole, "fc2 (input)": given})

    def said(later: Inspection) -> list[Finding]:
        first = tuple(Note(rank, 2, 0, told(whole=False, given=False)) for rank in (0, 1))
        notes = *first, *(Note(rank, 34, 0, later) for rank in (0, 1))
        series = tuple(StepNumbers(step, 0, {}) for step in range(40))
        window = Window(now_ns=0, world_size=2, attached=frozenset({0, 1}), notes=notes, series=series)
        return list(ComputeDtype().judge(window))

    (finding,) = said(told(whole=True, given=True, reason="changed"))
    assert (34, (0, 1), ("block",)) == (finding.first_step, finding.ranks, finding.modules)
    assert "precision_round_trip" == top_cause(finding)
    assert not said(told(whole=False, given=True, reason="changed")), "inputs may come in coarse steps by right"


def test_with_two_ranks_both_are_named() -> None:
    (finding,) = judge(GOOD, WIDE)
    assert finding.ranks == (0, 1)
    assert finding.facts["has_majority"] is False


def test_a_region_without_effect_is_found() -> None:
    idle = inspection("bfloat16", fc1="float32", norm="float32", fc2="float32")
    (finding,) = judge(idle, idle)
    assert finding.modules == ("fc1", "fc2")
    assert top_cause(finding) == "autocast_not_applied"


def test_one_layer_alone_may_be_wide_on_purpose() -> None:
    assert judge(inspection("bfloat16", fc="float32", norm="float32")) == []


def test_stages_that_only_some_ranks_have_are_not_compared() -> None:
    assert judge(inspection("", stage0="float32"), inspection("", stage1="bfloat16")) == []
