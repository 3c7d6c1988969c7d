"""Dumps as gloo and NCCL write them, and as somebody might who means harm."""

import json
import pickle
import subprocess
import sys
import time

import msgspec
import pytest

from holter.errors import FlightError
from holter.flight import from_bytes, from_json, from_pickle, trimmed
from holter.records import Call, Flight, Group


def gloo_entry(record: int, sequence: int, *, retired: bool, name: str = "gloo:all_reduce") -> dict[str, object]:
    return {
        "collective_seq_id": sequence,
        "input_dtypes": ["Float"],
        "input_sizes": [[100]],
        "is_p2p": False,
        "op_id": sequence + 1,
        "output_dtypes": ["Float"],
        "output_sizes": [[100]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "record_id": record,
        "retired": retired,
        "state": "scheduled",
        "thread_id": "140",
        "time_created_ns": 1794846769315820707,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 1800000,
    }


GLOO = {
    "comm_lib_version": "",
    "nccl_comm_state": {},
    "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
    "pg_status": {
        "0": {"last_completed_collective": "9000", "last_enqueued_collective": "9002", "last_started_collective": "-1"}
    },
    "version": "2.10",
    "entries": [gloo_entry(6, 8, retired=True), gloo_entry(7, 9, retired=False)],
}

NCCL = {
    "version": "2.9",
    "pg_config": {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "12": {"name": "12", "desc": "TENSOR", "ranks": "[0, 1]"},
        "7": {"name": "7", "desc": "PIPELINE", "ranks": "[0, 2]"},
    },
    "pg_status": {
        "0": {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 5},
        "2": {"last_enqueued_collective": 14000, "last_started_collective": -1, "last_completed_collective": 13998},
        "3": {"last_enqueued_collective": 88, "last_started_collective": -1, "last_completed_collective": 87},
    },
    "entries": [
        {
            "frames": [{"name": "f", "filename": "train.py", "line": 3}],
            "record_id": 41,
            "pg_id": 2,
            "process_group": ("7", "PIPELINE"),
            "collective_seq_id": 29,
            "p2p_seq_id": 13999,
            "profiling_name": "nccl:send 0->1",
            "time_created_ns": 5,
            "input_sizes": [[2048, 1, 5120]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[2048, 1, 5120]],
            "output_dtypes": ["BFloat16"],
            "state": "started",
            "time_discovered_started_ns": 7,
            "time_discovered_completed_ns": None,
            "retired": False,
            "is_p2p": True,
        }
    ],
}


def test_gloo_in_spite_of_its_gaps():
    flight = from_json(json.dumps(GLOO).encode(), 77)
    assert flight.taken_ns == 77
    # gloo's own count (9002) includes what it does not record.
    assert flight.groups == [Group("0", "default_pg", (), 9, 8)]
    created = 1794846769315820707
    sizes = ((100,),)
    assert flight.calls[1] == Call(
        "0", 9, "all_reduce", sizes, ("float32",), created, False, "scheduled", False, 0, 0, sizes, ("float32",), 7
    )
    assert flight.calls[0].is_retired


def test_nccl_with_the_counts_of_groups_that_have_no_calls():
    flight = from_json(json.dumps(NCCL).encode(), 0)
    assert {group.name: (group.ranks, group.last_entered, group.last_completed) for group in flight.groups} == {
        "0": ((0, 1, 2, 3), 5, 5),
        "7": ((0, 2), 14000, 13998),
        "12": ((0, 1), 88, 87),
    }
    (call,) = flight.calls
    assert (call.group, call.sequence, call.operation, call.is_p2p) == ("7", 13999, "send 0->1", True)
    assert (call.state, call.started_ns, call.completed_ns, call.dtypes) == ("started", 7, 0, ("bfloat16",))


def test_counts_are_not_guessed_where_a_call_contradicts():
    dump = msgspec.convert(msgspec.to_builtins(NCCL), dict)
    dump["entries"][0]["pg_id"] = 3
    groups = {group.name: group.last_entered for group in from_json(json.dumps(dump).encode(), 0).groups}
    assert groups == {"0": -1, "7": 88, "12": -1}


def test_a_pickle_says_the_same_as_json():
    assert from_json(json.dumps(NCCL).encode(), 3) == from_pickle(pickle.dumps(NCCL, protocol=2), 3)
    assert from_bytes(json.dumps(GLOO).encode(), 3) == from_bytes(pickle.dumps(GLOO), 3)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("gloo:barrier", "barrier"),
        ("nccl:ALLGATHER_coalesced", "allgather_coalesced"),
        ("nccl:recv 1<-0", "recv 1<-0"),
        ("all_reduce", "all_reduce"),
    ],
)
def test_operations_are_named_alike_for_all_backends(written, read):
    dump = {"entries": [gloo_entry(0, 1, retired=True, name=written)]}
    assert from_json(json.dumps(dump).encode(), 0).calls[0].operation == read


