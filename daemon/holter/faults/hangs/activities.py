"""What a thread is doing, read from its stack.

A stack is read from the inside out, and every frame is looked up in the tables below:

    context      compile, checkpoint, evaluation, data: holds for all that runs beneath it, whoever's code that is
    collective   only where nothing of the script's own runs beneath it: a hook of the script's that spins is the script
    library      code that is neither torch's, nor a training framework's, nor the script's; input and output of the standard library
                 or of a file, other processes that are waited for, a person at its debugger too
    compute      an operation of torch's own that runs on the processor; not one that waits for a device
    script       all other code
    plumbing     torch, frameworks, locks and queues of the standard library: says nothing, its caller does

The innermost context wins, then the innermost of the rest. holter's own frames are skipped.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from holter.records import Frame

FrameKind = Literal[
    "collective",
    "compile",
    "checkpoint",
    "evaluation",
    "data",
    "library",
    "compute",
    "device",
    "script",
    "plumbing",
    "own",
]

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
    # Pickling may take long, and is no wait.
    ("library", re.compile(r"(^|/)torch/distributed/distributed_c10d\.py$"), re.compile(r"^_(object_to_tensor|tensor_to_object)$")),
    ("collective", re.compile(r"(^|/)torch/distributed/(distributed_c10d|rendezvous|_functional_collectives\w*)\.py$"), None),
    ("collective", re.compile(r"(^|/)torch/distributed/(utils|nn/functional)\.py$"), re.compile(r"^_?(sync|verify|all|forward)")),
    (
        "collective",
        re.compile(r"(^|/)torch/nn/parallel/distributed\.py$"),
        re.compile(r"broadcast_coalesced|^_sync|^_verify|^_pre_forward$|^_ddp_init_helper$|^_check_global"),
    ),
)  # fmt: skip
"""What a file says, perhaps only in some of its functions; the first match counts."""

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
"""What the script, or a training framework, calls a function; none that also trains."""

SHOWING = re.compile(
    r"^_*((maybe|do|run|async|rank0|main)_)*(plot|visuali[sz]e|upload|render|generate)(_\w+)?$"
    r"|^_*((maybe|do|run)_)*(log|sample|decode|draw|make|report|show|write)_(\w+_)?"
    r"(images?|samples?|videos?|audios?|figures?|plots?|tables?|artifacts?|examples?|generations?|grids?|reports?|texts?)$",
    re.IGNORECASE,
)
"""What the script calls a function in which one rank makes something for people to see, while the others wait."""

INPUT_OUTPUT = re.compile(
    r"(^|/)(pdb|bdb|cmd|code|socket|ssl|subprocess|shutil|ftplib|smtplib|tarfile|zipfile|gzip|bz2|lzma|pickle|_compression)\.py$"
    r"|(^|/)python3[^/]*/(http|urllib|asyncio|json|sqlite3|xml|concurrent/futures)/"
    r"|(^|/)python3[^/]*/multiprocessing/(pool|popen_\w+)\.py$"
)


def activity(frames: Sequence[Frame]) -> str:
    """What a thread with these frames, innermost first, is doing.

    A context, `collective`, `library`, `compute`, `script` or `unknown`.
    """
    nearest, is_on_device = "unknown", False
    for frame in frames:
        kind = kind_of(frame)
        if kind in CONTEXTS or (kind == "collective" and nearest == "unknown"):
            return kind
        is_on_device = is_on_device or kind == "device"
        if nearest == "unknown" and (kind in {"library", "script"} or (kind == "compute" and not is_on_device)):
            nearest = kind
    return nearest


def is_own_code(frames: Sequence[Frame]) -> bool:
    """Whether the script's own lines run, or wait, whatever they are for: an evaluation that loops is the script that loops."""
    telling = (frame for frame in frames if kind_of(frame) not in {"plumbing", "own", "device"})
    innermost = next(telling, None)
    if innermost is None or innermost.is_native:
        return False
    file = innermost.file.replace("\\", "/")
    return not INSTALLED.search(file) and not STANDARD.search(file)


def operation(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Which operation of torch's it is, and whose line called it: two looks at one long operation show the same."""
    for number, frame in enumerate(frames):
        if not frame.is_native:
            outermost = next((one for one in reversed(frames[:number]) if kind_of(one) == "compute"), None)
            return outermost.function if outermost else "", frame.function, frame.file, str(frame.line)
    return ()


@lru_cache(maxsize=4096)
def kind_of(frame: Frame) -> FrameKind:
    """What one frame says, by itself."""
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
    """What a frame says by whose code it is."""
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
