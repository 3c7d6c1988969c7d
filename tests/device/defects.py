"""What the device path did wrong once, each put back by a patch, so that the test of its mend is seen to fail (`test_defects.py`)."""

import contextlib
from typing import Any

import numpy as np
import torch


def one_part_ends_a_hook() -> None:
    """What one reading raises ends the whole hook."""
    from holter.rank.guard import Guard  # noqa: PLC0415
    from holter.rank.readings.fused_pass import Readings  # noqa: PLC0415

    count = Guard.count

    def give_up(_: Any, __: str, error: Exception) -> None:
        raise error

    def count_or_raise(guard: Guard, name: str, error: Exception) -> None:
        if name.startswith("reading "):
            raise error
        count(guard, name, error)

    Guard.attempt = lambda _, call, *args, **kwargs: call(*args, **kwargs)
    Guard.count, Readings._give_up = count_or_raise, give_up


def every_asker_reads() -> None:
    """Gradients are read by each who asks."""
    from holter.rank.readings.gradient_answers import GradientAnswers  # noqa: PLC0415

    GradientAnswers._find = lambda *_, **__: None


def results_are_made_anew() -> None:
    """Each launch takes memory of its own for its results."""
    from holter_kernels.gpu import DevicePass  # noqa: PLC0415

    start = DevicePass._start

    def fresh(self: Any, *args: Any) -> Any:
        self._ring = self._tables = None
        return start(self, *args)

    DevicePass._start = fresh


def nobody_holds() -> None:
    """No flag is given to the device, and its answer is not waited for."""
    from holter.rank.hold.finite_guard import FiniteGuard  # noqa: PLC0415

    FiniteGuard.is_flagged = lambda *_: False
    FiniteGuard._wait_for = lambda self, answer, _: self._owed.append((self._context.log.step, answer))


def saved_on_the_training_s_stream() -> None:
    """A rescue is queued behind the work that hangs."""
    from holter.frameworks import halts  # noqa: PLC0415
    from holter.rank.undo import side_stream, snapshots  # noqa: PLC0415

    for module in (side_stream, snapshots, halts):
        module.beside_training = lambda *_, **__: contextlib.nullcontext()


def device_time_is_not_seen() -> None:
    """The budget counts the host's time only."""
    from holter_kernels import slots  # noqa: PLC0415

    slots._elapsed_s = lambda _: None


def captures_are_not_seen() -> None:
    """What holter reads becomes a part of the script's graph."""
    from holter_kernels import devices  # noqa: PLC0415

    devices.is_capturing = lambda _: False


def tensors_are_held() -> None:
    """A pass keeps what it was given until the next."""
    from holter_kernels.gpu import DevicePass  # noqa: PLC0415

    start = DevicePass._start

    def keeping(self: Any, tensors: Any, placement: Any) -> Any:
        self.kept = list(tensors)
        return start(self, tensors, placement)

    DevicePass._start = keeping


def queued_work_is_not_waited_for() -> None:
    """A snapshot is put back beside what is queued."""
    from holter.rank.undo import snapshots  # noqa: PLC0415

    beside = snapshots.beside_training
    snapshots.beside_training = lambda there, **_: beside(there, is_hung=True)


def one_program_a_row() -> None:
    """However long a row's list of partial rows is."""
    from holter_kernels import gpu  # noqa: PLC0415

    cut = gpu._segments

    def whole(first: np.ndarray) -> np.ndarray:
        segment, gpu.SEGMENT = gpu.SEGMENT, 1 << 40
        try:
            return cut(first)
        finally:
            gpu.SEGMENT = segment

    gpu._segments = whole


def unknown_dtypes_raise() -> None:
    """One tensor of a dtype without statistics spoils the whole list."""
    from holter_kernels import sources  # noqa: PLC0415

    sources.BITS_DTYPE = {}


def kernels_are_compiled_in_hooks() -> None:
    """There is no thread for it."""
    from holter.rank.readings.warming import KernelWarmUp  # noqa: PLC0415

    KernelWarmUp.see = lambda *_: None


def tables_are_pageable() -> None:
    """The host waits for their copies."""
    from holter_kernels import gpu, torch_pass  # noqa: PLC0415

    def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]

    gpu.upload = torch_pass.upload = upload


def streams_come_from_the_pool() -> None:
    """Which NCCL shares."""
    from holter_kernels import devices  # noqa: PLC0415

    devices._own_stream = lambda _: None


def pinned_memory_is_taken_tensor_by_tensor() -> None:
    """Rounded up to a power of two each."""
    from holter_kernels.pinned import PinnedMemory, PinnedPiece  # noqa: PLC0415

    PinnedMemory.take = lambda _, num_bytes, **__: PinnedPiece(
        torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    )


def copies_under_way_are_read() -> None:
    """A gradient that ZeRO-Offload is copying to the host."""
    from holter.frameworks.deepspeed import framework  # noqa: PLC0415

    framework._is_copied = lambda *_: True


def our_flag_hides_the_weights() -> None:
    """What the device is given to leave steps out is taken for a loss scaler's word that it does."""
    from holter.rank.hold.device_flags import DeviceFlags  # noqa: PLC0415

    DeviceFlags.of_scaler = lambda _, optimizer: getattr(optimizer, "found_inf", None)


def a_device_that_captures_is_asked() -> None:
    """Whether it has left a step out."""
    from holter.rank.hold import device_flags  # noqa: PLC0415
    from holter.rank.hooks import step  # noqa: PLC0415

    device_flags.is_past = lambda event, _: event.query()
    step.is_capturing = lambda: False


def autograds_thread_is_a_stranger() -> None:
    """Optimizers that step inside of a device's backward pass are not the training's."""
    from holter.rank.guard import Guard  # noqa: PLC0415

    Guard.is_in_backward = property(lambda _: False, lambda *_: None)


def put_back(name: str) -> None:
    """In this process, for good."""
    globals()[name]()
