"""`holter doctor` without `--gpu`: the machine, the job's settings, its script, and two steps of it under holter."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import holter
from holter import clock, config, offline
from holter.cli.parts.terminal import printable
from holter.coordinator.recovery import journal
from holter.errors import UsageError
from holter.files import read_json
from holter.offline.found import Config
from holter.offline.preflight import PreflightCheck, machine, script, settings
from holter.offline.preflight.record import failed, fine, warned
from holter.records import Attached, Census, Groups, SightLost, StepDone, Traffic

WORDS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "skipped": "skipped"}
WANTED_STEPS = 2
LAUNCH_S = 180.0
END_S = 15.0
TICK_S = 0.5
TAIL_LINES = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="accelerate's YAML or DeepSpeed's JSON of the job")
    parser.add_argument("--script", metavar="F", help="look at this training script, by its syntax; nothing is run")
    parser.add_argument("--launch", action="store_true", help="run two steps of the job that follows `--` under holter")


def run(args: argparse.Namespace) -> int:
    """Run the checks; exit code 0 if nothing will fail, 1 if something will."""
    words = tuple(args.words)
    if args.launch and not words:
        raise UsageError(
            "--launch takes the job's command after `--`: holter doctor --launch -- accelerate launch train.py"
        )
    if words and not args.launch:
        raise UsageError("a command after `--` needs --launch")
    began_s, checks = clock.monotonic_s(), list[PreflightCheck]()
    for check in _looked(args, words):
        checks.append(check)
        if not args.json:
            sys.stdout.write("\n".join(_lines(check)) + "\n")
            sys.stdout.flush()
    bad = [one.check for one in checks if one.outcome == "failed"]
    if args.json:
        sys.stdout.write(json.dumps(_facts(checks, is_healthy=not bad, began_s=began_s), indent=2) + "\n")
    else:
        num = {kind: sum(one.outcome == kind for one in checks) for kind in WORDS}
        counts = f"{num['ok']} ok, {num['warning']} warnings, {num['failed']} failed, {num['skipped']} skipped in {clock.monotonic_s() - began_s:.0f} s"
        sys.stdout.write(f"{'WILL NOT WORK: ' + ', '.join(dict.fromkeys(bad)) if bad else 'well'} ({counts})\n")
    return int(bool(bad))


def _facts(checks: Sequence[PreflightCheck], *, is_healthy: bool, began_s: float) -> dict[str, Any]:
    return {
        "schema": 1,
        "is_healthy": is_healthy,
        "holter": holter.__version__,
        "at": clock.rfc3339(clock.wall_ns()),
        "seconds": round(clock.monotonic_s() - began_s, 1),
        "checks": msgspec.to_builtins(list(checks)),
    }


def _lines(check: PreflightCheck) -> Iterator[str]:
    where = f"{check.file}: " if check.file else ""
    yield printable(f"{WORDS[check.outcome]:9}{check.check:16} {where}{check.says}")
    if check.do:
        yield printable(f"{'':26}do: {check.do}")


def _looked(args: argparse.Namespace, words: tuple[str, ...]) -> Iterator[PreflightCheck]:
    text = _text(args.script) if args.script else ""
    known, wrong = config.usable()
    yield from (failed("settings", sentence, "Correct it, or unset it.") for sentence in wrong)
    yield from (warned("settings", sentence, "Unset it.") for sentence in known.warnings())
    job = settings.JobContext(
        environ=os.environ,
        configs=tuple(_configs(args.configs, words)),
        command=words,
        interfaces=frozenset(_interfaces()),
        num_devices=len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        if Path("/proc/driver/nvidia").exists()
        else None,
        num_cores=len(os.sched_getaffinity(0)),
        plain_save_line=script.plain_save_line(text),
    )
    yield from machine.look(_needs(known, job))
    yield from settings.look(job) or [
        fine("job", f"{len(job.configs)} configs and the environment do not contradict each other")
    ]
    if args.script:
        yield from script.look(text, args.script) or [fine("script", f"nothing in {args.script} looks like a trap")]
    if args.launch:
        yield from two_steps(words)


def _needs(known: config.Settings, job: settings.JobContext) -> machine.MachineNeeds:
    ports = [("HOLTER_PORT", known.port)] if known.port and not known.coordinator else []
    ports += [
        ("HOLTER_METRICS_PORT", known.metrics_port + rank) for rank in range(job.local_ranks) if known.metrics_port
    ]
    return machine.MachineNeeds(
        runs=Path(known.run_dir).parent if known.run_dir else Path("holter-runs"),
        run_dir=Path(known.run_dir) if known.run_dir else None,
        local_ranks=job.local_ranks,
        ports=tuple(ports),
        ring_bytes=known.ring_bytes,
        coordinator=known.coordinator,
    )


def _interfaces() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (path.name for path in Path("/sys/class/net").iterdir())


def _configs(named: Sequence[str], words: tuple[str, ...]) -> Iterator[Config]:
    """Yield the configs named as arguments or in the job's command; a missing file is wrong use."""
    job = settings.JobContext(environ={}, command=words)
    said = [*named, *job.named_configs()]
    for name in said:
        if not Path(name).is_file():
            raise UsageError(f"the config {name} is not there")
        found = offline.read([Path(name)])
        if not found.configs:
            raise UsageError(f"{name} holds no settings that can be read")
        yield from found.configs


