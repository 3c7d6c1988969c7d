import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from zlib import crc32

import pytest

from holter.errors import PageError, TornPageError
from holter.page import PageHeartbeat, PageReader, PageWriter
from holter.page.layout import RING_OFFSET, WRITE_POSITION
from holter.records import Phase

MakePage = Callable[..., tuple[PageWriter, PageReader]]


def _page_bytes(writer: PageWriter) -> bytes:
    return os.pread(writer.fd, os.fstat(writer.fd).st_size, 0)


def _with_header(page: bytes, *fields: object) -> bytes:
    header = struct.pack("<8s6Q", *fields)
    return header + struct.pack("<Q", crc32(header)) + page[64:]


def _refusal(content: bytes) -> PageError:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        with pytest.raises(PageError) as raised:
            PageReader.open(file.name)
        assert file.name in str(raised.value)
        return raised.value


def test_a_foreign_file_is_refused_by_its_magic() -> None:
    refusal = _refusal(b"\x7fELF" + bytes(RING_OFFSET + 4096))

    assert "is not a page: it begins with b'\\x7fELF" in str(refusal)
    assert not isinstance(refusal, TornPageError)


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 4096, RING_OFFSET + 63])
def test_a_short_file_is_refused_by_its_size(make_page: MakePage, num_bytes: int) -> None:
    writer, _ = make_page(ring_bytes=64)

    assert f"is not a page: {num_bytes} bytes are too few" in str(_refusal(_page_bytes(writer)[:num_bytes]))


def test_another_version_is_refused_and_both_are_named(make_page: MakePage) -> None:
    writer, _ = make_page()
    refusal = _refusal(_with_header(_page_bytes(writer), b"HOLTERPG", 3, 1, 4, 4242, 777, 4096))

    assert "is a page of version 3, and this holter reads version 2" in str(refusal)
    assert not isinstance(refusal, TornPageError)


@pytest.mark.parametrize("offset", [16, 24, 32, 40, 48, 56, 63])
def test_a_header_that_changed_is_torn(make_page: MakePage, offset: int) -> None:
    writer, _ = make_page()
    page = bytearray(_page_bytes(writer))
    page[offset] ^= 1
    refusal = _refusal(bytes(page))

    assert isinstance(refusal, TornPageError)
    assert "header's checksum" in str(refusal)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ((4, 4, 4242, 777, 4096), "rank must be at least 0 and below world_size, got 4 of 4"),
        ((1, 4, 4242, 777, 4104), "its size is 143360 bytes, and its header says 143368"),
        ((1, 4, 4242, 777, 64), "its size is 143360 bytes, and its header says 139328"),
        ((1, 4, 4242, 777, 8), "got 8"),
        ((1, 4, 4242, 777, 1 << 63), "got 9223372036854775808"),
    ],
)
def test_a_header_that_does_not_add_up_is_torn(make_page: MakePage, fields: tuple[int, ...], sentence: str) -> None:
    writer, _ = make_page()
    refusal = _refusal(_with_header(_page_bytes(writer), b"HOLTERPG", 2, *fields))

    assert isinstance(refusal, TornPageError)
    assert str(refusal).endswith(sentence)


def test_what_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")

    with pytest.raises(PageError, match=f"{missing} cannot be opened as a page: No such file or directory"):
        PageReader.open(missing)
    with pytest.raises(PageError, match="descriptor 987 cannot be opened as a page: Bad file descriptor"):
        PageReader.open(987)
    with pytest.raises(PageError, match="descriptor -1 cannot be opened as a page: Bad file descriptor"):
        PageReader.open(-1)
    with pytest.raises(PageError, match="/dev/null is not a page: it is no regular file"):
        PageReader.open("/dev/null")


def test_a_descriptor_without_write_permission_is_refused(make_page: MakePage) -> None:
    writer, _ = make_page()
    fd = os.open(f"/proc/self/fd/{writer.fd}", os.O_RDONLY)
    try:
        with pytest.raises(PageError, match="Permission denied"):
            PageReader.open(fd)
    finally:
        os.close(fd)


def test_a_refused_page_leaves_no_descriptor_open(make_page: MakePage) -> None:
    make_page()
    before = os.dup(0)
    os.close(before)
    _refusal(bytes(RING_OFFSET + 4096))
    after = os.dup(0)
    os.close(after)

    assert before == after


def test_open_leaves_the_descriptor_to_the_caller(make_page: MakePage) -> None:
    writer, reader = make_page()
    reader.close()

    assert os.fstat(writer.fd).st_size == RING_OFFSET + 4096


def test_a_heartbeat_is_none_until_the_first_then_the_latest(make_page: MakePage) -> None:
    writer, reader = make_page()

    assert reader.heartbeat() is None
    for step in range(3):
        writer.beat(step=step, phase=Phase.OPTIMIZER, micro_step=1, at_ns=step + 10)
        expected = PageHeartbeat(step=step, phase=Phase.OPTIMIZER, micro_step=1, at_ns=step + 10)
        assert expected == reader.heartbeat()
    assert reader.torn == 0


def test_an_unknown_phase_is_other(make_page: MakePage) -> None:
    writer, reader = make_page()
    writer.beat(step=0, phase=99, micro_step=0, at_ns=0)

    assert reader.heartbeat().phase is Phase.OTHER


