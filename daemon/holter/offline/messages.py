"""Judges what a log says of errors: one finding for what broke first, with everything else that broke as its consequence. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from holter.offline.found import FrameAt, LoggedError
from holter.records import Collective, Evidence, Finding

DETECTOR = "message"
MEMORY_XIDS = frozenset({48, 63, 64, 94, 95})
LINK_XIDS = frozenset({74})
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen|^<")
MANY_OVERFLOWS = 16
"""Number of overflows in a row from which on they are no longer the scaler's search for its scale."""
MIN_LOW_OVERFLOWS, LOW_SCALE = 5, 4
"""Smaller number of overflows that is no search either if it leads to so low a scale, which would mean gradients beyond
sixteen thousand."""
TINY_SCALE = 2.0**-10
"""Scale at or below which two overflows are enough: it would mean gradients beyond sixty million."""
MANY_ROWS = 12
"""Number of rows of numbers after an error from which on we conclude that training has continued in spite of it."""
SURVIVED = frozenset({"traceback", "connection_lost", "worker_killed", "device_oom", "label_range", "loss_stopped"})
"""Errors that a script can catch, or after which it can be started again."""
FACTS = {
    "device_oom": "is_out_of_memory", "kernel_oom": "is_out_of_memory", "shared_memory": "is_worker_killed", "killed": "is_killed", "ecc": "is_memory_error",
    "unfinished_reduction": "is_unreduced", "unused_indices": "is_unreduced", "no_graph": "is_without_graph", "empty_optimizer": "is_empty_optimizer",
    "device_assert": "is_out_of_range", "label_range": "is_out_of_range", "anomaly": "is_anomaly", "minimum_scale": "is_every_step_skipped",
    "loss_stopped": "is_loss_stopped", "device_error": "is_device_error", "segfault": "is_signal", "connection_lost": "is_connection_lost", "gloo_timeout": "is_timed_out",
    "watchdog_stuck": "is_watchdog_stuck", "unreachable": "is_unreachable",
}  # fmt: skip
ORDER = (
    "xid", "ecc", "kernel_oom", "device_oom", "shared_memory", "worker_killed", "fingerprint", "monitored_barrier", "unused_indices", "unfinished_reduction", "no_graph",
    "empty_optimizer", "device_assert", "label_range", "anomaly", "minimum_scale", "overflow", "segfault", "root_signal", "traceback", "loss_stopped", "watchdog",
    "watchdog_stuck", "work_status", "killed", "device_error", "unreachable", "gloo_timeout", "root_cause", "connection_lost", "child_failed",
)  # fmt: skip
"""Kinds of errors, those that explain others first: a lost rank, then an exception of the script, then ranks that waited."""
VICTIM = re.compile(
    r"closed by peer|reset by peer|NCCL|timed? ?out|Timed out|DistBackendError|DistStoreError|DistNetworkError|connectFullMesh|gloo/transport|ChildFailedError|ProcessRaisedException|broken pipe",
    re.IGNORECASE,
)

DEVICE = re.compile(
    r"CUDA error: (?:an illegal|misaligned|unspecified launch|uncorrectable|the launch timed out|unknown error)|HIP error"
)
LOST = re.compile(
    r"loss (?:is|became|was) (?:nan|inf)|(?:nan|infinite) loss|loss became infinite or nan", re.IGNORECASE
)
"""Matches the exception of a script that checks its own loss."""
LAUNCHER = re.compile(r"ChildFailedError|CalledProcessError")
"""Matches the exception of a launcher when a rank has failed, which has no further information."""


def judge(errors: Sequence[LoggedError], num_ranks: int) -> Iterator[Finding]:
    """Yield at most one finding, for the error that explains the others."""
    known = [
        error
        for error in errors
        if error.kind != "variance_warning"
        and not (error.kind == "overflow" and not _is_collapse(error))
        and not (error.kind in SURVIVED and error.num_rows_after >= (2 if "is_bare" in error.values else MANY_ROWS))
    ]
    has_summary = any(error.kind == "root_cause" for error in known)
    # Before its summary, or instead of one, the launcher says in one line which of its processes failed first.
    known = [
        _as_root(error)
        for error in known
        if error.kind != "process_failed" or ("code" in error.values and not has_summary)
    ]
    if not known:
        return
    lead = min(known, key=lambda error: (_place(error), error.line))
    facts, ranks, summary, collective = _verdict(lead, known, num_ranks)
    if not facts:
        return
    others = [error for error in known if error is not lead and error.kind != "child_failed"]
    yield Finding(
        detector=DETECTOR, severity="warning" if "is_scale_tiny" in facts else "critical", first_step=lead.step, detected_step=lead.step, ranks=ranks, summary=summary, facts=facts, collective=collective,
        evidence=(_evidence(lead), *_frames(lead), *(_evidence(error) for error in others[:6])),
    )  # fmt: skip


