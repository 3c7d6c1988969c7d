"""Reads what a log says when something breaks: tracebacks, launchers' summaries, watchdogs, the kernel, the driver.

Each kind of message is one line of `KINDS`: the words by which it is found, and what is read from it. Words are searched as
bytes, so that a large file costs no more than its size. What follows from a message is judged elsewhere (`messages`).
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from holter.offline.found import FrameAt, LoggedError
from holter.offline.lines import rank_of

MAX_ERRORS = 400
MAX_TEXT = 600
MAX_FRAMES = 80
LOOKAHEAD = 160
"""Number of lines after the beginning of a traceback that belong to it."""


@dataclass(frozen=True)
class Kind:
    """One kind of message."""

    name: str
    words: tuple[str, ...]
    """A line of this kind contains one of these, in this case."""
    reads: re.Pattern[str] | None = None
    """Pattern whose named groups are kept as values; None if nothing is read."""
    needs: bool = False
    """Whether the pattern must match, or else the line is not of this kind."""


KINDS = (
    Kind("variance_warning", ("degrees of freedom is <= 0",), re.compile(r"(?P<where>\S+\.py:\d+)")),
    Kind("xid", ("NVRM: Xid", "Xid ("), re.compile(r"Xid \((?P<device>[^)]*)\): (?P<number>\d+)"), needs=True),
    Kind("ecc", ("uncorrectable ECC error", "Uncorrectable ECC"), re.compile(r"(?P<text>.*ECC.*)")),
    Kind("kernel_oom", ("Out of memory: Killed process", "oom-kill:", "Memory cgroup out of memory", "oom_reaper: reaped", "OOM Killed", "oom-kill event", "OOMKilled"),
         re.compile(r"Killed process (?P<pid>\d+)(?: \((?P<process>[^)]*)\))?.*?(?:anon-rss:(?P<rss>\d+kB))?")),
    Kind("device_oom", ("CUDA out of memory", "OutOfMemoryError", "HIP out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory",
                        "DefaultCPUAllocator: not enough memory", "CUDA_ERROR_OUT_OF_MEMORY", "RESOURCE_EXHAUSTED: Out of memory", "OOM when allocating tensor"),
         re.compile(r"(?:.*?Tried to allocate (?P<asked>[\d.]+ \w+)|.*?you tried to allocate (?P<asked_bytes>\d+) bytes)?"
                    r"(?:.*?GPU (?P<device>\d+))?(?:.*?(?:capacity of (?P<capacity>[\d.]+ \w+)|(?P<total>[\d.]+ \w+) total capacity))?"
                    r"(?:.*?(?P<free>[\d.]+ \w+) (?:is )?free)?(?:.*?(?P<used>[\d.]+ \w+) (?:already allocated|is allocated by PyTorch))?")),
    Kind("worker_killed", ("is killed by signal", "exited unexpectedly"),
         re.compile(r"DataLoader worker \(pid(?:\(s\))?\s*(?P<pid>[\d, ]+)\) (?:is killed by signal: (?P<signal>\w[\w ]*)|exited unexpectedly)"), needs=True),
    Kind("shared_memory", ("unable to allocate shared memory", "insufficient shared memory", "unable to open shared memory object", "out of shared memory"), None),
    Kind("watchdog", ("Watchdog caught collective operation timeout",),
         re.compile(r"(?:\[Rank (?P<rank>\d+)\]|Rank (?P<rank2>\d+)\]).*?SeqNum=(?P<sequence>\d+)(?:, OpType=(?P<operation>\w+)(?=\W))?"
                    r"(?:, NumelIn=(?P<numel>\d+))?(?:, NumelOut=\d+)?(?:, TensorShape=(?P<shape>\[[\d, ]*\]))?(?:.*?Timeout\(ms\)=(?P<timeout>\d+))?"
                    r"(?:.*?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+))?"), needs=True),
    Kind("watchdog_stuck", ("watchdog got stuck for", "Heartbeat monitor timed out"), re.compile(r"(?:Rank |\[Rank )(?P<rank>\d+)\]")),
    Kind("work_status", ("last enqueued NCCL work", "last enqueued work"),
         re.compile(r"\[?(?:PG (?:ID )?(?P<group>\d+)[^\]]*?)?\s?Rank (?P<rank>\d+)\].*?(?:at (?:NCCL )?work(?: sequence id)?:? (?P<sequence>\d+))?[^\d]*?"
                    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)"), needs=True),
    Kind("monitored_barrier", ("monitoredBarrier", "monitored barrier"), re.compile(r"[Rr]anks? (?P<missing>\d+(?:, *(?:[Rr]ank )?\d+)*) failed to pass"), needs=True),
    Kind("fingerprint", ("Detected mismatch between collectives on ranks", "CollectiveFingerPrint"),
         re.compile(r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<sequence>\d+), )?OpType=(?P<operation>\w+)"
                    r"(?:.*?but Rank (?P<other>\d+) is running.*?OpType=(?P<other_operation>\w+))?"), needs=True),
    Kind("gloo_timeout", ("ms for recv operation to complete", "ms for send operation to complete"), re.compile(r"(?P<text>Timed out waiting \d+ms)")),
    Kind("unreachable", ("connectFullMesh failed", "client socket has", "Call to connect", "socketStartConnect", "waiting for clients", "waiting for workers"),
         re.compile(r"connectFullMesh failed|client socket has (?:timed out|failed)|Timed out after \d+ seconds waiting for|(?:Call to connect|socketStartConnect).*(?:refused|[Nn]o route|timed out|unreachable)"), needs=True),
    Kind("connection_lost", ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "remote process exited", "socket closed"), None),
    Kind("unfinished_reduction", ("Expected to have finished reduction in the prior iteration",), None),
    Kind("unused_indices", ("Parameter indices which did not receive grad", "Parameters which did not receive grad"),
         re.compile(r"did not receive grad for rank (?P<rank>\d+): (?P<parameters>.+)"), needs=True),
    Kind("no_graph", ("does not require grad and does not have a grad_fn",), None),
    Kind("empty_optimizer", ("optimizer got an empty parameter list",), None),
    Kind("device_assert", ("device-side assert triggered", "` failed.", "Assertion `"),
         re.compile(r"(?P<kernel>\S+\.cu\w*:\d+).*?Assertion `(?P<condition>[^`]*)` failed|(?P<text>device-side assert triggered)"), needs=True),
    Kind("label_range", ("is out of bounds.", "index out of range in self", "Target "), re.compile(r"Target (?P<target>-?\d+) is out of bounds|(?P<text>index out of range in self)"), needs=True),
    Kind("anomaly", ("returned nan values in its", "returned an invalid gradient"), re.compile(r"Function '(?P<function>\w+)' returned nan values"), needs=True),
    Kind("minimum_scale", ("Minimum loss scale reached", "loss scale already at minimum"), re.compile(r"(?P<text>.*minimum.*)", re.IGNORECASE)),
    Kind("overflow", ("OVERFLOW!", "Grad overflow on iteration", "Gradient overflow.", "overflow detected"),
         re.compile(r"(?:.*?[Aa]ttempted loss scale: (?P<scale>\d[\d.]*(?:e[+-]?\d+)?), (?:reducing to (?P<next>\d[\d.]*(?:e[+-]?\d+)?)|but hysteresis))?(?:.*?(?:[Rr]educ\w+|setting) loss scale to:? (?P<to>\d[\d.]*(?:e[+-]?\d+)?))?")),
    Kind("loss_stopped", ("Loss is nan, stopping", "Loss is inf, stopping", "loss is NaN, stopping", "NaN or Inf found in input tensor", "Loss became NaN", "Loss became infinite or NaN", "NaN loss encountered"), re.compile(r"(?:at iteration|at step|iteration)[= ](?P<at>\d+)")),
    Kind("device_error", ("CUDA error:", "fallen off the bus", "RmInitAdapter failed", "NCCL WARN Cuda failure", "unhandled cuda error", "CUDA driver error"), re.compile(r"CUDA error: (?P<error>[^\n]*)")),
    Kind("root_cause", ("Root Cause (first observed failure)",), None),
    Kind("child_failed", ("exitcode  :", "exitcode:"), re.compile(r"exitcode\s*: (?P<code>-?\d+)\s*\(pid: (?P<pid>\d+)\)"), needs=True),
    Kind("process_failed", ("Signals.SIG", "failed (exitcode:"), re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+)|Signals\.(?P<signal>SIG\w+)")),
    Kind("segfault", ("Segmentation fault", "Fatal Python error: Bus error"),
         re.compile(r"^(?:\[[^]]*\]:? *)?(?:\S+: line \d+: +\d+ +)?(?P<text>(?:Fatal Python error: )?(?:Segmentation fault|Bus error))"), needs=True),
    Kind("killed", ("error: Detected 1 oom", "Out Of Memory", "oom_kill"), None),
)  # fmt: skip
TRACEBACK = "Traceback (most recent call last)"
SEARCHED = (
    b"Traceback (", b"rror", b"Xid", b"ECC", b"illed", b"oom", b"OOM", b"ut Of Memory", b"ut of memory", b"OUT_OF_MEMORY", b"atchdog ", b"eartbeat monitor", b"last enqueued", b"onitored", b"onnection ",
    b"remote process", b"ssertion `", b"degrees of freedom", b"verflow", b"VERFLOW", b"stopping", b"NaN ", b"Root Cause", b"exitcode", b"egmentation", b"fallen off", b"RmInitAdapter",
    b"Cuda failure", b"Signals.SIG", b"already at min", b"loss scale reached", b"socket closed", b"shared memory", b"xception ignored", b"connectFullMesh", b"client socket", b"to connect", b"socketStartConnect",
)  # fmt: skip
"""In a large file, only lines with one of these are looked at: every word of `KINDS` contains one, or is part of what
an exception says."""
_PREFIX = re.compile(
    r"^(?:\s*\[(?:rank|default)\d+\]:?\s?|\s*\(\w+ pid=[^)]*\)\s?|\s*\[\d+\]\s?|\d+:\s|std(?:err|out):\s)+"
)
_HARMLESS = re.compile(r"^[WI]\d{4} |\b(?:WARN(?:ING)?|INFO|DEBUG)\b")
"""Matches a logger's mark of a harmless level: a traceback after it was already handled by the script."""
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_LAST = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|Iteration)?)(?::\s?(?P<text>.*))?$"
)
_BARE = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)):\s(?P<text>\S.{7,})")
_SHOWN = re.compile(
    r"^│\s+(?P<file>/\S+\.py):(?P<line>\d+) in\s*(?P<function><?\w*>?)|^(?P<cell>(?:~|/|<ipython)[^ ]*(?:\.py|>)) in (?P<name><?\w+>?)\("
)
"""Matches a frame as rich and notebooks show it."""
_SUMMARY = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*:\s*(.*)$")
_ONE_FAILURE = re.compile(r"^\s*rank\s*: \d+ \(local_rank: \d+\)\s*$")
MEANT = ("KeyboardInterrupt", "SystemExit: 0", "BdbQuit")


