"""Fires on a dtype that changes in mid-run; quiet on set-up and on other changes of the census."""

from holter.diagnosis import top_cause
from holter.faults.precision.dtype_drift import DtypeDrift
from holter.faults.window import CensusChange
from holter.records import Finding
from made_up import made_window


def change(rank: int, step: int, name: str = "fc.weight", *, what: str = "dtype") -> CensusChange:
    return CensusChange(rank, step, name, what, "float32", "bfloat16")


def judge(*changes: CensusChange) -> list[Finding]:
    window = made_window(changes=changes)
    return list(DtypeDrift().judge(window))


def test_a_cast_on_all_ranks_is_found_with_its_step() -> None:
    (finding,) = judge(*(change(rank, 30, name) for rank in (0, 1) for name in ("a.weight", "a.bias")), change(0, 40))
    assert (finding.severity, finding.first_step, finding.ranks) == ("warning", 30, (0, 1))
    assert finding.tensors == ("a.weight", "a.bias")
    assert (finding.facts["is_on_all_ranks"], finding.facts["is_narrower"]) == (True, True)
    assert top_cause(finding) == "dtype_changed"


def test_a_cast_on_one_rank_names_it() -> None:
    (finding,) = judge(change(1, 30))
    assert finding.ranks == (1,)
    assert any("rank 0 reported no such change" in one.summary for one in finding.evidence)


def test_a_cast_before_the_first_step_is_set_up() -> None:
    assert judge(change(0, 0), change(1, 0)) == []


def test_layers_unfrozen_on_purpose_are_no_matter_here() -> None:
    assert judge(change(0, 50, what="requires_grad"), change(1, 50, what="requires_grad")) == []
