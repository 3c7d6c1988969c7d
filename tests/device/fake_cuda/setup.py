"""`install()`: the device, `torch.cuda` on top of it (or the module of another maker), Triton's kernels on its streams."""

import atexit
import functools
import os
import sys

from fake_cuda import build, process_group, torch_cuda, torch_npu, triton_kernels
from fake_cuda.environment import kind


@functools.cache
def install() -> None:
    """Once a process, and for the rest of it. Raises `Unavailable` where the device cannot be had."""
    if "triton" in sys.modules and not _is_interpreted():
        raise build.Unavailable("triton was imported before the device, without TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
    device = build.load()
    if kind() == "cuda":
        torch_cuda.fill(device)
        process_group.install(device)
        triton_kernels.install_when_imported(device)
    else:
        torch_npu.install(device, kind())
    atexit.register(device.stop)


def is_installed() -> bool:
    """Whether this process has the device."""
    return install.cache_info().currsize == 1


def _is_interpreted() -> bool:
    from triton import knobs  # noqa: PLC0415

    return bool(knobs.runtime.interpret)
