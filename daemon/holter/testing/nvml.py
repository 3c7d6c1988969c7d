"""A stand-in for `pynvml` (nvidia-ml-py), for machines without a device: the same names, numbers and errors, readings that a test sets.

    nvml = FakeNvml(Gpu("GPU-1"))
    sys.modules["pynvml"] = nvml
    nvml.gpus["GPU-1"].reasons = nvml.nvmlClocksEventReasonHwThermalSlowdown

As in the real one, nothing can be asked before `nvmlInit`, a handle comes from a UUID, power is in milliwatts, and what goes wrong is an
`NVMLError` with a number.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar


@dataclass
class Gpu:
    """One device's readings."""

    uuid: str
    reasons: int = 0
    """Bits of `nvmlClocksEventReason...`."""
    sm_clock_mhz: int = 1980
    max_sm_clock_mhz: int = 1980
    temperature_c: int = 55
    power_mw: int = 350_000
    error: int = 0
    """With this number every question about it fails."""


class NVMLError(Exception):
    """What every function raises, with the number of the error."""

    texts: ClassVar[dict[int, str]] = {
        1: "Uninitialized",
        2: "Invalid Argument",
        3: "Not Supported",
        6: "Not Found",
        9: "Driver Not Loaded",
        12: "NVML Shared Library Not Found",
        13: "Function Not Found",
        15: "GPU is lost",
        999: "Unknown Error",
    }

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return self.texts.get(self.value, f"NVML Error with code {self.value}")


class FakeNvml(ModuleType):
    """The module; put it under `pynvml` in `sys.modules`."""

    NVMLError = NVMLError
    NVML_ERROR_UNINITIALIZED, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND = 1, 3, 6
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_FUNCTION_NOT_FOUND = 9, 12, 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    nvmlClocksEventReasonNone = 0x0  # noqa: N815 - the real names
    nvmlClocksEventReasonGpuIdle = 0x1  # noqa: N815
    nvmlClocksEventReasonApplicationsClocksSetting = 0x2  # noqa: N815
    nvmlClocksEventReasonSwPowerCap = 0x4  # noqa: N815
    nvmlClocksEventReasonHwSlowdown = 0x8  # noqa: N815
    nvmlClocksEventReasonSyncBoost = 0x10  # noqa: N815
    nvmlClocksEventReasonSwThermalSlowdown = 0x20  # noqa: N815
    nvmlClocksEventReasonHwThermalSlowdown = 0x40  # noqa: N815
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80  # noqa: N815
    nvmlClocksEventReasonDisplayClockSetting = 0x100  # noqa: N815

    def __init__(self, *gpus: Gpu, init_error: int = 0) -> None:
        super().__init__("pynvml")
        self.gpus = {gpu.uuid: gpu for gpu in gpus}
        self.init_error = init_error
        """With this number `nvmlInit` fails: 9 without a driver, 12 without its library."""
        self.is_old_driver = False
        """It does not know what is newer than 2023."""
        self.num_calls = 0
        self._is_initialised = False

    def nvmlInit(self) -> None:  # noqa: N802
        """Before anything else."""
        if self.init_error:
            raise NVMLError(self.init_error)
        self._is_initialised = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        """After everything else."""
        self._is_initialised = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        """What the other functions take."""
        self._check()
        if uuid not in self.gpus:
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return self._asked(self.gpus[uuid])

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Gpu) -> int:  # noqa: N802
        """Why the clock is not higher, as bits."""
        if self.is_old_driver:
            raise NVMLError(self.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self._asked(handle).reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Gpu) -> int:  # noqa: N802
        """The same, under its older name."""
        return self._asked(handle).reasons

    def nvmlDeviceGetClockInfo(self, handle: Gpu, type: int) -> int:  # noqa: A002, N802 - the real names
        """Megahertz; of the streaming multiprocessors only."""
        return self._clock(handle, type).sm_clock_mhz

    def nvmlDeviceGetMaxClockInfo(self, handle: Gpu, type: int) -> int:  # noqa: A002, N802
        """Megahertz."""
        return self._clock(handle, type).max_sm_clock_mhz

    def nvmlDeviceGetTemperature(self, handle: Gpu, sensor: int) -> int:  # noqa: N802
        """Degrees Celsius."""
        if sensor != self.NVML_TEMPERATURE_GPU:
            raise NVMLError(2)
        return self._asked(handle).temperature_c

    def nvmlDeviceGetPowerUsage(self, handle: Gpu) -> int:  # noqa: N802
        """Milliwatts."""
        return self._asked(handle).power_mw

    def _clock(self, handle: Gpu, kind: int) -> Gpu:
        if kind != self.NVML_CLOCK_SM:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return self._asked(handle)

    def _asked(self, handle: Gpu) -> Gpu:
        self._check()
        self.num_calls += 1
        if handle.error:
            raise NVMLError(handle.error)
        return handle

    def _check(self) -> None:
        if not self._is_initialised:
            raise NVMLError(self.NVML_ERROR_UNINITIALIZED)
