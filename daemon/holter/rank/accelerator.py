"""The accelerator that the script trains on, of any make: its generators, memory and graphs. `holter_kernels.devices` knows how to read it.

torch has a module for each type (`torch.cuda`, which also stands for ROCm, `torch.xpu`, `torch.npu`, …). What a module lacks is left out, and nothing
is asked of it before the script has begun to use it.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from holter_kernels import devices

GRAPHS = ("CUDAGraph", "XPUGraph", "NPUGraph")
_ask = getattr(torch._C, "_get_accelerator", torch.accelerator.current_accelerator)  # noqa: SLF001
is_autocast_on: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)  # noqa: SLF001  nothing public asks in one call
"""Whether autocast is on, for the host or the accelerator."""
_known: dict[int, str] = {}
"""The accelerator's type by the number of imported modules when torch was last asked; one entry at most."""


def kind() -> str:
    """Return the accelerator's type, such as "cuda"; empty if torch has none."""
    # Asking torch takes a microsecond, and this is called many times a step. So torch is asked again only if something, perhaps a backend, was imported.
    known = _known.get(len(sys.modules))
    if known is None:
        found = _ask()
        known = "" if found is None or found.type == "cpu" else str(found.type)
        _known.clear()
        _known[len(sys.modules)] = known
    return known


def module() -> Any:
    """Return torch's module for the accelerator, such as `torch.cuda`; None before the script has begun to use it."""
    name = kind()
    if not name:
        return None
    found = getattr(torch, name, None)
    is_begun = getattr(found, "is_initialized", None)
    return found if is_begun is None or is_begun() else None


def has_streams() -> bool:
    """Whether the accelerator is in use, and work can be queued on it beside the training's."""
    return module() is not None and devices.has_streams(torch.device(kind()))


def is_capturing() -> bool:
    """Whether a graph is being captured on this thread's stream; work started now would become a part of it."""
    if _known.get(len(sys.modules)) == "":
        return False
    asked = getattr(module(), "is_current_stream_capturing", None)
    if asked is None:
        return False
    try:
        return bool(asked())
    except RuntimeError:
        # A build without graphs.
        return False


def graph_classes() -> list[type]:
    """Return the classes of graphs, whose replay runs the captured operations without any hooks."""
    found = (getattr(getattr(torch, name, None), graph, None) for name in {"cuda", kind()} for graph in GRAPHS)
    return [each for each in found if each is not None]


def graph_makers() -> list[tuple[Any, ...]]:
    """Return the modules that have `make_graphed_callables`: for each make, all by which a script may call it."""
    found = (getattr(torch, name, None) for name in {"cuda", kind()})
    return [(each, getattr(each, "graphs", each)) for each in found if hasattr(each, "make_graphed_callables")]


class IndexedGenerator:
    """The random generator of one device, through the functions that every accelerator's module has."""

    def __init__(self, there: Any, index: int) -> None:
        self._there = there
        # torch.mps has only one device, and takes no index.
        self._index = (index,) if there.device_count() > 1 else ()

    def get_state(self) -> torch.Tensor:
        """Return the generator's state, like `torch.Generator.get_state`."""
        state: torch.Tensor = self._there.get_rng_state(*self._index)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        """Set the generator's state, like `torch.Generator.set_state`."""
        self._there.set_rng_state(state, *self._index)


def generators() -> list[Any]:
    """Return the generators of all devices, in order; empty while a graph is captured, and before the script first uses the accelerator."""
    there = module()
    if there is None or is_capturing():
        return []
    found = getattr(there, "default_generators", None)
    if found is not None:
        return list(found)
    return (
        [IndexedGenerator(there, index) for index in range(there.device_count())]
        if hasattr(there, "get_rng_state")
        else []
    )


def generator_of(device: torch.device) -> Any:
    """Return the generator of one device; None if it cannot be asked now."""
    found = generators()
    return found[device.index or 0] if len(found) > (device.index or 0) else None


def set_generators(states: Iterable[torch.Tensor]) -> None:
    """Set the states of the generators, in the order of `generators`; this may be the first use of the accelerator."""
    for index, state in enumerate(states):
        IndexedGenerator(getattr(torch, kind()), index).set_state(state)


class Memory(NamedTuple):
    """Memory of the current device, in bytes."""

    held: int
    """Bytes that tensors hold."""
    reserved: int
    """Bytes that torch's allocator has reserved from the driver."""
    total: int
    """Bytes that the device has."""


def memory() -> Memory | None:
    """Return the memory as torch's allocator counts it, without asking the driver, which could block; None if this accelerator does not tell."""
    there = module()
    try:
        counted = there.memory_stats()
        total = int(there.get_device_properties(there.current_device()).total_memory)
    except Exception:  # noqa: BLE001 - another maker's module may lack anything
        return None
    return Memory(counted.get("allocated_bytes.all.current", 0), counted.get("reserved_bytes.all.current", 0), total)


def uuid() -> str:
    """Return the current device's UUID as NVIDIA's tools write it; empty before its first use, and for other makes, which the sidecar cannot look up."""
    there = module()
    if kind() != "cuda" or there is None:
        return ""
    found = str(getattr(there.get_device_properties(there.current_device()), "uuid", ""))
    return found if not found or found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"


def streams_of(owner: Any) -> list[Any]:
    """Return the streams among the attributes of an object, and the current stream; empty without an accelerator that has streams."""
    if not has_streams():
        return []
    own = [each for each in vars(owner).values() if isinstance(each, torch.Stream)]
    return [*own, module().current_stream()]
