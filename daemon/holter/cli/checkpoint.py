"""`holter checkpoint`: whether a checkpoint is whole and healthy, and of which step; and which checkpoints a run has.

verify DIR    reads back everything and compares it with what was sealed: DIR is checkpoints/<step>, its state/, or a checkpoint of your own
list RUN      those that halts have kept, and those that the script saved itself, with the verdict on each
newest RUN    the path of the newest healthy one, for a job that starts again; 1 if there is none
assemble DIR  parts that blocked ranks saved each by itself, made into the framework's own format: DIR/assembled
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from holter.cli.parts.run_reader import RunReader, locate
from holter.cli.parts.terminal import Meter, printable, size_text, table
from holter.errors import UsageError, VaultError
from holter.frameworks.fsdp.framework import ASSEMBLED, PARTS
from holter.halting.vault import store, verification
from holter.halting.vault.manifest import STATE
from holter.halting.vault.store import Vault
from holter.halting.vault.verification import CheckpointExamination
from holter.records.titles import titled


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="read a checkpoint back and compare it with what was sealed")
    verify.add_argument("directory", metavar="DIR", help="checkpoints/<step>, its state/, or a checkpoint of your own")
    verify.add_argument("--json", action="store_true", help="as JSON")
    listing = actions.add_parser("list", help="the checkpoints of a run, with the verdict on each")
    listing.add_argument("run", nargs="?", metavar="RUN", help="run directory or address (default: the newest run)")
    listing.add_argument("--json", action="store_true", help="as JSON")
    newest = actions.add_parser("newest", help="the path of the newest healthy checkpoint, to go on from")
    newest.add_argument("run", nargs="?", metavar="RUN", help="run directory or address (default: the newest run)")
    newest.add_argument("--json", action="store_true", help="as JSON")
    joining = actions.add_parser(
        "assemble", help="join parts that ranks saved by themselves into the framework's own format"
    )
    joining.add_argument("directory", metavar="DIR", help="checkpoints/<step>, or its state/")
    joining.add_argument("--out", metavar="DIR", help="where to write (default: assembled/ in the checkpoint's folder)")
    joining.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the action.

    Exit codes: verify 0 good, 1 not good; list 0; newest 0, 1 if there is none; assemble 0 done, 1 if the parts are not
    good.
    """
    if args.action == "verify":
        return _verify(Path(args.directory), is_json=args.json)
    return {"assemble": _assemble, "list": _list, "newest": _newest}[args.action](args)


def _assemble(args: argparse.Namespace) -> int:
    path = Path(args.directory)
    directory = verification.home(path) if path.exists() else None
    if directory is None:
        raise UsageError(f"there is no checkpoint of a halt at {path}")
    meter = Meter()
    try:
        found = verification.examine(directory, meter.of("digests"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    finally:
        meter.end()
    made = found.manifest
    if made is not None and made.framework != PARTS:
        raise UsageError(
            f"{directory} needs no assembling: it is a checkpoint of {made.framework}, load {directory / STATE}"
        )
    out = Path(args.out) if args.out else directory / ASSEMBLED
    if out.exists():
        raise UsageError(f"{out} is there already")
    if made is None or found.problems or made.verdict == "incomplete":
        sys.stdout.write("\n".join(_exam_lines(found)) + "\n")
        return 1
    from holter.frameworks.fsdp import parts  # noqa: PLC0415 - brings torch

    try:
        number = parts.assemble(directory, out, made.world_size)
    except VaultError as error:
        sys.stdout.write(printable(f"{directory} cannot be assembled: {error}") + "\n")
        return 1
    facts = {"directory": str(out), "step": made.step, "verdict": made.verdict, "num_tensors": number}
    text = printable(f"{out}: {number} tensors of step {made.step}, {made.verdict}; dcp.load takes it")
    sys.stdout.write((json.dumps(facts, indent=2) if args.json else text) + "\n")
    return 0


def _verify(path: Path, *, is_json: bool) -> int:
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    directory = verification.home(path)
    meter = Meter()
    try:
        found = _sealed(directory, meter) if directory is not None else _own(path, meter)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    finally:
        meter.end()
    sys.stdout.write(json.dumps(_facts(found), indent=2) + "\n" if is_json else "\n".join(_exam_lines(found)) + "\n")
    return 0 if found.is_good else 1


def _sealed(directory: Path, meter: Meter) -> CheckpointExamination:
    found = verification.examine(directory, meter.of("digests"))
    if found.manifest is not None and found.manifest.tensors:
        try:
            from holter.frameworks.saving import reading  # noqa: PLC0415 - brings torch
        except ImportError as error:
            found.notes.append(f"the tensors were not read one by one, their files' digests cover them: {error}")
        else:
            found.problems += reading.compare(directory, found.manifest, meter.per_file(found.num_bytes))
    return found


def _own(path: Path, meter: Meter) -> CheckpointExamination:
    """Examine a checkpoint that holter did not make."""
    try:
        from holter.frameworks.saving import reading  # noqa: PLC0415 - brings torch
    except ImportError as error:
        raise UsageError(f"{path} has no manifest.json, and without torch nothing can be said of it: {error}") from None
    total = sum(each.stat().st_size for each in path.rglob("*") if each.is_file()) if path.is_dir() else 0
    seen = reading.survey(path, meter.per_file(total))
    found = CheckpointExamination(path, None, seen.problems, seen.notes, seen.num_files, seen.num_bytes)
    found.notes.append("no manifest: it is not one that holter sealed, so that there is nothing to compare it with")
    if not seen.num_tensors and not seen.problems:
        raise UsageError(f"{path} is no checkpoint: there is no manifest.json, and no tensor in it")
    found.notes.append(f"{seen.num_tensors} tensors were read")
    return found


def _exam_lines(found: CheckpointExamination) -> Iterator[str]:
    manifest = found.manifest
    yield printable(f"{found.directory}: {'good' if found.is_good else 'not good'}")
    if manifest is not None:
        halted = f", halted for {titled(manifest.cause)}" if manifest.cause else ""
        ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size != 1)}"
        yield printable(f"  step {manifest.step} of run {manifest.run_id}, {manifest.framework}, {ranks}{halted}")
        yield printable(f"  {manifest.verdict}" + (f": {manifest.why}" if manifest.why else ""))
    content = f"{found.num_files} files, {size_text(found.num_bytes)}"
    tensors = f", {len(manifest.tensors)} tensors" if manifest is not None else ""
    as_sealed = ", all as they were sealed" if manifest is not None and not found.problems else ""
    yield f"  {content}{tensors}{as_sealed}"
    yield from (printable(f"  - {problem.text}") for problem in found.problems)
    yield from (printable(f"  ({note})") for note in found.notes)