def _text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--script {name}: {error.strerror if isinstance(error, OSError) else 'it is no text'}"
        ) from None


def two_steps(words: tuple[str, ...]) -> Iterator[PreflightCheck]:
    """Run the job until every rank has made two steps, end it, and yield what was seen."""
    with tempfile.TemporaryDirectory(prefix="holter-doctor-") as folder:
        run_dir, output = Path(folder) / "run", Path(folder) / "output"
        environ = os.environ | {
            "HOLTER": "1",
            "HOLTER_RUN_DIR": str(run_dir),
            "HOLTER_ACTION": "observe",
            "HOLTER_LINGER_S": "0",
            "HOLTER_MEMORY": "off",
        }
        with output.open("wb") as sink:
            try:
                process = subprocess.Popen(  # noqa: S603 - what the user asked for
                    words, env=environ, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
                )
            except OSError as error:
                raise UsageError(f"{words[0]} cannot be started: {error.strerror}") from None
        code = _wait(process, run_dir)
        _end(process, run_dir)
        yield from _seen(JobSight.of(run_dir), code, output)


def _wait(process: "subprocess.Popen[bytes]", run_dir: Path) -> int | None:
    """Wait until there are two steps, or time is over (None), or the job has ended (its exit code)."""
    deadline_s = clock.monotonic_s() + LAUNCH_S
    while clock.monotonic_s() < deadline_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(TICK_S)
        if JobSight.of(run_dir).is_enough:
            return None
    return None