def _is_collapse(error: LoggedError) -> bool:
    """Whether a loss scaler skipped more steps than a search for its scale: very many, or down to a scale that no gradient should need."""
    has_gone_on = error.num_rows_after >= MANY_ROWS
    lowest, at_floor = float(error.values.get("lowest", "inf")), int(error.values.get("at_floor", "0"))
    is_low = at_floor > 1 or (error.num_times >= MIN_LOW_OVERFLOWS and lowest <= LOW_SCALE)
    is_low |= error.num_times > 1 and lowest <= TINY_SCALE
    return error.num_times >= MANY_OVERFLOWS or (is_low and not has_gone_on)


def _as_root(error: LoggedError) -> LoggedError:
    if error.kind != "process_failed":
        return error
    local = error.values["local"]
    values = {"code": error.values["code"], "exitcode": error.values["code"], "rank": f"{local} of its host"}
    return replace(error, kind="root_cause", rank=int(local), values=values)


def _place(error: LoggedError) -> int:
    kind = error.kind
    if kind == "traceback" and LAUNCHER.search(error.text):
        return len(ORDER)
    if kind == "traceback" and DEVICE.search(error.text):
        # The line that raises a device error is seldom the one that caused it.
        kind = "device_error"
    if kind == "traceback" and LOST.search(error.text):
        kind = "loss_stopped"
    if kind == "traceback" and not error.values.get("type") and all(LIBRARY.search(one.file) for one in error.frames):
        # The traceback ends before its message, and none of its frames is in the script's own code.
        kind = "root_cause"
    if kind == "traceback" and VICTIM.search(error.text):
        # A gloo timeout is reported twice: as a traceback, and as the message in it.
        kind = "connection_lost"
    if kind == "root_cause" and error.values.get("code", "").startswith("-") and error.values.get("code") != "-15":
        kind = "root_signal"
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


Verdict = tuple[dict[str, bool], tuple[int, ...], str, Collective | None]
Said = tuple[dict[str, bool], str]


def _verdict(lead: LoggedError, known: Sequence[LoggedError], num_ranks: int) -> Verdict:
    ranks = _ranks(lead, known)
    text = lead.text if len(lead.text) < 200 else f"{lead.text[:200]}..."  # noqa: PLR2004 - a sentence
    on = f" on rank {ranks[0]}" if len(ranks) == 1 else ""
    match lead.kind:
        case "watchdog" | "work_status":
            return _waiting(known, num_ranks)
        case "gloo_timeout":
            return _silent(known, num_ranks, text)
        case "monitored_barrier":
            missing = tuple(int(rank) for rank in re.findall(r"\d+", lead.values["missing"]))
            return {"is_behind": True}, missing, f"{_listed(missing)} never came to a barrier.", None
        case "fingerprint":
            other = lead.values.get("other_operation", lead.values.get("operation"))
            fact = "is_order" if lead.values.get("operation") != other else "is_shape"
            return {fact: True}, (int(lead.values["rank"]),), f"Ranks call different collectives: {text}", None
    facts, said = _OF_KIND[lead.kind](lead, on, text) if lead.kind in _OF_KIND else _plain(lead, on, text)
    return (facts, ranks, said, None) if facts else ({}, (), "", None)


def _plain(lead: LoggedError, on: str, text: str) -> Said:
    fact = FACTS.get(lead.kind, "")
    times = f", {lead.num_times} times" if lead.num_times > 1 else ""
    return ({fact: True} if fact else {}), f"The log says{on}{times}: {text}"


def _xid(lead: LoggedError, _on: str, _text: str) -> Said:
    number = int(lead.values["number"])
    fact = "is_memory_error" if number in MEMORY_XIDS else "is_link_error" if number in LINK_XIDS else "is_device_fault"
    return {fact: True}, f"The driver reported Xid {number} of device {lead.values.get('device', '?')}."


def _worker(lead: LoggedError, on: str, text: str) -> Said:
    is_killed = any(word in lead.values.get("signal", "") for word in ("illed", "Bus"))
    return {"is_worker_killed" if is_killed else "is_exception": True}, f"A worker of the data loader ended{on}: {text}"


