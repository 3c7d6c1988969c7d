"""Turns what a job without holter left behind into the observations that holter would have made, so that the same detectors judge it.

Flight Recorder dumps of a job that hung or died, a file per rank, as if each rank had been examined at the moment of the
dump:

    rank_03.json   nccl_trace_rank_3   trace_3.pkl        ->   Attached, Overdue, Exam of rank 3

A dump holds calls and groups; no stack, no step, no state of the process, and not how long the job has hung. That it hung
follows from the dumps: a backend writes them when a call times out. Pickle is read by a reader that builds containers,
numbers and text and nothing else. A diagnosis made from dumps lacks the evidence and the actions that need a live job.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holter.errors import UsageError
from holter.faults.shared.wording import ranks_text
from holter.flight import FlightError, from_bytes
from holter.records import (
    Attached,
    Cause,
    Diagnosis,
    Directive,
    Evidence,
    Exam,
    ExamDepth,
    Flight,
    Observation,
    Overdue,
    Phase,
    Unexamined,
)

MAX_BYTES = 512 * 2**20
"""Largest file that is read; a recorder of 20,000 calls makes 10 MB."""
NO_STACK = "a dump of the Flight Recorder holds no stacks"
LIVE = frozenset({"deadline", "process_state"})
"""Kinds of evidence that only a sidecar gathers: a dump says nothing for or against them."""
NOTHING = Directive(directive="observe", reason="judged from dumps after the event: holter was not there to act")
NO_STACKS = "stacks and process states: a dump has none. If the job still hangs, `py-spy dump --native --pid PID` on the named ranks shows what they do"

_IN_NAME = re.compile(r"rank[_\-.]?(\d{1,6})(?!\d)", re.IGNORECASE)
_AT_END = re.compile(r"(?:^|[_\-.])(\d{1,6})$")
_SUFFIX = re.compile(r"\.(json|pickle|pkl|bin|trace|dump|txt)$", re.IGNORECASE)
_PICKLE = b"\x80"


@dataclass(frozen=True)
class Dumps:
    """All dumps that can be used, and remarks on the other files."""

    flights: dict[int, Flight]
    files: dict[int, Path]
    remarks: tuple[str, ...]
    """One sentence for each file that is no dump."""
    failures: tuple[str, ...]
    """One sentence for each dump that cannot be used: its content is not judged."""
    ranks: tuple[int, ...] = field(init=False)
    """All ranks of the job that any group names."""

    def __post_init__(self) -> None:
        members = {rank for flight in self.flights.values() for group in flight.groups for rank in group.ranks}
        object.__setattr__(self, "ranks", tuple(sorted(members | set(self.flights))))

    @property
    def taken_ns(self) -> int:
        """Wall-clock time of the newest call in any dump, taken as the time at which they were made; 0 if there is no dump."""
        return max((flight.taken_ns for flight in self.flights.values()), default=0)

    def observations(self) -> Iterator[Observation]:
        """Yield what sidecars would have reported: all ranks hang, and those with a dump were examined."""
        for rank in self.ranks:
            attached = Attached(
                pid=rank + 1, host="", world_size=len(self.ranks), local_rank=rank, command=[], versions={}
            )
            overdue = Overdue(
                tier="overdue",
                phase=Phase.OTHER,
                micro_step=0,
                waited_s=0.0,
                deadline_s=0.0,
                because="dumps are made when a job hangs",
            )
            yield Observation(rank=rank, step=-1, at_ns=self.taken_ns, body=attached)
            yield Observation(rank=rank, step=-1, at_ns=self.taken_ns, body=overdue)
            yield self.examined(rank, self.taken_ns, "native")

    def examined(self, rank: int, asked_ns: int, depth: ExamDepth) -> Observation:
        """Return the answer to a request to examine this rank: its dump, and nothing new."""
        body: Exam | Unexamined = Unexamined(asked_ns=asked_ns)
        if rank in self.flights:
            body = Exam(reason="asked", asked_ns=asked_ns, depth=depth, stack_error=NO_STACK, flight=self.flights[rank])
        return Observation(rank=rank, step=-1, at_ns=self.taken_ns, body=body)


def read_dumps(paths: Sequence[Path]) -> Dumps:
    """Read the dumps in these files and directories; raise UsageError if there are none, or two of one rank."""
    flights: dict[int, Flight] = {}
    files: dict[int, Path] = {}
    remarks: list[str] = []
    failures: list[str] = []
    for path in _files(paths):
        try:
            rank, flight = _dump(path)
        except _NotADumpError as reason:
            remarks.append(f"{path} is {reason}, and was skipped")
        except (FlightError, OSError) as error:
            failures.append(f"{path} cannot be used: {_reason(error)}")
        else:
            if rank in files:
                raise UsageError(f"{files[rank]} and {path} are both of rank {rank}: name the dumps of one moment only")
            flights[rank], files[rank] = flight, path
    if not flights:
        raise UsageError(_nothing(paths, failures))
    # All dumps count as made at one moment, which is not before the newest call in any of them.
    taken_ns = max((call.created_ns for flight in flights.values() for call in flight.calls), default=0)
    flights = {rank: msgspec.structs.replace(flight, taken_ns=taken_ns) for rank, flight in sorted(flights.items())}
    return Dumps(flights, files, tuple(remarks), tuple(failures))


class _NotADumpError(Exception):
    """Raised for a file that is something else, such as a note or a result."""


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for path in paths:
        try:
            inside = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {_reason(error)}") from None
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        for one in inside:
            if one.resolve() not in seen:
                seen.add(one.resolve())
                yield one


def _dump(path: Path) -> tuple[int, Flight]:
    named = rank_in_name(path.name)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise FlightError(f"it has {size} bytes, and a dump has at most {MAX_BYTES}")
    content = path.read_bytes()
    if not looks_like_a_dump(content) and named is None:
        raise _NotADumpError("no Flight Recorder dump")
    flight = from_bytes(content, taken_ns=0)
    if not flight.calls and not flight.groups:
        raise FlightError("it holds neither calls nor groups")
    rank = _rank(named, flight)
    if rank is None:
        raise FlightError("neither its name nor its groups tell of which rank it is; name it like rank_3.json")
    return rank, flight


def rank_in_name(name: str) -> int | None:
    """Return the rank in a file's name: 3 for `rank_03.json`, `nccl_trace_rank_3`, `trace_3.pkl`; None if there is none."""
    while (shorter := _SUFFIX.sub("", name)) != name:
        name = shorter
    found = _IN_NAME.findall(name) or _AT_END.findall(name)
    return int(found[-1]) if found else None


