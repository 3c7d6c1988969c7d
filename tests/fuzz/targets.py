"""What is fuzzed: everything that reads what others wrote. A target takes bytes; whatever it raises is a defect.

wire         what a sidecar or a pretender sends, from the frame to the judgement
journal      a journal's file, cut, flipped, or with entries that are whole and cannot be true; restart and replay
dumps        Flight Recorder dumps, as JSON and as pickles
checkpoints  a sealed checkpoint's manifest, and files that torch wrote
logs         logs, tables, tracebacks, configs of others, as `holter diagnose` gets them
config       holter.toml and the environment
"""

import contextlib
import io
import json
import pickle
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from holter import clock
from holter.cli import main
from holter.config import usable
from holter.coordinator.identity import RunSettings
from holter.coordinator.recovery import journal
from holter.coordinator.recovery.replay import Replay
from holter.coordinator.run import Run
from holter.errors import HolterError
from holter.faults import ALL
from holter.files import UNREADABLE
from holter.flight import FlightError, from_bytes
from holter.halting.vault import manifest
from holter.halting.vault.manifest import Circumstances, RankPart
from holter.halting.vault.store import Vault
from holter.records import Attached, Census, Exited, Farewell, Nonfinite, Observation, Phase, StepDone, TensorEntry
from holter.transport import wire

WEIGHTS = b"weights"
KEPT = Path(__file__).with_name("kept")
"""A folder a target: inputs that reached something new, and those that once failed."""
HELLO = wire.Hello(
    run_id="r", rank=0, world_size=2, host="h", rank_pid=1, sidecar_pid=2, metrics_address="h:1", key="k"
)


@dataclass(frozen=True)
class Target:
    """What is called with bytes, and what it begins with."""

    call: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]


@cache
def folder() -> Path:
    """Of this process; the system cleans it away."""
    return Path(tempfile.mkdtemp(prefix="holter-fuzz-"))