def _overflow(lead: LoggedError, _on: str, _text: str) -> Said:
    lowest = float(lead.values.get("lowest", "inf"))
    scale = f", down to a scale of {lowest:g}" if lowest < 64 else ""  # noqa: PLR2004 - a usual scale says nothing
    is_every = lead.num_times >= MIN_LOW_OVERFLOWS or int(lead.values.get("at_floor", "0")) > 1
    fact = "is_every_step_skipped" if is_every else "is_scale_tiny"
    return {fact: True}, f"The loss scaler skipped {lead.num_times} steps{scale}."


def _root(lead: LoggedError, _on: str, _text: str) -> Said:
    code = lead.values.get("code", "")
    facts = {"is_signal" if code.startswith("-") else "is_exit_code": True} | ({"is_killed": True} if code == "-9" else {})  # fmt: skip
    return (
        facts,
        f"The launcher says that rank {lead.values.get('rank', '?')} failed first, with exit code {lead.values.get('exitcode', '?')}.",
    )


def _raised(lead: LoggedError, on: str, text: str) -> Said:
    if DEVICE.search(lead.text):
        return {"is_device_error": True}, f"A kernel of the device failed{on}: {text}"
    if VICTIM.search(lead.text):
        return {"is_connection_lost": True}, f"A rank lost its peers{on}: {text}"
    if LOST.search(lead.text):
        return {"is_loss_stopped": True}, f"The script stopped at its own loss{on}: {text}"
    return {"is_exception": True}, f"The script raised{on}: {text}"


_OF_KIND: Mapping[str, Callable[[LoggedError, str, str], Said]] = {
    "xid": _xid, "worker_killed": _worker, "overflow": _overflow, "root_cause": _root, "traceback": _raised,
}  # fmt: skip


def _ranks(lead: LoggedError, known: Sequence[LoggedError]) -> tuple[int, ...]:
    """Return the ranks that report the leading error, or if none does, those that the launcher names."""
    said = {
        error.rank
        for error in known
        if error.kind == lead.kind and error.rank is not None and _unranked(error.text) == _unranked(lead.text)
    }
    if not said:
        said = {error.rank for error in known if error.kind == "root_cause" and error.rank is not None}
    return tuple(sorted(rank for rank in said if rank is not None))


def _unranked(text: str) -> str:
    """Return the beginning of a message without its rank, to compare messages of different ranks."""
    return re.sub(r"[Rr]ank ?\d+", "rank", text)[:60]


def _waiting(known: Sequence[LoggedError], num_ranks: int) -> Verdict:
    """Judge a timeout: find which ranks are missing, by the sequence numbers of all ranks that report."""
    spoke = [error for error in known if error.kind in {"watchdog", "work_status"} and error.rank is not None]
    calls: dict[int, tuple[int, str, str]] = {}
    for error in spoke:
        if error.rank is not None and "operation" in error.values:
            call = (int(error.values["sequence"]), error.values["operation"], error.values.get("numel", ""))
            calls[error.rank] = min(call, calls.get(error.rank, call))
    enqueued = _enqueued(spoke)
    at = min((int(error.values["sequence"]) for error in spoke if "sequence" in error.values), default=max(enqueued.values(), default=-1))  # fmt: skip
    sequence, operation, _ = min(calls.values(), default=(at, "", ""))
    collective = Collective(group="", sequence=sequence, operation=operation.lower() or "?")
    waiting = sorted({error.rank for error in spoke if error.rank is not None})
    behind = tuple(rank for rank, number in sorted(enqueued.items()) if number < max(enqueued.values())) or _earlier(calls)  # fmt: skip
    what = f"{operation or 'call'} #{sequence}"
    timed_out = {"is_timed_out": True}
    if behind:
        named = f"{_listed(behind)} {'is' if len(behind) == 1 else 'are'} behind: others wait in {what}."
        return {"is_behind": True} | timed_out, behind, named, collective
    if (apart := _apart(calls, sequence)) is not None:
        return *apart, collective
    silent = tuple(rank for rank in range(num_ranks) if rank not in waiting)
    # A single rank's log says nothing about the others.
    is_cut = any("is_cut" in error.values for error in spoke)
    if silent and len(silent) <= len(waiting) and len(waiting) > 1 and not is_cut:
        named = (
            f"{_listed(silent)} {'says' if len(silent) == 1 else 'say'} nothing while all others time out in {what}."
        )
        is_last = len({error.file for error in spoke}) == 1 and any("is_last" in error.values for error in spoke)
        return {"is_maybe_silent" if is_last else "is_silent": True} | timed_out, silent, named, collective
    why = "the log ends while the ranks still speak" if is_cut else "who is missing cannot be told from this log"
    return timed_out, (), f"{_listed(waiting)} timed out in {what}; {why}.", collective


