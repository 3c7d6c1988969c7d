"""Any sequence of writes and reads equals a model; any damage is noticed or harmless; nothing foreign is believed."""

import os
from collections import deque
from contextlib import ExitStack, closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holter.errors import PageError
from holter.page import PageReader, PageWriter
from holter.page.layout import (
    HEARTBEAT_OFFSET,
    MAGIC,
    READ_POSITION_OFFSET,
    RING_OFFSET,
    WRITE_POSITION,
    PageIdentity,
    decode_identity,
    encode_identity,
)

RING_SIZES = st.sampled_from([64, 72, 128, 1000])
WRITES = st.tuples(st.just("write"), st.binary(max_size=150))
READS = st.tuples(st.just("read"), st.integers(0, 6))
REOPENS = st.tuples(st.just("reopen"), st.none())
WORDS = st.one_of(st.integers(0, 1 << 12), st.integers(0, (1 << 64) - 1))


def _create(ring_bytes: int) -> PageWriter:
    return PageWriter.create(rank=0, world_size=1, pid=1, started_ticks=2, ring_bytes=ring_bytes)


def _unbounded(payload: bytes) -> int:
    return 8 + -(-len(payload) // 8) * 8


@given(ring_bytes=RING_SIZES, actions=st.lists(st.one_of(WRITES, READS, REOPENS), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_sequence_of_writes_and_reads_equals_a_bounded_queue(
    ring_bytes: int, actions: list[tuple[str, bytes | int | None]]
) -> None:
    model: deque[bytes] = deque()
    num_dropped = 0
    with ExitStack() as stack:
        writer = stack.enter_context(closing(_create(ring_bytes)))
        reader = stack.enter_context(closing(PageReader.open(writer.fd)))
        for action, argument in actions:
            if action == "write":
                fits = sum(map(_unbounded, model)) + _unbounded(argument) <= ring_bytes
                assert fits == writer.write(argument)
                if fits:
                    model.append(argument)
                num_dropped += not fits
            elif action == "read":
                expected = [model.popleft() for _ in range(min(argument, len(model)))]
                assert expected == reader.read(limit=argument)
            else:
                reader = stack.enter_context(closing(PageReader.open(writer.fd)))
        assert list(model) == reader.read()
        assert (num_dropped, num_dropped, 0) == (writer.dropped, reader.dropped, reader.torn)


@given(
    before=st.lists(st.binary(max_size=60), max_size=12),
    after=st.lists(st.binary(max_size=60), min_size=1, max_size=12),
    offset=st.one_of(
        st.integers(0, RING_OFFSET + 511),
        st.integers(HEARTBEAT_OFFSET, 295),
        st.integers(RING_OFFSET, RING_OFFSET + 63),
    ),
    flip=st.integers(1, 255),
    is_reopened=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_a_flipped_byte_never_raises_and_never_yields_what_was_not_written(
    before: list[bytes], after: list[bytes], offset: int, flip: int, *, is_reopened: bool
) -> None:
    with closing(_create(512)) as writer, closing(PageReader.open(writer.fd)) as first:
        reader = first
        written = []
        beats = []

        def write(payloads: list[bytes]) -> None:
            for number, payload in enumerate(payloads):
                writer.beat(step=number, phase=number % 8, micro_step=len(payload), at_ns=number)
                beats.append((number, number % 8, len(payload), number))
                tagged = b"%d " % len(written) + payload
                if writer.write(tagged):
                    written.append(tagged)

        write(before)
        os.pwrite(writer.fd, bytes([os.pread(writer.fd, 1, offset)[0] ^ flip]), offset)
        if is_reopened and offset >= HEARTBEAT_OFFSET:
            reader = PageReader.open(writer.fd)
        received = []
        for payloads in ([], after):
            write(payloads)
            heartbeat = reader.heartbeat()
            if heartbeat is not None:
                assert (heartbeat.step, heartbeat.phase, heartbeat.micro_step, heartbeat.at_ns) in beats
            received += reader.read()
            writer.control()
            writer.sidecar()
            writer.take_notice()
        places = [written.index(payload) for payload in received]
        assert sorted(set(places)) == places, "in the order of writing, none twice"
        assert reader.torn or places == list(range(len(written))), "none missing without a word"


@given(
    actions=st.lists(st.one_of(st.binary(max_size=150), WORDS), max_size=40),
    is_write_position_damaged=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_whatever_the_positions_say_the_writer_stays_inside_the_ring(
    actions: list[bytes | int], *, is_write_position_damaged: bool
) -> None:
    with closing(_create(128)) as writer:
        untouched = slice(READ_POSITION_OFFSET + 40, RING_OFFSET)
        head = os.pread(writer.fd, RING_OFFSET, 0)
        num_written = num_dropped = 0
        for action in actions:
            if isinstance(action, bytes):
                is_written = writer.write(action)
                num_written += is_written
                num_dropped += not is_written
            else:
                writer._page.read_position.publish(action)
                if is_write_position_damaged:
                    writer._page.words[WRITE_POSITION] = action
        now = os.pread(writer.fd, RING_OFFSET, 0)
        assert (head[:192], head[untouched]) == (now[:192], now[untouched])
        assert num_dropped == writer.dropped


@given(
    content=st.one_of(
        st.binary(min_size=64, max_size=256),
        st.binary(min_size=56, max_size=56).map(lambda tail: MAGIC + tail),
        st.binary(min_size=48, max_size=48).map(lambda tail: MAGIC + (1).to_bytes(8, "little") + tail),
    ),
    num_bytes=st.integers(0, 1 << 20),
)
def test_arbitrary_bytes_are_never_believed(content: bytes, num_bytes: int) -> None:
    with pytest.raises(PageError):
        decode_identity(content, num_bytes)


@given(offset=st.integers(0, 63), flip=st.integers(1, 255))
def test_any_flipped_byte_of_the_header_is_refused(offset: int, flip: int) -> None:
    with closing(_create(64)) as writer:
        os.pwrite(writer.fd, bytes([os.pread(writer.fd, 1, offset)[0] ^ flip]), offset)
        with pytest.raises(PageError):
            PageReader.open(writer.fd)


@given(
    rank=st.integers(0, 1 << 20),
    num_more=st.integers(1, 1 << 20),
    pid=st.integers(0, (1 << 64) - 1),
    started_ticks=st.integers(0, (1 << 64) - 1),
    ring_bytes=st.integers(8, 1 << 27).map(lambda words: words * 8),
)
def test_an_identity_comes_back_as_it_was(
    rank: int, num_more: int, pid: int, started_ticks: int, ring_bytes: int
) -> None:
    identity = PageIdentity(
        rank=rank, world_size=rank + num_more, pid=pid, started_ticks=started_ticks, ring_bytes=ring_bytes
    )

    assert identity == decode_identity(encode_identity(identity), identity.page_bytes)


@given(text=st.text(alphabet=st.characters(), max_size=1500))
@settings(deadline=None)
def test_any_notice_arrives_as_much_as_fits(text: str) -> None:
    with closing(_create(64)) as writer, closing(PageReader.open(writer.fd)) as reader:
        reader.post_notice(text)
        taken = writer.take_notice()
        sent = text.encode(errors="replace")
        assert sent[: len(taken.encode())] == taken.encode()
        assert sent[len(taken.encode()) : 1021].rstrip(b"\0") == b"", "cut by more than a character"
