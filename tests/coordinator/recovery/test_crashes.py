"""Killed at any write, or damaged at any byte, a run's record loses at most the entry that was hit, doubles nothing and changes nothing in silence.

A life writes entries of the journal, incidents, a sealed checkpoint and halt.json, one after another, each acknowledged through a pipe once it is on the
disk. It is killed at a random one of its system calls that write or rename, a write perhaps half done. The next life goes on behind it. What is read
afterwards is held against what was acknowledged.
"""

import os
import random
import signal
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.coordinator.conftest import RUN_ID, attached, census, done, exited
from tests.made_up import diagnosis

from holter import clock
from holter.coordinator.disk import Disk
from holter.coordinator.identity import RunIdentity, RunSettings
from holter.coordinator.incidents import DATABASE, FOLDER, Incidents
from holter.coordinator.recovery import journal, rebuilt_run
from holter.coordinator.recovery.journal import Entry, Journal
from holter.coordinator.run import Run
from holter.halting import halt_record
from holter.halting.halt_record import HaltRecord
from holter.halting.vault.manifest import Circumstances, RankPart
from holter.halting.vault.store import Vault
from holter.halting.vault.verification import examine
from holter.records import Diagnosis

RELEASE = (pytest.mark.release, pytest.mark.slow)
RESTART_S = 5.0
NUM_STEPS = 12
NUM_LIVES = 3
HALT = HaltRecord(
    cause="nonfinite_input", ranks=[1], step=30, checkpoint="checkpoints/30/state", verdict="healthy", at=""
)


def said(life: int) -> list[Entry]:
    """What one life appends; no two are alike."""
    first = life * NUM_STEPS
    observed = [attached(0, pid=1000 + life), census(0), *(done(0, first + step) for step in range(NUM_STEPS))]
    return [Entry(life * 10**6 + number, one) for number, one in enumerate([*observed, exited(0, life, life)])]


def incident(life: int, version: int) -> Diagnosis:
    made = diagnosis(first_step=version)
    causes = tuple(msgspec.structs.replace(cause, basis="observation") for cause in made.causes)
    return msgspec.structs.replace(made, id=f"20261115T101500-{life + 1}", causes=causes)