def _rank(named: int | None, flight: Flight) -> int | None:
    """Return the rank by the file's name if its groups allow that, or else the only rank that is in all of its groups."""
    members = [set(group.ranks) for group in flight.groups if group.ranks]
    common = set.intersection(*members) if members else set()
    if named is not None and (named in common or not members):
        return named
    return next(iter(common)) if len(common) == 1 else None


def looks_like_a_dump(content: bytes) -> bool:  # noqa: D103
    return content.startswith(_PICKLE) or (
        content.lstrip()[:1] == b"{" and (b'"entries"' in content or b'"pg_config"' in content)
    )


def _nothing(paths: Sequence[Path], failures: Sequence[str]) -> str:
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        return f"there is no Flight Recorder dump that can be used: {failures[0]}{more}"
    folders = [str(one) for path in paths if path.is_dir() for one in sorted(path.iterdir()) if one.is_dir()]
    hint = f"; name one of the directories in it: {', '.join(folders[:4])}" if folders else ""
    return f"there is no Flight Recorder dump in {', '.join(map(str, paths))}{hint}"


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def afterwards(diagnosis: Diagnosis, dumped: Collection[int]) -> Diagnosis:
    """Return the same verdict with the evidence that dumps can give; `dumped` are the ranks that have a dump."""
    causes = tuple(
        msgspec.structs.replace(cause, evidence=tuple(_of_dumps(cause, dumped))) for cause in diagnosis.causes
    )
    return msgspec.structs.replace(diagnosis, causes=causes, action=NOTHING, detected_after_s=0.0)


def _of_dumps(cause: Cause, dumped: Collection[int]) -> Iterator[Evidence]:
    absent = [rank for rank in cause.ranks if rank not in dumped]
    if absent:
        text = f"a dump of {ranks_text(absent)}: what it did is inferred from its peers' waiting; it may have died, or never been asked"
        yield Evidence(kind="missing", summary=text, values={"ranks": absent})
    for one in cause.evidence:
        if one.kind == "missing" and "stack" in one.summary:
            yield Evidence(kind="missing", summary=NO_STACKS)
        elif one.kind not in LIVE:
            yield one
