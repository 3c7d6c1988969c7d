import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

import pytest

from holter.errors import PageError
from holter.page import PageReader, PageWriter
from holter.page.layout import RING_OFFSET, WRITE_POSITION
from holter.records import Phase

MakePage = Callable[..., tuple[PageWriter, PageReader]]
StartPython = Callable[[str], subprocess.Popen[str]]
IDENTITY = {"rank": 0, "world_size": 1, "pid": 1, "started_ticks": 2}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ring_bytes": 0}, "ring_bytes must be a multiple of 8 from 64 to 1073741824, got 0"),
        ({"ring_bytes": -8}, "got -8"),
        ({"ring_bytes": 4100}, "got 4100"),
        ({"ring_bytes": 1 << 60}, "got 1152921504606846976"),
        ({"rank": 2, "world_size": 2}, "rank must be at least 0 and below world_size, got 2 of 2"),
        ({"rank": -1}, "got -1 of 1"),
        ({"pid": -1}, "pid must fit an unsigned 64-bit word, got -1"),
        ({"started_ticks": 1 << 64}, "started_ticks must fit an unsigned 64-bit word, got 18446744073709551616"),
    ],
)
def test_a_page_that_makes_no_sense_is_refused_in_one_sentence(settings: dict[str, int], sentence: str) -> None:
    with pytest.raises(PageError) as raised:
        PageWriter.create(**{**IDENTITY, **settings})

    assert str(raised.value).startswith("the shared page cannot be made: ")
    assert str(raised.value).endswith(sentence)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("resource.RLIMIT_AS, pages * resource.getpagesize() + (32 << 20)", "Cannot allocate memory"),
        ("resource.RLIMIT_FSIZE, 1 << 20", "File too large"),
        ("resource.RLIMIT_NOFILE, 3", "Too many open files"),
    ],
)
def test_what_the_system_refuses_is_one_sentence_and_leaves_no_descriptor(
    start_python: StartPython, limit: str, reason: str
) -> None:
    child = start_python(f"""
import os, resource
from holter.errors import PageError
from holter.page import PageWriter
pages = int(open("/proc/self/statm").read().split()[0])
before = os.dup(0)
os.close(before)
which, soft = {limit}
hard = resource.getrlimit(which)[1]
resource.setrlimit(which, (soft, hard))
try:
    PageWriter.create(rank=0, world_size=1, pid=1, started_ticks=2, ring_bytes=64 << 20)
except PageError as error:
    print(error)
resource.setrlimit(which, (hard, hard))
print(os.dup(0) - before)
""")
    out, errors = child.communicate(timeout=30)

    assert f"the shared page of {(64 << 20) + RING_OFFSET} bytes cannot be made: {reason}\n0\n" == out, errors


def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")

    with pytest.raises(PageError, match="little-endian"):
        PageWriter.create(**IDENTITY)


def test_nobody_can_shrink_the_page_under_the_rank(make_page: MakePage) -> None:
    writer, _ = make_page()

    for num_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(writer.fd, num_bytes)


def test_descriptor_is_not_inherited_unless_asked(make_page: MakePage) -> None:
    writer, _ = make_page()

    assert fcntl.fcntl(writer.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def _refuse_memfd(_name: str, _flags: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "refused"])
def test_without_memfd_an_unlinked_file_serves(
    make_page: MakePage, monkeypatch: pytest.MonkeyPatch, *, is_missing: bool
) -> None:
    if is_missing:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", _refuse_memfd)
    writer, reader = make_page()

    assert writer.write(b"payload")
    assert reader.read() == [b"payload"]
    assert os.fstat(writer.fd).st_nlink == 0


def test_memory_is_taken_in_advance(make_page: MakePage) -> None:
    writer, _ = make_page(ring_bytes=1 << 20)

    assert os.fstat(writer.fd).st_blocks * 512 >= RING_OFFSET + (1 << 20)


def test_without_memfd_a_directory_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_settings: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)

    with pytest.raises(PageError, match="cannot be made: No space left on device"):
        PageWriter.create(**IDENTITY)


def test_a_full_ring_drops_and_counts_and_takes_again_when_read(make_page: MakePage) -> None:
    writer, reader = make_page(ring_bytes=64)

    assert [writer.write(bytes(24)), writer.write(bytes(24)), writer.write(b"")] == [True, True, False]
    assert (writer.dropped, reader.dropped) == (1, 1)
    assert [bytes(24)] == reader.read(limit=1)
    assert writer.write(b"again")
    assert [bytes(24), b"again"] == reader.read()


