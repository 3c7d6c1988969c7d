"""What makes judging urgent, and what a sidecar may not say."""

from pathlib import Path

import pytest
from tests.coordinator.conftest import RUN_ID, done, exited, seen
from tests.coordinator.test_assembly import feed_note

from holter.coordinator import journal
from holter.coordinator.ward import Ward, WardSettings
from holter.records import Body, Inspection, Judged, Logged, Skipped, StepDone, Swapped, Table, Unavailable, Vitals
from holter.transport import wire

HELLO = wire.Hello(run_id=RUN_ID, rank=0, world_size=1, host="h", rank_pid=1, sidecar_pid=2, metrics_address="")


@pytest.fixture
def ward(tmp_path: Path) -> Ward:
    made = Ward(WardSettings(tmp_path, RUN_ID, "http://127.0.0.1:1"))
    made.roster.connect(HELLO, 0)
    return made


def hear(ward: Ward, *bodies: Body) -> bool:
    said = [seen(0, 3, body) for body in bodies]
    return ward.hear(0, wire.Report(heartbeat=None, observations=said, dropped=0), 5)


def skipped(in_a_row: int) -> Skipped:
    return Skipped(in_a_row=in_a_row, scale=1.0, lowest_scale=1.0, first_scale=65536.0, loss=1.0)


@pytest.mark.parametrize(
    ("body", "is_urgent"),
    [
        (skipped(16), True),
        (skipped(15), False),
        (feed_note(0, 0), True),
        (feed_note(0, 0, is_end=True), False),
        (Swapped(distance=0.1, is_input_equal=True, is_output_equal=True, num_times=1), True),
        (Inspection(reason="first", autocast_dtype="", witnesses=[], num_modules=1), True),
        (exited(0, 3).body, True),
        (Vitals(view="local", modules=[], num_trainable=1), False),
        (Logged(values={"kl": 1.0}), False),
        (done(0, 3).body, False),
    ],
)
def test_what_cannot_wait_is_urgent(ward: Ward, body: Body, is_urgent: bool) -> None:  # noqa: FBT001
    assert is_urgent is hear(ward, body)


def test_a_sidecar_cannot_speak_for_the_coordinator(ward: Ward) -> None:
    hear(ward, Judged(), Unavailable(tensor_class="gradients"))
    assert 2 == ward.strangers
    assert frozenset() == ward.assembly.window(0).unavailable


@pytest.mark.parametrize("part", ["norms", "sums", "marks"])
def test_a_table_that_does_not_add_up_counts_as_none(ward: Ward, part: str) -> None:
    beside = {"norms": [], part: [1]}
    table = Table(tensor_class="g", root=1, names=["a", "b"], fingerprints=[1, 2], **beside)
    ward.hear_table(("g", 3, 0), seen(0, 3, table), 5)
    window = ward.assembly.window(0)
    assert ({}, {("g", 3, 0)}) == (window.tables, window.unavailable)


def test_the_journal_says_when_it_was_judged_and_what_could_not_be_had(ward: Ward, tmp_path: Path) -> None:
    hear(ward, done(0, 3).body)
    ward.judge(6)
    ward.judge(7)
    ward.hear_table(("g", 3, 0), None, 8)
    ward.judge(9)
    ward.close(10, 5.0)
    bodies = [entry.observation.body for entry in journal.read(tmp_path / "journal")]
    assert [StepDone, Judged, Unavailable, Judged] == [type(body) for body in bodies], "nothing new, nothing written"
