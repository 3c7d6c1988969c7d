"""Tables kept beside the rank: bounded, and given out with their names."""

import struct

from holter.records import Census, Observation, PackedTable, Table, TensorEntry
from holter.sidecar.service import TableHistory


def packed(step: int, *fingerprints: int, tensor_class: str = "parameters_before") -> Observation:
    body = PackedTable(
        tensor_class=tensor_class,
        root=step + 7,
        fingerprints=struct.pack(f"<{len(fingerprints)}Q", *fingerprints),
        norms=struct.pack(f"<{len(fingerprints)}f", *(1.5 for _ in fingerprints)),
    )
    return Observation(rank=3, step=step, at_ns=10, body=body)


def census(*names: str, part: int = 0, parts: int = 1, buffers: tuple[str, ...] = ()) -> Census:
    entries = [
        TensorEntry(name, (1,), "float32", name not in buffers, name in buffers, 0) for name in (*names, *buffers)
    ]
    return Census(
        model=0,
        wrapper="Linear",
        is_replicated=True,
        optimizers=[],
        backward_order=[],
        part=part,
        parts=parts,
        entries=entries,
    )


def test_a_table_is_unpacked_with_its_names():
    history = TableHistory()
    history.learn_census(census("a", "b"))
    history.keep(packed(4, 11, 2**64 - 1))
    found = history.table("parameters_before", 4)
    assert (3, 4, 10) == (found.rank, found.step, found.at_ns)
    assert (
        Table(
            tensor_class="parameters_before", root=11, names=["a", "b"], fingerprints=[11, 2**64 - 1], norms=[1.5, 1.5]
        )
        == found.body
    )


def test_what_was_not_kept_is_not_there():
    history = TableHistory()
    history.learn_census(census("a"))
    history.keep(packed(4, 11))
    assert history.table("parameters_before", 5) is None
    assert history.table("gradients", 4) is None


def test_without_names_there_is_no_table():
    history = TableHistory()
    history.keep(packed(4, 11))
    assert history.table("parameters_before", 4) is None
    history.learn_census(census("a", part=0, parts=2))
    assert history.table("parameters_before", 4) is None


def test_names_that_do_not_fit_are_not_believed():
    history = TableHistory()
    history.learn_census(census("a", "b", "c"))
    history.keep(packed(4, 11, 12))
    assert history.table("parameters_before", 4) is None


def test_a_census_in_parts_is_put_together():
    history = TableHistory()
    history.learn_census(census("a", "b", part=0, parts=2))
    history.learn_census(census("c", part=1, parts=2))
    history.keep(packed(1, 1, 2, 3))
    assert ["a", "b", "c"] == history.table("parameters_before", 1).body.names


def test_the_oldest_are_forgotten_first_and_the_bound_holds():
    history = TableHistory(max_bytes=10 * 12)
    history.learn_census(census("a"))
    for step in range(100):
        history.keep(packed(step, step))
    kept = [step for step in range(100) if history.table("parameters_before", step) is not None]
    assert list(range(90, 100)) == kept


def test_one_table_larger_than_the_bound_is_kept():
    history = TableHistory(max_bytes=1)
    history.learn_census(census("a"))
    history.keep(packed(0, 1))
    history.keep(packed(1, 1))
    assert history.table("parameters_before", 0) is None
    assert history.table("parameters_before", 1) is not None


def test_a_table_told_twice_is_counted_once():
    history = TableHistory(max_bytes=3 * 12)
    history.learn_census(census("a"))
    history.keep(packed(0, 1))
    for _ in range(50):
        history.keep(packed(1, 1))
    assert history.table("parameters_before", 0) is not None


def test_sums_and_marks_are_unpacked_beside_the_fingerprints():
    history = TableHistory()
    history.learn_census(census("a", "b"))
    body = PackedTable(
        tensor_class="gradients",
        root=1,
        fingerprints=struct.pack("<2Q", 5, 6),
        norms=struct.pack("<2f", 1.0, 2.0),
        sums=struct.pack("<2d", 0.5, -0.25),
        marks=bytes([0, 3]),
    )
    history.keep(Observation(rank=3, step=4, at_ns=10, body=body))
    found = history.table("gradients", 4).body
    assert ([0.5, -0.25], [0, 3]) == (found.sums, found.marks)


def hyperparameters(step: int, rate: float) -> Observation:
    body = PackedTable(
        tensor_class="hyperparameters", root=step, fingerprints=struct.pack("<d", rate), norms=b"", names=["group0.lr"]
    )
    return Observation(rank=3, step=step, at_ns=10, body=body)


def test_hyperparameters_have_names_of_their_own_and_hold_until_they_change():
    history = TableHistory()
    history.keep(hyperparameters(2, 0.5))
    history.keep(hyperparameters(7, 0.25))
    (bits,) = struct.unpack("<Q", struct.pack("<d", 0.5))
    for step in (2, 3, 6):
        found = history.table("hyperparameters", step)
        assert (step, ["group0.lr"], [bits]) == (found.step, found.body.names, found.body.fingerprints)
    assert history.table("hyperparameters", 1) is None
    assert history.table("hyperparameters", 9).body.fingerprints != [bits]


def test_a_table_keeps_the_names_of_its_own_time():
    history = TableHistory()
    history.learn_census(census("a", "b"))
    history.keep(packed(4, 11, 12))
    history.learn_census(census("c", "d"))
    assert ["a", "b"] == history.table("parameters_before", 4).body.names
    history.learn_census(census("a", "b", "c"))
    assert ["a", "b"] == history.table("parameters_before", 4).body.names
