"""What must be equal on all ranks, and runs of it as one number."""

import msgspec
import pytest

from holter.flight import BLOCK_CALLS, blocks, signature
from holter.records import Call, Flight


def call(sequence: int = 0, operation: str = "all_reduce", size: int = 100, **more: object) -> Call:
    plain = Call("0", sequence, operation, ((size,),), ("float32",), 0, is_retired=True)
    return msgspec.structs.replace(plain, **more)


def flight(calls: list[Call]) -> Flight:
    return Flight(groups=[], calls=calls, taken_ns=0)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (call(), "all_reduce float32 [100]"),
        (call(sizes=((2, 3), (4,)), dtypes=("float32", "int64")), "all_reduce float32 int64 [2, 3] [4]"),
        (call(operation="barrier", sizes=(), dtypes=()), "barrier"),
        (call(operation="all_to_all"), "all_to_all float32"),
        (call(operation="send 0->1", is_p2p=True), "send 0->1 float32"),
        (call(operation="scatter", sizes=(), dtypes=(), output_dtypes=("int64",)), "scatter int64"),
    ],
)
def test_a_call_in_a_line(one, text):
    assert signature(one) == text


def test_a_root_has_the_same_signature_as_the_others():
    root = call(operation="scatter", sizes=((2, 10),), output_sizes=((10,),), output_dtypes=("float32",))
    other = call(operation="scatter", sizes=(), dtypes=(), output_sizes=((10,),), output_dtypes=("float32",))
    assert signature(root) == signature(other)


def test_whole_runs_have_a_digest_wherever_the_recorder_begins():
    calls = [call(number, size=number % 7) for number in range(1, 200)]
    whole = blocks(flight(calls))
    assert [one.block for one in whole] == [0, 1, 2]
    later = blocks(flight(calls[50:]))
    assert later == whole[1:]
    assert blocks(flight(calls[: BLOCK_CALLS - 2])) == []
    assert [one.block for one in blocks(flight(calls[: BLOCK_CALLS - 1]))] == [0]


def test_one_other_dtype_makes_another_digest_of_its_run_only():
    calls = [call(number) for number in range(1, 200)]
    other = [*calls[:99], call(100, dtypes=("int32",)), *calls[100:]]
    pairs = list(zip(blocks(flight(calls)), blocks(flight(other)), strict=True))
    assert [one == two for one, two in pairs] == [True, False, True]


def test_numbers_left_out_on_all_ranks_and_messages_between_change_nothing():
    calls = [call(number) for number in range(1, 140) if number != 70]
    talk = call(70, operation="send 0->1", is_p2p=True)
    assert [one.block for one in blocks(flight(calls))] == [0, 1]
    assert blocks(flight(calls)) == blocks(flight([*calls[:80], talk, *calls[80:]]))
