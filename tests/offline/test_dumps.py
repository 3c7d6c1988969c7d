"""Dumps of a job that never ran holter: found, read safely, told apart from other files, and never lost in silence."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from holter import offline
from holter.errors import UsageError
from holter.records import Attached, Exam, Overdue, Unexamined


def dump(num_calls: int = 3, ranks: str = "[0, 1]", **more: Any) -> dict[str, Any]:
    entries = [
        {
            "record_id": number,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_000_000_000 * number,
            "input_sizes": [[100]],
            "input_dtypes": ["Float"],
            "output_sizes": [[100]],
            "output_dtypes": ["Float"],
            "state": "completed" if number < num_calls else "scheduled",
            "retired": number < num_calls,
            "is_p2p": False,
        }
        for number in range(1, num_calls + 1)
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.9", "pg_config": config, "pg_status": {}, "entries": entries} | more


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("loaded",))


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank_03.json", 3),
        ("nccl_trace_rank_3", 3),
        ("rank3.pickle", 3),
        ("trace_12.pkl", 12),
        ("7.json", 7),
        ("dump.rank-4.json", 4),
        ("run2_rank_5.json", 5),
        ("truth.json", None),
        ("README.md", None),
        ("dump_20260101120000", None),
    ],
)
def test_the_rank_is_in_the_name(name: str, rank: int | None) -> None:
    assert rank == offline.rank_in_name(name)


def test_json_and_pickle_of_a_directory_are_read(tmp_path: Path) -> None:
    write(tmp_path / "rank_0.json", dump(3))
    (tmp_path / "rank_1").write_bytes(pickle.dumps(dump(2)))
    found = offline.read_dumps([tmp_path])
    assert {0: 3, 1: 2} == {rank: len(flight.calls) for rank, flight in found.flights.items()}
    assert (0, 1) == found.ranks
    assert ((), ()) == (found.remarks, found.failures)
    assert {3_000_000_000} == {flight.taken_ns for flight in found.flights.values()}


def test_files_can_be_named_one_by_one_and_twice(tmp_path: Path) -> None:
    one = write(tmp_path / "rank_0.json", dump())
    assert [0] == list(offline.read_dumps([one, one, tmp_path]).flights)


def test_other_files_are_skipped_and_said(tmp_path: Path) -> None:
    write(tmp_path / "rank_0.json", dump())
    write(tmp_path / "truth.json", {"faulty_ranks": [1]})
    (tmp_path / "README.md").write_text("# Dumps\n")
    found = offline.read_dumps([tmp_path])
    assert () == found.failures
    assert ["README.md", "truth.json"] == [Path(line.split(" is no ")[0]).name for line in found.remarks]


def test_a_pickle_that_would_run_code_is_refused_and_the_others_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "rank_0.json", dump())
    (tmp_path / "rank_1.pkl").write_bytes(pickle.dumps({"entries": [Evil()]}))
    found = offline.read_dumps([tmp_path])
    assert [0] == list(found.flights)
    (failure,) = found.failures
    assert "rank_1.pkl cannot be used" in failure
    assert "loaded" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [b"", b'{"entries": [', b"not a dump", b"\x80\x04garbage", b'{"entries": 5}', b"{}"]
)
def test_a_damaged_dump_is_named_and_not_taken_for_another_file(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "rank_0.json", dump())
    (tmp_path / "rank_1.json").write_bytes(content)
    found = offline.read_dumps([tmp_path])
    assert ([0], 1) == (list(found.flights), len(found.failures))
    assert "rank_1.json" in found.failures[0]


def test_two_dumps_of_one_rank_are_wrong_use(tmp_path: Path) -> None:
    write(tmp_path / "rank_0.json", dump())
    write(tmp_path / "rank_00.json", dump())
    with pytest.raises(UsageError, match="both of rank 0"):
        offline.read_dumps([tmp_path])


def test_a_directory_of_directories_says_which_could_be_meant(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    write(tmp_path / "README.json", {})
    with pytest.raises(UsageError, match=r"no Flight Recorder dump in .*first"):
        offline.read_dumps([tmp_path])


def test_nothing_usable_says_why(tmp_path: Path) -> None:
    (tmp_path / "rank_1.json").write_text("{")
    with pytest.raises(UsageError, match=r"rank_1\.json cannot be used"):
        offline.read_dumps([tmp_path])
    with pytest.raises(UsageError, match="does not exist"):
        offline.read_dumps([tmp_path / "nowhere"])


def test_a_dump_without_a_name_is_known_by_its_groups(tmp_path: Path) -> None:
    own = dump()
    own["pg_config"]["5"] = {"name": "5", "desc": "own", "ranks": "[1]"}
    write(tmp_path / "trace.json", own)
    write(tmp_path / "other.json", dump())
    found = offline.read_dumps([tmp_path])
    assert [1] == list(found.flights)
    assert "of which rank" in found.failures[0]


def test_a_number_that_no_group_has_is_no_rank(tmp_path: Path) -> None:
    own = dump()
    own["pg_config"]["5"] = {"name": "5", "desc": "own", "ranks": "[1]"}
    write(tmp_path / "incident_42.json", own)
    assert [1] == list(offline.read_dumps([tmp_path]).flights)


def test_every_rank_is_attached_overdue_and_examined(tmp_path: Path) -> None:
    write(tmp_path / "rank_0.json", dump())
    found = offline.read_dumps([tmp_path])
    attached, overdue, exam, *_, unexamined = (one.body for one in found.observations())
    assert isinstance(unexamined, Unexamined)
    assert isinstance(attached, Attached)
    assert 2 == attached.world_size
    assert isinstance(overdue, Overdue)
    assert "overdue" == overdue.tier
    assert isinstance(exam, Exam)
    assert exam.flight is found.flights[0]
    assert exam.stack_error


def test_a_second_look_at_a_dump_shows_the_same_and_at_no_dump_nothing(tmp_path: Path) -> None:
    write(tmp_path / "rank_0.json", dump())
    found = offline.read_dumps([tmp_path])
    again = found.examined(0, 77, "quick").body
    assert isinstance(again, Exam)
    assert (77, "quick", found.flights[0]) == (again.asked_ns, again.depth, again.flight)
    assert isinstance(found.examined(1, 77, "quick").body, Unexamined)