@dataclass
class _Open:
    """A traceback that is being read."""

    line: int
    rank: int | None
    step: int
    is_ignored: bool = False
    prefix: str = ""
    """What a logger writes in front of each line, with all digits replaced by 0."""
    frames: list[FrameAt] = field(default_factory=list)
    num_lines: int = 0
    awaits_code: bool = False

    def own(self, text: str) -> str:
        """Return the line without the prefix of this traceback's lines."""
        size = len(self.prefix)
        return text[size:] if size and _alike(text[:size]) == self.prefix else _PREFIX.sub("", text)


class ErrorReader:
    """Takes the lines of one file and keeps the errors that they report."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._open: dict[int | None, _Open] = {}
        self._errors: dict[tuple[str, str, int | None], LoggedError] = {}
        self._summary: dict[str, str] = {}
        self._is_root = self._has_summary = False
        self._ignores = False
        self._num_rows = 0
        self._tail = ("", "")
        """The last two lines."""
        self._places_shown: list[tuple[int, FrameAt]] = []
        self._rows: dict[tuple[str, str, int | None], int] = {}
        """Error -> number of rows of numbers that came before it."""

    def places(self, chunk: bytes) -> Iterator[int]:
        """Yield the positions in a chunk at which an error may be reported, and those of a traceback's further lines."""
        for word in SEARCHED:
            at = chunk.find(word)
            num = 0
            while at >= 0 and num < MAX_ERRORS:
                yield at
                num += 1
                if word == SEARCHED[0]:
                    yield from _following(chunk, at)
                at = chunk.find(word, at + len(word))

    def line(self, text: str, number: int, step: int, num_rows: int = 0) -> bool:
        """Look at a line that follows `num_rows` rows of numbers; return whether it was part of an error."""
        self._num_rows = num_rows
        self._tail = (self._tail[1], text)
        self._has_summary |= text.lstrip().startswith(("Failures:", "Root Cause"))
        if not self._has_summary and _ONE_FAILURE.match(text):
            # The log has only this one failure, without the summary around it.
            self._is_root, self._summary = True, {"line": str(number)}
        if self._is_root and self._of_summary(text, number, step):
            return True
        if (shown := _SHOWN.match(text)) and len(self._places_shown) < MAX_FRAMES:
            self._places_shown.append(
                (
                    number,
                    FrameAt(
                        shown["file"] or shown["cell"],
                        int(shown["line"] or 0),
                        shown["function"] or shown["name"] or "",
                    ),
                )
            )
        rank = rank_of(text) if "ank" in text or "default" in text or text[:1].isdigit() else None
        if self._open:
            opened = self._open.get(rank)
            if opened is not None and self._goes_on(opened, opened.own(text), number, rank):
                return True
        if text.startswith("Exception ignored in"):
            # The interpreter prints this while it cleans up; the traceback that follows has stopped nothing.
            self._ignores = True
            return True
        if TRACEBACK in text:
            before = text.partition(TRACEBACK)[0]
            # In joined lines, or after an unfinished progress bar, the text before is a message of its own.
            self._is_known(before, number, step, rank)
            self._open[rank] = _Open(
                number,
                rank,
                step,
                is_ignored=self._ignores,
                prefix="" if before.startswith("Exception ") else _alike(before),
            )
            self._ignores = False
            return True
        return self._is_known(text, number, step, rank) or self._is_bare(text, number, step, rank)

    def _is_bare(self, text: str, number: int, step: int, rank: int | None) -> bool:
        """Keep the last line of a traceback without the rest of it: cut out, framed, or as a notebook prints it."""
        if "Error" not in text and "Exception" not in text:
            return False
        found = _BARE.match(_PREFIX.sub("", text).strip(" #`'│|"))
        if found is None:
            return False
        name = found["type"].rpartition(".")[2]
        self._keep(LoggedError("traceback", found.group(0)[:MAX_TEXT], self._file, number, rank, step, self._shown(number), {"type": name, "is_bare": "yes"}))  # fmt: skip
        return True

    def _shown(self, number: int) -> tuple[FrameAt, ...]:
        """Return the frames that a notebook or rich showed shortly before."""
        frames = tuple(frame for at, frame in self._places_shown if number - at < LOOKAHEAD)
        self._places_shown = []
        return frames

    def _is_known(self, text: str, number: int, step: int, rank: int | None) -> bool:
        for kind in KINDS:
            if not any(word in text for word in kind.words):
                continue
            match = kind.reads.search(text) if kind.reads else None
            if kind.needs and match is None:
                continue
            values = {name: value for name, value in match.groupdict().items() if value} if match else {}
            if kind.name == "root_cause":
                self._is_root, self._summary = True, {"line": str(number)}
                return True
            if kind.name in {"work_status", "watchdog_stuck"} and "rank" in values:
                rank = int(values["rank"])
            if kind.name == "watchdog":
                rank = int(values.get("rank") or values.get("rank2") or 0)
            self._keep(LoggedError(kind.name, text.strip()[:MAX_TEXT], self._file, number, rank, step, values=values))
            return True
        return False

    def _goes_on(self, opened: _Open, text: str, number: int, rank: int | None) -> bool:
        """Whether a line belongs to the traceback; ends it at its last line."""
        opened.num_lines += 1
        if opened.num_lines > LOOKAHEAD:
            del self._open[rank]
            return False
        if frame := _FRAME.match(text):
            if len(opened.frames) < MAX_FRAMES:
                opened.frames.append(FrameAt(frame["file"], int(frame["line"]), frame["function"] or ""))
            opened.awaits_code = True
            return True
        if text[:1] in {" ", "\t"}:
            if opened.awaits_code and opened.frames and text.strip(" ~^\t"):
                opened.frames[-1] = replace(opened.frames[-1], code=text.strip()[:200])
                opened.awaits_code = False
            return True
        if not opened.frames:
            if opened.num_lines > 3:  # noqa: PLR2004 - it was cut off
                del self._open[rank]
            return False
        last = _LAST.match(text.rstrip())
        if last is None:
            return False
        del self._open[rank]
        self._ended(opened, last, text, number)
        return True

    def _ended(self, opened: _Open, last: re.Match[str], text: str, number: int) -> None:
        if opened.is_ignored or text.startswith(MEANT) or _HARMLESS.search(opened.prefix):
            return
        frames = tuple(opened.frames)
        name = last["type"].rpartition(".")[2]
        made = LoggedError(
            "traceback",
            text.strip()[:MAX_TEXT],
            self._file,
            number,
            opened.rank,
            opened.step,
            frames,
            {"type": name, "begins": str(opened.line)},
        )
        self._keep(made)
        self._is_known(text, number, opened.step, opened.rank)

    def _of_summary(self, text: str, number: int, step: int) -> bool:
        """Read a line of torchrun's summary about the first failure; return whether it is one."""
        found = _SUMMARY.match(_PREFIX.sub("", text))
        if found:
            self._summary[found.group(1)] = found.group(2).strip()
            return True
        if "exitcode" in self._summary and (set(text.strip()) <= {"=", "-"} or not text.strip()):
            rank = re.match(r"(\d+)", self._summary.get("rank", ""))
            code = re.match(r"(-?\d+)", self._summary["exitcode"])
            values = {name: value for name, value in self._summary.items() if name != "line"} | {
                "code": code.group(1) if code else ""
            }
            line = int(self._summary["line"])
            text = f"root cause: rank {values.get('rank', '?')}, exit code {values['exitcode']}"
            self._keep(
                LoggedError(
                    "root_cause", text, self._file, line, int(rank.group(1)) if rank else None, step, values=values
                )
            )
            self._is_root = False
        return number - int(self._summary.get("line", number)) < 40 and set(text.strip()) <= {"=", "-", "<"}  # noqa: PLR2004 - a summary is shorter

    def _keep(self, error: LoggedError) -> None:
        key = (error.kind, _shape(error), error.rank)
        known = self._errors.get(key)
        if error.kind == "overflow":
            error = _with_floor(error, known)
        if known is not None:
            values = dict(known.values)
            if error.kind in {"overflow", "work_status"}:
                values = dict(error.values) | {
                    "first_step": values.get("first_step", str(known.step)),
                    "last_step": str(error.step),
                    "first_scale": values.get("first_scale", known.values.get("scale", "")),
                }
            began = known.step if known.step >= 0 else error.step
            self._errors[key] = replace(known, num_times=known.num_times + 1, step=began, values=values)
        elif len(self._errors) < MAX_ERRORS:
            self._errors[key] = error
        self._rows[key] = self._num_rows

    def finish(self, step: int, num_rows: int = 0) -> Iterator[LoggedError]:
        """Yield the errors in the order of the file, which has `num_rows` rows of numbers."""
        for opened in self._open.values():
            if opened.frames:
                text = "the traceback ends without its last line"
                yield LoggedError(
                    "traceback",
                    text,
                    self._file,
                    opened.line,
                    opened.rank,
                    opened.step,
                    tuple(opened.frames),
                    {"type": ""},
                )
        if self._is_root and "exitcode" in self._summary:
            self._of_summary("", 10**9, step)
        made = [
            replace(error, num_rows_after=max(0, num_rows - self._rows[key])) for key, error in self._errors.items()
        ]
        if how := _how_cut(self._tail):
            made = [
                replace(error, values={**error.values, how: "yes"})
                if error.kind in {"watchdog", "work_status"}
                else error
                for error in made
            ]
        yield from sorted(made, key=lambda error: error.line)