def _facts(found: CheckpointExamination) -> dict[str, Any]:
    manifest = found.manifest
    is_poisoned = any(problem.kind == "nonfinite_tensor" for problem in found.problems)
    return {
        "directory": str(found.directory),
        "is_good": found.is_good,
        "has_manifest": manifest is not None,
        **{name: getattr(manifest, name, None) for name in ("run_id", "step", "framework", "world_size")},
        "verdict": manifest.verdict if manifest else "poisoned" if is_poisoned else "unknown",
        "why": manifest.why if manifest else "",
        "num_files": found.num_files,
        "num_bytes": found.num_bytes,
        "num_tensors": len(manifest.tensors) if manifest else None,
        "problems": [asdict(problem) for problem in found.problems],
        "notes": found.notes,
    }


def _newest(args: argparse.Namespace) -> int:
    healthy = [one for one in _of_run(locate(args.run)) if one.verdict == "healthy" and one.is_there]
    if not healthy:
        sys.stderr.write("holter: no healthy checkpoint is known\n")
        return 1
    sys.stdout.write((json.dumps(healthy[-1]._asdict(), indent=2) if args.json else healthy[-1].path) + "\n")
    return 0


def _list(args: argparse.Namespace) -> int:
    found = locate(args.run)
    entries = _of_run(found)
    if args.json:
        sys.stdout.write(json.dumps([entry._asdict() for entry in entries], indent=2) + "\n")
    elif not entries:
        sys.stdout.write(printable(f"run {found.name}: no checkpoint is known") + "\n")
    else:
        columns = ("step", "verdict", "by", "saved", "path", "why")
        shown = [(one.step, one.verdict, one.by, one.saved_at, one.path, one.why) for one in entries]
        rows = [tuple(printable(str(cell)) for cell in cells) for cells in shown]
        sys.stdout.write("\n".join(table(columns, rows)) + "\n")
    return 0


def _of_run(found: RunReader) -> "list[_Entry]":
    """Return all known checkpoints of a run, oldest first."""
    run_dir = found.directory
    if run_dir is None:
        state = found.ask("/api/v1/status")
        if state is None:
            raise UsageError(f"no coordinator answers at {found.address}")
        run_dir = Path(str(state["run_dir"]))
    return sorted(_entries(run_dir), key=lambda entry: (entry.step, entry.saved_at))


class _Entry(NamedTuple):
    """One checkpoint in the list."""

    step: int
    verdict: str
    by: str
    framework: str
    saved_at: str
    path: str
    why: str
    is_there: bool = True


def _entries(run_dir: Path) -> Iterator[_Entry]:
    vault = Vault(run_dir)
    for one in vault.all():
        made = one.manifest
        yield _Entry(made.step, one.verdict, "holter", made.framework, made.sealed_at, str(one.state), one.why)
    for save in store.read_script_saves(run_dir):
        is_there = "://" in save.path or Path(save.path).exists()
        why = save.why if is_there else f"{save.why}; it is no longer there".removeprefix("; ")
        yield _Entry(save.step, save.verdict, "script", save.framework, save.saved_at, save.path, why, is_there)
    for path in vault.damaged():
        why = "its manifest is missing or damaged: `holter checkpoint verify` says more"
        yield _Entry(int(path.name.partition("-")[0]), "unknown", "holter", "", "", str(path / "state"), why)
