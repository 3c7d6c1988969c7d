"""`holter diagnose`: dumps in, diagnoses out; nothing that could not be judged is taken for health."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from holter.cli import main

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "nccl_traces"


def entry(number: int, *, size: int = 100, dtype: str = "Float", is_over: bool = True) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000 + number * 10**9,
        "input_sizes": [[size]],
        "input_dtypes": [dtype],
        "output_sizes": [[size]],
        "output_dtypes": [dtype],
        "state": "completed" if is_over else "scheduled",
        "retired": is_over,
        "is_p2p": False,
    }


def write(folder: Path, rank: int, entries: list[dict[str, Any]], ranks: int = 4, *, is_pickled: bool = False) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    content = {"version": "2.9", "pg_config": config, "pg_status": {}, "entries": entries}
    if is_pickled:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))
    else:
        (folder / f"rank_{rank}.json").write_text(json.dumps(content))


def program(last: dict[str, Any] | None = None, num: int = 20) -> list[dict[str, Any]]:
    return [*(entry(number) for number in range(1, num)), *([last] if last else [])]


def diagnosed(capsys: pytest.CaptureFixture[str], *paths: Path, code: int) -> list[dict[str, Any]]:
    assert code == main(["diagnose", *map(str, paths), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, list)
    return found


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the recorded NCCL traces are not at {TRACES}")
@pytest.mark.parametrize("scenario", ["gpu_error_2nd", "lock_gil_1st"])
def test_the_recorded_traces_name_exactly_the_faulty_ranks(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    truth = json.loads((TRACES / scenario / "truth.json").read_text())
    (diagnosis,) = diagnosed(capsys, TRACES / scenario, code=1)
    first = diagnosis["causes"][0]
    assert "rank_missing_from_collective" == first["cause"]
    assert truth["faulty_ranks"] == first["ranks"]
    assert "EXPERT_MODEL_PARALLEL_GROUP" == first["collective"]["group"]
    assert "all_to_all" == first["collective"]["operation"]
    assert not {"deadline", "process_state"} & {one["kind"] for one in first["evidence"]}
    assert [9, 14] == [one["values"]["rank"] for one in first["evidence"] if one["kind"] == "last_collectives"][:2]


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the recorded NCCL traces are not at {TRACES}")
def test_the_report_is_for_a_person_and_says_what_was_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == main(["diagnose", str(TRACES / "lock_gil_1st")])
    out, err = capsys.readouterr()  # noqa: RUF059
    assert out.startswith(
        "critical: Rank missing from collective (rank_missing_from_collective) on ranks 9, 14 (confidence"
    )
    assert "ranks 9 and 14 have not entered it" in out
    assert "Judged from 16 dumps of 16 ranks" in out
    assert "step -1" not in out


def test_a_mismatch_in_dumps_of_both_formats_is_named_with_both_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        last = entry(20, size=200 if rank == 2 else 100, is_over=False)
        write(tmp_path, rank, program(last), is_pickled=rank % 2 == 0)
    (diagnosis,) = diagnosed(capsys, tmp_path, code=1)
    first = diagnosis["causes"][0]
    assert ("collective_shape_mismatch", [2]) == (first["cause"], first["ranks"])
    assert {"group": "default_pg", "sequence": 20, "operation": "all_reduce"} == first["collective"]
    assert "[100]" in diagnosis["symptom"]
    assert "[200]" in diagnosis["symptom"]
    assert ("observe", -1) == (diagnosis["action"]["directive"], diagnosis["first_step"])


def test_a_rank_that_has_not_entered_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        write(tmp_path, rank, program(None if rank == 3 else entry(20, is_over=False)))
    (diagnosis,) = diagnosed(capsys, tmp_path, code=1)
    assert ("rank_missing_from_collective", [3]) == (
        diagnosis["causes"][0]["cause"],
        diagnosis["causes"][0]["ranks"],
    )


def test_dumps_in_which_nobody_waits_are_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        write(tmp_path, rank, program())
    assert 0 == main(["diagnose", str(tmp_path)])
    assert capsys.readouterr().out.startswith("4 dumps of 4 ranks: all calls match")
    assert [] == diagnosed(capsys, tmp_path, code=0)


def test_a_rank_without_a_dump_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        write(tmp_path, rank, program())
    assert 0 == main(["diagnose", str(tmp_path)])
    assert "there is none of rank 3" in capsys.readouterr().out


def test_a_rank_that_left_no_dump_and_is_waited_for_is_named_as_inferred(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        write(tmp_path, rank, program(entry(20, is_over=False)))
    (diagnosis,) = diagnosed(capsys, tmp_path, code=1)
    first = diagnosis["causes"][0]
    assert ("rank_missing_from_collective", [3]) == (first["cause"], first["ranks"])
    assert first["confidence"] < 0.7
    assert any(one["kind"] == "missing" and "a dump of rank 3" in one["summary"] for one in first["evidence"])


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code was run",))


@pytest.mark.parametrize("has_fault", [True, False])
def test_a_refused_pickle_is_named_the_rest_is_judged_and_nothing_found_is_not_health(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, has_fault: bool
) -> None:
    for rank in range(3):
        write(tmp_path, rank, program(entry(20, dtype="Int" if rank else "Float") if has_fault else None))
    (tmp_path / "rank_3.pkl").write_bytes(pickle.dumps([Evil()]))
    assert (1 if has_fault else 2) == main(["diagnose", str(tmp_path)])
    out, err = capsys.readouterr()
    assert "rank_3.pkl cannot be used" in err
    assert "code was run" not in out
    assert has_fault == ("collective_dtype_mismatch" in out)
    assert "Traceback" not in err


@pytest.mark.parametrize("what", ["nothing", "missing", "twice"])
def test_wrong_use_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    if what == "twice":
        write(folder, 1, program())
        (folder / "rank_01.json").write_bytes((folder / "rank_1.json").read_bytes())
    assert 2 == main(["diagnose", str(folder / "no" if what == "missing" else folder)])
    out, err = capsys.readouterr()
    assert "" == out
    assert 1 == err.count("\n")
    assert err.startswith("holter: ")


def test_it_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", "--help"])
    assert 0 == ended.value.code
    assert "rank_3.json" in capsys.readouterr().out
    assert 2 == main(["diagnose"])


def test_recorders_that_hold_no_call_yet_are_judged_and_show_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 0, [], ranks=3)
    write(tmp_path, 1, [], ranks=3)
    assert [] == diagnosed(capsys, tmp_path, code=0)
    assert [] == caplog.records, "no detector fails"