def test_a_torn_heartbeat_is_none_and_counted_until_the_next(make_page: MakePage) -> None:
    writer, reader = make_page()
    writer.beat(step=1, phase=Phase.DATA, micro_step=0, at_ns=1)
    writer._page.heartbeat._slots[1][0] ^= 1

    assert (reader.heartbeat(), reader.heartbeat(), reader.torn) == (None, None, 2)
    writer.beat(step=2, phase=Phase.DATA, micro_step=0, at_ns=2)
    assert reader.heartbeat().step == 2


def test_a_beat_that_was_never_finished_leaves_the_one_before(make_page: MakePage) -> None:
    writer, reader = make_page()
    writer.beat(step=1, phase=Phase.DATA, micro_step=0, at_ns=1)
    writer._page.heartbeat._slots[0][:7] = b"half of"

    assert reader.heartbeat().step == 1


def test_a_second_reader_continues_where_the_first_stopped(make_page: MakePage) -> None:
    writer, reader = make_page()
    for number in range(4):
        writer.write(b"%d" % number)
    reader.read(limit=2)
    reader.set_control(1, 10)
    with closing(PageReader.open(f"/proc/self/fd/{writer.fd}")) as second:
        assert second.read() == [b"2", b"3"]
        second.set_control(2, 20)
    assert writer.control() == (2, 20)


def test_limit_bounds_a_read(make_page: MakePage) -> None:
    writer, reader = make_page()
    for number in range(3):
        writer.write(b"%d" % number)

    assert reader.read(limit=0) == []
    assert reader.read(limit=2) == [b"0", b"1"]
    assert reader.read(limit=2) == [b"2"]
    assert reader.read() == []


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        pytest.param(RING_OFFSET, 0xFF, id="length"),
        pytest.param(RING_OFFSET + 3, 0xFF, id="absurd length"),
        pytest.param(RING_OFFSET + 4, 0x01, id="check"),
        pytest.param(RING_OFFSET + 8, 0x01, id="payload"),
    ],
)
def test_a_damaged_record_is_torn_and_reading_goes_on_behind_it(make_page: MakePage, offset: int, value: int) -> None:
    writer, reader = make_page()
    writer.write(b"damaged")
    writer.write(b"behind it")
    writer._page.words.cast("B")[offset] ^= value

    assert reader.read() == []
    assert reader.torn == 1
    assert writer.write(b"new")
    assert reader.read() == [b"new"]
    assert reader.torn == 1


@pytest.mark.parametrize("position", [4, 9000, 1 << 40, (1 << 64) - 1, (1 << 64) - 8])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_damaged_write_position_is_torn_and_the_next_write_heals(
    make_page: MakePage, position: int, *, is_reopened: bool
) -> None:
    writer, reader = make_page()
    writer.write(b"lost")
    writer._page.words[WRITE_POSITION] = position
    if is_reopened:
        reader = PageReader.open(writer.fd)

    assert [reader.read() for _ in range(3)] == [[], [], []]
    assert reader.torn == 1
    assert writer.write(b"lost too: the reader was told to stand elsewhere")
    assert reader.read() == []
    assert reader.torn == 2
    assert writer.write(b"healed")
    assert reader.read() == [b"healed"]


@pytest.mark.parametrize("position", [4, 24, 9000, 1 << 40, (1 << 64) - 1, (1 << 64) - 8])
def test_a_second_reader_does_not_start_at_an_impossible_position(make_page: MakePage, position: int) -> None:
    writer, reader = make_page()
    writer.write(b"lost")
    reader._page.read_position.publish(position)
    with closing(PageReader.open(writer.fd)) as second:
        assert second.read() == []
        assert second.torn == 1
        assert writer.write(b"next")
        assert second.read() == [b"next"]


def test_a_second_reader_that_cannot_tell_where_the_first_stopped_starts_at_the_writer(make_page: MakePage) -> None:
    writer, reader = make_page()
    writer.write(b"read before, or lost")
    reader._page.read_position._slots[1][0] ^= 16
    with closing(PageReader.open(writer.fd)) as second:
        assert second.torn == 1
        assert second.read() == []
        assert writer.write(b"next")
        assert second.read() == [b"next"]


def test_a_record_of_an_earlier_lap_is_not_believed(make_page: MakePage) -> None:
    writer, reader = make_page(ring_bytes=64)
    for number in range(5):  # laps of four records
        writer.write(b"%d" % number)
        reader.read()
    writer._page.words[WRITE_POSITION] += 16  # where record 1 still lies, whole

    assert reader.read() == []
    assert reader.torn == 1


def test_a_record_that_reaches_beyond_the_write_position_is_not_believed(make_page: MakePage) -> None:
    writer, reader = make_page()
    writer.write(bytes(20))
    writer._page.words[WRITE_POSITION] = 16

    assert reader.read() == []
    assert reader.torn == 1


def test_zeroed_memory_is_not_an_empty_record(make_page: MakePage) -> None:
    writer, reader = make_page()
    writer._page.words[WRITE_POSITION] = 8

    assert reader.read() == []
    assert reader.torn == 1


def test_empty_payloads_are_payloads(make_page: MakePage) -> None:
    writer, reader = make_page()

    assert writer.write(b"")
    assert reader.read() == [b""]


def test_a_closed_reader_says_so(make_page: MakePage) -> None:
    _, reader = make_page()
    reader.close()
    reader.close()

    for call in (reader.heartbeat, reader.read, lambda: reader.dropped, lambda: reader.set_control(1, 2)):
        with pytest.raises(PageError, match="the page of rank 1 was closed by its reader"):
            call()
