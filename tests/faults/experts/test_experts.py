"""Routers that collapse, experts that are full, terms that balance nothing; uneven, early and padded routing is silent."""

import pytest
from tests.made_up import made_window

from holter.diagnosis import rank_causes
from holter.faults.experts.balance_term import BalanceTerm
from holter.faults.experts.expert_capacity import ExpertCapacity
from holter.faults.experts.expert_load import ExpertLoad
from holter.faults.window import Note
from holter.records import Finding, Routing

STEPS = range(2, 62, 4)


def told(counts, step: int, rank: int = 0, **more) -> Note:
    top_k = more.pop("top_k", 1)
    routing = Routing(
        module="moe", num_experts=len(counts), top_k=top_k, num_tokens=sum(counts) // top_k, counts=counts, **more
    )
    return Note(rank, step, 0, routing)


def judged(detector, notes) -> list[Finding]:
    return list(detector.judge(made_window(notes=tuple(notes))))


def load(*looks, **more) -> list[Finding]:
    """Counts look by look; the last goes on."""
    every = [*looks, *([looks[-1]] * (len(STEPS) - len(looks)))]
    return judged(ExpertLoad(), [told(list(counts), step, **more) for step, counts in zip(STEPS, every, strict=True)])


def test_a_router_with_one_expert_left_is_found_dated_and_explained():
    (finding,) = load((8, 8, 8, 8), (20, 4, 4, 4), (32, 0, 0, 0))
    assert ("warning", 10, ("moe",)) == (finding.severity, finding.first_step, finding.modules)
    assert 38 == finding.detected_step, "eight looks were there by then, whenever they are read"
    assert [256, 0, 0, 0] == finding.evidence[0].values["counts"]
    assert ["expert_collapse"] == [cause.cause for cause in rank_causes(finding)]


def test_experts_that_get_nothing_are_a_warning_if_they_are_many_and_information_if_one_is():
    assert ["warning"] == [finding.severity for finding in load((10, 10, 12, 0, 0, 0, 0, 0))]
    assert ["info"] == [finding.severity for finding in load((5, 5, 6, 4, 4, 4, 4, 0))]


@pytest.mark.parametrize(
    "looks",
    [
        [(20, 6, 4, 2)],
        [(32, 0, 0, 0)] * 6 + [(24, 4, 2, 2)],
        [(32, 0, 0, 0)] * 12 + [(31, 1, 0, 0), (29, 1, 1, 1), (28, 2, 1, 1)],
        [(29, 3)],
        [(1, 0, 0, 0)],
    ],
    ids=["uneven", "early", "evening_out", "two_experts", "few_tokens"],
)
def test_healthy_routing_is_silent(looks):
    assert [] == [finding.severity for finding in load(*looks) if finding.severity != "info"]


def test_ranks_that_prefer_different_experts_are_balanced_together():
    notes = [told([32, 0] if rank else [0, 32], step, rank) for step in STEPS for rank in (0, 1)]
    assert [] == judged(ExpertLoad(), notes)


def capacity(counts, received, num_looks: int = 15) -> list[Finding]:
    notes = [told(counts, step, rank, received=received) for step in STEPS[:num_looks] for rank in (0, 1)]
    return judged(ExpertCapacity(), notes)


def test_tokens_that_full_experts_drop_are_found_and_explained():
    (finding,) = capacity([20, 6, 3, 3], [4, 4, 3, 3])
    assert (0, 1) == finding.ranks
    assert 4 == finding.evidence[0].values["capacity"]
    assert ["expert_overflow"] == [cause.cause for cause in rank_causes(finding)]


@pytest.mark.parametrize(
    "received",
    [[20, 6, 3, 3], [15, 6, 3, 3], [10, 3, 1, 1], [32, 32, 32, 32], []],
    ids=["all", "a_few", "padding", "dense", "unknown"],
)
def test_what_is_no_overflow_is_silent(received):
    assert [] == capacity([20, 6, 3, 3], received)


def test_experts_of_other_ranks_are_counted_with_all_that_was_sent():
    notes = [told([14, 2], step, rank, received=[7]) for step in STEPS for rank in (0, 1)]
    (finding,) = judged(ExpertCapacity(), notes)
    assert (32, 14) == (finding.evidence[0].values["sent"], finding.evidence[0].values["received"])


def term(*, is_learning: bool, num_looks: int = 8, term: str = "aux_loss") -> list[Finding]:
    notes = [told([4, 4], step, term=term, is_term_learning=is_learning) for step in STEPS[:num_looks]]
    return judged(BalanceTerm(), notes)


def test_a_balancing_term_without_a_gradient_is_found_and_explained():
    (finding,) = term(is_learning=False)
    assert "aux_loss" == finding.evidence[0].values["term"]
    assert ["auxiliary_loss_inactive"] == [cause.cause for cause in rank_causes(finding)]
    assert [] == [*term(is_learning=True), *term(is_learning=False, num_looks=7), *term(is_learning=False, term="")]
