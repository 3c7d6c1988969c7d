"""`holter status`: where every rank is, and what is wrong."""

import argparse
import contextlib
import json
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from holter.cli.parts.run_reader import RunReader, has_open_critical, locate
from holter.cli.parts.terminal import fitted, folded, printable, table
from holter.diagnosis.report import headline
from holter.errors import UsageError
from holter.files import read_json
from holter.halting import halt_record
from holter.records import Diagnosis
from holter.records.goodput import GOODPUT, Goodput, in_words
from holter.records.titles import titled

CLEAR = "\x1b[H\x1b[2J"
COLUMNS = ("rank", "host", "step", "phase", "progress", "loss", "sidecar")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="run directory or coordinator's address (default: the newest run)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--watch", action="store_true", help="again and again, until the run has ended or Ctrl-C")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="between two looks (default: %(default)s s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the status; exit code 1 if a critical incident is open."""
    if not args.watch:
        return _show(args)[0]
    if args.interval <= 0:
        raise UsageError(f"--interval must be positive, got {args.interval:g}")
    return _watch(args)


def _watch(args: argparse.Namespace) -> int:
    """Show the status again and again until nobody answers.

    A terminal is redrawn; elsewhere the outputs follow each other.
    """
    is_drawn = sys.stdout.isatty() and not args.json
    code = 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            sys.stdout.write(CLEAR if is_drawn else "")
            code, is_live = _show(args)
            sys.stdout.flush()
            if not is_live:
                break
            threading.Event().wait(args.interval)
    return code


def _show(args: argparse.Namespace) -> tuple[int, bool]:
    """Print the status once; return the exit code and whether the run is live."""
    found = locate(args.run)
    state = found.ask("/api/v1/status")
    if state is None and found.directory is None:
        raise UsageError(f"no coordinator answers at {found.address}")
    diagnoses = found.diagnoses()
    if args.json:
        content = {"is_live": state is not None, **(state if state is not None else _recorded(found, diagnoses))}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        lines = _live(state) if state is not None else _past(found)
        sys.stdout.write("\n".join(folded([*lines, *_incidents(diagnoses)])) + "\n")
    return int(has_open_critical(diagnoses)), state is not None


def _live(state: dict[str, Any]) -> Iterator[str]:
    ranks = state["ranks"]
    yield f"run {printable(state['run_id'])}: {len(ranks)} of {state['world_size']} ranks, {state['coordinator']}"
    yield from fitted(table(COLUMNS, [_row(rank) for rank in ranks]))
    yield from (printable(_finding(found)) for found in state["findings"])
    if state["halt"] is not None:
        yield printable(_halt(state["halt"]))
    yield from _goodput(state.get("goodput"))
    yield from (
        printable(f"compared: {one['num_tensors']} {one['what']}: {one['over']}") for one in state.get("compared", ())
    )
    yield from (f"blind: {printable(what)}" for what in state["blind"])
    yield from (f"warning: {printable(what)}" for what in state["warnings"])


def _past(found: RunReader) -> Iterator[str]:
    about = found.identity
    where = found.address or "an unknown address"
    silent = f"its coordinator at {where} does not answer; this is what was written down"
    yield printable(f"run {found.name}: " + (f"ended at {about['ended_at']}" if about.get("ended_at") else silent))
    yield printable(f"  command   {' '.join(about.get('command', []))}")
    yield printable(f"  hosts     {', '.join(about.get('hosts', []))}")
    yield f"  ranks     {len(about.get('ranks', []))} of {about.get('world_size', 0)} attached"
    yield printable(f"  started   {about.get('started_at', 'unknown')}")
    known = _goodput_record(found)
    if known is not None and in_words(known):
        yield f"  goodput   {in_words(known)}"
    halted = _halt_record(found)
    if halted is not None:
        kept = f"{halted.checkpoint}, {halted.verdict}" if halted.checkpoint else "no checkpoint"
        yield printable(f"  halted    after {halted.step} steps, {titled(halted.cause)}; {kept}")


def _finding(found: dict[str, Any]) -> str:
    waits = " (waits for evidence)" if found["waits"] else ""
    return f"finding: {found['severity']}: {found['detector']}{waits}: {found['summary']}"


def _halt(halt: dict[str, Any]) -> str:
    """Describe how far a halt is and why, or its outcome."""
    if halt["outcome"]:
        return f"halt: {halt['outcome']}: {halt['text']}"
    course = halt["course"] if halt.get("step") is None else f"{halt['course']}, step {halt['step']}"
    why = ": ".join(filter(None, (titled(halt.get("cause") or ""), halt.get("reason"))))
    return f"halt: {course}" + (f" ({why})" if why else "")


def _halt_record(found: RunReader) -> halt_record.HaltRecord | None:
    return None if found.directory is None else halt_record.read(found.directory)


def _goodput(told: Any) -> Iterator[str]:
    """Yield the goodput line; nothing if the coordinator is too old to report it."""
    if told is not None:
        with contextlib.suppress(msgspec.ValidationError):
            words = in_words(msgspec.convert(told, Goodput))
            yield from ((f"goodput: {words}",) if words else ())


def _goodput_record(found: RunReader) -> Goodput | None:
    return None if found.directory is None else read_json(found.directory / GOODPUT, Goodput)


def _recorded(found: RunReader, diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    incidents = [{"id": one.id, "headline": headline(one)} for one in diagnoses]
    halted, known = _halt_record(found), _goodput_record(found)
    return {
        **found.identity,
        "incidents": incidents,
        "halt": None if halted is None else msgspec.to_builtins(halted),
        "goodput": None if known is None else msgspec.to_builtins(known),
    }


def _incidents(diagnoses: Sequence[Diagnosis]) -> Iterator[str]:
    still_open = [one for one in diagnoses if one.closed_at is None]
    if not still_open:
        yield "no open incident"
    for one in still_open:
        yield printable(f"incident {one.id}: {headline(one)}")


def _loss(loss: float, num_divided: int) -> str:
    """Format the loss that the script means; if it is divided over several backward passes, also what each was given."""
    each = f" ({loss:.4g} x {num_divided})" if num_divided > 1 and math.isfinite(loss) else ""
    return f"{loss * num_divided:.4g}{each}".replace("nan", "NaN")


def _row(rank: dict[str, Any]) -> tuple[str, ...]:
    age_s, loss = rank["last_progress_age_s"], math.nan if "loss" in rank.get("not_finite", ()) else rank["loss"]
    state = "rank exited" if rank["exited"] else rank["sidecar"]
    cells = (
        rank["rank"],
        rank["host"],
        "-" if rank["step"] is None else rank["step"],
        rank["phase"] or "-",
        "-" if age_s is None else f"{age_s:.1f} s ago",
        "-" if loss is None else _loss(loss, int(rank.get("num_divided", 1))),
        state,
    )
    return tuple(printable(str(cell)) for cell in cells)
