"""A status says what is compared over which axis, and what is not."""

from holter.coordinator.http.status import coverage
from holter.records import Census, TensorEntry


def entry(name, **more):
    return TensorEntry(name, (4,), "float32", True, more.pop("is_buffer", False), 0, **more)


def census(*entries):
    return Census(
        model=0,
        wrapper="",
        is_replicated=False,
        optimizers=[],
        backward_order=[],
        part=0,
        parts=1,
        entries=list(entries),
    )


def test_tensors_are_counted_by_what_they_are_compared_over():
    told = coverage(
        [
            census(
                entry("a", is_replicated=True),
                entry("b", axis="replicate"),
                entry("c", axis="own"),
                entry("d"),
                entry("e", axis="replicate"),
                entry("f", is_buffer=True, is_replicated=True),
            )
        ]
    )
    assert {
        ("parameters", "all ranks", 1),
        ("parameters", "axis replicate", 2),
        ("parameters", "own history", 1),
        ("parameters", "not compared", 1),
        ("buffers", "all ranks", 1),
    } == {(one["what"], one["over"], one["num_tensors"]) for one in told}


def test_ranks_with_equal_models_count_once_and_no_rank_counts_nothing():
    assert [1] == [one["num_tensors"] for one in coverage([census(entry("a")), census(entry("b"))])]
    assert [] == coverage([])
