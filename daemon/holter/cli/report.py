"""`holter report`: the incidents' diagnoses, for a person."""

import argparse
import re
import sys
from pathlib import Path

import msgspec

from holter import config
from holter.cli.parts.run_reader import RunReader, has_open_critical, locate
from holter.cli.parts.terminal import width
from holter.diagnosis import report
from holter.errors import UsageError
from holter.files import read_json
from holter.records import Diagnosis
from holter.records.goodput import GOODPUT, Goodput, in_words

_INCIDENT_ID = re.compile(r"\d{8}T\d{6}-\d+")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="run directory or coordinator's address (default: the newest run)"
    )
    parser.add_argument("incident", nargs="?", metavar="INCIDENT", help="one incident's id (default: all)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of diagnoses")
    form.add_argument("--markdown", action="store_true", help="for a ticket")
    form.add_argument("--html", metavar="FILE", help="write one incident's report as a self-contained page")


def run(args: argparse.Namespace) -> int:
    """Print the diagnoses; exit code 1 if an open critical incident is among them."""
    chosen, incident = args.run, args.incident
    if chosen and incident is None and _INCIDENT_ID.fullmatch(chosen) and not Path(chosen).exists():
        chosen, incident = None, chosen
    found = locate(chosen)
    diagnoses = _select(found, incident)
    if args.html:
        _write_html(Path(args.html), diagnoses)
    else:
        sys.stdout.write(rendered(found.name, diagnoses, is_json=args.json, is_markdown=args.markdown))
        if not args.json and incident is None and (used := goodput_of(found)):
            sys.stdout.write(f"\ngoodput: {used}\n")
    return int(has_open_critical(diagnoses))


def _select(found: RunReader, incident: str | None) -> list[Diagnosis]:
    diagnoses = found.diagnoses()
    if incident is None:
        return diagnoses
    selected = [one for one in diagnoses if one.id == incident]
    if not selected:
        known = ", ".join(one.id for one in diagnoses) or "none"
        raise UsageError(f"run {found.name} has no incident {incident}; it has {known}")
    return selected


def rendered(run: str, diagnoses: list[Diagnosis], *, is_json: bool, is_markdown: bool = False) -> str:
    """Return all diagnoses as text, as this command and `holter replay` print them."""
    if is_json:
        return msgspec.json.format(msgspec.json.encode(diagnoses), indent=2).decode() + "\n"
    if not diagnoses:
        return f"run {run}: no incident\n"
    if is_markdown:
        return "\n".join(report.to_markdown(one) for one in diagnoses)
    color = config.wants_color(is_terminal=sys.stdout.isatty())
    return "\n".join(report.to_text(one, width(), color=color) for one in diagnoses)


def goodput_of(found: RunReader) -> str:
    """Say how much of the wall time made progress, as last written down; empty if not known."""
    known = read_json(found.directory / GOODPUT, Goodput) if found.directory is not None else None
    return in_words(known) if known is not None else ""


def _write_html(path: Path, diagnoses: list[Diagnosis]) -> None:
    if len(diagnoses) > 1:
        raise UsageError(f"--html takes one incident; name one of {', '.join(one.id for one in diagnoses)}")
    if not diagnoses:
        sys.stderr.write("no incident, nothing written\n")
        return
    try:
        path.write_text(report.to_html(diagnoses[0]), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}") from None