def chance(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - to be repeated, not to be secret


Deed = tuple[str, int, Callable[[], object]]
"""Kind, number, and what is done."""


def deeds(run_dir: Path, life: int) -> Iterator[Deed]:
    """In order; each is on the disk when it returns."""
    disk = Disk()
    kept = Journal(run_dir / "journal")
    incidents = Incidents(run_dir, disk)
    incidents.load()

    def wait() -> None:
        disk.close(60.0)
        disk.__init__()  # type: ignore[misc]  # the same disk, with a new thread

    def append(entry: Entry) -> None:
        kept.append(entry.received_ns, entry.observation)
        kept.flush(disk, is_now=True)
        wait()

    def put(version: int) -> None:
        incidents.put(incident(life, version))
        wait()

    for number, entry in enumerate(said(life)):
        yield "journal", number, lambda entry=entry: append(entry)
        if number % 4 == 0:
            yield "incident", number // 4, lambda version=number // 4: put(version)
    yield "checkpoint", 0, lambda: seal(run_dir, life)
    yield "halt", 0, lambda: (halt_record.begin(run_dir), halt_record.write(run_dir, HALT))


def seal(run_dir: Path, life: int) -> None:
    vault, content = Vault(run_dir), b"weights of life %d" % life
    partial = vault.begin(30 + life)
    (partial / "state" / "model.bin").write_bytes(content)
    part = RankPart(rank=0, framework="loop", files={"state/model.bin": len(content)})
    (partial / "parts" / "0.json").write_bytes(msgspec.json.encode(part))
    about = Circumstances(run_id="r", step=30 + life, world_size=1, savers=(0,), cause="requested", why="asked")
    vault.seal(partial, about)


class Death:
    """Kills this process at its n-th call that writes, renames or syncs; a write is perhaps half done."""

    def __init__(self, at: int, luck: random.Random) -> None:
        self.left, self.luck = at, luck

    def install(self) -> None:
        for name in ("fsync", "replace", "rename", "ftruncate", "utime", "unlink", "mkdir", "open"):
            setattr(os, name, self._around(getattr(os, name)))
        write, connect = os.write, sqlite3.connect

        def half(descriptor: int, content: Any) -> int:
            if self._is_time():
                write(descriptor, bytes(content)[: self.luck.randrange(len(content) + 1)])
                self.die()
            return write(descriptor, content)

        def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection = connect(*arguments, **options)
            connection.set_trace_callback(lambda _: self._is_time() and self.die())
            return connection

        os.write, sqlite3.connect = half, traced  # type: ignore[assignment]

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def _is_time(self) -> bool:
        self.left -= 1
        return self.left < 0

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            is_time, is_late = self._is_time(), self.luck.random() < 0.5
            if is_time and not is_late:
                self.die()
            result = call(*arguments, **options)
            if is_time:
                self.die()
            return result

        return called


def live(run_dir: Path, life: int, at: int | None, seed: int) -> list[tuple[str, int]]:
    """One life in a process of its own; what it acknowledged. `at` None: it is let live."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        acknowledge = os.write
        try:
            if at is not None:
                Death(at, chance(seed)).install()
            for kind, number, do in deeds(run_dir, life):
                do()
                acknowledge(writing, f"{kind} {number}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        lines = told.read().split("\n")[:-1]
    os.waitpid(child, 0)
    return [(kind, int(number)) for kind, number in (line.split() for line in lines)]


@dataclass
class History:
    """What was acknowledged, life by life."""

    lives: list[list[tuple[str, int]]] = field(default_factory=list)

    def of(self, kind: str, life: int) -> list[int]:
        return [number for known, number in self.lives[life] if known == kind]


def check(run_dir: Path, history: History) -> None:
    """Against what is on the disk now."""
    damage: list[str] = []
    found = list(journal.read(run_dir / "journal", damage))
    assert len({msgspec.msgpack.encode(entry.observation) for entry in found}) == len(found), "nothing is doubled"
    written = {entry.received_ns: entry for life in range(len(history.lives)) for entry in said(life)}
    read = {entry.received_ns: entry for entry in found}
    assert all(same(written[at], entry) for at, entry in read.items()), "nothing is changed"
    for life in range(len(history.lives)):
        acknowledged = [said(life)[number].received_ns for number in history.of("journal", life)]
        assert set(acknowledged) <= read.keys() | known_before(life, acknowledged), "nothing acknowledged is lost"
        check_incident(run_dir, life, history.of("incident", life))
    acknowledged = [life for life in range(len(history.lives)) if history.of("checkpoint", life)]
    # The newest two are kept, and one more may have got its name before its life ended.
    assert all(is_good(run_dir / "checkpoints" / str(30 + life)) for life in acknowledged[-1:])
    for sealed in Vault(run_dir).all():
        assert is_good(sealed.path)
    assert halt_record.read(run_dir) in (None, HALT)
    if any(history.of("halt", life) for life in range(len(history.lives))):
        assert HALT == halt_record.read(run_dir)


def is_good(checkpoint: Path) -> bool:
    return examine(checkpoint, lambda *_: None).is_good


def same(written: Entry, read: Entry) -> bool:
    """But for the moment at which the test made it."""
    strip = msgspec.structs.replace
    return strip(written.observation, at_ns=0) == strip(read.observation, at_ns=0)


def known_before(life: int, acknowledged: list[int]) -> set[int]:
    """A census of a later life that says the same as one before may be written again or not."""
    return {at for at in acknowledged if at == said(life)[1].received_ns}


def check_incident(run_dir: Path, life: int, versions: list[int]) -> None:
    disk = Disk()
    incidents = Incidents(run_dir, disk)
    incidents.load()
    assert disk.close(60.0)
    assert 0 == incidents.num_unreadable
    found = incidents.get(f"20261115T101500-{life + 1}")
    if versions:
        assert found is not None, "an incident that was acknowledged is there"
    if found is not None:
        newest = max(versions, default=-1)
        assert found.first_step in (newest, newest + 1), "as it was acknowledged, or as it was about to be"
        assert incident(life, found.first_step) == msgspec.structs.replace(found, opened_at=incident(life, 0).opened_at)


def killed_run(folder: Path, seed: int) -> None:
    luck = chance(seed)
    history = History()
    for life in range(NUM_LIVES):
        is_last = life == NUM_LIVES - 1
        history.lives.append(live(folder, life, None if is_last else luck.randrange(420), seed + life))
        check(folder, history)
    assert len(said(0)) == len(history.of("journal", NUM_LIVES - 1)), "the last life comes to its end"


@pytest.mark.parametrize("seed", range(30))
def test_killed_at_any_write_nothing_that_was_acknowledged_is_lost(seed: int, tmp_path: Path) -> None:
    killed_run(tmp_path, seed)


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_killed_at_five_hundred_writes(batch: int, tmp_path: Path) -> None:
    for seed in range(1000 + 50 * batch, 1050 + 50 * batch):
        killed_run(tmp_path / str(seed), seed)


def damaged(content: bytes, luck: random.Random) -> bytes:
    """One flip, or what a cut leaves."""
    at = luck.randrange(len(content))
    if luck.random() < 0.8:
        return content[:at] + bytes([content[at] ^ (1 << luck.randrange(8))]) + content[at + 1 :]
    return content[:at]


def restart_s(run_dir: Path) -> float:
    """How long a coordinator that is started again on this directory needs until it judges."""
    (run_dir / "run.json").write_bytes(
        msgspec.json.encode(RunIdentity(run_id=RUN_ID, started_at="", coordinator="http://127.0.0.1:1"))
    )
    began_s = clock.monotonic_s()
    run = Run(RunSettings(run_dir, RUN_ID, "http://127.0.0.1:1", 2))
    rebuilt_run.recall(run, clock.wall_ns())
    took_s = clock.monotonic_s() - began_s
    assert run.silent_until_ns > 0, "it has taken over"
    run.close(60.0)
    return took_s


BATCHES = [pytest.param(300, 0), *(pytest.param(1000, seed, marks=RELEASE) for seed in range(1, 11))]


@pytest.mark.parametrize(("num", "seed"), BATCHES)
def test_a_flip_or_a_cut_of_the_journal_costs_the_entry_it_hit(num: int, seed: int, tmp_path: Path) -> None:
    live(tmp_path, 0, None, 0)
    (path,) = [path for number, path in journal.segments(tmp_path / "journal") if number != journal.IDENTITY]
    whole, before = path.read_bytes(), list(journal.read(tmp_path / "journal"))
    luck, slowest_s = chance(seed), 0.0
    for number in range(num):
        content = damaged(whole, luck)
        path.write_bytes(content)
        told: list[str] = []
        found = list(journal.read(tmp_path / "journal", told))
        assert [entry for entry in before if entry in found] == found, "nothing is changed, doubled or out of order"
        lost = len(before) - len(found)
        # What a cut leaves is whole but for its last entry.
        allowed = 1 if len(content) == len(whole) else 1 + sum(1 for _ in whole[len(content) :].split(journal.MARK)[1:])
        assert lost <= allowed
        assert bool(told) or lost == 0 or len(content) < len(whole)
        if number % 10 == 0:
            slowest_s = max(slowest_s, restart_s(tmp_path))
            path.write_bytes(whole)
    print(f"{num} flips and cuts of a journal: the slowest restart took {slowest_s:.3f} s")
    assert slowest_s < RESTART_S


DATABASE_BATCHES = [pytest.param(40, 0), *(pytest.param(200, seed, marks=RELEASE) for seed in range(1, 11))]


@pytest.mark.parametrize(("num", "seed"), DATABASE_BATCHES)
def test_a_flip_or_a_cut_of_the_database_loses_no_incident_and_changes_none(
    num: int, seed: int, tmp_path: Path
) -> None:
    for life in range(3):
        live(tmp_path, life, None, 0)
    path = tmp_path / DATABASE
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    whole = path.read_bytes()
    before = [incident(life, 3) for life in range(3)]
    luck, slowest_s = chance(seed), 0.0
    for _ in range(num):
        for beside in tmp_path.glob(f"{DATABASE}*"):
            beside.unlink()
        path.write_bytes(damaged(whole, luck))
        disk = Disk()
        began_s = clock.monotonic_s()
        again = Incidents(tmp_path, disk)
        again.load()
        slowest_s = max(slowest_s, clock.monotonic_s() - began_s)
        assert disk.close(60.0)
        assert [(one.id, one.causes, one.first_step) for one in before] == [
            (one.id, one.causes, one.first_step) for one in again.all()
        ]
    assert (tmp_path / FOLDER).is_dir()
    print(f"{num} flips and cuts of a database: the slowest took {slowest_s:.3f} s to be read")
    assert slowest_s < RESTART_S
