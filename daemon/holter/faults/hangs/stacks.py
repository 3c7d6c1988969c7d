"""Reads stacks: what a thread is doing, from its own stack, and where many ranks are, as one tree.

What a thread is doing: its stack is read from the inside out, and every frame is looked up in the tables below.
    context      compile, checkpoint, evaluation, data: holds for everything that runs beneath it, whoever's code that is
    collective   only if nothing of the script's own runs beneath it: a hook of the script that spins is the script
    library      code that is neither torch's, nor a training framework's, nor the script's; input and output of the standard library
                 or of a file, other processes that are waited for, a person at its debugger too
    compute      an operation of torch's own that runs on the processor; not one that waits for a device
    script       all other code
    plumbing     torch, frameworks, locks and queues of the standard library: says nothing, its caller does

The innermost context wins, then the innermost of the rest. holter's own frames are skipped.

The tree: which ranks are where, outermost frame first, common frames once; bounded, however many ranks and frames there are.

    all 4 ranks
      <module> (train.py:88)
      main (train.py:61)
    ├─ ranks 0,2-3
    │    backward (torch/_tensor.py:630)
    │    c10d::Reducer::finalize_backward [native] (libtorch_cpu.so)
    └─ rank 1
         spin (train.py:31)
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeVar

from holter.records import Evidence, Exam, Frame, ThreadStack

FrameKind = Literal[
    "collective", "compile", "checkpoint", "evaluation", "data", "library", "compute", "device", "script", "plumbing", "own",
]  # fmt: skip

CONTEXTS = {"compile", "checkpoint", "evaluation", "data"}

OWN = re.compile(
    r"(^|/)holter/(rank|frameworks|halting|page|sidecar|cli)/|(^|/)holter/(__main__|clock|files)\.py$|/holter_kernels/"
)
RUNNERS = re.compile(r"^<frozen runpy>$|(^|/)runpy\.py$")
INSTALLED = re.compile(r"(^|/)(site|dist)-packages/")
STANDARD = re.compile(r"(^|/)lib(64)?/python3(\.\d+)?t?/|^<frozen ")
TORCH = re.compile(r"(^|/)(torch|functorch|torchgen)/")
FRAMEWORKS = re.compile(
    r"(^|/)(accelerate|deepspeed|transformers|lightning|pytorch_lightning|lightning_fabric|peft|trl|diffusers|timm|"
    r"torchvision|torchaudio|torchtune|torchtitan|megatron|fairscale|xformers|flash_attn|apex|composer|ignite|fastai)/"
)

FILES: tuple[tuple[FrameKind, re.Pattern[str], re.Pattern[str] | None], ...] = (
    # A compiled model passes through these whenever it runs.
    ("plumbing", re.compile(r"(^|/)torch/_dynamo/(eval_frame|external_utils|utils)\.py$"), None),
    ("plumbing", re.compile(r"(^|/)torch/_inductor/(output_code|utils|cudagraph_\w+|runtime/\w+)\.py$"), None),
    ("compute", re.compile(r"(^|/)torchinductor_[^/]+/"), None),
    ("compile", re.compile(r"(^|/)torch/(_dynamo|_inductor|_functorch/_aot_autograd/\w*(graph|frontend)\w*)(/|\.py$)"), None),
    ("compile", re.compile(r"(^|/)torch/utils/(cpp_extension|file_baton|_cpp_extension_versioner)\.py$"), None),
    ("compile", re.compile(r"(^|/)triton/(compiler|backends)/|(^|/)triton/runtime/build\.py$"), None),
    ("checkpoint", re.compile(r"(^|/)torch/serialization\.py$|(^|/)torch/distributed/checkpoint/"), None),
    ("checkpoint", re.compile(r"(^|/)safetensors/|(^|/)accelerate/checkpointing\.py$|/checkpoint_engine/"), None),
    ("data", re.compile(r"(^|/)torch/utils/data/|(^|/)site-packages/(datasets|webdataset|streaming|torchdata)/"), None),
    # Pickling may take long, and does not wait for other ranks.
    ("library", re.compile(r"(^|/)torch/distributed/distributed_c10d\.py$"), re.compile(r"^_(object_to_tensor|tensor_to_object)$")),
    ("collective", re.compile(r"(^|/)torch/distributed/(distributed_c10d|rendezvous|_functional_collectives\w*)\.py$"), None),
    ("collective", re.compile(r"(^|/)torch/distributed/(utils|nn/functional)\.py$"), re.compile(r"^_?(sync|verify|all|forward)")),
    (
        "collective",
        re.compile(r"(^|/)torch/nn/parallel/distributed\.py$"),
        re.compile(r"broadcast_coalesced|^_sync|^_verify|^_pre_forward$|^_ddp_init_helper$|^_check_global"),
    ),
)  # fmt: skip
"""What a file, or some of its functions, means for a thread in it; the first match counts."""

NATIVE: tuple[tuple[FrameKind, re.Pattern[str]], ...] = (
    ("collective", re.compile(r"\bgloo::|\bc10d::|\bnccl[A-Z]\w+|\bucc_|\bMPI_")),
    ("checkpoint", re.compile(r"\bcaffe2::serialize::")),
    ("device", re.compile(r"cuda|CUDA|\bcu[A-Z]\w+|\bhip[A-Z]|\brocr::|\bxpu|[sS]ynchronize")),
    (
        "compute",
        re.compile(r"\bat::(native|_ops|cpu|meta|redispatch|functorch|internal)\b|\bmkl_\w|\bdnnl(::|_)|\bcblas_"),
    ),
    (
        "library",
        re.compile(
            r"^(__)?(libc_)?(wait4|waitpid|waitid|do_system|fsync|fdatasync|msync|p?(read|write)v?(64)?)$|^os_system"
        ),
    ),
)

TRAINS = re.compile(r"(^|_)(train|fit)|forward|activation|gradient|recompute", re.IGNORECASE)
NAMES: tuple[tuple[FrameKind, re.Pattern[str]], ...] = (
    ("checkpoint", re.compile(r"^_*(maybe_|do_|async_)?save(_.*|d?)$|checkpoint|^(dump|write|load)_(ckpt|state|model)", re.IGNORECASE)),
    (
        "evaluation",
        re.compile(
            r"^_*((run|do|maybe|model|inner)_)*(eval|evaluate|evaluation|validate|validation|prediction)"
            r"(_(model|epoch|one_epoch|loop|step|loss|set|dataset|all|metrics|perplexity|ppl|policy|generation)\w*)?$"
            r"|_(eval|evaluate|evaluation|validation)$",
            re.IGNORECASE,
        ),
    ),
)  # fmt: skip
"""Names of functions in a script or a training framework, by what they do; `TRAINS` excludes functions that also train."""

SHOWING = re.compile(
    r"^_*((maybe|do|run|async|rank0|main)_)*(plot|visuali[sz]e|upload|render|generate)(_\w+)?$"
    r"|^_*((maybe|do|run)_)*(log|sample|decode|draw|make|report|show|write)_(\w+_)?"
    r"(images?|samples?|videos?|audios?|figures?|plots?|tables?|artifacts?|examples?|generations?|grids?|reports?|texts?)$",
    re.IGNORECASE,
)
"""Names of the script's functions in which one rank makes something for people to see, while the others wait."""

