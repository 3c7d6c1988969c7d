"""Fires on labels that stop varying or leave their range and on inputs off their scale; quiet on what healthy batches do."""

import random
from collections.abc import Callable, Sequence

import pytest

from holter.diagnosis import rank_causes
from holter.faults.data.batch_values import BatchValues
from holter.faults.window import Spread, StepNumbers, StepView, Window
from holter.records import Finding
from made_up import made_window

Stats = tuple[float, float]
"""Smallest and largest element of one rank's tensor."""


def spread(values: Sequence[float]) -> Spread:
    low, high = min(values), max(values)
    return Spread(sum(values) / len(values), low, high, values.index(low), values.index(high), len(values))


def judge(leaves: dict[str, Callable[[int, int], Stats]], *, checks: int = 30, ranks: int = 2) -> list[Finding]:
    """Leaf -> (step, rank) -> its smallest and largest element; checked at every fifth step."""
    series = []
    for step in range(0, 5 * checks, 5):
        numbers = {}
        for leaf, make in leaves.items():
            stats = [make(step, rank) for rank in range(ranks)]
            numbers |= {
                f"batch.{leaf}.min": spread([low for low, _ in stats]),
                f"batch.{leaf}.max": spread([high for _, high in stats]),
                f"batch.{leaf}.mean": spread([(low + high) / 2 for low, high in stats]),
                f"batch.{leaf}.absmax": spread([max(abs(low), abs(high)) for low, high in stats]),
                f"batch.{leaf}.is_constant": spread([float(low == high) for low, high in stats]),
            }
        series.append(StepNumbers(step, 0, numbers))
    window = Window(now_ns=0, world_size=ranks, attached=frozenset(range(ranks)), series=tuple(series))
    return list(BatchValues().judge(window))


def noise(step: int, rank: int) -> float:
    return random.Random(f"{step} {rank}").random()  # noqa: S311 - test data


def inputs(step: int, rank: int) -> Stats:
    return -3 - noise(step, rank), 3 + noise(rank, step)


def labels(step: int, rank: int) -> Stats:
    return float(noise(step, rank) > 0.5), 8 + float(noise(rank, step) > 0.5)


HEALTHY: dict[str, Callable[[int, int], Stats]] = {"x": inputs, "y": labels}


def test_healthy_batches_raise_nothing() -> None:
    assert judge(HEALTHY) == []
    assert judge(HEALTHY, ranks=4, checks=200) == []


def test_labels_that_stop_varying_on_one_rank_are_named() -> None:
    (finding,) = judge(HEALTHY | {"y": lambda step, rank: (3, 3) if rank == 1 and step >= 60 else labels(step, rank)})
    assert (finding.severity, finding.first_step, finding.ranks, finding.tensors) == ("warning", 60, (1,), ("y",))
    assert finding.facts["series"] == ["batch.y.is_constant"]
    (cause,) = rank_causes(finding)
    assert (cause.cause, cause.confidence) == ("corrupt_labels_or_range", 0.90)
    assert any("varied at 12 checks before step 60" in e.summary for e in finding.evidence)


def test_few_checks_are_enough_where_one_rank_is_alone() -> None:
    (finding,) = judge(
        HEALTHY | {"y": lambda step, rank: (3, 3) if rank == 1 and step >= 15 else labels(step, rank)}, checks=9
    )
    assert (finding.first_step, finding.ranks, finding.tensors) == (15, (1,), ("y",))
    (finding,) = judge(
        HEALTHY | {"x": lambda step, rank: (-3e3, 3e3) if rank == 1 and step >= 15 else inputs(step, rank)}, checks=8
    )
    assert (finding.first_step, finding.ranks, finding.tensors) == (15, (1,), ("x",))
    both = HEALTHY | {"x": lambda step, rank: (-3e3, 3e3) if step >= 15 else inputs(step, rank)}
    assert judge(both, checks=8) == []


def test_small_batches_of_rare_labels_on_one_rank_are_no_proof() -> None:
    rare = {"y": lambda step, rank: (0, 0) if (rank == 1 and step >= 15) or step % 2 else (0, 1)}
    assert judge(rare, checks=9) == []


def test_labels_that_stop_varying_on_all_ranks_are_less_sure() -> None:
    (finding,) = judge(HEALTHY | {"y": lambda step, rank: (3, 3) if step >= 60 else labels(step, rank)})
    assert finding.ranks == (0, 1)
    assert rank_causes(finding)[0].confidence == 0.80


def test_labels_that_never_vary_on_one_rank_are_named() -> None:
    (finding,) = judge({"y": lambda step, rank: (3, 3) if rank == 2 else labels(step, rank)}, ranks=4)
    assert (finding.first_step, finding.ranks) == (0, (2,))


