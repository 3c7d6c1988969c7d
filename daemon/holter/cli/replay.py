"""`holter replay`: judge a recorded run again, from its journal alone, with other thresholds if given."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

import msgspec

from holter.cli.parts.run_reader import RunReader, has_open_critical, locate
from holter.cli.parts.terminal import with_progress
from holter.cli.report import rendered
from holter.coordinator.recovery import journal
from holter.coordinator.recovery.replay import Pace, Replay, differences
from holter.errors import UsageError
from holter.faults import ALL, Detector
from holter.records import Diagnosis, Judged


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory (default: the newest run)")
    parser.add_argument("--json", action="store_true", help="a list of diagnoses")
    parser.add_argument(
        "--set", action="append", default=[], metavar="DETECTOR.FIELD=VALUE", help="another threshold; may be repeated"
    )
    parser.add_argument(
        "--detector", action="append", default=[], metavar="NAME", help="judge with this one only; may be repeated"
    )


def run(args: argparse.Namespace) -> int:
    """Print what the replay finds; exit code 1 if an open critical incident is among it."""
    detectors = changed(chosen(ALL, args.detector), args.set)
    found = locate(args.run)
    if found.directory is None:
        raise UsageError(f"a replay needs the run's directory; {args.run} is an address")
    folder, damage = found.directory / "journal", list[str]()
    has_marks = any(isinstance(entry.observation.body, Judged) for entry in journal.read(folder))
    replay = Replay(found.name, "halt", detectors)
    # With other thresholds, something may be found where the live run judged and found nothing.
    pace: Pace = "silence" if args.set or args.detector else "marks"
    replay.read(with_progress(journal.read(folder, damage)), pace, has_marks=has_marks)
    diagnoses = replay.finish() if replay.num_entries else []
    sys.stderr.write("".join(f"holter: {line}\n" for line in _remarks(found, replay, damage)))
    sys.stdout.write(rendered(found.name, diagnoses, is_json=args.json))
    if not args.json and replay.num_entries:
        sys.stdout.write(_verdict(found, diagnoses, is_changed=bool(args.set or args.detector)))
    return int(has_open_critical(diagnoses))


def chosen(detectors: Sequence[Detector], names: Sequence[str]) -> list[Detector]:
    """Return the detectors with these names; all if there are none."""
    known = {detector.name: detector for detector in detectors}
    for name in names:
        if name not in known:
            raise UsageError(f"--detector {name}: there is no such detector; there are {', '.join(sorted(known))}")
    return [detector for detector in detectors if not names or detector.name in names]


def changed(detectors: Sequence[Detector], settings: Sequence[str]) -> list[Detector]:
    """Return the detectors with changed thresholds, each given as `detector.field=value`."""
    known = {detector.name: detector for detector in detectors}
    for setting in settings:
        place, equals, text = setting.partition("=")
        name, dot, field = place.strip().partition(".")
        if not (equals and dot):
            raise UsageError(f"--set {setting}: write it as detector.field=value")
        if name not in known:
            raise UsageError(f"--set {setting}: there is no detector {name}; there are {', '.join(sorted(known))}")
        known[name] = _replaced(known[name], field, text.strip(), setting)
    return list(known.values())


def _replaced(detector: Any, field: str, text: str, setting: str) -> Detector:
    fields = [one.name for one in dataclasses.fields(detector) if one.init]
    if field not in fields:
        has = f"it has {', '.join(fields)}" if fields else "it has no thresholds"
        raise UsageError(f"--set {setting}: {detector.name} has no threshold {field}; {has}")
    wanted = get_type_hints(type(detector))[field]
    try:
        value = msgspec.convert(_parsed(text), wanted, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--set {setting}: {str(error)[:1].lower()}{str(error)[1:]}") from None
    try:
        made: Detector = dataclasses.replace(detector, **{field: value})
    except ValueError as error:
        raise UsageError(f"--set {setting}: {error}") from None
    return made


def _parsed(text: str) -> Any:
    """Parse JSON, so that lists can be given; anything else is a plain word."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _remarks(found: RunReader, replay: Replay, damage: list[str]) -> Iterator[str]:
    assert found.directory is not None
    folder = found.directory / "journal"
    if not replay.num_entries:
        yield f"the journal of {found.name} is empty or missing ({folder}): there is nothing to judge"
    yield from (f"journal: {line}" for line in damage)
    stream = [number for number, _ in journal.segments(folder) if number != journal.IDENTITY]
    if stream and stream[0] > journal.IDENTITY + 1:
        yield "journal: its oldest part was dropped when it grew too large, so what happened first is not judged"
    yield from replay.failures()


def _verdict(found: RunReader, diagnoses: list[Diagnosis], *, is_changed: bool) -> str:
    assert found.directory is not None
    recorded = dataclasses.replace(found, address="").diagnoses()
    differ = differences(recorded, diagnoses)
    whose = "With these settings the replay" if is_changed else "The replay"
    if not differ:
        return f"{whose} equals what was recorded: the same causes, ranks, tensors and first steps.\n"
    return f"{whose} differs from what was recorded: {'; '.join(differ)}.\n"
