"""Fires on the rank that made the NaN, not on those it spread to; waits for ranks that are behind."""

import msgspec
import pytest

from holter.diagnosis import rank_causes
from holter.faults import StepView
from holter.faults.numerics.nonfinite_values import NonfiniteValues, is_outside
from holter.records import Census, Finding, MeshAxis, Nonfinite, Origin, Where
from made_up import made_window

SECOND = 1_000_000_000


def tensor(
    where: Where, name: str, *, nans: int = 1, infs: int = 0, order: int = 0, healthy_steps: int = 0
) -> Nonfinite:
    return Nonfinite(where=where, name=name, nans=nans, infs=infs, numel=512, order=order, healthy_steps=healthy_steps)


def view(step: int, *entries: tuple[int, Nonfinite], missing: tuple[int, ...] = ()) -> StepView:
    return StepView(
        step=step, first_seen_ns=step * SECOND, num_reported=2 - len(missing), missing=missing, nonfinite=entries
    )


def judge(
    *views: StepView, now_s: float = 30.1, origins: dict[tuple[int, int], Origin] | None = None, ranks: int = 2
) -> list[Finding]:
    window = made_window(
        now_ns=int(now_s * SECOND),
        world_size=ranks,
        attached=frozenset(range(ranks)),
        steps=views,
        origins=origins or {},
    )
    return list(NonfiniteValues().judge(window))


REDUCED = tensor("reduced_gradient", "head.weight", nans=512)
SPREAD = ((0, REDUCED), (1, REDUCED))


def test_a_bad_batch_names_its_rank_although_every_rank_has_the_reduced_nan() -> None:
    batch, loss, gradient = (
        tensor("input", "batch['x']", nans=3),
        tensor("loss", "loss"),
        tensor("gradient", "head.weight", nans=512),
    )
    (finding,) = judge(view(29), view(30, *SPREAD, (1, batch), (1, loss), (1, gradient)))
    assert finding.ranks == (1,)
    assert (finding.first_step, finding.detected_step, finding.severity) == (30, 30, "critical")
    assert finding.tensors == ("batch['x']",)
    assert finding.facts["has_nonfinite_input"] is True
    assert finding.facts["has_nonfinite_loss"] is True
    assert finding.facts["is_local_view"] is True
    assert finding.evidence[0].summary == "rank 1, step 30: input batch['x'] held 3 NaN in 512 values"
    assert {"rank": 1, "step": 30, "nans": 3, "numel": 512, "where": "input"}.items() <= finding.evidence[
        0
    ].values.items()
    assert any("it reached 1 of the gradients" in e.summary for e in finding.evidence)
    assert any(e.kind == "comparison" and "rank 0 had nothing" in e.summary for e in finding.evidence)


def test_only_the_first_step_is_judged() -> None:
    (finding,) = judge(
        view(29),
        view(30, (1, tensor("loss", "loss"))),
        view(31, (0, tensor("loss", "loss")), (1, tensor("loss", "loss"))),
    )
    assert (finding.first_step, finding.ranks) == (30, (1,))


def test_healthy_steps_raise_nothing() -> None:
    assert judge(view(28), view(29), view(30)) == []


def test_a_mask_that_was_there_on_healthy_steps_is_no_evidence() -> None:
    mask = tensor("input", "batch['mask']", nans=0, infs=99, healthy_steps=30)
    assert judge(view(30, (0, mask), (1, mask))) == []
    (finding,) = judge(view(30, (0, mask), (1, mask), (1, tensor("loss", "loss"))))
    assert finding.ranks == (1,)
    assert finding.facts["has_nonfinite_input"] is False
    assert finding.tensors == ()


def test_a_bad_batch_that_left_its_rank_healthy_is_not_to_blame() -> None:
    (finding,) = judge(view(30, (0, tensor("input", "batch['unused']")), (1, tensor("loss", "loss"))))
    assert finding.ranks == (1,)
    assert finding.facts["has_nonfinite_input"] is False


def test_a_rank_that_had_it_later_in_the_step_is_told_apart() -> None:
    (finding,) = judge(view(30, (1, tensor("input", "x")), (1, tensor("loss", "loss")), (0, tensor("loss", "loss"))))
    assert finding.ranks == (1,)
    assert any("rank 0 had it later in the step" in e.summary for e in finding.evidence)


