"""Many ranks' stacks as one tree: who stands where, what is common said once.

    all 4 ranks
      <module> (train.py:88)
      main (train.py:61)
    ├─ ranks 0,2-3
    │    backward (torch/_tensor.py:630)
    │    c10d::Reducer::finalize_backward [native] (libtorch_cpu.so)
    └─ rank 1
         spin (train.py:31)

Outermost first, as a traceback reads. Bounded, whatever the number of ranks and however deep their stacks are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from holter.faults.hangs.activities import INSTALLED, STANDARD, activity, kind_of
from holter.records import Evidence, Exam, Frame, ThreadStack

T = TypeVar("T")

MAX_LINES = 160
MAX_BRANCHES = 8
"""At one place; the largest and the smallest are shown, the rest is counted."""
MAX_RUN = 24
"""Frames in a row without a branch: the middle of a longer run is counted."""
MAX_RANGES = 8
MAX_FUNCTION = 80
MAX_PATH = 56
MAX_PLACES = 4
"""In a summary."""

PASSED_THROUGH = {"_wrapped_call_impl", "_call_impl", "wrapper", "inner", "decorate_context"}
"""Functions of torch that only call another."""
NATIVE_PASSAGES = re.compile(
    r"^(torch::autograd::|std::(_Function_handler|function|thread|invoke|__)|THP|pybind11::|c10::(Dispatcher|impl)|"
    r"_?Py(Eval|Object|Vectorcall|Run|_)|cfunction_|method_|slot_tp|start_thread$|__libc_start|clone3?$)"
)


def main_stack(exam: Exam) -> ThreadStack | None:
    """The stack of the thread that trains."""
    return next((stack for stack in exam.stacks if stack.is_main), None)


def ranges(ranks: Sequence[int]) -> str:
    """`0-2,5`; of very many pieces the first few and how many ranks there are."""
    pieces: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1] = (pieces[-1][0], rank)
        else:
            pieces.append((rank, rank))
    text = ",".join(_range(*piece) for piece in pieces[:MAX_RANGES])
    return text if len(pieces) <= MAX_RANGES else f"{text},... ({len(set(ranks))} ranks)"


def merged(stacks: Mapping[int, Sequence[Frame]]) -> list[str]:
    """A tree of lines for a fixed-width block; frames of each rank innermost first."""
    root = _Node()
    for rank in sorted(stacks):
        if frames := list(_telling_frames(stacks[rank])):
            root.ranks.append(rank)
            root.add(rank, frames)
    lines = [_everyone(root.ranks, len(stacks)), *_lines(root, "  ", "")] if root.ranks else []
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"... and {len(lines) - MAX_LINES} more lines"]
    if without := sorted(set(stacks) - set(root.ranks)):
        lines.append(f"{_who(without)}: no stack")
    return lines


def evidence(exams: Mapping[int, Exam]) -> Evidence | None:
    """Where the ranks' main threads are; None if no stack was had."""
    found = {rank: stack.frames for rank, exam in exams.items() if (stack := main_stack(exam)) and stack.frames}
    if not found:
        return None
    places: dict[tuple[str, str, int, str], list[int]] = {}
    for rank, frames in sorted(found.items()):
        places.setdefault((*_place(frames), activity(frames)), []).append(rank)
    ordered = sorted(places.items(), key=lambda item: (-len(item[1]), item[1][0]))
    chosen, num_left = _ends(ordered, MAX_PLACES)
    said = [f"{_who(ranks)} in {_call(*place[:3])}" for place, ranks in chosen]
    if num_left:
        said.append(f"and {num_left} more places")
    kept, _ = _ends(ordered, 4 * MAX_PLACES)
    values = {
        "tree": merged(found),
        "ranks": {ranges(ranks): dict(zip(_PLACE, place, strict=True)) for place, ranks in kept},
        "columns": [
            {"ranks": _who(ranks), "activity": place[3], "frames": _column(found[ranks[0]])} for place, ranks in chosen
        ],
    }
    return Evidence(kind="stacks", summary="; ".join(said), values=values)


_PLACE = ("function", "file", "line", "activity")


@dataclass
class _Node:
    """Ranks that share all frames so far, and how they go on."""

    ranks: list[int] = field(default_factory=list)
    inner: dict[Frame, "_Node"] = field(default_factory=dict)

    def add(self, rank: int, frames: Sequence[Frame]) -> None:
        node = self
        for frame in frames:
            node = node.inner.setdefault(frame, _Node())
            node.ranks.append(rank)


def _column(frames: Sequence[Frame]) -> list[str]:
    """One rank's stack by itself, outermost first."""
    return _bounded([_frame(frame) for frame in _telling_frames(frames)])


def _bounded(run: list[str]) -> list[str]:
    """The middle of a long run is counted."""
    if len(run) <= MAX_RUN:
        return run
    head, tail = MAX_RUN // 3, MAX_RUN - MAX_RUN // 3
    return [*run[:head], f"... {len(run) - MAX_RUN} frames ...", *run[-tail:]]