INPUT_OUTPUT = re.compile(
    r"(^|/)(pdb|bdb|cmd|code|socket|ssl|subprocess|shutil|ftplib|smtplib|tarfile|zipfile|gzip|bz2|lzma|pickle|_compression)\.py$"
    r"|(^|/)python3[^/]*/(http|urllib|asyncio|json|sqlite3|xml|concurrent/futures)/"
    r"|(^|/)python3[^/]*/multiprocessing/(pool|popen_\w+)\.py$"
)
T = TypeVar("T")
MAX_LINES = 160
MAX_BRANCHES = 8
"""Number of branches at one place; the largest and the smallest are shown, the rest are counted."""
MAX_RUN = 24
"""Number of frames in a row without a branch; the middle of a longer run is counted."""
MAX_RANGES = 8
MAX_FUNCTION = 80
MAX_PATH = 56
MAX_PLACES = 4
"""Number of places in a summary."""
PASSED_THROUGH = {"_wrapped_call_impl", "_call_impl", "wrapper", "inner", "decorate_context"}
"""Functions of torch that only call another."""
NATIVE_PASSAGES = re.compile(
    r"^(torch::autograd::|std::(_Function_handler|function|thread|invoke|__)|THP|pybind11::|c10::(Dispatcher|impl)|"
    r"_?Py(Eval|Object|Vectorcall|Run|_)|cfunction_|method_|slot_tp|start_thread$|__libc_start|clone3?$)"
)
_PLACE = ("function", "file", "line", "activity")


def activity(frames: Sequence[Frame]) -> str:
    """Return what a thread with these frames, innermost first, is doing.

    One of the contexts, `collective`, `library`, `compute`, `script` or `unknown`.
    """
    nearest, is_on_device = "unknown", False
    for frame in frames:
        kind = _kind_of(frame)
        if kind in CONTEXTS or (kind == "collective" and nearest == "unknown"):
            return kind
        is_on_device = is_on_device or kind == "device"
        if nearest == "unknown" and (kind in {"library", "script"} or (kind == "compute" and not is_on_device)):
            nearest = kind
    return nearest


def is_own_code(frames: Sequence[Frame]) -> bool:
    """Whether the script's own lines run or wait, whatever they are for.

    An evaluation that loops for ever is the script looping.
    """
    telling = (frame for frame in frames if _kind_of(frame) not in {"plumbing", "own", "device"})
    innermost = next(telling, None)
    return innermost is not None and not innermost.is_native and _is_script(innermost)


