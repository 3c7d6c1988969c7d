"""Which accelerator the rank computes on, told once: the sidecar reads it, the rank never asks a driver."""

import torch

from holter.rank.context import Context
from holter.records import OnDevice


class DeviceProbe:
    """Looks when a backward pass begins, until the script has begun to use a device."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_done = False

    def look(self) -> None:
        """Starts no device that the script did not start, and waits for none."""
        if self._is_done or not torch.cuda.is_initialized():
            return
        self._is_done = True
        uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
        if uuid:
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._context.writer.say(self._context.log.step, OnDevice(uuid=name))
