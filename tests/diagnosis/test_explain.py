"""Each line of the differential speaks when it should; none is surer than its basis allows; none is unsure without saying why."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter import faults
from holter.diagnosis import rank_causes, top_cause
from holter.diagnosis.explain import CAPS, SURE, after_halt
from holter.faults import CAUSES, DETECTORS
from holter.faults.family import Row
from holter.records import Finding

ROWS = [row for entry in CAUSES.values() for row in entry.rows]
FACTS = {
    detector: sorted(
        {name for row in ROWS if row.detector == detector for name in (*row.seen, *row.absent, *row.unless)}
    )
    for detector in {row.detector for row in ROWS}
}
three_valued = st.sampled_from([True, False, None])


def finding(detector: str, **facts: Any) -> Finding:
    known = {"compared_ranks": [0, 1], "parameter_tensors": ["p.weight"], "gradient_tensors": ["g.weight"]}
    return Finding(
        detector=detector,
        severity="critical",
        first_step=30,
        detected_step=30,
        ranks=(1,),
        tensors=("t.weight",),
        summary="s",
        facts=known | facts,
    )


@st.composite
def findings(draw: st.DrawFn) -> Finding:
    detector = draw(st.sampled_from(sorted(FACTS)))
    return finding(detector, **{name: draw(three_valued) for name in FACTS[detector]})


@given(findings())
def test_causes_are_ranked_capped_and_never_unsure_without_saying_what_is_missing(seen: Finding) -> None:
    ranked = rank_causes(seen)
    assert ranked
    assert [cause.confidence for cause in ranked] == sorted((cause.confidence for cause in ranked), reverse=True)
    assert len({cause.cause for cause in ranked}) == len(ranked)
    for cause in ranked:
        assert 0 < cause.confidence <= CAPS[cause.basis]
        assert cause.confidence >= SURE or any(e.kind == "missing" and e.summary for e in cause.evidence)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.detector}-{row.confidence}")
def test_a_row_keeps_to_its_basis_and_speaks_of_what_exists(row: Row) -> None:
    assert row.confidence <= CAPS[row.basis]
    assert row.confidence >= SURE or row.missing
    assert row.detector in DETECTORS
    columns = (*row.seen, *row.absent, *row.unknown, *row.unless)
    assert len(set(columns)) == len(columns)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.detector}-{row.confidence}")
def test_a_row_fits_its_own_facts_and_no_longer_when_one_is_turned(row: Row) -> None:
    own = dict.fromkeys(row.seen, True) | dict.fromkeys(row.absent, False)
    assert row.fits(finding(row.detector, **own))
    for name in (*row.seen, *row.absent):
        assert not row.fits(finding(row.detector, **own | {name: None}))
        assert not row.fits(finding(row.detector, **own | {name: not own[name]}))
    for name in row.unknown:
        assert not row.fits(finding(row.detector, **own | {name: False}))
    for name in row.unless:
        assert not row.fits(finding(row.detector, **own | {name: True}))


def test_every_fact_of_the_differential_is_one_that_a_detector_gives() -> None:
    sources = {
        detector.name: Path(str(__import__(type(detector).__module__, fromlist=["x"]).__file__)).read_text()
        for detector in faults.ALL
    }
    for detector, names in FACTS.items():
        assert [name for name in names if f'"{name}"' not in sources[detector]] == []
    for entry in CAUSES.values():
        assert any(f'"{entry.refuting_fact}"' in text for text in sources.values())


NONFINITE = {
    "has_nonfinite_input": False,
    "has_nonfinite_loss": False,
    "has_nonfinite_gradient": True,
    "is_local_view": True,
}
SYNCED = {
    "parameters_differ_at_first": False,
    "gradients_differ": False,
    "gradients_differ_always": False,
    "parameters_differ": True,
}
BYPASS = {
    "gradients_differ": True,
    "gradients_differ_always": True,
    "gradients_differ_in_all_tensors": True,
}


@pytest.mark.parametrize(
    ("expected", "confidence", "seen"),
    [
        (
            "nonfinite_input",
            0.93,
            finding("nonfinite_values", **NONFINITE | {"has_nonfinite_input": True, "has_nonfinite_loss": True}),
        ),
        ("nonfinite_input", 0.85, finding("nonfinite_values", **NONFINITE | {"has_nonfinite_input": True})),
        (
            "nonfinite_forward",
            0.95,
            finding(
                "nonfinite_values",
                **NONFINITE | {"has_nonfinite_loss": True, "has_origin_module": True, "is_origin_input_finite": True},
            ),
        ),
        ("nonfinite_forward", 0.85, finding("nonfinite_values", **NONFINITE | {"has_nonfinite_loss": True})),
        (
            "nonfinite_input",
            0.60,
            finding(
                "nonfinite_values",
                **NONFINITE | {"has_nonfinite_loss": True, "has_origin_module": True, "is_origin_input_finite": False},
            ),
        ),
        ("nonfinite_backward", 0.93, finding("nonfinite_values", **NONFINITE)),
        (
            "nonfinite_backward",
            0.60,
            finding("nonfinite_values", **NONFINITE | {"has_nonfinite_gradient": None, "is_local_view": False}),
        ),
        (
            "unsynced_initialisation",
            0.95,
            finding("replica_divergence", parameters_differ_at_first=True, gradients_differ=False),
        ),
        ("unsynced_initialisation", 0.80, finding("replica_divergence", parameters_differ_at_first=True)),
        ("gradient_sync_bypassed", 0.90, finding("replica_divergence", parameters_differ_at_first=False, **BYPASS)),
        (
            "gradient_sync_bypassed",
            0.95,
            finding("replica_divergence", parameters_differ_at_first=False, gradients_differ_repeatedly=True, **BYPASS),
        ),
        ("gradient_sync_bypassed", 0.90, finding("replica_divergence", parameters_differ_at_first=True, **BYPASS)),
        (
            "gradient_sync_bypassed",
            0.65,
            finding("replica_divergence", gradients_differ=True, gradients_differ_always=True),
        ),
        (
            "unreduced_parameters",
            0.85,
            finding(
                "replica_divergence",
                gradients_differ=True,
                gradients_differ_always=True,
                gradients_differ_in_all_tensors=False,
            ),
        ),
        (
            "corrupted_collective",
            0.50,
            finding(
                "replica_divergence",
                gradients_differ=True,
                gradients_differ_always=False,
                gradients_differ_ever_since=False,
            ),
        ),
        (
            "silent_data_corruption",
            0.93,
            finding(
                "replica_divergence", own_history_broke_on_some=True, parameters_differ_in_all_tensors=False, **SYNCED
            ),
        ),
        (
            "silent_data_corruption",
            0.80,
            finding("replica_divergence", is_culprit_known=True, parameters_differ_in_all_tensors=False, **SYNCED),
        ),
        (
            "silent_data_corruption",
            0.60,
            finding("replica_divergence", parameters_differ_in_all_tensors=False, **SYNCED),
        ),
        (
            "silent_data_corruption",
            0.50,
            finding(
                "replica_divergence",
                parameters_parted_within_a_step=True,
                parameters_differ_in_all_tensors=False,
                **SYNCED,
            ),
        ),
        ("rank_dead", 0.95, finding("dead_rank", is_signal=True, is_terminated=False, is_status_known=True)),
        ("rank_dead", 0.90, finding("dead_rank", is_signal=True, is_terminated=True, is_status_known=True)),
        (
            "rank_dead",
            0.93,
            finding("dead_rank", is_signal=False, is_exception=True, is_connection_lost=False, is_status_known=True),
        ),
        (
            "rank_dead",
            0.55,
            finding("dead_rank", is_signal=False, is_exception=True, is_connection_lost=True, is_status_known=True),
        ),
        (
            "rank_dead",
            0.85,
            finding("dead_rank", is_signal=False, is_exception=False, is_status_known=False, is_order_clear=True),
        ),
        (
            "rank_dead",
            0.60,
            finding("dead_rank", is_signal=False, is_exception=False, is_status_known=False, is_order_clear=False),
        ),
    ],
)
def test_the_leading_cause(expected: str, confidence: float, seen: Finding) -> None:
    first = rank_causes(seen)[0]
    assert (expected, confidence) == (first.cause, first.confidence)


STALL = {
    "is_suspended": False,
    "is_uninterruptible": False,
    "is_process_normal": True,
    "is_unreachable": False,
    "has_answered": True,
    "has_ended": False,
    "is_interpreter_locked": False,
    "is_in_data": False,
    "is_in_checkpoint": False,
    "is_in_script": False,
    "is_elsewhere": False,
    "has_entered": False,
    "has_stack": True,
    "has_flight": True,
    "is_culprit_clear": True,
    "is_everyone_stuck": False,
}


@pytest.mark.parametrize(
    ("expected", "confidence", "facts"),
    [
        ("rank_suspended", 0.95, {"is_suspended": True, "is_in_script": True}),
        ("rank_suspended", 0.95, {"is_suspended": True, "is_in_data": True, "is_interpreter_locked": None}),
        ("rank_suspended", 0.88, {"is_uninterruptible": True, "is_in_script": True}),
        ("stalled_checkpoint", 0.93, {"is_uninterruptible": True, "is_in_checkpoint": True}),
        ("stalled_data_loader", 0.93, {"is_uninterruptible": True, "is_in_data": True}),
        ("host_unreachable", 0.90, {"is_unreachable": True, "has_stack": False, "is_in_data": None}),
        ("interpreter_locked", 0.95, {"is_interpreter_locked": True, "is_in_script": True}),
        ("interpreter_locked", 0.95, {"is_interpreter_locked": True, "is_in_data": True}),
        ("interpreter_locked", 0.85, {"is_interpreter_locked": True, "has_stack": False, "is_in_script": None}),
        ("stalled_data_loader", 0.93, {"is_in_data": True}),
        ("stalled_data_loader", 0.88, {"is_in_data": True, "is_everyone_stuck": True}),
        ("stalled_checkpoint", 0.93, {"is_in_checkpoint": True, "has_stack": False}),
        ("stalled_checkpoint", 0.88, {"is_in_checkpoint": True, "is_everyone_stuck": True}),
        ("rank_stuck_in_python", 0.93, {"is_in_script": True}),
        ("rank_stuck_in_python", 0.85, {"is_in_script": True, "is_interpreter_locked": None}),
        ("rank_stuck_in_python", 0.85, {"is_in_script": True, "is_everyone_stuck": True}),
        ("rank_missing_from_collective", 0.93, {"is_elsewhere": True}),
        ("rank_missing_from_collective", 0.93, {"is_elsewhere": True, "is_in_script": True}),
        ("rank_missing_from_collective", 0.90, {"has_ended": True, "has_stack": False, "is_in_data": True}),
        ("rank_missing_from_collective", 0.80, {}),
        ("rank_missing_from_collective", 0.65, {"is_elsewhere": True, "is_culprit_clear": False}),
        ("rank_missing_from_collective", 0.65, {"has_stack": False, "is_in_script": None}),
        ("rank_missing_from_collective", 0.30, {"is_everyone_stuck": True, "is_culprit_clear": False}),
    ],
)
def test_why_a_rank_does_not_go_on(expected: str, confidence: float, facts: dict[str, Any]) -> None:
    first = rank_causes(finding("stalled_rank", **STALL | facts))[0]
    assert (expected, confidence) == (first.cause, first.confidence)


@pytest.mark.parametrize(
    "facts", [{"is_suspended": True}, {"is_interpreter_locked": True}, {"is_in_script": True}, {"is_in_data": True}]
)
def test_the_refutation_of_a_stall_was_looked_for_and_not_seen(facts: dict[str, Any]) -> None:
    turned = {"is_suspended": {"is_process_normal": False}, "is_interpreter_locked": {"is_lock_free": False}}
    seen = facts | turned.get(next(iter(facts)), {})
    first = rank_causes(finding("stalled_rank", **STALL | seen))[0]
    assert first.would_refute.endswith("This was looked for and not seen.")


def test_both_unsynced_and_bypassed_puts_the_bypass_first_and_the_other_second() -> None:
    ranked = rank_causes(finding("replica_divergence", parameters_differ_at_first=True, **BYPASS))
    assert [cause.cause for cause in ranked[:2]] == ["gradient_sync_bypassed", "unsynced_initialisation"]


def test_a_cause_that_is_nobodys_fault_names_everyone_and_its_own_tensors() -> None:
    bypassed, unsynced, *_ = rank_causes(finding("replica_divergence", parameters_differ_at_first=True, **BYPASS))
    assert (bypassed.ranks, bypassed.tensors) == ((0, 1), ("g.weight",))
    assert (unsynced.ranks, unsynced.tensors) == ((0, 1), ("p.weight",))


def test_whether_the_refutation_was_looked_for_is_said() -> None:
    facts = {"own_history_broke_on_some": True}
    looked = rank_causes(finding("replica_divergence", gradients_differ=False, **facts))[0]
    assert looked.would_refute.endswith("This was looked for and not seen.")
    blind = next(c for c in rank_causes(finding("replica_divergence", **facts)) if c.cause == "silent_data_corruption")
    assert blind.would_refute.endswith("This was not looked for.")


def test_a_detector_unknown_to_the_differential_has_no_cause() -> None:
    assert top_cause(finding("loss_spike")) == ""


NOT_YET_LISTED = {"wrong_reference", "wrong_weights_loaded"}
"""Real faults that fitted none of the catalogue's causes; whoever keeps it adds them."""


def test_every_cause_is_in_the_public_catalogue() -> None:
    catalogue = Path(__file__).resolve().parents[2].parent / "shared" / "CAUSES.md"
    if not catalogue.exists():
        pytest.skip(f"no catalogue at {catalogue}")
    slugs = {line.split("|")[1].strip() for line in catalogue.read_text().splitlines() if line.startswith("| ")}
    assert set(CAUSES) - slugs <= NOT_YET_LISTED


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        ("Stop the run. Mend the line.", "Mend the line."),
        ("Give it a timeout. Then end the job and resume from the last good checkpoint.", "Give it a timeout."),
        (
            "Update it. End the job with SIGKILL (no handler runs) and resume from the last good checkpoint.",
            "Update it.",
        ),
    ],
)
def test_once_halted_nobody_is_told_to_stop_or_end_the_job(do: str, expected: str) -> None:
    cause = rank_causes(finding("nonfinite_values", has_nonfinite_input=True, has_nonfinite_loss=True))[0]
    before = msgspec.structs.replace(cause, fix=msgspec.structs.replace(cause.fix, do=do))
    (after,) = after_halt([before], "Go on from step 30.")
    assert f"{expected} Go on from step 30." == after.fix.do
