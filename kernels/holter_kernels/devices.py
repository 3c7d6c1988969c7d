"""The one place that knows device types: the implementation that reads each, its streams and its events.

cpu                       native code, or the reference
cuda (NVIDIA, and AMD under ROCm, which torch calls cuda too)     Triton; torch operations where Triton cannot be had
xpu, hpu, npu, mps, …     torch operations; streams and events of `torch.<type>` where there are any
meta                      nothing
"""

import contextlib
import ctypes
import importlib.util
import os
import tempfile
import threading
import warnings
from functools import lru_cache
from typing import Any

import torch

NON_BLOCKING = 1
"""Value of cudaStreamNonBlocking and hipStreamNonBlocking: such a stream does not wait for the default stream, nor does
that wait for it."""
_lock = threading.Lock()
_side_streams: dict[tuple[torch.device, str], Any] = {}
_said: set[str] = set()
_triton_failed: list[str] = []
warming: set[torch.device] = set()
"""Devices whose kernels `warm_up` is compiling."""


def say_once(sentence: str) -> None:
    """Warn with this sentence, but only once and not at every step."""
    if sentence not in _said:
        _said.add(sentence)
        with contextlib.suppress(Warning):  # made an error by whoever runs this: said all the same
            warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def module(device: torch.device) -> Any:
    """Return the module with a device type's streams and events, such as `torch.cuda`; None if there is none."""
    return getattr(torch, device.type, None)


def implementation(device: torch.device) -> str:
    """Return what reads this device: "native", "triton", "torch" or "none"."""
    if device.type == "cpu":
        return "native"
    if device.type == "meta":
        return "none"
    return "triton" if device.type == "cuda" and has_triton() else "torch"


@lru_cache(maxsize=1)
def _finds_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether Triton is installed and has not failed yet."""
    return _finds_triton() and not _triton_failed


def reads_as_host(kernel: Any) -> bool:
    """Whether this kernel runs in Triton's interpreter, which copies tensors to the host and reads the addresses in tables there."""
    return type(kernel).__name__ == "InterpretedFunction" and not getattr(kernel, "reads_devices", False)


def give_up_triton(error: BaseException) -> None:
    """Use torch operations from now on in this process, because no kernel could be compiled or launched."""
    _triton_failed.append(repr(error))
    reason = str(error).strip().splitlines()
    say_once(
        f"Triton could not run holter's kernels ({type(error).__name__}: {reason[0] if reason else ''}): "
        "statistics of GPU tensors are taken by torch operations, many times slower"
    )


@lru_cache(maxsize=1)
def prepare_triton_cache() -> None:
    """Give Triton a temporary cache directory if its own cannot be written, because it fails otherwise."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111 - as Triton finds it
    wanted = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")  # noqa: PTH118
    try:
        os.makedirs(wanted, exist_ok=True)  # noqa: PTH103
        with tempfile.TemporaryFile(dir=wanted):
            return
    except OSError:
        os.environ["TRITON_CACHE_DIR"] = directory = tempfile.mkdtemp(prefix="holter-triton-")
        say_once(f"Triton's cache {wanted} cannot be written: kernels are compiled to {directory} for this process")


def has_streams(device: torch.device) -> bool:
    """Whether a thread can choose streams to queue work beside the training's.

    `torch.cpu` has the functions but they do nothing.
    """
    return device.type != "cpu" and all(
        hasattr(module(device), name) for name in ("Stream", "Event", "current_stream", "stream")
    )


def obeys_flag(device: torch.device) -> bool:
    """Whether the device's fused optimizers are known to skip a step if `found_inf` says so, as CUDA's do."""
    return device.type == "cuda"


@lru_cache(maxsize=16)
def can_pin(kind: str) -> bool:
    """Whether host memory can be pinned for devices of this type, so that nobody waits for copies of it."""
    if kind in ("cpu", "meta"):
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except Exception:  # noqa: BLE001 - another maker's device: whatever it raises, it cannot
        return False


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is capturing a graph; then nothing may be launched, allocated or waited for."""
    if not hasattr(module(device), "is_current_stream_capturing"):
        return False
    return bool(module(device).is_current_stream_capturing())


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which this device is the current one."""
    there = getattr(module(device), "device", None)
    return contextlib.nullcontext() if there is None or device.index is None else there(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream that the training uses now; None for devices without streams."""
    there = getattr(module(device), "current_stream", None)
    return None if there is None else there(device)


