"""What a torch for the CPU lacks of `torch._C`, so that `torch.cuda`, as it is, runs on the device."""

import ctypes
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

GIGABYTES = 32
CUDA = 1
"""The device's type as c10 numbers it."""


def stream_base(device: ModuleType) -> type:
    """What `torch.cuda.Stream` derives from."""

    class CudaStreamBase(torch.Stream):
        def __new__(cls, priority=0, stream_id=None, device_index=None, device_type=CUDA, stream_ptr=0):  # noqa: ANN204
            index = device.get_device() if device_index is None else device_index
            if stream_ptr:
                stream_id = stream_ptr
            elif stream_id is None:
                stream_id = device.take_from_pool(index)
            return super().__new__(cls, stream_id=stream_id, device_index=index, device_type=device_type)

        cuda_stream = property(lambda self: self.stream_id)
        priority = property(lambda _: 0)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    return CudaStreamBase


def event_base(device: ModuleType) -> type:
    """What `torch.cuda.Event` derives from."""

    class CudaEventBase(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):  # noqa: ANN204, ARG004, FBT002
            event = super().__new__(cls, device="cuda", enable_timing=enable_timing)
            event._has_time = enable_timing
            return event

        # torch.Event's own takes no class derived from it.
        def elapsed_time(self, end: "CudaEventBase") -> float:
            if not (self._has_time and end._has_time):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            return device.elapsed_ms(self.event_id, end.event_id)

        def record(self, stream: torch.Stream) -> None:
            super().record(stream)

        def wait(self, stream: torch.Stream) -> None:
            super().wait(stream)

    return CudaEventBase


def properties(index: int) -> SimpleNamespace:
    """Of a device that has nothing to boast of."""
    return SimpleNamespace(
        name=f"fake_cuda {index}",
        major=9,
        minor=0,
        total_memory=GIGABYTES << 30,
        multi_processor_count=1,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=233472,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="fake",
        uuid=f"00000000-0000-0000-0000-{index:012d}",
        L2_cache_size=1 << 20,
        pci_bus_id=index,
        pci_device_id=0,
        pci_domain_id=0,
    )


def memory_stats(device: ModuleType, index: int) -> dict[str, Any]:
    """Nested as `_cuda_memoryStats` has it."""
    found = device.memory_of(index)

    def levels(current: int, peak: int) -> dict[str, dict[str, int]]:
        level = {"current": current, "peak": peak, "allocated": current, "freed": 0}
        return {pool: dict(level) for pool in ("all", "small_pool", "large_pool")}

    allocated = levels(found["current"], found["peak"])
    reserved = levels(found["reserved"], found["reserved"])
    return {
        "allocated_bytes": allocated,
        "active_bytes": allocated,
        "requested_bytes": allocated,
        "reserved_bytes": reserved,
        "allocation": levels(found["allocations"], found["allocations"]),
        "num_ooms": 0,
        "num_alloc_retries": 0,
    }


def runtime(device: ModuleType) -> SimpleNamespace:
    """`torch.cuda.cudart()`: what it has of the runtime's functions."""

    def create_stream(address: int) -> int:
        ctypes.c_uint64.from_address(address).value = device.make_external()
        return 0

    def register(address: int, size: int, _flags: int) -> int:
        device.register_host(address, size)
        return 0

    def unregister(address: int) -> int:
        device.unregister_host(address)
        return 0

    return SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=lambda code: f"error {int(code)}",
        cudaStreamCreate=create_stream,
        cudaStreamDestroy=lambda _: 0,
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaMemGetInfo=lambda index: (
            (GIGABYTES << 30) - device.memory_of(index)["reserved"],
            GIGABYTES << 30,
        ),
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )


def functions(device: ModuleType) -> dict[str, Any]:
    """`torch._C._cuda_*`."""

    def set_device(index: int) -> None:
        device.exchange_device(index)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:  # noqa: ARG001
        device.set_stream(device_index, stream_id)

    def init() -> None:
        torch.cuda.default_generators = device.default_generators()

    return {
        "_cuda_init": init,
        "_cuda_getDeviceCount": lambda: 2,
        "_cuda_getDevice": device.get_device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": device.exchange_device,
        "_cuda_maybeExchangeDevice": device.exchange_device,
        "_cuda_getCurrentStream": lambda index: (device.get_stream(index), index, CUDA),
        "_cuda_getCurrentRawStream": device.get_stream,
        "_cuda_getDefaultStream": lambda index: (0, index, CUDA),
        "_cuda_getStreamFromExternal": lambda pointer, index: (pointer, index, CUDA),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": device.synchronize,
        "_cuda_sleep": device.sleep,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_canDeviceAccessPeer": lambda _a, _b: True,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_ipc_collect": lambda: None,
        "_cuda_emptyCache": lambda *_: None,
        "_host_emptyCache": lambda: None,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_memoryStats": lambda index: memory_stats(device, index),
        "_cuda_resetPeakMemoryStats": device.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda _: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_getMemoryFraction": lambda _: 1.0,
        "_cuda_setMemoryFraction": lambda *_: None,
        "_cuda_set_sync_debug_mode": device.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": device.get_sync_debug_mode,
        "_cuda_isCurrentStreamCapturing": device.is_capturing,
        "_graph_pool_handle": device.next_pool,
        "_CUDAGraph": device.Graph,
        "_CudaStreamBase": stream_base(device),
        "_CudaEventBase": event_base(device),
        "_CudaDeviceProperties": SimpleNamespace,
        "_has_cuda": True,
    }


def fill(device: ModuleType) -> None:
    """Put all of it in its place; classes of `torch.cuda` that derive from stand-ins are made again, over ours."""
    for name, value in functions(device).items():
        setattr(torch._C, name, value)
    for module in ("torch.cuda.streams", "torch.cuda.graphs"):
        made = importlib.reload(sys.modules[module])
        for name in ("Stream", "Event", "ExternalStream", "CUDAGraph", "graph", "make_graphed_callables"):
            if hasattr(made, name):
                setattr(torch.cuda, name, getattr(made, name))
    for name in ("is_current_stream_capturing", "graph_pool_handle"):
        setattr(torch.cuda, name, getattr(torch.cuda.graphs, name))
    cudart = runtime(device)
    torch._C._cudart = cudart
    torch.cuda._cudart = cudart
    torch.cuda._exchange_device = device.exchange_device
    torch.cuda._maybe_exchange_device = device.exchange_device
    torch.cuda._is_in_bad_fork = lambda: False
    torch.cuda._get_device_properties = properties
    torch.cuda._device_count_nvml = lambda: -1
    _resize_storages(device)


def _resize_storages(device: ModuleType) -> None:
    """The CPU's build refuses to resize the storage of a device, which FSDP does all the time."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize(storage, size)
        handle = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        device.resize_storage(handle, size)
        return storage

    torch.UntypedStorage.resize_ = resize_
