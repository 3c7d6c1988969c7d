"""The layout is a promise between two processes that may run different versions: its bytes are kept.

After a change of layout, raise `VERSION` and write the new file: python tests/page/test_golden.py
"""

import os
import struct
import tempfile
from contextlib import closing
from pathlib import Path

from holter.page import PageHeartbeat, PageIdentity, PageReader, PageWriter
from holter.page.layout import RING_OFFSET
from holter.records import Phase

GOLDEN = Path(__file__).parent / "golden" / "page_v2.bin"
RING_BYTES = 4096
PAYLOADS = [bytes([number]) * 600 for number in range(9)]
AT_NS = 1_800_000_000_000_000_000


def page_as_written_today() -> bytes:
    writer = PageWriter.create(rank=1, world_size=4, pid=4242, started_ticks=777, ring_bytes=RING_BYTES)
    with closing(writer), closing(PageReader.open(writer.fd)) as reader:
        for step in (28, 29, 30):
            writer.beat(step=step, phase=Phase.BACKWARD, micro_step=2, at_ns=AT_NS + step)
        for payload in PAYLOADS[:5]:
            assert writer.write(payload)
        assert PAYLOADS[:4] == reader.read(limit=4)
        for payload in PAYLOADS[5:]:  # the seventh meets the end of the ring
            assert writer.write(payload)
        assert not writer.write(b"x" * RING_BYTES)
        reader.set_control(3, 40)
        reader.beat(pid=4243, at_ns=AT_NS + 1)
        for step in (30, 31):
            assert writer.publish_rewind(step, b"random states of %d" % step)
        reader.post_notice("rank 1: NaN in the batch, step 30 …")
        return os.pread(writer.fd, RING_OFFSET + RING_BYTES, 0)


def test_bytes_written_today_equal_the_golden_page() -> None:
    assert GOLDEN.read_bytes() == page_as_written_today()


def test_golden_page_is_understood() -> None:
    with tempfile.NamedTemporaryFile() as copy:
        Path(copy.name).write_bytes(GOLDEN.read_bytes())
        with closing(PageReader.open(copy.name)) as reader:
            assert reader.identity == PageIdentity(
                version=2, rank=1, world_size=4, pid=4242, started_ticks=777, ring_bytes=RING_BYTES
            )
            assert reader.heartbeat() == PageHeartbeat(step=30, phase=Phase.BACKWARD, micro_step=2, at_ns=AT_NS + 30)
            assert PAYLOADS[4:] == reader.read()
            assert [(30, b"random states of 30"), (31, b"random states of 31")] == reader.rewinds()
            assert (reader.dropped, reader.torn) == (1, 0)


def test_golden_page_holds_what_the_layout_table_says() -> None:
    page = GOLDEN.read_bytes()

    assert struct.unpack_from("<8s6Q", page, 0) == (b"HOLTERPG", 2, 1, 4, 4242, 777, RING_BYTES)
    assert struct.unpack_from("<Q", page, 64) == (3,)
    assert struct.unpack_from("<4q", page, 80) == (29, 3, 2, AT_NS + 29)
    assert struct.unpack_from("<4q", page, 120) == (30, 3, 2, AT_NS + 30)
    assert struct.unpack_from("<2Q", page, 192) == (9 * 608, 1)
    assert struct.unpack_from("<Q8xQ8xQ", page, 256) == (2, 4 * 608, 0)
    assert struct.unpack_from("<Q32x2q", page, 320) == (1, 3, 40)
    assert struct.unpack_from("<Q32x2q", page, 384) == (1, 4243, AT_NS + 1)
    assert struct.unpack_from("<Q", page, 448) == (1,)
    assert page[1496 : 1496 + 1024].rstrip(b"\0").decode() == "rank 1: NaN in the batch, step 30 …"
    assert struct.unpack_from("<I", page, 139264 + 4 * 608) == (600,)
    assert PAYLOADS[4] == page[139264 + 4 * 608 + 8 :][:600]


if __name__ == "__main__":
    GOLDEN.write_bytes(page_as_written_today())
