"""A stand-in for NVIDIA's management library, for machines without a device: a shared library with NVML's own calls, structs and error numbers, which nvidia-ml-py itself loads.

    library = NvmlLibrary.build(folder)          # needs a C compiler
    library.set(0, uuid="GPU-1", reasons=0x40)   # readings, at any time; what can be set is said in nvml.c
    library.event(0, xid=79)
    subprocess.run(job, env={**environ, **library.environment})
    library.load()                               # or in this process

Calls about a device that has no line say that it does not exist; readings that nobody set are those of a healthy device.
"""

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("nvml.c")
SONAME = "libnvidia-ml.so.1"
CONTROL = "HOLTER_TESTING_NVML"
LOST = 15
"""Error number of NVML_ERROR_GPU_IS_LOST."""


class NvmlLibrary:
    """A compiled stand-in library, and the file that its readings come from."""

    def __init__(self, path: Path, control: Path) -> None:
        self.path = path
        self.control = control
        self._values: dict[tuple[str, str], Any] = {}
        self._lines: list[str] = []
        self._write()

    @classmethod
    def build(cls, folder: Path, compiler: str = "cc", options: Sequence[str] = ()) -> "NvmlLibrary":
        """Compile the library into this folder.

        Raises OSError or subprocess.CalledProcessError if that cannot be done. `options` are added to the compiler's.
        """
        path = folder / SONAME
        flags = ["-shared", "-fPIC", "-O1", "-pthread", f"-Wl,-soname,{SONAME}", *options]
        subprocess.run([compiler, *flags, "-o", str(path), str(SOURCE)], check=True)  # noqa: S603
        return cls(path, folder / "nvml.txt")

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables with which a process loads it instead of the real library."""
        return {"LD_LIBRARY_PATH": str(self.path.parent), CONTROL: str(self.control)}

    def load(self) -> None:
        """Load it into this process, before nvidia-ml-py looks for the real one; the linker then finds it by its name."""
        ctypes.CDLL(str(self.path), mode=ctypes.RTLD_GLOBAL)
        # The library reads the process's environment, not Python's copy.
        os.putenv(CONTROL, str(self.control))

    def set(self, device: int | None, **readings: Any) -> None:
        """Set readings of a device, or of all calls if None.

        Two underscores stand for the dot: `error__nvmlDeviceGetPowerUsage=3`.
        """
        for key, value in readings.items():
            self._values["*" if device is None else str(device), key.replace("__", ".")] = value
        self._write()

    def event(self, device: int, xid: int) -> None:
        """Let the driver report a fault of this number."""
        self.lines(f"{device} xid {xid}")

    def lines(self, *lines: str) -> None:
        """Add raw lines to the file: `0 mig MIG-bbbb 1 0`."""
        self._lines += lines
        self._write()

    def clear(self) -> None:
        """Remove all devices, readings and events."""
        self._values, self._lines = {}, []
        self._write()

    def _write(self) -> None:
        lines = [f"{device} {key} {value}" for (device, key), value in self._values.items()]
        new = self.control.with_suffix(".new")
        new.write_text("\n".join([*lines, *self._lines, ""]), encoding="utf-8")
        new.replace(self.control)