def test_a_payload_as_large_as_the_ring_can_hold_is_taken_a_larger_one_is_dropped(make_page: MakePage) -> None:
    writer, reader = make_page(ring_bytes=64)

    assert not writer.write(bytes(57))
    assert writer.write(b"x" * 56)
    assert reader.read() == [b"x" * 56]
    assert writer.dropped == 1


@pytest.mark.parametrize("position", [8, 4096, 1 << 40, (1 << 64) - 1, (1 << 64) - 8])
def test_a_read_position_ahead_of_the_writer_counts_as_full(make_page: MakePage, position: int) -> None:
    writer, reader = make_page(ring_bytes=64)
    writer._page.read_position.publish(position)

    assert writer.write(bytes(56))
    assert not writer.write(b"no room is known")
    assert writer.dropped == 1
    assert [bytes(56)] == reader.read()
    assert writer.write(b"the reader put it right")


def test_a_read_position_behind_by_more_than_the_ring_counts_as_full(make_page: MakePage) -> None:
    writer, reader = make_page(ring_bytes=64)
    for _ in range(3):
        assert writer.write(bytes(56))
        reader.read()
    writer._page.read_position.publish(0)

    assert not writer.write(bytes(56))


def test_a_torn_read_position_counts_as_full_until_the_reader_reads(make_page: MakePage) -> None:
    writer, reader = make_page(ring_bytes=64)
    writer.write(bytes(56))
    reader.read()
    writer._page.read_position._slots[0][0] ^= 1

    assert not writer.write(bytes(56))
    assert reader.read() == []
    assert writer.write(bytes(56))
    assert reader.torn == 0


def test_a_damaged_write_position_is_said_again(make_page: MakePage) -> None:
    writer, reader = make_page(ring_bytes=64)
    writer.write(bytes(56))
    writer._page.words[WRITE_POSITION] = 1 << 50

    assert reader.read() == []
    assert not writer.write(b"dropped, but the position is true again")
    assert reader.read() == []
    assert reader.torn == 2
    assert writer.write(b"healed")
    assert reader.read() == [b"healed"]


def test_a_writer_that_meets_itself_drops_and_counts(make_page: MakePage) -> None:
    writer, reader = make_page()
    with writer._ring_lock, writer._beat_lock:
        writer.beat(step=1, phase=Phase.DATA, micro_step=0, at_ns=1)
        assert not writer.write(b"contended")

    assert writer.dropped == 2
    assert reader.heartbeat() is None
    assert writer.write(b"free")


def test_a_beat_and_a_payload_do_not_contend(make_page: MakePage) -> None:
    writer, reader = make_page()
    with writer._beat_lock:
        assert writer.write(b"payload")
    with writer._ring_lock:
        writer.beat(step=1, phase=Phase.DATA, micro_step=0, at_ns=1)

    assert reader.heartbeat() is not None
    assert writer.dropped == 0


def test_a_beat_that_fits_no_word_is_dropped_and_counted(make_page: MakePage) -> None:
    writer, reader = make_page()
    writer.beat(step=5, phase=Phase.DATA, micro_step=0, at_ns=1)
    writer.beat(step=1 << 63, phase=Phase.DATA, micro_step=0, at_ns=2)

    assert reader.heartbeat().step == 5
    assert writer.dropped == 1


def test_a_signal_handler_that_writes_over_a_write_harms_nothing(make_page: MakePage) -> None:
    writer, reader = make_page(ring_bytes=1 << 20)
    written: list[bytes] = []
    num_attempts = {"loop": 0, "handler": 0}

    def write(source: str) -> None:
        payload = f"{source} {num_attempts[source]}".encode() * 9
        num_attempts[source] += 1
        if writer.write(payload):
            written.append(payload)

    previous = signal.signal(signal.SIGVTALRM, lambda _number, _frame: write("handler"))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0001, 0.0001)
    received: list[bytes] = []
    try:
        while num_attempts["handler"] < 50:
            write("loop")
            received += reader.read()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    received += reader.read()

    assert reader.torn == 0
    # A handler that runs between write() and append() notes its payload first.
    assert sorted(written) == sorted(received)
    assert not writer.write(bytes(1 << 20))
    assert sum(num_attempts.values()) + 1 == len(received) + reader.dropped