def operation(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Return which operation of torch it is, and the line that called it: two looks at one long operation return the same."""
    for number, frame in enumerate(frames):
        if not frame.is_native:
            outermost = next((one for one in reversed(frames[:number]) if _kind_of(one) == "compute"), None)
            return outermost.function if outermost else "", frame.function, frame.file, str(frame.line)
    return ()


@lru_cache(maxsize=4096)
def _kind_of(frame: Frame) -> FrameKind:
    """Return the kind of one frame by itself."""
    if frame.is_native:
        return next((kind for kind, pattern in NATIVE if pattern.search(frame.function)), "plumbing")
    file = frame.file.replace("\\", "/")
    if OWN.search(file) or RUNNERS.search(file):
        return "own"
    function = frame.function.rpartition(".")[2]
    for kind, pattern, functions in FILES:
        if pattern.search(file) and (functions is None or functions.search(function)):
            return kind
    return _of_owner(file, function)


def _of_owner(file: str, function: str) -> FrameKind:
    """Return the kind of a frame by whose code it is."""
    if INSTALLED.search(file):
        if TORCH.search(file):
            return "plumbing"
        return _named(function) or ("plumbing" if FRAMEWORKS.search(file) else "library")
    if STANDARD.search(file):
        return "library" if INPUT_OUTPUT.search(file) else "plumbing"
    return _named(function) or ("evaluation" if SHOWING.search(function) and not TRAINS.search(function) else "script")


def _named(name: str) -> FrameKind | None:
    if TRAINS.search(name):
        return None
    return next((kind for kind, pattern in NAMES if pattern.search(name)), None)


def main_stack(exam: Exam) -> ThreadStack | None:
    """Return the stack of the thread that trains."""
    return next((stack for stack in exam.stacks if stack.is_main), None)


def ranges(ranks: Sequence[int]) -> str:
    """Format ranks: `0-2,5`; if there are very many ranges, the first few and the number of ranks."""
    pieces: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1] = (pieces[-1][0], rank)
        else:
            pieces.append((rank, rank))
    text = ",".join(_range(*piece) for piece in pieces[:MAX_RANGES])
    return text if len(pieces) <= MAX_RANGES else f"{text},... ({len(set(ranks))} ranks)"


def merged(stacks: Mapping[int, Sequence[Frame]]) -> list[str]:
    """Return the tree as lines for a fixed-width block; each rank's frames are given innermost first."""
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
    """Return where the ranks' main threads are; None if there is no stack."""
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


@dataclass
class _Node:
    """Ranks that share all frames so far, and their next frames."""

    ranks: list[int] = field(default_factory=list)
    inner: dict[Frame, "_Node"] = field(default_factory=dict)

    def add(self, rank: int, frames: Sequence[Frame]) -> None:
        node = self
        for frame in frames:
            node = node.inner.setdefault(frame, _Node())
            node.ranks.append(rank)


def _column(frames: Sequence[Frame]) -> list[str]:
    """Return one rank's stack by itself, outermost frame first."""
    return _bounded([_frame(frame) for frame in _telling_frames(frames)])


def _bounded(run: list[str]) -> list[str]:
    """Replace the middle of a long run by the number of its frames."""
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
    """Yield the branches, the largest first; ranks whose stack ends here while others go on are a branch of their own."""
    # These ranks have no further frame: they are in the frame above.
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
    """Return the frames outermost first, without those that tell nothing."""
    # An address without a name differs in every process.
    return (frame for frame in reversed(frames) if not frame.function.startswith("0x") and _is_telling(frame))


@lru_cache(maxsize=4096)
def _is_telling(frame: Frame) -> bool:
    """Whether the frame is neither holter's own nor one that only passes a call on."""
    if frame.is_native:
        return not NATIVE_PASSAGES.search(frame.function)
    is_passage = frame.function.rpartition(".")[2] in PASSED_THROUGH and _short(frame.file).startswith("torch/")
    return not is_passage and _kind_of(frame) != "own"


def _place(frames: Sequence[Frame]) -> tuple[str, str, int]:
    """Return what the script called, and where: `all_reduce`, `train.py`, 61."""
    shown = list(_telling_frames(frames))
    if not shown:
        return "?", "", 0
    kinds = [_kind_of(frame) for frame in shown]
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
    """Remove brackets and what is in them, as in `c10d::Work::wait(std::chrono::...)`."""
    name = name.replace("(anonymous namespace)::", "")
    depth, kept = 0, []
    for char in name:
        depth += char in "<("
        if not depth:
            kept.append(char)
        depth -= char in ">)" and depth > 0
    return "".join(kept).strip() or name


def _short(file: str) -> str:
    """Return the path below its folder for installed code; for the script's own, the end of a long path."""
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
    """Return the first and the last items if there are too many, and how many were left out."""
    if len(items) <= limit:
        return list(items), 0
    return [*items[: limit // 2], *items[-(limit - limit // 2) :]], len(items) - limit