def silently(*arguments: str) -> None:
    """A command of the shell: it ends with 0, 1 or 2, and never with a traceback."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(list(arguments)) in {0, 1, 2}


def observations() -> list[Observation]:
    """A short life of a rank."""
    attached = Attached(pid=1, host="h", world_size=2, local_rank=0, command=["train.py"], versions={})
    entries = [TensorEntry("w", (4, 4), "float32", True, False, 0)]
    names = Census(
        model=0,
        wrapper="",
        is_replicated=True,
        optimizers=["SGD"],
        backward_order=[0],
        part=0,
        parts=1,
        entries=entries,
    )
    nan = [Nonfinite(where="loss", name="loss", nans=1, infs=0, numel=1)]
    steps = [
        StepDone(
            seconds=0.1, phase_seconds={"data": 0.01}, micro_steps=1, loss=1.0, gradient_norm=1.0, learning_rate=0.1,
            batch=step, roots={"gradients": step}, nonfinite=nan if step == 3 else [], overhead_ratio=0.001, check_interval=1,
        )
        for step in range(4)
    ]  # fmt: skip
    ended = Exited(
        pid=1, exit_code=1, signal=None, out_of_memory=False, last_step=4, last_phase=Phase.DATA,
        farewell=Farewell(kind="exception", text="boom", where="train.py:1"),
    )  # fmt: skip
    bodies = [attached, names, *steps, ended]
    return [Observation(rank=0, step=step, at_ns=10**18 + step, body=body) for step, body in enumerate(bodies)]


# The wire.


def wire_seeds() -> Iterator[bytes]:
    yield wire.encode(HELLO)
    beat = wire.Heartbeat(3, Phase.FORWARD, 0, 5)
    for observation in observations():
        yield wire.encode(wire.Report(heartbeat=beat, observations=[observation], dropped=0))
    for message in (wire.Goodbye(), wire.ClockAsked(sent_ns=1), wire.Welcome(run_id="r", run_dir="d", boot_id="b")):
        yield wire.encode(message)


class Listening:
    """A run that hears everything; begun anew now and then, since it remembers."""

    def __init__(self) -> None:
        self.num_heard, self.run = 0, self._begin()

    def _begin(self) -> Run:
        run_dir = folder() / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        run = Run(RunSettings(run_dir, "r", "http://h:1", 2))
        run.intake.connect(HELLO, clock.wall_ns())
        return run

    def hear(self, message: wire.Upward) -> None:
        self.num_heard += 1
        if self.num_heard % 200 == 0:
            self.run.close(5.0)
            self.run = self._begin()
        if isinstance(message, wire.Report):
            self.run.intake.hear(0, message, clock.wall_ns())
            self.run.judge(clock.wall_ns())
            assert not any(self.run.judging.runner.failures.values()), self.run.judging.runner.failures


@cache
def listening() -> Listening:
    return Listening()


def call_wire(data: bytes) -> None:
    with contextlib.suppress(*UNREADABLE):
        wire.decode_downward(data)
    with contextlib.suppress(*UNREADABLE):
        listening().hear(wire.decode_upward(data))


# The journal.


def framed(contents: list[bytes]) -> bytes:
    """As the journal writes them."""
    header = struct.Struct(f"<{len(journal.MARK)}sII")
    return b"".join(header.pack(journal.MARK, len(one), zlib.crc32(one)) + one for one in contents)


def journal_seeds() -> Iterator[bytes]:
    entries = [msgspec.msgpack.encode(journal.Entry(10**18 + n, one)) for n, one in enumerate(observations())]
    yield framed(entries)
    yield from (framed([one]) for one in entries)


def call_journal(data: bytes) -> None:
    path = folder() / "journal"
    path.mkdir(exist_ok=True)
    (path / "0001.msgpack").write_bytes(data)
    damage: list[str] = []
    replay = Replay("r", "halt", ALL)
    replay.read(journal.read(path, damage))
    replay.finish()
    assert not replay.failures(), replay.failures()


def mutate_journal(data: bytes, max_size: int, seed: int, mutate: Callable[[bytes, int], bytes]) -> bytes:
    """Half of the time one entry's content changes and its checksum holds again: what cannot be true gets past the reader."""
    parts = data.split(journal.MARK)[1:]
    if seed % 2 or not parts:
        return mutate(data, max_size)
    contents = [part[8:] for part in parts]
    chosen = (seed // 2) % len(contents)
    contents[chosen] = mutate(contents[chosen], max(1, max_size - len(data)))
    return framed(contents)[:max_size]


# Dumps.


def dump_seeds() -> Iterator[bytes]:
    entry = {
        "record_id": 1, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1,
        "profiling_name": "gloo:all_reduce", "time_created_ns": 10**18, "input_sizes": [[4]], "input_dtypes": ["Float"],
        "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "scheduled", "retired": False, "is_p2p": False, "timeout_ms": 1000,
    }  # fmt: skip
    dump = {
        "version": "2.5",
        "entries": [entry],
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    }
    yield json.dumps(dump).encode()
    yield pickle.dumps(dump, protocol=4)
    yield pickle.dumps(dump, protocol=2)


def call_dumps(data: bytes) -> None:
    with contextlib.suppress(FlightError):
        from_bytes(data, 10**18)
    path = folder() / "rank_0"
    path.write_bytes(data)
    silently("diagnose", str(path))


# Checkpoints.


def checkpoint_seeds() -> Iterator[bytes]:
    vault = Vault(folder() / "sealed")
    partial = vault.begin(1)
    (partial / "state" / "model.bin").write_bytes(WEIGHTS)
    part = RankPart(rank=0, framework="loop", files={"state/model.bin": len(WEIGHTS)})
    (partial / "parts" / "0.json").write_bytes(msgspec.json.encode(part))
    vault.seal(partial, Circumstances(run_id="r", step=1, world_size=1, savers=(0,), cause="requested", why="asked"))
    yield b"\x00" + (folder() / "sealed" / "checkpoints" / "1" / "manifest.json").read_bytes()
    import torch  # noqa: PLC0415 - one target needs it

    for is_zip in (True, False):
        packed = io.BytesIO()
        torch.save({"w": torch.ones(3), "step": 1}, packed, _use_new_zipfile_serialization=is_zip)
        yield b"\x01" + packed.getvalue()
    yield b"\x01" + pickle.dumps({"w": 1}, protocol=2)


def call_checkpoints(data: bytes) -> None:
    """The first byte chooses whether the rest is the manifest of a sealed checkpoint, whose digest is made right, or a file of somebody's own."""
    if data[:1] != b"\x00":
        path = folder() / "own"
        path.mkdir(exist_ok=True)
        (path / "model.pt").write_bytes(data[1:])
        silently("checkpoint", "verify", str(path))
        return
    path = folder() / "run" / "checkpoints" / "1"
    (path / "state").mkdir(parents=True, exist_ok=True)
    (path / "state" / "model.bin").write_bytes(WEIGHTS)
    content = data[1:]
    with contextlib.suppress(ValueError, TypeError, *UNREADABLE):
        right = json.loads(content) | {"digest": manifest.digest_of(content)}
        content = msgspec.json.format(msgspec.json.encode(right), indent=1) + b"\n"
    (path / "manifest.json").write_bytes(content)
    silently("checkpoint", "verify", str(path))


# Logs and tables.


def log_seeds() -> Iterator[bytes]:
    yield b"".join(b"step %d loss %.3f lr 0.001 grad_norm 1.0\n" % (n, 2 - n / 50) for n in range(40))
    yield b"".join(b"{'loss': %.3f, 'learning_rate': 0.1, 'epoch': %d}\n" % (2 - n / 50, n) for n in range(10))
    yield b"step,loss\n" + b"".join(b"%d,%.3f\n" % (n, 2 - n / 50) for n in range(20)) + b"20,nan\n"
    yield json.dumps({"log_history": [{"step": n, "loss": 2.0, "grad_norm": 1.0} for n in range(5)]}).encode()
    yield b'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nRuntimeError: CUDA out of memory\n'
    yield b"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 2\n"


def call_logs(data: bytes) -> None:
    path = folder() / "file"
    path.write_bytes(data)
    silently("diagnose", str(path), "--json")


# Configuration.


def config_seeds() -> Iterator[bytes]:
    yield b'action = "notify"\noverhead_budget = 0.02\nport = 0\n\x00HOLTER_PORT=80\x00HOLTER_MESH=dp=2'
    yield b"[detectors.loss_spike]\nfactor = 4.0\n\x00HOLTER_ACTION=observe\x00HOLTER_OVERHEAD_BUDGET=nan"


def call_config(data: bytes) -> None:
    """A file, then NAME=VALUE, each behind a zero byte."""
    text, *pairs = data.split(b"\x00")
    (folder() / "holter.toml").write_bytes(text)
    named = (pair.decode("utf-8", "surrogateescape").partition("=") for pair in pairs)
    environ = {name: value for name, _, value in named if name.startswith("HOLTER")}
    with contextlib.suppress(HolterError):
        usable(environ=environ | {"HOLTER_CONFIG": str(folder() / "holter.toml")})


TARGETS = {
    "wire": Target(call_wire, wire_seeds),
    "journal": Target(call_journal, journal_seeds),
    "dumps": Target(call_dumps, dump_seeds),
    "checkpoints": Target(call_checkpoints, checkpoint_seeds),
    "logs": Target(call_logs, log_seeds),
    "config": Target(call_config, config_seeds),
}