def test_threads_that_write_at_once_lose_nothing_uncounted(make_page: MakePage) -> None:
    writer, reader = make_page(ring_bytes=1 << 20)
    num_threads, num_writes = 4, 1000
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda i=i: [writer.write(b"%d " % i * 20) for _ in range(num_writes)])
            for i in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    received = reader.read(limit=num_threads * num_writes)

    assert received
    assert set(received) <= {b"%d " % i * 20 for i in range(num_threads)}
    assert reader.torn == 0
    assert not writer.write(bytes(1 << 20))
    assert num_threads * num_writes + 1 == len(received) + reader.dropped


def test_control_is_nothing_until_set_then_the_last_one(make_page: MakePage) -> None:
    writer, reader = make_page()

    assert writer.control() == (0, 0)
    reader.set_control(1, 40)
    assert writer.control() == (1, 40)
    reader.set_control(2, -1)
    assert writer.control() == (2, -1)
    assert writer.control() == (2, -1)


def test_a_torn_control_reads_as_the_last_good_one(make_page: MakePage) -> None:
    writer, reader = make_page()
    reader.set_control(1, 40)
    writer.control()
    reader.set_control(2, 50)
    writer._page.control._slots[0][0] ^= 1

    assert writer.control() == (1, 40)
    reader.set_control(3, 60)
    assert writer.control() == (3, 60)


def test_a_notice_is_taken_once(make_page: MakePage) -> None:
    writer, reader = make_page()

    assert writer.take_notice() is None
    reader.post_notice("first")
    reader.post_notice("rank 3 is silent …")
    assert writer.take_notice() == "rank 3 is silent …"
    assert writer.take_notice() is None
    reader.post_notice("rank 3 is silent …")
    assert writer.take_notice() == "rank 3 is silent …"


def test_a_long_notice_is_cut_between_characters(make_page: MakePage) -> None:
    writer, reader = make_page()
    reader.post_notice("a" + "é" * 1000)

    assert writer.take_notice() == "a" + "é" * 511


def test_a_torn_notice_is_not_taken(make_page: MakePage) -> None:
    writer, reader = make_page()
    reader.post_notice("text")
    writer._page.notice._slots[1][2] ^= 1

    assert writer.take_notice() is None


def test_a_notice_that_is_no_text_is_taken_for_what_can_be_read(make_page: MakePage) -> None:
    writer, reader = make_page()
    reader._page.notice.publish(b"ab\xff")

    assert writer.take_notice() == "ab\N{REPLACEMENT CHARACTER}"


def test_sidecar_is_known_once_it_beats(make_page: MakePage) -> None:
    writer, reader = make_page()

    assert writer.sidecar() == (0, 0)
    reader.beat(pid=99, at_ns=1_800_000_000_000_000_000)
    assert writer.sidecar() == (99, 1_800_000_000_000_000_000)


def test_after_close_every_call_does_nothing_and_the_sidecar_still_reads(make_page: MakePage) -> None:
    writer, reader = make_page()
    writer.beat(step=7, phase=Phase.FORWARD, micro_step=0, at_ns=1)
    writer.write(b"last words")
    reader.set_control(1, 2)
    writer.control()
    writer.close()
    writer.close()
    writer.beat(step=8, phase=Phase.FORWARD, micro_step=0, at_ns=2)
    reader.post_notice("too late")

    assert not writer.write(b"too late")
    assert (
        writer.fd,
        writer.dropped,
        writer.control(),
        writer.take_notice(),
        writer.sidecar(),
    ) == (-1, 0, (1, 2), None, (0, 0))
    assert reader.read() == [b"last words"]
    assert reader.heartbeat().step == 7


def test_a_forked_worker_is_not_the_rank(start_python: StartPython) -> None:
    child = start_python("""
import os
from holter.page import PageReader; from holter.page import PageWriter
writer = PageWriter.create(rank=0, world_size=1, pid=os.getpid(), started_ticks=0, ring_bytes=4096)
reader = PageReader.open(writer.fd)
if (worker := os.fork()) == 0:
    writer.beat(step=1, phase=1, micro_step=0, at_ns=1)
    is_written = writer.write(b"worker")
    can_become_sidecar = PageReader.open(writer.fd).identity == reader.identity
    writer.close()
    os._exit(0 if can_become_sidecar and not is_written else 1)
print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), reader.heartbeat(), reader.read(), writer.write(b"rank"))
""")
    out, errors = child.communicate(timeout=30)

    assert out == "0 None [] True\n", errors
