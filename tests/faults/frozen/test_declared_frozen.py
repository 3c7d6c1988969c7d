"""Fires on what is declared frozen and trained; quiet without a declaration, and on what is frozen as declared."""

import pytest

from holter.diagnosis import rank_causes
from holter.faults.frozen.declared_frozen import DeclaredFrozen
from holter.records import Census, Finding, TensorEntry
from made_up import made_window


def judge(*patterns: str, is_frozen: bool = False, is_held: bool = True) -> list[Finding]:
    entries = [
        TensorEntry("encoder.0.weight", (4, 4), "float32", not is_frozen, False, 0 if is_held else -1),
        TensorEntry("head.weight", (4, 4), "float32", True, False, 0),
    ]
    census = Census(
        model=0,
        wrapper="DistributedDataParallel",
        is_replicated=True,
        optimizers=["SGD"],
        declared_frozen=list(patterns),
        backward_order=[],
        part=0,
        parts=1,
        entries=entries,
    )
    return list(DeclaredFrozen().judge(made_window(census={0: census, 1: census})))


@pytest.mark.parametrize("pattern", ["encoder", "encoder.*", "enc*.weight", "encoder.0.weight"])
def test_a_declared_component_that_is_trained(pattern: str) -> None:
    (finding,) = judge(pattern)
    assert (finding.tensors, finding.ranks, finding.severity) == (("encoder.0.weight",), (0, 1), "warning")
    assert rank_causes(finding)[0].cause == "unfrozen_by_mistake"
    assert pattern in finding.evidence[0].summary


def test_what_is_frozen_as_declared_raises_nothing() -> None:
    assert judge("encoder", is_frozen=True) == []
    assert judge("encoder", is_held=False) == []


def test_nothing_is_guessed_from_names() -> None:
    assert judge() == []
    assert judge("enc", "ncoder.*") == []
