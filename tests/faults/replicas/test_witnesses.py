"""The first witness that speaks says who left, and why; where none does, nobody is accused."""

from typing import Any

import pytest
from tests.faults.replicas.test_replica_divergence import parted, table, tables

from holter.faults import StepView
from holter.faults.replicas.replica_case import Case
from holter.faults.replicas.witnesses import WITNESSES, who_left
from holter.faults.shared.parting import find_parting
from made_up import made_window

TIE = {11: (0, 2), 22: (1, 3)}
MOST = {11: (0, 2, 3), 22: (1,)}
CLASS = "parameters_before"


def parted_weights(roots: dict[int, tuple[int, ...]], odd_norm: float = 1.0, **seen: Any) -> Case:
    step = StepView(30, 0, 4, (), roots={CLASS: roots}, **seen)
    right, wrong = (
        table(CLASS, 11, {}),
        table(CLASS, 22, {"b.weight": 8}, norms={"b.weight": odd_norm}),
    )
    known = [wrong if rank in roots[22] else right for rank in range(4)]
    window = made_window(
        0, 4, frozenset(range(4)), steps=(step,), classes={CLASS: parted(30)}, tables=tables(CLASS, 30, *known)
    )
    first = find_parting(window, CLASS)
    assert first is not None
    return Case(window, first, {CLASS: first}, 0.9, 100.0, max_ranks_asked=8, ranks_per_group=2)


@pytest.mark.parametrize(
    ("case", "ranks", "why"),
    [
        (parted_weights(MOST), (1,), "most ranks agree"),
        # A rank's own past knows better than a majority.
        (
            parted_weights(MOST, broke_history=(3,), kept_history=(0, 1, 2)),
            (3,),
            "its weights changed between two steps",
        ),
        # A majority knows better than a norm; where there is none, the norm breaks the tie.
        (parted_weights({11: (1,), 22: (0, 2, 3)}, odd_norm=1e9), (1,), "most ranks agree"),
        (parted_weights(TIE, odd_norm=1e9), (1, 3), "the norm of its weights is implausible"),
        (parted_weights(TIE), (0, 1, 2, 3), ""),
    ],
)
def test_the_first_that_speaks_counts(case: Case, ranks: tuple[int, ...], why: str) -> None:
    assert (ranks, why) == who_left(case)


def test_every_witness_has_a_reason_of_its_own() -> None:
    assert len(WITNESSES) == len({why for _, why in WITNESSES if why})