def _listed(ranks: Sequence[int]) -> str:
    """Name ranks: `Rank 3`, `Ranks 1, 2`."""
    return f"Rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def _enqueued(spoke: Sequence[LoggedError]) -> dict[int, int]:
    """Return rank -> number of its last enqueued call, in the group that most ranks report, because each group counts by itself."""
    groups: dict[str, dict[int, int]] = {}
    for error in spoke:
        if error.rank is not None and "enqueued" in error.values:
            of = groups.setdefault(error.values.get("group", ""), {})
            of[error.rank] = max(int(error.values["enqueued"]), of.get(error.rank, -1))
    return max(groups.values(), key=lambda of: (len(of), len(set(of.values()))), default={})


def _apart(calls: Mapping[int, tuple[int, str, str]], sequence: int) -> tuple[dict[str, bool], tuple[int, ...], str] | None:  # fmt: skip
    """Find ranks that are in different calls with one number, or if few ranks report, at numbers far apart; None if there are none."""
    at_one = {call for call in calls.values() if call[0] == sequence}
    if len({call[1] for call in at_one}) > 1 or len({call[2] for call in at_one}) > 1:
        counts = {call: [rank for rank, own in calls.items() if own == call] for call in at_one}
        odd = min(counts.values(), key=len)
        fact = "is_order" if len({call[1] for call in at_one}) > 1 else "is_shape"
        named = ", ".join(sorted(f"{call[1]} of {call[2]}" for call in at_one))
        return {fact: True}, tuple(sorted(odd)), f"At #{sequence} ranks call different things: {named}."
    first = tuple(sorted(rank for rank, call in calls.items() if call[0] == sequence))
    if len(first) < len(calls):
        others = max(call[0] for call in calls.values())
        return {"is_apart": True, "is_timed_out": True}, first, f"{_listed(first)} waited at #{sequence}, others at #{others}: in one group, they are behind."  # fmt: skip
    return None


def _silent(known: Sequence[LoggedError], num_ranks: int, text: str) -> Verdict:
    """Judge gloo's timeout: find the ranks that report that they wait, and so the others, for which they wait."""
    waiting = {error.rank for error in known if error.kind == "gloo_timeout" and error.rank is not None}
    silent = tuple(rank for rank in range(num_ranks) if rank not in waiting)
    if not waiting or not silent or len(silent) > len(waiting):
        return {"is_timed_out": True}, (), f"A rank waited for the others in vain: {text}", None
    says = f"{_listed(silent)} {'says' if len(silent) == 1 else 'say'} nothing while all others time out: {text}"
    return {"is_silent": True, "is_timed_out": True}, silent, says, None


def _earlier(calls: Mapping[int, tuple[int, str, str]]) -> tuple[int, ...]:
    """Return the few ranks whose call has a lower number than that of most; empty if there are none."""
    numbers = sorted(number for number, _, _ in calls.values())
    usual = numbers[len(numbers) // 2] if numbers else 0
    few = tuple(sorted(rank for rank, (number, _, _) in calls.items() if number < usual))
    return few if 2 * len(few) < len(calls) else ()


def _evidence(error: LoggedError) -> Evidence:
    times = f" ({error.num_times} times)" if error.num_times > 1 else ""
    who = f"rank {error.rank}: " if error.rank is not None else ""
    return Evidence(
        kind="message",
        summary=f"{who}{error.text}{times} ({error.file}, line {error.line})",
        values={
            "file": error.file,
            "line": error.line,
            "step": error.step,
            "rank": error.rank,
            **{name: value for name, value in error.values.items() if value},
        },
    )


def own_frame(frames: Sequence[FrameAt]) -> FrameAt | None:
    """Return the innermost frame of the script's own code."""
    return next((frame for frame in reversed(frames) if not LIBRARY.search(frame.file)), frames[-1] if frames else None)


def _frames(error: LoggedError) -> Iterator[Evidence]:
    frame = own_frame(error.frames)
    if frame is not None:
        code = f": `{frame.code}`" if frame.code else ""
        yield Evidence(
            kind="code",
            summary=f"{frame.file}, line {frame.line}, in {frame.function or '?'}{code}",
            values={"file": frame.file, "line": frame.line, "function": frame.function},
        )