def new_event(device: torch.device, *, is_timing: bool = False) -> Any:
    """Return a new event of a device, with `record` and `query`."""
    there = getattr(module(device), "Event", None) or getattr(getattr(module(device), "event", None), "Event", None)
    if there is None:
        return torch.Event(device, enable_timing=is_timing)
    return there(enable_timing=is_timing)


def is_past(event: Any, device: torch.device) -> bool:
    """Whether an event is known to have passed.

    While a graph is captured the answer is False, because a query would spoil the capture.
    """
    return not is_capturing(device) and bool(event.query())


def recorded(device: torch.device) -> Any:
    """Return an event that passes when everything queued by now is done."""
    event = new_event(device)
    record(event, current_stream(device))
    return event


def wait_for(event: Any, device: torch.device) -> None:
    """Let the device, not this thread, wait for the event; a device with only one queue is in order already."""
    stream = current_stream(device)
    if stream is not None:
        stream.wait_event(event)


def on_stream(stream: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which this thread uses a stream; None: the one that it already uses."""
    return contextlib.nullcontext() if stream is None else module(device).stream(stream)


def record(event: Any, stream: Any) -> None:
    """Record an event on a stream, or on the device's only queue if it has no streams."""
    if stream is None:
        event.record()
    else:
        event.record(stream)


def say_slow(device: torch.device) -> None:
    """Warn once that a device is read by torch operations."""
    if _triton_failed:
        return  # said when it failed
    why = "Triton is not installed" if device.type == "cuda" else f"holter has no kernels for {device.type}"
    say_once(f"{why}: statistics of tensors on {device.type} are taken by torch operations, many times slower")


def side_stream(device: torch.device, purpose: str = "results") -> Any:
    """Return holter's own stream on a device, the same at every call; None for devices without streams.

    torch hands out streams from a pool of 32 in turn, and NCCL takes its own from it: a stream of the pool may be one
    on which a collective hangs. So this one is made by the runtime itself if that can be reached, and it does not wait
    for the default stream either.
    """
    if not has_streams(device):
        return None
    key = torch.device(device.type, module(device).current_device() if device.index is None else device.index), purpose
    with _lock:
        if key not in _side_streams:
            with on(key[0]):
                _side_streams[key] = _own_stream(key[0]) or module(device).Stream(device=key[0])
    return _side_streams[key]


def _own_stream(device: torch.device) -> Any:
    if device.type != "cuda" or not (torch.version.cuda or torch.version.hip):
        return None
    with contextlib.suppress(Exception):  # another name, another version: torch's pool will do
        create = _stream_function()
        pointer = ctypes.c_void_p()
        if create is not None and create(ctypes.byref(pointer), NON_BLOCKING) == 0 and pointer.value:
            return torch.cuda.ExternalStream(pointer.value, device=device)
    return None


def _stream_function() -> Any:
    """Return `cudaStreamCreateWithFlags` of the runtime that torch has loaded; None if it cannot be found."""
    if torch.version.hip:
        names = [("libamdhip64.so", "hipStreamCreateWithFlags")]
    else:
        major = str(torch.version.cuda).split(".", maxsplit=1)[0]
        names = [(f"libcudart.so.{major}", "cudaStreamCreateWithFlags")]
    for library, function in names:
        with contextlib.suppress(OSError, AttributeError):
            # RTLD_NOLOAD: only the copy that torch itself uses; another one would have a state of its own.
            return getattr(ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL | os.RTLD_NOLOAD), function)
    return None
