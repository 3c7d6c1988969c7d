"""One scale for all parameters of a model, and one weight for all ranks."""

import pytest
from tests.made_up import made_window

from holter.diagnosis import rank_causes
from holter.faults.replicas.gradient_scale import GradientScale
from holter.faults.replicas.rank_shares import RankShares
from holter.faults.window import CallCounts, Note, Spread, StepNumbers
from holter.records import Finding, GradientScales, Named, ScaleGroup

DENSE = ScaleGroup(Named(3, ["a", "b", "c"]), 4.0, 4, "fully_shard", [4])


def spread(values) -> Spread:
    low, high = min(values), max(values)
    return Spread(sum(values) / len(values), low, high, values.index(low), values.index(high), len(values))


def scales(*groups: ScaleGroup, is_free: bool = False) -> list[Finding]:
    told = GradientScales(groups=list(groups), is_scale_free=is_free)
    return list(GradientScale().judge(made_window(notes=(Note(0, 3, 0, told),))))


def experts(divisor: float, how: str = "fully_shard") -> ScaleGroup:
    return ScaleGroup(Named(1, ["moe.experts.w1"]), divisor, 4, how)


def test_experts_that_are_divided_by_fewer_ranks_than_have_losses_in_them_are_found_and_explained():
    (finding,) = scales(DENSE, experts(2.0))
    assert ("warning", ("moe.experts.w1",)) == (finding.severity, finding.tensors)
    assert 2.0 == finding.evidence[0].values["scale"]
    assert ["gradient_scale_mismatch"] == [cause.cause for cause in rank_causes(finding)]


def test_what_adam_takes_back_is_information_if_it_was_only_measured():
    assert ["info"] == [one.severity for one in scales(DENSE, experts(1.0, "experts: measured"), is_free=True)]
    assert ["warning"] == [one.severity for one in scales(DENSE, experts(1.0, "experts: measured"))]


def test_a_mean_over_one_axis_and_a_sum_over_another_is_found():
    (finding,) = scales(ScaleGroup(Named(2, ["a", "b"]), 2.0, 8, "fully_shard", [4, 2]))
    assert "4 times the mean over all ranks" in finding.summary


@pytest.mark.parametrize("divisor", [8.0, 1.0, 3.0], ids=["mean", "sum", "own_factor"])
def test_one_scale_for_all_is_silent(divisor):
    assert [] == scales(*[ScaleGroup(Named(1, [name]), divisor, 8, "fully_shard", [4, 2]) for name in "ab"])


def numbers(name: str, values, num_ranks: int = 2, calls=None) -> list[Finding]:
    """The first rank has the usual value, the last the odd one."""
    series = tuple(
        StepNumbers(
            step,
            step,
            {
                "loss": Spread(1, 1, 1, 0, 0, num_ranks),
                name: Spread(
                    (usual * (num_ranks - 1) + odd) / num_ranks,
                    min(usual, odd),
                    max(usual, odd),
                    0 if usual < odd else num_ranks - 1,
                    num_ranks - 1 if usual < odd else 0,
                    num_ranks,
                ),
            },
        )
        for step, (usual, odd) in enumerate(values)
    )
    return list(
        RankShares().judge(made_window(world_size=num_ranks, series=series, **({"counts": calls} if calls else {})))
    )


def test_a_rank_that_sums_its_loss_is_found_with_its_factor():
    (finding,) = numbers("loss", [(2.5 - step / 50, 80 - step) for step in range(20)], num_ranks=4)
    assert ((3,), 0) == (finding.ranks, finding.first_step)
    assert ["gradient_scale_mismatch"] == [cause.cause for cause in rank_causes(finding)][:1]


def test_a_sum_over_few_samples_is_a_noisy_factor_and_a_sum_all_the_same():
    noisy = [(0.5 + 0.2 * (step % 3), 32 * (0.7 + 0.2 * (step % 4))) for step in range(20)]
    for num_samples, cause in ((32, "gradient_scale_mismatch"), (500, "corrupt_labels_or_range")):
        series = tuple(
            StepNumbers(step, step, {"loss": spread(pair), "batch.num_samples": spread([num_samples] * 2)})
            for step, pair in enumerate(noisy)
        )
        (finding,) = RankShares().judge(made_window(series=series))
        assert cause == rank_causes(finding)[0].cause


def test_a_rank_in_another_world_is_found_as_such():
    (finding,) = numbers("loss", [(2.5, 2.5)] * 5 + [(2.5, 113_426.0 / (1 + step % 5)) for step in range(15)])
    assert ((1,), 5) == (finding.ranks, finding.first_step)
    assert "corrupt_labels_or_range" == rank_causes(finding)[0].cause


@pytest.mark.parametrize(
    "values",
    [[(2.5, 9.0)] * 20, [(2.5, 2.5)] * 5 + [(0.001, 0.04)] * 20, [(2.5, 100.0)] * 8, [(0.1, 3.0), (3.0, 0.1)] * 10],
    ids=["harder_data", "near_zero", "a_spike", "in_turns"],
)
def test_losses_that_differ_as_losses_do_are_silent(values):
    assert [] == numbers("loss", values)


