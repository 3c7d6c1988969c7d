"""Parts of a model that ranks begin with: a part of its own for each, from its own file."""

import msgspec
import pytest
from tests.faults.shared.test_axes import census
from tests.made_up import made_window

from holter.diagnosis import rank_causes
from holter.faults.replicas.starting_parts import StartingParts
from holter.faults.window import OWN_START, Note, StepView
from holter.records import Finding, Loaded, Mark, Table, TensorEntry

NAMES = ("a.weight", "b.weight", "norm.weight")


def entry(name, *, is_sharded, kind="Linear"):
    return TensorEntry(name, (8, 8), "float32", True, False, 0, is_sharded=is_sharded, module_class=kind, axis="own")


def judged(
    prints, *, is_sharded=False, files=None, num_elements=1000, later=None, names=NAMES, kind="Linear"
) -> list[Finding]:
    """Ranks with these fingerprints, the last of them constant; what they loaded; fingerprints after a later step."""
    num = len(prints)
    tables, steps = {}, []
    for step, tensor_class, told in ((0, OWN_START, prints), (3, OWN_START, later)):
        if told is not None:
            roots = {}
            for rank, values in enumerate(told):
                roots.setdefault(hash(values), []).append(rank)
                tables[tensor_class, step, rank] = Table(
                    tensor_class=tensor_class,
                    root=hash(values),
                    names=list(names),
                    fingerprints=list(values),
                    norms=[],
                    marks=[0, 0, Mark.CONSTANT],
                )
            roots = {root: tuple(ranks) for root, ranks in roots.items()}
            steps.append(
                StepView(
                    step=step,
                    first_seen_ns=0,
                    num_reported=num,
                    missing=(),
                    roots={tensor_class: roots} if step == 0 else {},
                    kept_history=tuple(range(num)),
                )
            )
    model = census()
    entries = [entry(name, is_sharded=is_sharded, kind=kind) for name in names]
    known = {rank: msgspec.structs.replace(model, entries=entries, axes=[], stages=[rank]) for rank in range(num)}
    notes = tuple(
        Note(rank, 0, 0, Loaded(files=[path] if path else [], num_elements=num_elements))
        for rank, path in enumerate(files or [])
    )
    window = made_window(
        world_size=num,
        attached=frozenset(range(num)),
        steps=tuple(steps),
        tables=tables,
        notes=notes,
        census=known,
    )
    return list(StartingParts().judge(window))


OWN_FILES = [f"/run/stage_{rank}.pt" for rank in range(4)]
OTHERS_FILE = [*OWN_FILES[:2], OWN_FILES[1], OWN_FILES[3]]
DISTINCT = [(1, 2, 9), (3, 4, 9), (5, 6, 9), (7, 8, 9)]
TWINS = [(1, 2, 9), (3, 4, 9), (3, 4, 9), (7, 8, 9)]


@pytest.mark.parametrize("is_sharded", [False, True], ids=["stages", "shards"])
def test_a_rank_that_loaded_anothers_file_is_named(is_sharded):
    (finding,) = judged(TWINS, is_sharded=is_sharded, files=OTHERS_FILE)
    assert ("critical", (2,), ("a.weight", "b.weight")) == (finding.severity, finding.ranks, finding.tensors)
    assert "stage_1.pt" in finding.summary
    assert "wrong_weights_loaded" == rank_causes(finding)[0].cause


@pytest.mark.parametrize("name", ["model.pt", "epoch_2.pt"])
def test_stages_that_take_the_same_layers_of_a_whole_file_are_named_but_the_first(name):
    (finding,) = judged([(1, 2, 9)] * 4, files=[f"/run/{name}"] * 4)
    assert (1, 2, 3) == finding.ranks
    assert "warning" == finding.severity, (
        "a model may have been made deeper by copies of its layers, and no run is stopped for it"
    )


def test_files_that_are_exchanged_are_seen_by_their_numbers():
    (finding,) = judged(DISTINCT, files=[OWN_FILES[0], OWN_FILES[2], OWN_FILES[1], OWN_FILES[3]])
    assert ("warning", (1, 2)) == (finding.severity, finding.ranks)
    assert "wrong_weights_loaded" == rank_causes(finding)[0].cause


@pytest.mark.parametrize(
    ("prints", "more"),
    [
        (DISTINCT, {"files": OWN_FILES}),
        (DISTINCT, {"files": ["/run/model.pt"] * 4}),
        (DISTINCT, {"files": [f"/run/step-200/tp_{rank % 2}_pp_{rank // 2}.pt" for rank in range(4)]}),
        ([(1, 2, 9)] * 4, {}),
        ([(1, 2, 9)] * 4, {"files": OWN_FILES}),
        ([(1, 2, 9)] * 4, {"files": ["/run/vgg.pt"] * 4, "num_elements": 10}),
        (
            [(1, 2, 9)] * 4,
            {"files": ["/run/model.pt"] * 4, "is_sharded": True, "names": ("experts.0", "experts.1", "norm")},
        ),
        ([(1, 2, 9), (1, 4, 9)], {"files": ["/run/model.pt"] * 2}),
    ],
    ids=[
        "own_files",
        "whole_file",
        "two_axes",
        "one_seed",
        "one_seed_saved",
        "another_model_loaded",
        "copied_experts",
        "one_tensor",
    ],
)
def test_what_is_meant_is_silent(prints, more):
    assert [] == judged(prints, **more)


def test_shards_of_one_seed_are_information():
    assert ["info"] == [finding.severity for finding in judged([(1, 2, 9)] * 2, is_sharded=True)]


def test_tied_weights_of_two_stages_that_part_are_found():
    started, ended = [(1, 2, 9), (1, 4, 9)], [(11, 12, 19), (13, 14, 19)]
    (finding,) = judged(started, later=ended, kind="Embedding")
    assert ("warning", (0, 1), ("a.weight", "a.weight")) == (finding.severity, finding.ranks, finding.tensors)
    assert "unreduced_parameters" == rank_causes(finding)[0].cause
    assert [] == judged(started, later=[(11, 12, 19), (11, 14, 19)], kind="Embedding")
    assert [] == judged(started, later=ended, kind="Linear")


def test_tables_are_asked_for_before_anything_is_said():
    window = made_window(
        steps=(StepView(step=0, first_seen_ns=0, num_reported=2, missing=(), roots={OWN_START: {7: (0, 1)}}),)
    )
    (finding,) = StartingParts().judge(window)
    assert (0, 1) == finding.needs[0].ranks
