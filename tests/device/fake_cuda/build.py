"""Compiles the device, once for each state of its sources and each torch; workers and ranks wait for the first of them."""

import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from fake_cuda.environment import kind

SOURCES = Path(__file__).resolve().parent / "csrc"
KEYS = {"cuda": "CUDA", "npu": "PrivateUse1", "bare": "PrivateUse1"}
"""By the name of the device: what it is registered as."""


class Unavailable(RuntimeError):  # noqa: N818 - a state of this machine, seldom an error
    """The device cannot be had here; says why."""


def folder() -> Path:
    """Where the compiled device lies: named after its sources and all that it is built against."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {torch.__file__}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    base = os.environ.get("TESTS_DEVICE_CACHE") or Path(tempfile.gettempdir(), f"fake-cuda-{os.getuid()}")
    return Path(base, digest.hexdigest()[:16])


def compile_into(directory: Path, key: str) -> Path:
    """The compiled library; built under a name of its own, so that a build that was killed leaves nothing to load."""
    from torch.utils import cpp_extension  # noqa: PLC0415

    include = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    name = name_of(key)
    library, unfinished = directory / f"{name}.so", directory / f"{name}.{os.getpid()}.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *include]
    command += [
        f"-DTORCH_EXTENSION_NAME={name}",
        f"-DDEVICE_KEY={key}",
        str(SOURCES / "device.cpp"),
        "-o",
        str(unfinished),
    ]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"no C++ compiler: {error}") from error
    if run.returncode != 0:
        errors = [line for line in run.stderr.splitlines() if "error" in line] or [run.stderr[-500:]]
        raise Unavailable(f"torch {torch.__version__} or the compiler refuses the device: {errors[0]}")
    return unfinished.rename(library)


def name_of(key: str) -> str:
    """Of the compiled module."""
    return f"fake_{key}_device"


def library(key: str = "CUDA") -> Path:
    """The compiled device; raises `Unavailable`. A refusal is remembered, so that it costs one build and not one a test."""
    directory = folder()
    directory.mkdir(parents=True, exist_ok=True)
    found, refusal = directory / f"{name_of(key)}.so", directory / f"refused-{key}"
    with (directory / f"lock-{key}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found.exists():
            return found
        if refusal.exists():
            raise Unavailable(refusal.read_text())
        try:
            return compile_into(directory, key)
        except Unavailable as error:
            refusal.write_text(str(error))
            raise


@functools.cache
def load() -> ModuleType:
    """The device itself, of the kind that this process is to have. Loading registers it with torch; that cannot be undone in this process."""
    key = KEYS[kind()]
    if torch.version.cuda or torch.version.hip:
        raise Unavailable("this torch has a device of its own: fake_cuda is for builds for the CPU")
    spec = importlib.util.spec_from_file_location(name_of(key), library(key))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