def test_a_rank_one_step_behind_is_waited_for() -> None:
    late = view(30, (0, REDUCED), missing=(1,))
    assert judge(view(29), late, now_s=31.9) == []
    (finding,) = judge(view(29), late, now_s=32.0)
    assert finding.facts["missing_ranks"] == [1]
    assert any(e.kind == "missing" and "rank 1 had not reported" in e.summary for e in finding.evidence)


def test_an_earlier_step_that_a_rank_has_not_reported_is_waited_for_too() -> None:
    assert judge(view(29, missing=(1,)), view(30, (0, tensor("loss", "loss")))) == []


def test_a_later_step_that_a_rank_has_not_reported_is_not_waited_for() -> None:
    assert len(judge(view(30, (0, tensor("loss", "loss"))), view(31, missing=(1,)))) == 1


def test_the_module_of_the_replay_is_named() -> None:
    origin = Origin(
        module="blocks.2.mlp", module_class="MLP", is_input_finite=True, input_absmax=61000.0, replayed=True, reason=""
    )
    (finding,) = judge(view(30, (1, tensor("loss", "loss")), *SPREAD), origins={(1, 30): origin})
    assert finding.modules == ("blocks.2.mlp",)
    assert finding.facts["has_origin_module"] is True
    assert finding.facts["is_origin_input_finite"] is True
    assert any(
        e.kind == "origin" and "blocks.2.mlp (MLP)" in e.summary and "6.1e+04" in e.summary for e in finding.evidence
    )


def by_graph(module: str, place: int) -> Origin:
    return Origin(
        module=module,
        module_class="Linear",
        is_input_finite=True,
        input_absmax=1.0,
        replayed=False,
        reason=f"by the graph of the loss: what {module} was given is finite",
        is_by_graph=True,
        place=place,
    )


def test_of_ranks_that_compute_one_result_the_one_that_had_it_first_is_named_with_its_module() -> None:
    losses = view(30, (0, tensor("loss", "loss")), (1, tensor("loss", "loss")))
    origins = {(0, 30): by_graph("down", 7), (1, 30): by_graph("up", 5)}
    axes = [MeshAxis("tp", 2, 1, "tensor")]
    census = Census(
        model=0,
        wrapper="",
        is_replicated=False,
        optimizers=[],
        backward_order=[],
        part=0,
        parts=1,
        entries=[],
        axes=axes,
    )
    window = made_window(now_ns=31 * SECOND, steps=(losses,), origins=origins, census={0: census, 1: census})
    (finding,) = NonfiniteValues().judge(window)
    assert ((1,), ("up",)) == (finding.ranks, finding.modules)
    assert any("what up was given is finite" in evidence.summary for evidence in finding.evidence)
    (finding,) = judge(losses, origins=origins)
    assert (0, 1) == finding.ranks


def test_a_replay_that_could_not_be_made_is_missing_evidence() -> None:
    origin = Origin(
        module="", module_class="", is_input_finite=True, input_absmax=0.0, replayed=False, reason="the batch is gone"
    )
    (finding,) = judge(view(30, (1, tensor("loss", "loss"))), origins={(1, 30): origin})
    assert finding.modules == ()
    assert finding.facts["has_origin_module"] is None
    assert any(e.kind == "missing" and "the batch is gone" in e.summary for e in finding.evidence)


def test_gradients_are_named_in_backward_order() -> None:
    entries = [
        (1, tensor("gradient", name, order=order))
        for name, order in (("embed.weight", 7), ("blocks.1.norm.weight", 2), ("blocks.0.fc.weight", 5))
    ]
    (finding,) = judge(view(30, *entries, *SPREAD))
    assert finding.ranks == (1,)
    assert finding.tensors == ("blocks.1.norm.weight", "blocks.0.fc.weight", "embed.weight")
    assert finding.modules == ("blocks.1.norm",)
    assert finding.facts["has_nonfinite_loss"] is False
    assert finding.facts["has_nonfinite_gradient"] is True


