"""Nobody is unwatched in silence: a missing coordinator is said in time, and is always started again."""

import asyncio
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from holter import clock
from holter.page import PageIdentity
from holter.sidecar import coordinator_link
from holter.sidecar.coordinator_link import CoordinatorLink, CoordinatorProcess, restart_pause_s

IDENTITY = PageIdentity(rank=0, world_size=2, pid=1, started_ticks=1, ring_bytes=4096)


def make_link() -> CoordinatorLink:
    return CoordinatorLink(IDENTITY, lambda _: None, lambda _: None)


def test_a_missing_coordinator_is_said_once_and_so_is_its_return() -> None:
    link, now_s = make_link(), clock.monotonic_s()
    link._uplink = uplink = SimpleNamespace(is_connected=True, heard_s=now_s, refusal="")
    assert link.look(now_s) is None
    uplink.is_connected = False
    said = [link.look(now_s + second) for second in range(1, 30)]
    told = [(second, text) for second, text in enumerate(said, start=1) if text]
    assert [10] == [second for second, _ in told]
    assert "not watched" in told[0][1]
    assert link.is_unwatched(now_s + 30)
    uplink.is_connected, uplink.heard_s = True, now_s + 31
    assert "watched again" in str(link.look(now_s + 31))
    assert not link.is_unwatched(now_s + 31)
    assert link.look(now_s + 32) is None
    uplink.is_connected, uplink.refusal = False, "another process speaks for rank 0"
    assert "(another process speaks for rank 0)" in str(link.look(now_s + 50))


def test_a_coordinator_whose_line_stands_and_that_does_not_answer_is_missing_too() -> None:
    """It is stopped: the line is given up only when a second ping is not answered."""
    link, now_s = make_link(), clock.monotonic_s()
    link._uplink = uplink = SimpleNamespace(is_connected=True, heard_s=now_s, refusal="")
    said = [bool(link.look(now_s + second)) for second in range(20)]
    assert [False] * 15 + [True] + [False] * 4 == said
    uplink.heard_s = now_s + 20
    assert "watched again" in str(link.look(now_s + 20))


def test_a_coordinator_that_never_came_is_missing_too() -> None:
    link, now_s = make_link(), clock.monotonic_s()
    assert link.look(now_s + 5) is None
    assert "not watched" in str(link.look(now_s + 15))


def test_pauses_grow_and_end_at_a_minute() -> None:
    pauses = [restart_pause_s(lives) for lives in range(1, 40)]
    assert all(one <= other for one, other in pairwise(pauses))
    assert max(pauses[:10]) < 10
    assert pauses[-1] == 60


async def test_it_is_started_again_however_often_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_link, "PAUSES_S", (0.0,))
    codes = iter([-9] * 20 + [0])
    process = CoordinatorProcess(arguments=[], token="", listen_fd=-1)
    ends = []

    async def run_once() -> int:
        ends.append(next(codes))
        return ends[-1]

    monkeypatch.setattr(process, "_run_once", run_once)
    async with asyncio.timeout(20):
        await process._keep_alive()
    assert [-9] * 20 + [0] == ends


def test_a_directory_is_the_coordinators_own_if_the_job_was_told_so_or_our_token_lies_in_it(tmp_path: Path) -> None:
    found = make_link()
    found.run_dir, found._token = "/told", "ours"
    assert found.is_own_directory("/told")
    assert not found.is_own_directory("")
    assert not found.is_own_directory(str(tmp_path))
    access = tmp_path / "coordinator.json"
    for content, is_own in (('{"token": "ours"}', True), ('{"token": "theirs"}', False), ("[]", False), ("{", False)):
        access.write_text(content)
        assert is_own == found.is_own_directory(str(tmp_path)), content
