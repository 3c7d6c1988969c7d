"""From a window to a diagnosis, for the first faults of the public corpus: the right cause first, on the right rank."""

import signal

from holter import faults
from holter.diagnosis import correlate, explain, headline, rank_causes
from holter.faults import ClassHistory, RankExit, StepView, TableKey
from holter.halting.verdicts import decide
from holter.records import Diagnosis, Directive, Exited, Finding, Nonfinite, Phase, Table
from made_up import made_window

SECOND = 1_000_000_000
NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]
TWO = {11: (0,), 22: (1,)}
AGREED = {5: (0, 1)}


def diagnose(**parts: object) -> list[Diagnosis]:
    window = made_window(now_ns=1000 * SECOND, world_size=2, attached=frozenset({0, 1}), **parts)  # type: ignore[arg-type]
    found = [finding for detector in faults.ALL for finding in detector.judge(window)]
    return [
        explain(
            incident.leading,
            incident.consequences,
            incident_id=incident.id,
            run_id="r",
            opened_at="2026-11-15T10:15:00Z",
            detected_after_s=0.5,
            directive=decide(incident.leading.severity, rank_causes(incident.leading), "halt"),
        )
        for incident in correlate((), found, stamp="T")
    ]


def tables(tensor_class: str, step: int, differing: list[str]) -> dict[TableKey, Table]:
    return {
        (tensor_class, step, rank): Table(
            tensor_class=tensor_class,
            root=root,
            names=NAMES,
            fingerprints=[7 + (rank if name in differing else 0) for name in NAMES],
            norms=[1.0] * len(NAMES),
        )
        for rank, root in ((0, 11), (1, 22))
    }


def history(*, unequal_from: int | None, last: int) -> ClassHistory:
    num_equal = last + 1 if unequal_from is None else unequal_from
    last_equal = num_equal - 1 if num_equal else None
    return ClassHistory(0, unequal_from != 0, last_equal, unequal_from, num_equal, last + 1 - num_equal)


def test_lost_hooks_are_a_bypassed_reduction_of_all_tensors() -> None:
    (diagnosis,) = diagnose(
        steps=(StepView(0, 0, 2, (), roots={"parameters_before": AGREED, "gradients": TWO, "parameters_after": TWO}),),
        classes={
            "parameters_before": history(unequal_from=1, last=5),
            "gradients": history(unequal_from=0, last=5),
            "parameters_after": history(unequal_from=0, last=5),
        },
        tables=tables("gradients", 0, NAMES) | tables("parameters_after", 0, NAMES),
    )
    assert (
        headline(diagnosis)
        == "critical: Gradient sync bypassed (gradient_sync_bypassed) on ranks 0, 1 at step 0 (confidence 0.95)"
    )
    assert diagnosis.causes[0].tensors == tuple(NAMES)


def test_a_seed_per_rank_is_an_unsynced_initialisation() -> None:
    (diagnosis,) = diagnose(
        steps=(StepView(0, 0, 2, (), roots={"parameters_before": TWO, "gradients": AGREED, "parameters_after": TWO}),),
        classes={
            "parameters_before": history(unequal_from=0, last=5),
            "gradients": history(unequal_from=None, last=5),
            "parameters_after": history(unequal_from=0, last=5),
        },
        tables=tables("parameters_before", 0, NAMES),
    )
    assert (
        headline(diagnosis)
        == "critical: Unsynced initialisation (unsynced_initialisation) on ranks 0, 1 at step 0 (confidence 0.95)"
    )
    assert diagnosis.causes[0].tensors == tuple(NAMES)


def test_a_flipped_bit_is_laid_to_the_rank_whose_history_broke() -> None:
    views = (
        StepView(29, 0, 2, (), kept_history=(0, 1)),
        StepView(
            30, 0, 2, (), roots={"parameters_before": TWO, "gradients": AGREED}, broke_history=(1,), kept_history=(0,)
        ),
    )
    (diagnosis,) = diagnose(
        steps=views,
        classes={
            "parameters_before": history(unequal_from=30, last=33),
            "gradients": history(unequal_from=None, last=33),
            "parameters_after": history(unequal_from=30, last=33),
        },
        tables=tables("parameters_before", 30, ["b.weight"]),
    )
    assert (
        headline(diagnosis)
        == "critical: Silent data corruption (silent_data_corruption) on rank 1 at step 30 (confidence 0.93)"
    )
    assert diagnosis.causes[0].tensors == ("b.weight",)


def test_a_nan_in_a_batch_is_one_incident_although_replicas_then_differ() -> None:
    def bad(where: str, name: str) -> Nonfinite:
        return Nonfinite(where=where, name=name, nans=1, infs=0, numel=8)  # type: ignore[arg-type]

    entries = (
        (1, bad("input", "batch['x']")),
        (1, bad("loss", "loss")),
        (0, bad("reduced_gradient", "a.weight")),
        (1, bad("reduced_gradient", "a.weight")),
    )
    (diagnosis,) = diagnose(
        steps=(StepView(30, 0, 2, (), nonfinite=entries, roots={"gradients": TWO, "parameters_after": TWO}),),
        classes={
            "parameters_before": history(unequal_from=31, last=31),
            "gradients": history(unequal_from=30, last=31),
            "parameters_after": history(unequal_from=30, last=31),
        },
        unavailable=frozenset((name, 30, rank) for name in ("gradients", "parameters_after") for rank in (0, 1)),
    )
    assert headline(diagnosis) == "critical: Non-finite input (nonfinite_input) on rank 1 at step 30 (confidence 0.93)"
    assert [e.values["detector"] for e in diagnosis.causes[0].evidence if e.kind == "consequence"] == [
        "replica_divergence"
    ]


def test_sigkill_is_a_dead_rank_with_its_signal() -> None:
    killed = Exited(
        pid=7,
        exit_code=None,
        signal=signal.SIGKILL,
        out_of_memory=False,
        last_step=20,
        last_phase=Phase.FORWARD,
        farewell=None,
    )
    (diagnosis,) = diagnose(exits=(RankExit(1, 0, killed),))
    assert headline(diagnosis) == "critical: Rank dead (rank_dead) on rank 1 at step 20 (confidence 0.95)"
    assert "SIGKILL" in diagnosis.symptom


def test_an_incident_is_as_grave_as_what_it_brought_about() -> None:
    jump = Finding(
        detector="learning_rate", severity="warning", first_step=40, detected_step=45, ranks=(0, 1), summary="a jump"
    )
    nan = Finding(
        detector="nonfinite_values", severity="critical", first_step=44, detected_step=44, ranks=(0,), summary="NaN"
    )
    directive = Directive(directive="notify", reason="")
    about = {"incident_id": "T-1", "run_id": "r", "opened_at": "", "detected_after_s": 0.0, "directive": directive}
    assert explain(jump, [nan], **about).severity == "critical"
    assert explain(jump, [], **about).severity == "warning"
