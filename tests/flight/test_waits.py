"""Sends and receives: whom they wait for, and whether both ends agree."""

from holter.flight import analyse
from holter.records import Call, Flight, Group


def talk(sequence: int, operation: str, *, over: bool = True, size: int = 10, dtype: str = "float32", record: int = 0):
    return Call("5", sequence, operation, ((size,),), (dtype,), 1, over, is_p2p=True, record=record or sequence)


def pipeline(first: list[Call], last: list[Call]) -> dict[int, Flight]:
    """A pipeline of the ranks 3 and 8."""
    groups = [Group("5", "pipeline", (3, 8), 99, 99)]
    return {rank: Flight(groups=groups, calls=calls, taken_ns=0) for rank, calls in ((3, first), (8, last))}


def test_a_receiver_waits_for_its_sender():
    analysis = analyse(pipeline([talk(1, "send 0->1")], [talk(1, "recv 1<-0"), talk(2, "recv 1<-0", over=False)]))
    (wait,) = analysis.waits
    assert (wait.operation, wait.sequence, wait.entered, wait.absent) == ("recv 1<-0", 2, (8,), (3,))
    assert (analysis.culprits, analysis.victims) == ((3,), (8,))


def test_a_message_that_both_ends_are_in_is_on_its_way():
    analysis = analyse(
        pipeline(
            [talk(1, "send 0->1"), talk(2, "send 0->1", over=False)],
            [talk(1, "recv 1<-0"), talk(2, "recv 1<-0", over=False)],
        )
    )
    assert (analysis.waits, analysis.culprits) == ((), ())


def test_where_the_ends_count_differently_open_messages_are_counted():
    """Rank 3 sends other messages in between, so that its numbers run ahead."""
    sent = [talk(11, "send 0->1"), talk(13, "send 0->1", over=False)]
    received = [talk(4, "recv 1<-0"), talk(5, "recv 1<-0", over=False)]
    assert analyse(pipeline(sent, received)).waits == ()
    (wait,) = analyse(pipeline(sent[:1], received)).waits
    assert wait.absent == (3,)


def test_ends_that_do_not_agree_on_the_size():
    sent = [talk(1, "send 0->1"), talk(2, "send 0->1", size=20)]
    received = [talk(1, "recv 1<-0"), talk(2, "recv 1<-0", size=10)]
    (deviation,) = analyse(pipeline(sent, received)).deviations
    assert (deviation.kind, deviation.ranks, deviation.sequence, deviation.is_clear) == ("shape", (3, 8), 2, False)
    assert (deviation.expected, deviation.seen) == ("send 0->1 float32 [20]", "recv 1<-0 float32 [10]")


def test_sizes_are_not_compared_where_the_numbers_do_not_agree():
    sent = [talk(1, "send 0->1", size=5), talk(3, "send 0->1", size=20)]
    received = [talk(1, "recv 1<-0", size=5), talk(2, "recv 1<-0", size=20), talk(3, "recv 1<-0", size=7)]
    assert analyse(pipeline(sent, received)).deviations == ()


def test_a_message_to_nobody_knows_whom_is_left_out():
    analysis = analyse(pipeline([talk(1, "coalesced", over=False)], [talk(1, "send 7->9", over=False)]))
    assert (analysis.waits, analysis.culprits) == ((), ())


def test_a_call_left_out_in_a_group_of_its_own_is_missing_though_the_others_go_on():
    """Ranks 0 and 2 average a number among themselves after each step; rank 2 left that out, and waits for all in the next step."""
    pace_ns = {"0": 0, "1": 700}

    def call(group: str, sequence: int, *, over: bool = True) -> Call:
        size = 5829 if group == "0" else 1
        made_ns = 1000 * sequence + pace_ns[group]
        return Call(group, sequence, "all_reduce", ((size,),), ("float32",), made_ns, over, record=2 * sequence + int(group))  # fmt: skip

    def program(rounds: int) -> list[Call]:
        return [call(group, number) for number in range(1, rounds + 1) for group in "01"]

    groups = [Group("0", "default_pg", (0, 2), 99, 99), Group("1", "pair", (0, 2), 99, 99)]
    of_rank = {
        0: [*program(20), call("0", 21), call("1", 21, over=False)],
        2: [*program(20), call("0", 21), call("0", 22, over=False)],
    }
    flights = {rank: Flight(groups=groups, calls=calls, taken_ns=0) for rank, calls in of_rank.items()}
    (deviation,) = analyse(flights).deviations
    assert ("missing", (2,), "1", 21) == (deviation.kind, deviation.ranks, deviation.group, deviation.sequence)
