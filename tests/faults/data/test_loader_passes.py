"""Passes are put together; only what is trained on counts as training."""

from typing import Any

import pytest

from holter.faults.data.loader_passes import is_replicated_everywhere, passes, trained
from holter.faults.window import Note, Window
from holter.records import Census, Component, Feed, TensorEntry
from made_up import made_window


def note(step: int, *, rank: int = 0, **fields: Any) -> Note:
    known = {
        "loader": 0, "epoch": 0, "is_end": False, "is_training": False, "dataset": "Text", "dataset_size": 64, "num_batches": 16,
        "batch_size": 4, "num_taken": 0, "num_samples": 0, "sampler": "", "is_shuffling": False, "sampler_epoch": -1, "num_shards": 1,
    }  # fmt: skip
    return Note(rank, step, 0, Feed(**known | fields))


def window(*notes: Note) -> Window:
    return made_window(now_ns=0, world_size=1, attached=frozenset({0}), notes=notes)


def loaders(seen: Window) -> list[tuple[int, int]]:
    return [(one.begin.loader, one.begin.epoch) for one in trained(passes(seen))]


def test_a_beginning_and_its_end_are_one_pass() -> None:
    (one,) = passes(window(note(0), note(16, is_end=True, is_training=True, num_taken=16)))
    assert (one.begin_step, one.end_step) == (0, 16)
    assert one.latest.num_taken == 16


def test_a_loader_without_a_backward_pass_is_not_training() -> None:
    assert loaders(window(note(5, loader=1), note(5, loader=1, is_end=True, num_taken=16))) == []


def test_what_is_said_to_be_trained_on_counts_for_all_passes_of_that_loader() -> None:
    seen = window(
        note(0), note(8, is_end=True, is_training=True), note(8, epoch=1, is_training=True), note(8, loader=1)
    )
    assert loaders(seen) == [(0, 0), (0, 1)]


def census(*is_replicated: bool, num_replicas: int = 2) -> Census:
    return Census(
        model=0,
        wrapper="",
        is_replicated=True,
        optimizers=["SGD"],
        components=[Component("", "MLP", "", True, num_replicas)],
        backward_order=[],
        part=0,
        parts=1,
        entries=[
            TensorEntry(f"fc{i}.weight", (4, 4), "float32", True, False, 0, one) for i, one in enumerate(is_replicated)
        ],
    )


@pytest.mark.parametrize(
    ("expected", "known"),
    [
        (True, census(True, True)),
        (True, census(True, True, num_replicas=0)),
        (False, census(True, False)),
        (False, census(False, False, num_replicas=0)),
        (False, census(True, True, num_replicas=3)),
        (False, census()),
    ],
    ids=[
        "wrapped",
        "reduced by hand",
        "one sharded by hand",
        "nothing known",
        "a part of the ranks",
        "nothing trained",
    ],
)
def test_replicas_of_all_that_is_trained_must_be_fed_differently(*, expected: bool, known: Census) -> None:
    seen = made_window(census=dict.fromkeys((0, 1), known))
    assert is_replicated_everywhere(seen) is expected
    assert not is_replicated_everywhere(made_window())