def _how_cut(tail: tuple[str, str]) -> str:
    """Return how the log ends, because ranks without a message may have been about to print one.

    `is_cut`: in the middle of a watchdog's message. `is_last`: with a whole line of one, although processes end with other
    lines. Empty otherwise.
    """
    end = tail[1].rstrip("\n")
    if any("ProcessGroupNCCL" in line for line in tail) and end[-1:].isalpha():
        return "is_cut"
    return "is_last" if "ProcessGroupNCCL" in end else ""


def _with_floor(error: LoggedError, known: LoggedError | None) -> LoggedError:
    """Return an overflow with the lowest scale so far, and how often the scale could not fall any further."""
    before = known.values if known is not None else {}
    to = _number(error.values.get("next") or error.values.get("to"), math.inf)
    lowest = min(to, _number(before.get("lowest"), math.inf))
    is_floor = _number(error.values.get("scale"), math.inf) <= to <= 1
    at_floor = int(before.get("at_floor", "0")) + is_floor
    return replace(error, values={**error.values, "lowest": str(lowest), "at_floor": str(at_floor)})


def _number(text: str | None, otherwise: float) -> float:
    try:
        return float(text.rstrip(".")) if text else otherwise
    except ValueError:
        return otherwise


def _alike(prefix: str) -> str:
    """Replace all digits by 0, because times and process ids differ from line to line but have the same length."""
    return re.sub(r"\d", "0", prefix)


def _shape(error: LoggedError) -> str:
    """Return a key under which messages that differ only in numbers are the same."""
    if error.kind == "traceback":
        place = f"{error.frames[-1].file}:{error.frames[-1].line}" if error.frames else ""
        return f"{error.values.get('type', '')} {place}"
    if error.kind == "work_status":
        return error.values.get("group", "")
    if error.kind in {
        "overflow",
        "device_assert",
        "connection_lost",
        "watchdog_stuck",
        "device_oom",
        "gloo_timeout",
        "unreachable",
    }:
        return ""
    return re.sub(r"\d+", "#", error.text)[:120]


def _following(chunk: bytes, at: int) -> Iterator[int]:
    """Yield the beginnings of the lines after a traceback's first."""
    for _ in range(LOOKAHEAD // 2):
        at = chunk.find(b"\n", at) + 1
        if at <= 0 or at >= len(chunk):
            return
        yield at