def test_a_rank_whose_loss_rises_at_once_and_stays_above_the_others_is_named():
    calm = [(2.0 - step / 40, 2.05 - step / 40) for step in range(20)]
    (finding,) = numbers("loss", [*calm, *[(1.4, 2.6)] * 18])
    assert ((1,), 20) == (finding.ranks, finding.first_step)
    assert "corrupt_labels_or_range" == rank_causes(finding)[0].cause


def test_a_rank_that_learns_nothing_while_the_others_do_is_named():
    (finding,) = numbers("loss", [(2.3 * 0.96**step, 2.3 + 0.01 * step) for step in range(50)], num_ranks=4)
    assert (3,) == finding.ranks


@pytest.mark.parametrize(
    "values",
    [
        [(2.0 * 0.95**step, 2.0 * 0.97**step) for step in range(60)],
        [(1.0, 2.0)] * 60,
        [*[(2.0, 2.1)] * 20, *[(2.6, 3.0)] * 20],
        [*[(1.0, 1.05)] * 20, *[(1.0, 3.0)] * 12],
        [(1.0 + step % 2, 1.5) for step in range(60)],
    ],
    ids=["each_comes_down", "other_data_from_the_start", "all_rise", "too_short", "in_turns"],
)
def test_ranks_whose_losses_part_as_losses_do_are_silent(values):
    assert [] == numbers("loss", values)


def test_ranks_with_other_numbers_of_micro_batches_are_found_unless_they_change():
    (finding,) = numbers("micro_steps", [(4, 2)] * 15, num_ranks=4)
    assert (3,) == finding.ranks
    assert ["gradient_scale_mismatch"] == [cause.cause for cause in rank_causes(finding)][:1]
    assert [] == numbers("micro_steps", [(4, 4)] * 15)
    assert [] == numbers("micro_steps", [(4, 2), (4, 3)] * 8)


def divided(losses, flags, micro_steps=4) -> list[Finding]:
    """Ranks with these losses at every step, of which some divide."""
    numbers = {
        "loss": spread(losses),
        "loss.is_divided": spread(flags),
        "micro_steps": spread([micro_steps] * len(losses)),
    }
    series = tuple(StepNumbers(step, step, numbers) for step in range(16))
    return list(RankShares().judge(made_window(world_size=len(losses), series=series)))


def test_a_rank_that_alone_does_not_divide_by_its_micro_batches_is_named():
    (finding,) = divided([1.0, 1.1, 4.2, 0.9], [1, 1, 0, 1])
    assert ((2,), 0) == (finding.ranks, finding.first_step)
    assert "gradient_scale_mismatch" == rank_causes(finding)[0].cause
    (finding,) = divided([4.0, 1.1, 4.2, 3.9], [0, 1, 0, 0])
    assert (1,) == finding.ranks


def test_losses_that_are_divided_alike_or_as_large_as_the_others_are_silent():
    assert [] == divided([1.0, 1.1, 4.2, 0.9], [1, 1, 1, 1])
    assert [] == divided([1.0, 1.1, 1.2, 0.9], [1, 1, 0, 1])
    assert [] == divided([1.0, 1.1, 4.2, 0.9], [1, 1, 0, 1], micro_steps=1)


ODD = 12


def passes_and_calls(odd: int, off_by: int) -> tuple[list[tuple[int, int]], dict[str, tuple[CallCounts, ...]]]:
    """Two micro-batches and ten calls a step; the last of three ranks has another number of passes once, and calls off by some since."""
    passes = [(2, odd if step == ODD else 2) for step in range(20)]
    calls = tuple(
        CallCounts(
            step, {10 * step: (0, 1, 2)} if step < ODD or not off_by else {10 * step: (0, 1), 10 * step + off_by: (2,)}
        )
        for step in range(20)
    )
    return passes, {"0": calls}


@pytest.mark.parametrize(("odd", "off_by", "word"), [(4, 10, "left out"), (0, -10, "too many")])
def test_a_rank_that_steps_once_less_or_more_than_the_others_is_named_though_nobody_holds_what_it_holds(
    odd, off_by, word
):
    passes, calls = passes_and_calls(odd, off_by)
    (finding,) = numbers("micro_steps", passes, num_ranks=3, calls=calls)
    assert ("warning", (2,), ODD) == (finding.severity, finding.ranks, finding.first_step)
    assert word in finding.summary
    assert "optimizer_state_mismatch" == rank_causes(finding)[0].cause


@pytest.mark.parametrize(("odd", "off_by"), [(4, 0), (3, 10), (2, 10)])
def test_a_micro_batch_more_without_calls_of_its_own_or_calls_without_passes_is_silent(odd, off_by):
    passes, calls = passes_and_calls(odd, off_by)
    assert [] == numbers("micro_steps", passes, num_ranks=3, calls=calls)