def _end(process: "subprocess.Popen[bytes]", run_dir: Path) -> None:
    """End the job, then wait until its coordinator has written the rest."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            break
    deadline_s = clock.monotonic_s() + END_S
    while clock.monotonic_s() < deadline_s and (run_dir / "run.json").exists():
        if (read_json(run_dir / "run.json", dict[str, Any]) or {}).get("ended_at"):
            return
        threading.Event().wait(TICK_S)


class JobSight(msgspec.Struct, kw_only=True):
    """What holter saw of a job."""

    world_size: int = 0
    framework: str = ""
    wrapper: str = ""
    num_tensors: int = 0
    steps: dict[int, int] = {}
    """Number of steps that each rank has made."""
    attached: set[int] = set()
    seen: set[str] = set()
    lost: list[str] = []

    @classmethod
    def of(cls, run_dir: Path) -> "JobSight":
        """Read the journal, as far as it is written."""
        found = cls(steps={}, attached=set(), seen=set(), lost=[])
        with contextlib.suppress(OSError):
            for entry in journal.read(run_dir / "journal"):
                found.hear(entry.observation.rank, entry.observation.body)
        return found

    def hear(self, rank: int, body: object) -> None:
        """Take in one observation."""
        if isinstance(body, Attached):
            self.attached.add(rank)
            self.world_size, self.framework = max(self.world_size, body.world_size), body.framework
        elif isinstance(body, Census):
            self.wrapper = body.wrapper or self.wrapper
            self.num_tensors = max(self.num_tensors, len(body.entries))
        elif isinstance(body, StepDone):
            self.steps[rank] = self.steps.get(rank, 0) + 1
            told = {"loss": body.loss, "gradient norm": body.gradient_norm, "learning rate": body.learning_rate}
            self.seen |= {name for name, value in told.items() if value is not None}
            self.seen |= {"batches"} if body.batch else set()
            self.seen |= {"comparison of replicas"} if body.roots else set()
        elif isinstance(body, Traffic | Groups):
            self.seen.add("collectives")
        elif isinstance(body, SightLost):
            self.lost.append(f"rank {rank}: {body.what}")

    @property
    def is_enough(self) -> bool:
        """Whether every rank has made its steps."""
        return (
            bool(self.attached)
            and len(self.attached) >= self.world_size
            and all(self.steps.get(rank, 0) > WANTED_STEPS for rank in self.attached)
        )


MEANS = {
    "loss": "a loss that is no scalar, or computed by a framework that holter does not know: `watch.log(loss=...)`",
    "gradient norm": "gradients are read at the optimizer's step: is it one of torch's?",
    "learning rate": "the optimizer has no `lr` in its groups",
    "batches": "batches that come from no DataLoader are not seen: NaN in a batch is then found one step later",
    "collectives": "one rank, or a group that PyTorch's Flight Recorder does not see: hangs are explained by stacks alone",
    "comparison of replicas": "one rank, or nothing says that ranks are replicas: wrap the model, or set HOLTER_MESH",
}


def _seen(sight: JobSight, code: int | None, output: Path) -> Iterator[PreflightCheck]:
    tail = [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][
        -TAIL_LINES:
    ]
    if not sight.attached:
        why = (
            f"it ended with exit code {code}: {' | '.join(tail)}"
            if code
            else "it did not import torch, or TORCH_DEVICE_BACKEND_AUTOLOAD is 0"
        )
        yield failed(
            "launch",
            f"holter was attached to no rank; {why}",
            "Run the command by itself first; then with `-m holter` before the script.",
        )
        return
    num, world = len(sight.attached), max(sight.world_size, len(sight.attached))
    said = f"{num} of {world} ranks attached, by {sight.framework or 'a loop'}, {sight.wrapper or 'no wrapper'}, {sight.num_tensors} tensors"
    yield (
        fine("launch", said)
        if num == world
        else failed("launch", said, "Start all ranks with HOLTER=1 in their environment.")
    )
    steps = min((sight.steps.get(rank, 0) for rank in sight.attached), default=0)
    if steps < WANTED_STEPS:
        how = (
            f"the job ended with exit code {code}: {' | '.join(tail)}"
            if code is not None
            else f"not within {LAUNCH_S:.0f} s"
        )
        yield failed(
            "steps",
            f"{steps} steps were seen of the slowest rank; {how}",
            "Is an optimizer of torch's stepped? Run the command by itself.",
        )
        return
    yield fine("steps", f"{steps} steps of every rank were seen")
    for name, meaning in MEANS.items():
        if name in sight.seen:
            yield fine(name, "seen")
        elif world > 1 or name not in {"collectives", "comparison of replicas"}:
            yield warned(name, "not seen", meaning)
    yield from (
        warned("blind", one, "docs/limits.md says what holter cannot see.") for one in dict.fromkeys(sight.lost)
    )