def test_without_a_view_from_before_the_reduction_everyone_is_named_and_it_is_said() -> None:
    (finding,) = judge(view(30, *SPREAD))
    assert finding.ranks == (0, 1)
    assert finding.facts["is_local_view"] is False
    assert finding.facts["has_nonfinite_gradient"] is None
    assert "no view from before the reduction" in finding.summary


def test_shards_that_a_clip_gave_the_nan_to_are_not_to_blame() -> None:
    clipped = msgspec.structs.replace(tensor("reduced_gradient", "a.weight"), is_from_clip=True)
    entries = (0, clipped), (1, tensor("reduced_gradient", "a.weight")), (2, clipped)
    (found,) = judge(view(30, *entries), ranks=3)
    assert (1,) == found.ranks
    assert "in the shards of rank 1 only" in found.summary
    assert any("ranks 0 and 2, step 30: gradients were finite until" in proof.summary for proof in found.evidence)


def received(sender: int) -> Nonfinite:
    return msgspec.structs.replace(tensor("input", "input"), received_from=sender)


def test_what_a_stage_received_is_its_senders() -> None:
    loss, gradient = tensor("loss", "loss"), tensor("gradient", "0.weight")
    batch = view(
        30, (0, tensor("input", "input")), (0, gradient), (1, received(0)), (1, gradient), (2, received(1)), (2, loss)
    )
    (finding,) = judge(batch, ranks=3)
    assert ((0,), True) == (finding.ranks, finding.facts["has_nonfinite_input"])


def test_the_stage_that_made_it_is_named_with_its_module_and_not_those_that_received_it() -> None:
    loss, gradient = tensor("loss", "loss"), tensor("gradient", "0.weight")
    forward = view(30, (0, gradient), (1, gradient), (2, received(1)), (2, loss), (2, gradient))
    (finding,) = judge(forward, ranks=3, origins={(1, 30): born(module="layer.2")})
    assert ((1,), ("layer.2",)) == (finding.ranks, finding.modules)
    assert (False, True) == (finding.facts["has_nonfinite_input"], finding.facts["has_nonfinite_loss"])
    assert "rank 1 made it by module 'layer.2' and sent it on to the next stage" in finding.summary
    assert "rank 1, step 30: what it sent to rank 2 was not finite" in finding.evidence[0].summary


def test_a_loss_that_only_the_last_stage_made_is_the_last_stages() -> None:
    loss, gradient = tensor("loss", "loss"), tensor("gradient", "0.weight")
    (finding,) = judge(view(30, (0, gradient), (1, loss), (1, gradient)))
    assert (1,) == finding.ranks


def test_many_tensors_are_counted() -> None:
    entries = [(1, tensor("gradient", f"layers.{i}.weight", order=i)) for i in range(40)]
    (finding,) = judge(view(30, *entries))
    assert len(finding.tensors) == 40
    assert len(finding.evidence) < 10
    assert any("34 more tensors" in e.summary for e in finding.evidence)


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"nonfinite_values\.patience_s must not be negative, got -1"):
        NonfiniteValues(patience_s=-1)


def born(**figures: float | str) -> Origin:
    known = {
        "module": "layers.1",
        "module_class": "Block",
        "dtype": "float16",
        "dtype_max": 65504.0,
        "output_infs": 8,
        "output_nans": 0,
        "output_absmax": 30000.0,
        "input_absmax": 900.0,
        "weight_absmax": 0.5,
        "reason": "",
    }
    return Origin(is_input_finite=True, replayed=True, **known | figures)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"output_absmax": 5000.0},
        {"output_absmax": 0.0, "input_absmax": 900.0, "weight_absmax": 100.0},
        {"output_absmax": 0.0, "module_class": "Linear"},
        {"output_infs": 0, "output_nans": 3},
        {"dtype": "float32", "dtype_max": 3.4e38, "output_absmax": 1e38},
    ],
    ids=["near the limit", "within a sixteenth", "product", "a sum of products", "Inf - Inf inside", "float32"],
)
def test_an_output_that_passed_its_dtype_is_an_overflow_on_every_rank_that_has_it(figures: dict[str, float]) -> None:
    loss = tensor("loss", "loss")
    (finding,) = judge(view(5, (0, loss), (1, loss)), origins={(0, 5): born(**figures), (1, 5): born(**figures)})
    assert finding.facts["is_overflow"] is True
    assert (finding.ranks, finding.modules) == ((0, 1), ("layers.1",))
    assert any(e.kind == "range" and "layers.1: its output held" in e.summary for e in finding.evidence)


