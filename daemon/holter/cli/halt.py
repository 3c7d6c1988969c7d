"""`holter halt RUN`: stop a run at an agreed step with a verified checkpoint, and wait until that is done.

To halt takes a secret of its own: `halt_token` in coordinator.json of the run directory, which its owner alone can read, or
HOLTER_HALT_TOKEN_FILE. It is sent to the address in coordinator.json and to no other.
"""

import argparse
import getpass
import http.client
import json
import socket
import sys
import threading
from typing import Any

from holter import clock, config
from holter.cli.parts.numbers import seconds
from holter.cli.parts.run_reader import RunReader, locate
from holter.errors import UsageError
from holter.halting import halt_record

LOOK_S = 0.2
REFUSED = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory or address (default: the newest run)")
    parser.add_argument("--reason", default="", help="why, for the log, the report and halt.json")
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the halt is requested")
    parser.add_argument(
        "--wait-s", type=seconds, default=900.0, help="how many seconds to wait at most (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="what became of it")


def run(args: argparse.Namespace) -> int:
    """Request the halt; exit code 0 if the run is halted or the request accepted, 1 if the run goes on."""
    found = locate(args.run)
    if found.ask("/api/v1/status") is None:
        where = found.directory or found.address
        raise UsageError(f"no coordinator answers for {where}: the run has ended, or cannot be reached from here")
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    asked = {"reason": args.reason or "no reason given", "by": who}
    address, token = _access(found)
    code, answer = found.post("/api/v1/halt", asked, token, address)
    if code != http.client.ACCEPTED:
        return _print(args, REFUSED, {"outcome": "refused", "text": str(answer.get("error", code))})
    if args.no_wait:
        return _print(args, 0, {"outcome": "asked", "text": "asked for; `holter status` shows how it goes"})
    return _print(args, *_wait(found, args.wait_s, is_quiet=args.json))


def _wait(found: RunReader, wait_s: float, *, is_quiet: bool) -> tuple[int, dict[str, Any]]:
    until_s, shown = clock.monotonic_s() + wait_s, ""
    last: dict[str, Any] = {}
    while clock.monotonic_s() < until_s:
        state = found.ask("/api/v1/status")
        halt = state.get("halt") if isinstance(state, dict) else None
        if state is None:
            # The coordinator ends when the last rank has left.
            return _from_files(found, last)
        if isinstance(halt, dict):
            last = halt
            text = f"{halt['course']}" + (f", step {halt['step']}" if "step" in halt else "")
            if text != shown and not is_quiet:
                shown = text
                sys.stderr.write(f"holter: {text}\n")
            if halt.get("outcome"):
                return int(halt["course"] != "done"), halt
        threading.Event().wait(LOOK_S)
    return REFUSED, {"outcome": "late", "text": f"not halted within {wait_s:.0f} s; it may still be"}


def _from_files(found: RunReader, last: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    record = halt_record.read(found.directory) if found.directory is not None else None
    if record is not None:
        text = f"halted after {record.step} steps; {record.checkpoint or 'no checkpoint'}, {record.verdict}"
        outcome = "completed" if record.checkpoint else "incomplete"
        return 0, {**last, "outcome": outcome, "text": text, "checkpoint": record.checkpoint}
    return REFUSED, {"outcome": "ended", "text": "the run ended before it was halted"}


def _print(args: argparse.Namespace, code: int, facts: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(facts, indent=2) + "\n" if args.json else f"{facts['text']}\n")
    return code


def _access(found: RunReader) -> tuple[str, str]:
    """Return the address to ask and the secret.

    run.json names an address too, but whoever can write there must not be sent a secret.
    """
    path = config.load().halt_token_file
    token = config.secret_in(path, "HOLTER_HALT_TOKEN_FILE") if path else ""
    if found.directory is None:
        if not token:
            raise UsageError("which token? Name the run's directory, or set HOLTER_HALT_TOKEN_FILE")
        return found.address, token
    known = found.access()
    if known is None or not (token or known.halt_token):
        raise UsageError(f"the token to halt cannot be read from {found.directory / 'coordinator.json'}")
    return known.address.removeprefix("http://"), token or known.halt_token