def _lines(node: _Node, indent: str, trunk: str) -> Iterator[str]:
    run: list[str] = []
    while len(node.inner) == 1:
        frame, only = next(iter(node.inner.items()))
        if len(only.ranks) != len(node.ranks):
            break
        run.append(_frame(frame))
        node = only
    yield from (f"{indent}{text}" for text in _bounded(run))
    if node.inner:
        yield from _branches(node, trunk)


def _branches(node: _Node, trunk: str) -> Iterator[str]:
    """Largest first; ranks that stop here while others go on are a branch of their own."""
    # No frame: they stand in the frame above.
    here = sorted(set(node.ranks) - {rank for inner in node.inner.values() for rank in inner.ranks})
    branches = [_Node(inner.ranks, {frame: inner}) for frame, inner in node.inner.items()]
    if here:
        branches.append(_Node(here))
    branches.sort(key=lambda branch: (-len(branch.ranks), branch.ranks[0]))
    chosen, num_left = _ends(branches, MAX_BRANCHES)
    for number, branch in enumerate(chosen):
        if num_left and number == MAX_BRANCHES // 2:
            num_ranks = len(node.ranks) - sum(len(one.ranks) for one in chosen)
            yield f"{trunk}├─ {num_ranks} ranks in {num_left} other places"
        is_last = number == len(chosen) - 1
        bar = "   " if is_last else "│  "
        yield f"{trunk}{'└─' if is_last else '├─'} {_who(branch.ranks)}"
        if not branch.inner:
            yield f"{trunk}{bar}  here, in the frame above"
        yield from _lines(branch, f"{trunk}{bar}  ", f"{trunk}{bar}")


def _telling_frames(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Outermost first, without what tells nothing."""
    # An address without a name is another one in every process.
    return (frame for frame in reversed(frames) if not frame.function.startswith("0x") and _is_telling(frame))


@lru_cache(maxsize=4096)
def _is_telling(frame: Frame) -> bool:
    """Neither holter's own, nor one that only passes a call on."""
    if frame.is_native:
        return not NATIVE_PASSAGES.search(frame.function)
    is_passage = frame.function.rpartition(".")[2] in PASSED_THROUGH and _short(frame.file).startswith("torch/")
    return not is_passage and kind_of(frame) != "own"


def _place(frames: Sequence[Frame]) -> tuple[str, str, int]:
    """What the script called, and where: `all_reduce`, `train.py`, 61."""
    shown = list(_telling_frames(frames))
    if not shown:
        return "?", "", 0
    kinds = [kind_of(frame) for frame in shown]
    own = [number for number, frame in enumerate(shown) if not frame.is_native and _is_script(frame)]
    if not own:
        innermost = next((frame for frame in reversed(shown) if not frame.is_native), shown[-1])
        return _function(innermost), _short(innermost.file), innermost.line
    caller = shown[own[-1]]
    beneath = [number for number in range(own[-1] + 1, len(shown)) if not shown[number].is_native]
    collective = [number for number in beneath if kinds[number] == "collective"]
    called = next(iter(collective or beneath), own[-1])
    return _function(shown[called]), _short(caller.file), caller.line


def _is_script(frame: Frame) -> bool:
    file = frame.file.replace("\\", "/")
    return not INSTALLED.search(file) and not STANDARD.search(file)


def _frame(frame: Frame) -> str:
    place = _short(frame.file) + (f":{frame.line}" if frame.line else "")
    return " ".join([_function(frame), *(["[native]"] if frame.is_native else []), *([f"({place})"] if place else [])])


def _call(function: str, file: str, line: int) -> str:
    return f"{function} ({file}:{line})" if file and line else f"{function} ({file})" if file else function


def _function(frame: Frame) -> str:
    name = _without_arguments(frame.function) if frame.is_native else frame.function
    return name if len(name) <= MAX_FUNCTION else f"{name[: MAX_FUNCTION - 3]}..."


def _without_arguments(name: str) -> str:
    """`c10d::Work::wait(std::chrono::...)` without its brackets and what is in them."""
    name = name.replace("(anonymous namespace)::", "")
    depth, kept = 0, []
    for char in name:
        depth += char in "<("
        if not depth:
            kept.append(char)
        depth -= char in ">)" and depth > 0
    return "".join(kept).strip() or name


def _short(file: str) -> str:
    """For installed code the path below its folder; for the script's own the end of a long path."""
    file = file.replace("\\", "/")
    name = file.rpartition("/")[2]
    if name.endswith(".so") or ".so." in name:
        return name
    for folder in (INSTALLED, STANDARD):
        if match := list(folder.finditer(file)):
            return file[match[-1].end() :] or file
    return file if len(file) <= MAX_PATH else f".../{'/'.join(file.split('/')[-3:])}"[-MAX_PATH:]


def _everyone(ranks: Sequence[int], num_asked: int) -> str:
    return f"all {num_asked} ranks" if len(ranks) == num_asked > 2 else _who(ranks)  # noqa: PLR2004


def _who(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def _range(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first},{last}" if last == first + 1 else f"{first}-{last}"


def _ends(items: Sequence[T], limit: int) -> tuple[list[T], int]:
    """The first and the last of too many, and how many were left out."""
    if len(items) <= limit:
        return list(items), 0
    return [*items[: limit // 2], *items[-(limit - limit // 2) :]], len(items) - limit