@pytest.mark.parametrize(
    "figures",
    [
        {"dtype": "float32", "dtype_max": 3.4e38, "output_absmax": 3.2, "module_class": "Log", "weight_absmax": 0.0},
        {"output_absmax": 40.0, "input_absmax": 3.0, "module_class": "LayerNorm"},
        {"reason": "first module; its own weights are not finite", "module_class": "Linear"},
    ],
    ids=["log of zero", "small numbers", "weights that are NaN already"],
)
def test_an_undefined_operation_is_no_overflow(figures: dict[str, float]) -> None:
    (finding,) = judge(view(5, (1, tensor("loss", "loss"))), origins={(1, 5): born(**figures)})
    assert finding.facts["is_overflow"] is False
    assert finding.modules == ("layers.1",)


def test_without_magnitudes_nobody_knows_whether_it_overflowed() -> None:
    (finding,) = judge(view(5, (1, tensor("loss", "loss"))), origins={(1, 5): born(dtype_max=0.0)})
    assert finding.facts["is_overflow"] is None


def test_an_overflow_that_a_finite_loss_hid_is_still_the_cause_of_its_gradients() -> None:
    gradient = tensor("gradient", "layers.0.weight")
    (finding,) = judge(view(5, (1, gradient)), origins={(1, 5): born()})
    assert (finding.facts["is_overflow"], finding.modules) == (True, ("layers.1",))
    (masked,) = judge(view(5, (1, gradient)), origins={(1, 5): born(output_absmax=3.0, input_absmax=1.0)})
    assert (masked.facts["is_overflow"], masked.modules) == (None, ("layers.0",))


def staged(where: Where, stage: int, *, is_received: bool = False) -> Nonfinite:
    return msgspec.structs.replace(tensor(where, "up.weight"), stage=stage, is_received=is_received)


def test_a_nan_of_a_pipeline_is_the_last_stage_s_that_received_none() -> None:
    received = [(rank, staged("input", rank, is_received=True)) for rank in (2, 3)]
    gradients = [(rank, staged("gradient", rank)) for rank in range(4)]
    (finding,) = judge(view(30, *received, *gradients, (3, staged("loss", 3))), ranks=4)
    assert (1,) == finding.ranks
    assert "nonfinite_forward" == rank_causes(finding)[0].cause
    (proof,) = [one for one in finding.evidence if one.kind == "pipeline"]
    assert (1, [2, 3]) == (proof.values["stage"], proof.values["received"])


def test_a_stage_that_made_it_is_named_where_the_sender_is_known() -> None:
    received = msgspec.structs.replace(staged("input", 3, is_received=True), received_from=2)
    gradients = [(rank, staged("gradient", rank)) for rank in range(4)]
    (finding,) = judge(view(30, (3, received), *gradients, (3, staged("loss", 3))), ranks=4)
    assert finding.ranks == (2,)
    (proof,) = [one for one in finding.evidence if one.kind == "pipeline"]
    assert proof.values["stage"] == 2


def test_a_nan_that_no_stage_received_is_the_last_one_s_and_a_bad_batch_is_the_first_one_s() -> None:
    gradients = [(rank, staged("gradient", rank)) for rank in range(2)]
    (finding,) = judge(view(30, *gradients, (1, staged("loss", 1))))
    assert (1,) == finding.ranks
    bad = [(0, staged("input", 0)), (1, staged("input", 1, is_received=True))]
    (finding,) = judge(view(30, *bad, *gradients, (1, staged("loss", 1))))
    assert ((0,), "nonfinite_input") == (finding.ranks, rank_causes(finding)[0].cause)


def test_outputs_that_were_seen_not_to_be_finite_were_made_inside_whatever_a_replay_finds() -> None:
    replayed = Origin(module="", module_class="", is_input_finite=True, input_absmax=0.0, replayed=True, reason="")
    assert is_outside(replayed) is True
    assert is_outside(msgspec.structs.replace(replayed, are_outputs_finite=True)) is True
    assert is_outside(msgspec.structs.replace(replayed, are_outputs_finite=False)) is False
