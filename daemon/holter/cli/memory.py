"""`holter memory`: incidents of earlier runs, with cause, what was tried, what came of it, and notes by people.

Without a word: all of it. `search TEXT` finds entries by words, `add` writes one, `export` and `import` are Markdown. The file is HOLTER_MEMORY,
else memory.sqlite in ./holter-runs; nothing leaves the machine.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from holter import clock, config
from holter.cli.parts.earlier import entry_of, memory_path, project_of
from holter.cli.parts.evidence import settings_of
from holter.cli.parts.run_reader import RUNS, locate
from holter.errors import UsageError
from holter.faults import CAUSES
from holter.offline.proof.memory import MemoryEntry, MemoryFile, from_markdown, search, to_markdown
from holter.offline.proof.verify import VerdictWord

WORDS = ("list", "search", "add", "export", "import")
VERDICTS = get_args(VerdictWord)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "word",
        nargs="?",
        choices=WORDS,
        default="list",
        metavar="search|add|export|import",
        help="what to do (default: list all)",
    )
    parser.add_argument("text", nargs="*", metavar="TEXT", help="what to search for; the file to write or read")
    parser.add_argument(
        "--memory",
        default="",
        metavar="FILE",
        help="the memory's file (default: HOLTER_MEMORY, else holter-runs/memory.sqlite)",
    )
    parser.add_argument("--project", help="name of the project (default: this folder's)")
    parser.add_argument(
        "--run", help="add: a run directory whose incidents are remembered, or the one that a fix is about"
    )
    parser.add_argument("--incident", help="add: one incident of it (default: all)")
    parser.add_argument("--cause", help="add: the cause that a fix or a note is about")
    parser.add_argument("--place", default="", help="add: module, tensor or collective")
    parser.add_argument("--fix", default="", help="add: what was done about it")
    parser.add_argument("--verdict", choices=VERDICTS, help="add: what came of it, as `holter verify` says")
    parser.add_argument("--note", default="", help="add: anything else that the next one should know")
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def run(args: argparse.Namespace) -> int:
    """List, search, add, export or import entries."""
    file = memory_file(args.memory)
    if args.word == "add":
        _add(file, args)
    elif args.word == "import":
        _import(file, _one(args.text, "import takes the Markdown file to read"))
    else:
        found = file.entries()
        found = search(found, " ".join(args.text)) if args.word == "search" else found
        _show(found, args, file.path)
    sys.stderr.write("".join(f"holter: {remark}\n" for remark in file.remarks))
    return 0


def memory_file(name: str = "") -> MemoryFile:
    """Return the memory at the given path, else the one of HOLTER_MEMORY or of this folder. Raises UsageError."""
    path = memory_path(RUNS, name or config.load().memory)
    if path is None:
        raise UsageError("there is no memory: HOLTER_MEMORY is off, or anybody may write to ./holter-runs")
    return MemoryFile(path)


def add_told(file: MemoryFile, *, cause: str, fix: str, verdict: str, note: str, place: str) -> str:  # noqa: PLR0913 - what a person can say
    """Remember somebody's fix or note and return its key. Raises UsageError."""
    if cause not in CAUSES:
        raise UsageError(f"there is no cause {cause}; `holter explain` lists them")
    if not (fix or note):
        raise UsageError("there is neither a fix nor a note")
    told = argparse.Namespace(cause=cause, fix=fix, verdict=verdict, note=note, place=place)
    entry = _told(told, project_of(RUNS), ())
    file.put([entry])
    return entry.key


def _show(found: list[MemoryEntry], args: argparse.Namespace, path: Path) -> None:
    if args.word == "export":
        text = to_markdown(found)
        if args.text:
            _write(Path(_one(args.text, "export takes one file")), text)
            return
    elif args.json:
        text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
    else:
        text = "".join(f"{_line(one)}\n" for one in found) or f"nothing is remembered in {path}\n"
    sys.stdout.write(text)


def _line(one: MemoryEntry) -> str:
    where = f" in {one.place}" if one.place else ""
    said = [f"{one.at[:10]}  {one.kind:8}  {one.cause}{where}"]
    said += [
        text
        for text in (
            one.symptom,
            f"tried: {one.fix}" if one.kind == "fix" else "",
            one.verdict.replace("_", " "),
            one.note,
        )
        if text
    ]
    return "  ".join(said)


def _add(file: MemoryFile, args: argparse.Namespace) -> None:
    project = args.project or project_of(RUNS)
    if not (args.run or args.cause):
        raise UsageError("add needs --run or --cause: what is it about?")
    if args.cause and args.cause not in CAUSES and not args.run:
        raise UsageError(f"there is no cause {args.cause}; `holter explain` lists them")
    incidents = _incidents(args, project) if args.run else []
    told = bool(args.fix or args.note)
    if args.verdict and not args.fix:
        raise UsageError("--verdict says what came of a fix: give it with --fix")
    made = incidents + ([_told(args, project, incidents)] if told else [])
    if not made:
        raise UsageError(
            "add needs --fix or --note beside --cause" if args.cause else f"run {args.run} has no incident to remember"
        )
    file.put(made)
    sys.stdout.write(f"remembered {len(made)} in {file.path}\n")


def _incidents(args: argparse.Namespace, project: str) -> list[MemoryEntry]:
    found = locate(args.run)
    chosen = [one for one in found.diagnoses() if one.causes and args.incident in {None, one.id}]
    if args.incident and not chosen:
        raise UsageError(f"run {args.run} has no incident {args.incident}")
    return [entry_of(one, project, found.name, settings_of(found.identity)) for one in chosen]


def _told(args: argparse.Namespace, project: str, incidents: Sequence[MemoryEntry]) -> MemoryEntry:
    """Make an entry of a person's fix or note."""
    about = next(iter(incidents), None)
    at = clock.rfc3339(clock.wall_ns())
    return MemoryEntry(
        key=f"told-{clock.wall_ns()}",
        kind="fix" if args.fix else "note",
        at=at,
        project=project,
        run=about.run if about else "",
        incident=about.incident if about else "",
        cause=args.cause or (about.cause if about else ""),
        place=args.place or (about.place if about else ""),
        fix=args.fix,
        verdict=args.verdict or "",
        note=args.note,
    )


def _import(file: MemoryFile, name: str) -> None:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{name} cannot be read: {why}") from None
    entries = from_markdown(text)
    if not entries:
        raise UsageError(f"{name} holds no entries: `holter memory export` shows how they are written")
    file.put(entries)
    sys.stdout.write(f"imported {len(entries)} into {file.path}\n")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def _one(words: list[str], otherwise: str) -> str:
    if len(words) != 1:
        raise UsageError(otherwise)
    return words[0]
