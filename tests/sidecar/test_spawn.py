"""A process of ours is nobody's burden."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.page import PageReader, PageWriter
from holter.sidecar import spawn
from holter.sidecar.process import started_ticks
from holter.sidecar.spawn import Bootstrap


def wait_for(is_there: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process to be watched."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def page(rank) -> Iterator[PageWriter]:
    made = PageWriter.create(rank=0, world_size=1, pid=rank.pid, started_ticks=started_ticks(rank.pid))
    yield made
    made.close()


def sidecar_of(page: PageWriter) -> psutil.Process:
    wait_for(lambda: page.sidecar()[0])
    return psutil.Process(page.sidecar()[0])


def start(page: PageWriter) -> None:
    spawn.start(["sidecar", "--page", str(page.fd)], pass_fds=[page.fd], environ=os.environ)


def test_it_is_up_in_about_a_second_small_and_without_torch(page):
    start(page)
    sidecar = sidecar_of(page)
    used = sidecar.cpu_times()
    # One second is what is promised, of its own work: the machine runs other tests too.
    assert used.user + used.system < 3.0
    assert sidecar.memory_info().rss < 60 << 20
    assert not [m for m in Path(f"/proc/{sidecar.pid}/maps").read_text().splitlines() if "/torch/" in m]


def test_it_is_no_child_and_no_member_of_our_session(page):
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    start(page)
    sidecar = sidecar_of(page)
    assert children == {child.pid for child in psutil.Process().children(recursive=True)}
    assert os.getsid(0) != os.getsid(sidecar.pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(sidecar.pid, os.WNOHANG)


def test_it_ends_with_its_rank_and_leaves_no_zombie(page, rank):
    start(page)
    sidecar = sidecar_of(page)
    rank.kill()
    rank.wait()
    wait_for(lambda: not sidecar.is_running() or sidecar.status() == psutil.STATUS_ZOMBIE)
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


def test_it_keeps_nothing_open_that_is_not_meant_for_it(page, tmp_path):
    kept = (tmp_path / "mine").open("w")
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    start(page)
    sidecar = sidecar_of(page)
    os.close(write_end)
    assert b"" == os.read(read_end, 1), "the other end is closed: nobody else holds it"
    targets = [str(entry.readlink()) for entry in Path(f"/proc/{sidecar.pid}/fd").iterdir() if entry.exists()]
    assert str(tmp_path / "mine") not in targets
    assert ["/dev/null"] * 3 == [str(Path(f"/proc/{sidecar.pid}/fd/{number}").readlink()) for number in range(3)]
    os.close(read_end)
    kept.close()


def test_a_pipe_around_the_starter_is_closed_when_the_starter_ends(page):
    code = (
        "import os, sys; from holter.sidecar import spawn; fd = int(sys.argv[1]); "
        "spawn.start(['sidecar', '--page', str(fd)], pass_fds=[fd], environ=os.environ); print('started')"
    )
    starter = subprocess.run(
        [sys.executable, "-c", code, str(page.fd)],
        pass_fds=[page.fd],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert "started\n" == starter.stdout
    assert sidecar_of(page).is_running()


def test_what_the_rank_wrote_is_read(page):
    start(page)
    sidecar_of(page)
    page.write(b"not an observation")
    reader = PageReader.open(page.fd)
    wait_for(lambda: reader._page.read_position.read()[0] > 0)
    reader.close()


def test_a_shell_that_cannot_be_found_is_an_os_error(page, monkeypatch):
    monkeypatch.setattr(spawn, "SHELL", "/nonexistent/sh")
    with pytest.raises(OSError, match="nonexistent"):
        start(page)


words = st.builds(
    Bootstrap,
    address=st.text(),
    token=st.text(),
    run_id=st.text(),
    run_dir=st.text(),
    action=st.text(),
    starts_coordinator=st.booleans(),
)


@given(words)
def test_what_is_written_is_read_from_one_line(word):
    line = spawn.encode_bootstrap(word)
    assert 1 == line.count(b"\n")
    assert word == spawn.decode_bootstrap(line)


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b'{"address": 1}', b'"word"'])
def test_garbage_is_refused(garbage):
    with pytest.raises(msgspec.MsgspecError):
        spawn.decode_bootstrap(garbage)


@given(st.binary(max_size=64))
def test_whatever_comes_is_refused_in_one_way(noise):
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        spawn.decode_bootstrap(noise)