def test_missing_and_unknown_fields_do_no_harm():
    dump = {"entries": [{"profiling_name": "nccl:all_reduce", "news": [1]}, {"state": None}], "later": {"version": 9}}
    assert len(from_json(json.dumps(dump).encode(), 0).calls) == 2
    assert from_json(b"{}", 5) == Flight(groups=[], calls=[], taken_ns=5)


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"{", b"[1]", b'{"entries": 3}', b'{"entries": [{"record_id": "x"}]}', b"\x80\x02", b"\x80\x04."],
)
def test_what_is_no_dump_is_refused_in_one_sentence(data):
    with pytest.raises(FlightError, match=r"^this (is no|pickle is)") as caught:
        from_bytes(data, 0)
    assert "\n" not in str(caught.value)


class Harm:
    def __reduce__(self):
        return (print, ("harm",))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_that_calls_is_not_read(protocol, capsys):
    with pytest.raises(FlightError, match="plain data"):
        from_pickle(pickle.dumps({"entries": [Harm()]}, protocol=protocol), 0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [Call, {1, 2}, bytearray(b"x"), b"x", Flight(groups=[], calls=[], taken_ns=1)])
def test_a_pickle_holds_containers_and_scalars_or_is_not_read(value):
    with pytest.raises(FlightError):
        from_pickle(pickle.dumps({"version": value}), 0)


def test_a_forged_memo_index_costs_nothing():
    with pytest.raises(FlightError):
        from_pickle(b"\x80\x02}r\xff\xff\xff\x7fj\xff\xff\xff\x7e.", 0)


def test_a_pickle_that_unfolds_without_end_is_refused():
    row = [1] * 3000
    entry = {"input_sizes": [row] * 3000}
    with pytest.raises(FlightError, match="unfolds to far more than it holds"):
        from_pickle(pickle.dumps({"entries": [entry] * 3000}), 0)


def test_deep_nesting_is_no_way_in():
    with pytest.raises(FlightError):
        from_json(b'{"entries":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0)


def test_a_full_recorder_is_read_quickly():
    dump = {**GLOO, "entries": [gloo_entry(number, number, retired=True) for number in range(2000)]}
    data = json.dumps(dump).encode()
    began = time.process_time()
    flight = from_json(data, 0)
    # 25 ms on a slow machine; a hundred times a second would still be bearable.
    assert time.process_time() - began < 1
    assert len(flight.calls) == 2000


def test_trimmed_for_travel_it_keeps_what_is_new_and_what_is_open():
    calls = [Call("0", number, "all_reduce", (), (), 0, number != 3, record=number) for number in range(10)]
    groups = [
        Group("0", "default_pg", (0, 1, 2, 3, 4), 9, 8),
        Group("1", "", (4, 3, 2, 1), 2, 2),
        Group("2", "", (0, 1, 2, 3, 4), 2, 2),
    ]
    flight = Flight(groups=groups, calls=calls, taken_ns=4)
    small = trimmed(flight, rank=3, limit=4)
    assert [call.sequence for call in small.calls] == [3, 6, 7, 8, 9]
    assert [group.ranks for group in small.groups] == [(), (4, 3, 2, 1), ()]
    assert [group.ranks for group in trimmed(flight, rank=4).groups] == [(), (), ()]
    assert small.groups[0].last_entered == 9


SCRIPT = """
import json, sys, time, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(10, dtype=torch.bfloat16))
dist.barrier()
until = time.monotonic() + 20
while time.monotonic() < until and not all(e["retired"] for e in json.loads(_dump_fr_trace_json())["entries"]):
    time.sleep(0.01)  # a thread of gloo's writes that they are over
open(sys.argv[1], "wb").write(_dump_fr_trace_json())
open(sys.argv[2], "wb").write(_dump_fr_trace())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_this_torch_writes(tmp_path):
    paths = [tmp_path / "dump.json", tmp_path / "dump.pickle"]
    subprocess.run([sys.executable, "-c", SCRIPT, *paths], check=True, timeout=120, capture_output=True)
    flights = [from_bytes(path.read_bytes(), 1) for path in paths]
    assert flights[0].calls == flights[1].calls
    calls = [(call.group, call.sequence, call.operation, call.sizes, call.dtypes) for call in flights[0].calls]
    assert calls == [("0", 1, "all_reduce", ((10,),), ("bfloat16",)), ("0", 2, "barrier", (), ())]
    assert flights[0].groups[0].name == "0"
