"""Finds out what the machine has: devices, driver, torch, Triton and its compiler, NVML, the Flight Recorder."""

import importlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from holter.rank.doctor.outcome import CheckOutcome, Number, Say, judged
from holter_kernels import backend

GIB = 1 << 30
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
COMPILER_DEADLINE_S = 20


class FoundDevices(NamedTuple):
    """The devices that torch sees; `why_none` is empty if there are any."""

    names: list[str]
    why_none: str
    torch: str


def devices() -> FoundDevices:
    """Return the devices, or why there are none."""
    version = str(torch.__version__)
    try:
        names = [_device_name(index) for index in range(torch.cuda.device_count())]
        if names:
            torch.cuda.init()
            return FoundDevices(names, "", version)
    except Exception as error:  # noqa: BLE001 - torch and drivers raise whatever they like
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return FoundDevices([], f"torch {version} cannot use one: {first}", version)
    if torch.version.cuda is None and torch.version.hip is None:
        other = _other_accelerator()
        built = f"torch {version} was built for neither CUDA nor ROCm"
        return FoundDevices([], built + (f", and {other} is read by torch's own operations" if other else ""), version)
    return FoundDevices(
        [], f"torch {version} sees none (is the driver loaded, and CUDA_VISIBLE_DEVICES right?)", version
    )


def look(_: Say) -> CheckOutcome:
    """Report the environment, and as problems what is missing and what that costs."""
    problems: list[str] = []
    facts: dict[str, Number] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": str(torch.__version__),
        **_driver(),
        **_triton(problems),
        **_nvml(problems),
        **_recorder(problems),
    }
    for index in range(torch.cuda.device_count()):
        facts[f"device_{index}"] = _device_name(index)
    shown = ("driver", "cuda", "rocm", "torch", "triton", "compiler", "cache", "nvml", "recorder")
    return judged(problems, ", ".join(f"{name} {facts[name]}" for name in shown if name in facts), facts)


def _device_name(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name} ({found.total_memory / GIB:.0f} GiB, {found.major}.{found.minor})"


def _other_accelerator() -> str:
    # A process without CUDA may have another kind, which the kernels do not read.
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return there.type if there is not None else ""


def _driver() -> dict[str, Number]:
    facts: dict[str, Number] = {}
    for path in DRIVER_FILES:
        try:
            words = path.read_text(encoding="utf-8").split()
        except OSError:
            continue
        facts["driver"] = next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    facts.setdefault("driver", "none found")
    if torch.version.cuda:
        facts["cuda"] = torch.version.cuda
    if torch.version.hip:
        facts["rocm"] = torch.version.hip
    return facts


def _triton(problems: list[str]) -> dict[str, Number]:
    if backend("cuda") != "triton":
        problems.append(
            "Triton is not installed: statistics are taken by torch operations, many times slower; "
            f"`pip install triton` as torch {torch.__version__} wants it"
        )
        return {"triton": "none"}
    import triton  # noqa: PLC0415 - may be missing
    from triton import knobs  # noqa: PLC0415

    facts: dict[str, Number] = {"triton": triton.__version__}
    if knobs.runtime.interpret:
        facts["triton"] = f"{triton.__version__} (interpreted)"
        if torch.version.cuda or torch.version.hip:
            problems.append("TRITON_INTERPRET=1 is set: kernels run on the host, thousands of times slower; unset it")
    facts["compiler"] = _compiler(knobs.build.cc, problems)
    cache = Path(knobs.cache.dir)
    facts["cache"] = _abbreviated(cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        problems.append(
            f"Triton's cache {_abbreviated(cache)} cannot be written ({error.strerror}): every process compiles again; "
            "set TRITON_CACHE_DIR to a directory that can"
        )
    return facts


def _compiler(configured: str | None, problems: list[str]) -> str:
    found = next((path for name in (configured, "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)
    if found is None:
        problems.append(
            "there is no C compiler, and Triton needs one: install gcc, or set CC; until then torch operations are used, many times slower"
        )
        return "none"
    command = [found, "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILER_DEADLINE_S)  # noqa: S603
    lines = said.stdout.splitlines()
    return f"{Path(found).name} {lines[0].split()[-1]}" if said.returncode == 0 and lines else Path(found).name


def _abbreviated(path: Path) -> str:
    """Replace the home directory by `~`, because a report may be pasted where everybody can read it."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _nvml(problems: list[str]) -> dict[str, Number]:
    """Ask NVML in the same way as the sidecar does."""
    if not torch.version.cuda:
        return {"nvml": "not asked"}
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except ImportError:
        problems.append(
            "nvidia-ml-py is not installed: temperature, power and ECC errors are not seen; `pip install 'holter[gpu]'`"
        )
        return {"nvml": "none"}
    except Exception as error:  # noqa: BLE001 - NVMLError, whose class is in the module that may be missing
        problems.append(f"NVML does not answer: {error}: temperature, power and ECC errors are not seen")
        return {"nvml": "does not answer"}
    return {"nvml": "ok", "driver": version if isinstance(version, str) else version.decode()}


def _recorder(problems: list[str]) -> dict[str, Number]:
    if not dist.is_available():
        problems.append("torch was built without torch.distributed: hangs of several ranks cannot be explained")
        return {"recorder": "none"}
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):  # noqa: SLF001 - nothing public says it
        problems.append("this torch shows no Flight Recorder: a hang is seen, but the collective is not named")
        return {"recorder": "none"}
    return {"recorder": "ok"}
