"""A real rank, killed at any instant: what it said before is whole, in order and without gaps."""

import random
import subprocess
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from holter.page import PageReader

StartPython = Callable[[str], subprocess.Popen[str]]

RANK = """
import os
from holter.page import PageWriter
writer = PageWriter.create(rank=0, world_size=1, pid=os.getpid(), started_ticks=0, ring_bytes=4096)
print(writer.fd, flush=True)
number = 0
while True:
    writer.beat(step=number, phase=number % 8, micro_step=-number, at_ns=3 * number)
    if writer.write(number.to_bytes(8, "little") * (1 + number % 37)):
        number += 1
"""


def _payload(number: int) -> bytes:
    return number.to_bytes(8, "little") * (1 + number % 37)


def _open(rank: subprocess.Popen[str]) -> PageReader:
    assert rank.stdout is not None
    return PageReader.open(f"/proc/{rank.pid}/fd/{int(rank.stdout.readline())}")


@pytest.mark.parametrize("seed", range(16))
def test_a_killed_rank_leaves_every_payload_whole_and_in_order(start_python: StartPython, seed: int) -> None:
    delay_s = random.Random(seed).uniform(0.001, 0.05)  # noqa: S311 - an instant, not a secret
    rank = start_python(RANK)
    with closing(_open(rank)) as reader:
        received = reader.read()
        while not received:
            received = reader.read()
        kill_at = time.monotonic() + delay_s
        while time.monotonic() < kill_at:
            received += reader.read(limit=7)
        rank.kill()
        rank.wait()
        while payloads := reader.read():
            received += payloads
        heartbeat = reader.heartbeat()

        assert [_payload(number) for number in range(len(received))] == received
        assert reader.torn == 0
        assert heartbeat is not None
        assert heartbeat.step in (len(received) - 1, len(received))


def test_a_beat_read_while_it_is_written_is_whole(start_python: StartPython) -> None:
    rank = start_python(RANK)
    with closing(_open(rank)) as reader:
        steps = []
        while len(set(steps)) < 500:
            reader.read()
            heartbeat = reader.heartbeat()
            if heartbeat is not None:
                step = heartbeat.step
                assert (step % 8, -step, 3 * step) == (heartbeat.phase, heartbeat.micro_step, heartbeat.at_ns)
                steps.append(step)
        assert sorted(steps) == steps


def test_a_rank_whose_sidecar_stopped_reading_goes_on(start_python: StartPython) -> None:
    rank = start_python(RANK)
    with closing(_open(rank)) as reader:
        while reader.dropped < 1000:
            time.sleep(0.001)
        assert _payload(0) == reader.read(limit=1)[0]
        assert rank.poll() is None


def test_a_sidecar_that_starts_again_continues_without_a_gap(start_python: StartPython) -> None:
    rank = start_python(RANK)
    assert rank.stdout is not None
    path = f"/proc/{rank.pid}/fd/{int(rank.stdout.readline())}"
    received: list[bytes] = []
    for _ in range(20):
        with closing(PageReader.open(path)) as reader:
            while not (payloads := reader.read(limit=5)):
                pass
            received += payloads
            assert reader.torn == 0

    assert [_payload(number) for number in range(len(received))] == received
