"""The same device as an accelerator of another maker: in PrivateUse1, the place that torch keeps for them, where no Triton runs.

    npu     streams, events, generators, counters of memory, as torch_npu and torch.xpu have them
    bare    a number of devices, a way to wait, random states, as torch.mps has them; no float64

Collectives by `init_process_group("hccl")`.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist

GIGABYTES = 32
PRIVATE_USE_1 = 20
"""The device's type as c10 numbers it."""


class Npu:
    """Makes the module `torch.npu`."""

    def __init__(self, device: ModuleType, name: str) -> None:
        self._device, self._name = device, name

    def _index(self, given: Any) -> int:
        index = given if given is None or isinstance(given, int) else torch.device(given).index
        return self._device.get_device() if index is None else index

    def _generator(self, given: Any) -> torch.Generator:
        return self._device.default_generators()[self._index(given)]

    def common(self) -> dict[str, Any]:
        """What torch itself asks every device's module for."""
        every = self._device.default_generators()
        return {
            "is_available": lambda: True,
            "device_count": lambda: len(every),
            "_is_in_bad_fork": lambda: False,
            "synchronize": lambda _=None: self._device.synchronize(),
            "get_rng_state": lambda device=None: self._generator(device).get_state(),
            "set_rng_state": lambda state, device=None: self._generator(device).set_state(state),
            "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in every],
            "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        }

    def devices(self) -> dict[str, Any]:
        """Which of them is the current one, and what they have."""
        device, index = self._device, self._index

        @contextlib.contextmanager
        def on(wanted: Any) -> Iterator[None]:
            before = device.exchange_device(index(wanted))
            try:
                yield
            finally:
                device.exchange_device(before)

        def memory_stats(wanted: Any = None) -> dict[str, int]:
            found = device.memory_of(index(wanted))
            return {"allocated_bytes.all.current": found["current"], "reserved_bytes.all.current": found["reserved"]}

        return {
            "device": on,
            "current_device": device.get_device,
            "set_device": lambda wanted: device.exchange_device(index(wanted)),
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "default_generators": device.default_generators(),
            "memory_stats": memory_stats,
            "get_device_properties": lambda wanted=None: SimpleNamespace(
                name=f"{self._name} {index(wanted)}", total_memory=GIGABYTES << 30
            ),
        }

    def streams(self) -> dict[str, Any]:
        """Streams and events over torch's own, which any device has."""
        device, name, index = self._device, self._name, self._index

        class Stream(torch.Stream):
            def __new__(cls, device: Any = None, **more: Any) -> Self:
                return super().__new__(cls, **(more or {"device": torch.device(name, index(device))}))

            def record_event(self, event: Any = None) -> Any:
                event = event or Event()
                event.record(self)
                return event

        class Event(torch.Event):
            def __new__(cls, *, enable_timing: bool = False) -> Self:
                return super().__new__(cls, device=name, enable_timing=enable_timing)

            # torch.Event's own takes no class derived from it.
            def elapsed_time(self, end: "Event") -> float:
                return device.elapsed_ms(self.event_id, end.event_id)

        def current_stream(wanted: Any = None) -> Stream:
            at = index(wanted)
            return Stream(stream_id=device.get_stream(at), device_index=at, device_type=PRIVATE_USE_1)

        @contextlib.contextmanager
        def stream(wanted: Stream) -> Iterator[None]:
            before = device.get_device(), device.get_stream(wanted.device_index)
            device.set_stream(wanted.device_index, wanted.stream_id)
            try:
                yield
            finally:
                device.set_stream(wanted.device_index, before[1])
                device.exchange_device(before[0])

        return {"Stream": Stream, "Event": Event, "current_stream": current_stream, "stream": stream}


def install(device: ModuleType, name: str) -> None:
    """Give the device its name and its place in torch."""
    torch.utils.rename_privateuse1_backend(name)
    module, made = ModuleType(f"torch.{name}"), Npu(device, name)
    parts = made.common() if name == "bare" else made.common() | made.devices() | made.streams()
    vars(module).update(parts)
    device.set_float64(name != "bare")
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend()

    def group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return device.make_process_group(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    dist.Backend.register_backend("hccl", group, devices=[name])
