"""Compile the kernels before they are needed: each takes a second or two, better spent in a thread at the start than in a hook.

Meanwhile, a pass over that device declines ("warming up") instead of compiling the same kernels in the training thread.
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holter_kernels import devices
from holter_kernels.layout import FORMATS, Format

PASSES = (("off", True), ("sampled", True))
"""Histogram and statistics of the passes that a rank makes."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel, compiled for one device."""

    name: str
    device: str
    seconds: float
    registers: int | None = None
    spills: int | None = None
    """Number of registers spilled; both register figures are known once the kernel is loaded, on NVIDIA."""
    error: str | None = None


def warm_up(
    on: Iterable[torch.device],
    dtypes: Iterable[torch.dtype],
    progress: Callable[[int, int, str], None] | None = None,
    *,
    passes: Iterable[tuple[str, bool]] = PASSES,
    loads: bool = False,
) -> list[CompiledKernel]:
    """Compile what passes over these devices and dtypes need; `progress` is called with the number done, the total and the next name.

    Nothing is launched. `loads=True` also loads the kernels onto the device, which must not happen while another thread
    captures a graph. A kernel that does not compile raises nothing: its entry holds the error, and this process stops
    using Triton.
    """
    wanted = [device for device in on if devices.implementation(device) == "triton"]
    if not wanted:
        return []
    devices.prepare_triton_cache()
    work = [(device, *one) for device in wanted for one in _kernels(list(dtypes), list(passes))]
    found: list[CompiledKernel] = []
    devices.warming.update(wanted)
    try:
        for number, (device, name, compile_it) in enumerate(work):
            if progress is not None:
                progress(number, len(work), name)
            found.append(_compiled(device, name, compile_it, loads=loads))
            if found[-1].error is not None:
                break
    finally:
        devices.warming.difference_update(wanted)
    if progress is not None:
        progress(len(work), len(work), "")
    return found


class WarmUp:
    """A warm-up in a thread: passes over these devices decline from its creation until it is over, and nobody waits for it."""

    def __init__(self, on: Iterable[torch.device], dtypes: Iterable[torch.dtype]) -> None:
        self._on, self._dtypes = list(on), list(dtypes)
        self._began, self._is_over = time.monotonic(), threading.Event()
        self.compiled: list[CompiledKernel] = []
        self.seconds = 0.0
        try:
            devices.prepare_triton_cache()
            # Not in the thread: two threads that import the same packages at once can make the script's own import fail.
            from holter_kernels import gpu, triton_kernels  # noqa: F401, PLC0415 - needs triton
        except Exception as error:  # noqa: BLE001 - a Triton that cannot even be imported: torch operations then
            devices.give_up_triton(error)
        devices.warming.update(self._on)

    @property
    def is_over(self) -> bool:
        """Whether the warm-up is over, so that passes read again."""
        return self._is_over.is_set()

    def run(self) -> None:
        """Run the warm-up; called in a thread, raises nothing."""
        try:
            self.compiled = warm_up(self._on, self._dtypes)
        except Exception as error:  # noqa: BLE001 - whatever it is: torch operations then
            devices.give_up_triton(error)
        finally:
            devices.warming.difference_update(self._on)
            self.seconds = time.monotonic() - self._began
            self._is_over.set()


def is_needed(device: torch.device) -> bool:
    """Whether passes over this device would compile something; Triton's interpreter compiles nothing."""
    return devices.implementation(device) == "triton" and os.environ.get("TRITON_INTERPRET") != "1"


def _compiled(device: torch.device, name: str, compile_it: Callable[[], Any], *, loads: bool) -> CompiledKernel:
    began = time.monotonic()
    try:
        with devices.on(device):
            kernel = compile_it()
            if loads and hasattr(kernel, "_init_handles"):
                kernel._init_handles()  # noqa: SLF001 - as Triton itself does at the first launch
    except Exception as error:  # noqa: BLE001 - no compiler, no driver, an architecture that Triton has not: said, and torch operations then
        devices.give_up_triton(error)
        return CompiledKernel(name, str(device), time.monotonic() - began, error=f"{type(error).__name__}: {error}")
    registers, spills = (getattr(kernel, field, None) for field in ("n_regs", "n_spills"))
    return CompiledKernel(name, str(device), time.monotonic() - began, registers, spills)


def _kernels(dtypes: list[torch.dtype], passes: list[tuple[str, bool]]) -> Iterator[tuple[str, Callable[[], Any]]]:
    from holter_kernels import gpu, triton_kernels  # noqa: PLC0415 - needs triton

    options = gpu.launch_options(is_amd=torch.version.hip is not None)
    pointers = (
        torch.int32,
        torch.int64,
        torch.int64,
        torch.int64,
        torch.int64,
        torch.float32,
        torch.int32,
        torch.int32,
    )
    for fmt in _formats(dtypes):
        for histogram, statistics in passes:
            which = gpu.HISTOGRAMS[histogram] if statistics else 0
            name = f"{fmt.name}, histogram {histogram}" if statistics else f"{fmt.name}, fingerprint alone"
            kinds = {"float": name, "mixed": f"{name}, any alignment"} if fmt.code in gpu.KINDS else {"element": name}
            for kernel, called in kinds.items():
                function, constants, how = gpu.kernel_of(fmt, kernel, statistics=statistics, histogram=which)
                compile_it = getattr(triton_kernels, function).warmup
                yield called, functools.partial(compile_it, *pointers, *constants, grid=(1,), **how)
    rows = (torch.int64, torch.int64, torch.int64, torch.int32, torch.int64, torch.float32)
    yield (
        "rows",
        lambda: triton_kernels.combine_rows.warmup(
            *rows, gpu.COMBINE_TILE, grid=(1,), num_warps=gpu.combine_warps(options["num_warps"])
        ),
    )


def _formats(dtypes: list[torch.dtype]) -> list[Format]:
    found = {FORMATS[dtype].code: FORMATS[dtype] for dtype in dtypes if dtype in FORMATS}
    return [found[code] for code in sorted(found)]
