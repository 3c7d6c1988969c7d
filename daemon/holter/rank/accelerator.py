"""The accelerator that the script trains on, whatever its make: its generators, its memory, its graphs. `holter_kernels.devices` knows how it is read.

torch calls it by its type (`torch.cuda`, which ROCm is too, `torch.xpu`, `torch.npu`, …). What one of them lacks is left out, and nothing is asked of it before the script
has begun to use it.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from holter_kernels import devices

GRAPHS = ("CUDAGraph", "XPUGraph", "NPUGraph")
_ask = getattr(torch._C, "_get_accelerator", torch.accelerator.current_accelerator)  # noqa: SLF001
is_autocast_on: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)  # noqa: SLF001  nothing public asks in one call
"""Whether operations are cast, on the host or on it."""
_known: dict[int, str] = {}
"""How many modules there were when torch was last asked -> what it said."""


def kind() -> str:
    """Its type, "cuda" for one; nothing where torch has no accelerator."""
    # To ask torch takes a microsecond, and this is asked many times a step: again only if something was imported since, as another maker's backend is.
    known = _known.get(len(sys.modules))
    if known is None:
        found = _ask()
        known = "" if found is None or found.type == "cpu" else str(found.type)
        _known.clear()
        _known[len(sys.modules)] = known
    return known


def module() -> Any:
    """`torch.cuda` or its like, once the script has begun to use it; None before."""
    name = kind()
    if not name:
        return None
    found = getattr(torch, name, None)
    is_begun = getattr(found, "is_initialized", None)
    return found if is_begun is None or is_begun() else None


def has_streams() -> bool:
    """Whether it is used, and work can be queued beside the training's."""
    return module() is not None and devices.has_streams(torch.device(kind()))


def is_capturing() -> bool:
    """Whether a graph is being captured on this thread's stream: what is started now would become a part of it."""
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
    """Whose replay runs what was captured, and no hook."""
    found = (getattr(getattr(torch, name, None), graph, None) for name in {"cuda", kind()} for graph in GRAPHS)
    return [each for each in found if each is not None]


def graph_makers() -> list[tuple[Any, ...]]:
    """Who has `make_graphed_callables`: of each make, all modules by which a script may call it."""
    found = (getattr(torch, name, None) for name in {"cuda", kind()})
    return [(each, getattr(each, "graphs", each)) for each in found if hasattr(each, "make_graphed_callables")]


class IndexedGenerator:
    """The random generator of one device, by the functions that every module has."""

    def __init__(self, there: Any, index: int) -> None:
        self._there = there
        # torch.mps knows of one device, and takes no number of it.
        self._index = (index,) if there.device_count() > 1 else ()

    def get_state(self) -> torch.Tensor:
        """As `torch.Generator` has it."""
        state: torch.Tensor = self._there.get_rng_state(*self._index)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        """As `torch.Generator` has it."""
        self._there.set_rng_state(state, *self._index)


def generators() -> list[Any]:
    """Of its devices in order; none before the script uses it (ours would be its first use), nor while a graph is captured."""
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
    """The generator of one of its devices; None where it cannot be asked now."""
    found = generators()
    return found[device.index or 0] if len(found) > (device.index or 0) else None


def set_generators(states: Iterable[torch.Tensor]) -> None:
    """Put states back that `generators` gave, in the same order; this may be the first use of it."""
    for index, state in enumerate(states):
        IndexedGenerator(getattr(torch, kind()), index).set_state(state)


class Memory(NamedTuple):
    """Bytes of the current device."""

    held: int
    """By tensors."""
    reserved: int
    """From the driver."""
    total: int


def memory() -> Memory | None:
    """As torch's allocator counts it; the driver is not asked, which could wait. None: this accelerator does not tell."""
    there = module()
    try:
        counted = there.memory_stats()
        total = int(there.get_device_properties(there.current_device()).total_memory)
    except Exception:  # noqa: BLE001 - another maker's module: whatever it lacks, it does not tell
        return None
    return Memory(counted.get("allocated_bytes.all.current", 0), counted.get("reserved_bytes.all.current", 0), total)


def uuid() -> str:
    """Of the current device, as NVIDIA's tools write it; nothing of another maker's, which the sidecar could not look up, or before it is used."""
    there = module()
    if kind() != "cuda" or there is None:
        return ""
    found = str(getattr(there.get_device_properties(there.current_device()), "uuid", ""))
    return found if not found or found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"


def streams_of(owner: Any) -> list[Any]:
    """The streams among the attributes of an object, and the current one; none without an accelerator."""
    if not has_streams():
        return []
    own = [each for each in vars(owner).values() if isinstance(each, torch.Stream)]
    return [*own, module().current_stream()]
