"""Nothing that others wrote makes a reader raise: seeds and what fuzzers once found, mutated at random here, guided by coverage for a release."""

import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.fuzz.targets import KEPT, TARGETS, mutate_journal

ROOT = Path(__file__).resolve().parents[2]
NUM = 60
SECONDS = 60


def kept(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((KEPT / name).glob("*"))]


def mutated(data: bytes, luck: random.Random) -> bytes:
    """Some bytes changed, some taken out, some doubled."""
    content = bytearray(data or b"\x00")
    for _ in range(luck.randrange(1, 6)):
        at = luck.randrange(len(content))
        match luck.randrange(3):
            case 0:
                content[at] = luck.randrange(256)
            case 1:
                del content[at : at + luck.randrange(8)]
                content = content or bytearray(1)
            case _:
                content[at:at] = content[at : at + luck.randrange(16)]
    return bytes(content)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_was_once_found_raise_nothing(name: str) -> None:
    for data in [*TARGETS[name].seeds(), *kept(name)]:
        TARGETS[name].call(data)


@pytest.mark.parametrize("name", TARGETS)
def test_random_changes_raise_nothing(name: str) -> None:
    luck = random.Random(19)  # noqa: S311 - to be repeated
    seeds = [*TARGETS[name].seeds(), *kept(name)]
    for _ in range(NUM):
        data = luck.choice(seeds)
        if name == "journal":
            data = mutate_journal(data, 2**16, luck.randrange(1000), lambda part, _: mutated(part, luck))
        TARGETS[name].call(mutated(data, luck) if name != "journal" else data)


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed: it has no build for this Python")
@pytest.mark.parametrize("name", TARGETS)
def test_a_minute_guided_by_coverage_finds_nothing(name: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(SECONDS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS + 180)
    assert 0 == ended.returncode, ended.stderr[-4000:]
    print(name, *(line for line in ended.stderr.splitlines() if line.startswith("stat::")), sep="\n  ")
