"""What a test does to the device and asks it."""

import contextlib
from collections.abc import Iterator

import torch

from fake_cuda.build import load


def set_gate(*, is_open: bool, stream: torch.Stream | None = None) -> None:
    """A closed gate stops the device, or one stream of it, before its next operation; the host goes on."""
    if stream is None:
        load().set_gate(is_open)
    else:
        load().set_stream_gate(stream.device_index, stream.stream_id, is_open)


@contextlib.contextmanager
def closed(stream: torch.Stream | None = None) -> Iterator[None]:
    """The gate is closed inside."""
    set_gate(is_open=False, stream=stream)
    try:
        yield
    finally:
        set_gate(is_open=True, stream=stream)


def set_delay(seconds: float) -> None:
    """Every operation begins that much later: a device that lags behind its host."""
    load().set_delay_us(round(seconds * 1e6))


@contextlib.contextmanager
def delayed(seconds: float) -> Iterator[None]:
    """A device that lags, inside."""
    set_delay(seconds)
    try:
        yield
    finally:
        set_delay(0)


def drain() -> None:
    """Wait until nothing is queued; not counted as a synchronisation. What an operation raised is raised here."""
    load().drain()


def syncs() -> list[str]:
    """What made the host wait since the last call, by name, in order."""
    return load().take_syncs()


def count() -> dict[str, int]:
    """Launches, copies and their bytes, blocks, pinned allocations, streams taken from the pool: since the process began."""
    return load().counts()


@contextlib.contextmanager
def launches() -> Iterator[list[str]]:
    """The names of all operations that are queued inside, in order; filled at the end."""
    names: list[str] = []
    load().log_launches(True)
    try:
        yield names
    finally:
        names += load().log_launches(False)


def num_waiting(stream: torch.Stream | None = None) -> int:
    """How many operations a stream (the current one) has not finished."""
    stream = stream or torch.cuda.current_stream()
    return load().num_waiting(stream.device_index, stream.stream_id)


def make_external_stream(device: int = 0) -> torch.cuda.ExternalStream:
    """A stream that is not from the pool, as `cudaStreamCreate` makes it."""
    return torch.cuda.ExternalStream(load().make_external(), device=device)