def test_one_batch_over_and_over_may_have_equal_labels_on_one_rank() -> None:
    numbers = {
        "batch.y.min": spread([0, 1]),
        "batch.y.max": spread([1, 1]),
        "batch.y.absmax": spread([1, 1]),
        "batch.y.is_constant": spread([0.0, 1.0]),
    }
    series = tuple(StepNumbers(step, 0, numbers) for step in range(20))
    for num_batches, num_findings in ((1, 0), (3, 0), (20, 1)):
        steps = tuple(
            StepView(step, 0, 2, (), batches={100 + step % num_batches: (0,), 200 + step % num_batches: (1,)})
            for step in range(20)
        )
        window = made_window(series=series, steps=steps)
        assert len(list(BatchValues().judge(window))) == num_findings


def test_labels_that_turn_negative_are_named() -> None:
    (finding,) = judge({"y": lambda step, rank: (-7, 9) if rank == 1 and step >= 100 else labels(step, rank)})
    assert (finding.first_step, finding.ranks, finding.facts["is_out_of_range"]) == (100, (1,), True)


def test_labels_far_above_all_before_are_named() -> None:
    (finding,) = judge({"y": lambda step, rank: (0, 50000) if step >= 100 else labels(step, rank)})
    assert (finding.first_step, finding.ranks) == (100, (0, 1))
    assert finding.facts["is_on_all_ranks"] is True


@pytest.mark.parametrize("factor", [1000.0, 0.001], ids=["grown", "shrunk"])
def test_inputs_off_their_scale_since_a_step_are_named(factor: float) -> None:
    def make(step: int, rank: int) -> Stats:
        low, high = inputs(step, rank)
        return (low * factor, high * factor) if rank == 1 and step >= 100 else (low, high)

    (finding,) = judge({"x": make}, ranks=4)
    assert (finding.first_step, finding.ranks, finding.tensors) == (100, (1,), ("x",))


def test_a_rank_without_normalisation_is_named_by_its_peers() -> None:
    (finding,) = judge(
        {"x": lambda step, rank: (0, 250 + noise(step, rank)) if rank == 2 else inputs(step, rank)}, ranks=4
    )
    assert (finding.first_step, finding.ranks) == (0, (2,))
    (finding,) = judge({"x": lambda step, rank: (0, 250 + noise(step, rank)) if rank == 1 else inputs(step, rank)})
    assert finding.ranks == (1,)


def test_two_ranks_that_nothing_tells_apart_are_both_named_and_it_is_said() -> None:
    (finding,) = judge({"x": lambda step, rank: (0, (90 if rank else 1) + noise(step, rank) / 10)})
    assert finding.ranks == (0, 1)
    (cause,) = rank_causes(finding)
    assert cause.confidence == 0.65
    assert any(e.kind == "missing" and "both are named" in e.summary for e in cause.evidence)


@pytest.mark.parametrize(
    ("leaf", "make"),
    [
        ("attention_mask", lambda step, _: (1, 1) if step > 60 else (0, 1)),
        ("z", lambda step, _: (1, 1) if step > 60 else (0, 1)),
        ("position_ids", lambda _, __: (0, 127)),
        ("lengths", lambda step, _: (3, 3) if step > 60 else (1, 100)),
        ("labels", lambda step, rank: (-100, 40000 + 9000 * noise(step, rank) // 1)),
        ("y", lambda step, rank: (-1, 3) if step > 60 else labels(step, rank)),
        ("y", lambda step, rank: (round(noise(step, rank)),) * 2 if noise(rank, step) < 0.5 else (0, 1)),
        ("x", lambda step, rank: (-3, 900) if step % 50 == 0 else inputs(step, rank)),
        ("x", lambda step, rank: (-3, 900) if step > 135 else inputs(step, rank)),
        ("x", lambda _, __: (0.5, 0.5)),
        ("sample_number", lambda step, rank: (step * 8 + rank, step * 8 + 7)),
        ("noise", lambda step, _: (-(0.97**step), 0.97**step)),
        ("ids", lambda step, rank: (5, int(5 * 10 ** (4 * noise(step, rank))))),
    ],
    ids=[
        "mask",
        "mask by value",
        "positions",
        "lengths",
        "ignored labels",
        "ignored later",
        "tiny batches",
        "outliers",
        "two checks",
        "constant always",
        "counting up",
        "annealed",
        "rare tokens",
    ],
)
def test_the_nearest_healthy_things_raise_nothing(leaf: str, make: Callable[[int, int], Stats]) -> None:
    assert judge({leaf: make}) == []
    assert judge({leaf: make}, ranks=4) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"batch_values\.factor must be above 1, got 1"):
        BatchValues(factor=1)
