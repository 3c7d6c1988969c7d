"""The kernels of a device are compiled in a thread as soon as a model is called there, and not inside a hook when they are first needed.

    first call of a model on the device    the thread begins, and the sidecar is told: a rank that compiles may be slow, but is not stuck
    meanwhile                              no readings are made on that device, steps are reported without them, and the guard uses torch's own operations
    the thread is over                     at the next backward pass the sidecar is told, and how long it took

It does not begin earlier: before a script has chosen its device, we would create a context on the first one, on every rank of the host.
"""

import threading

import torch

from holter.rank import accelerator
from holter.rank.context import Context
from holter.records import Preparing
from holter.threads import without_signals
from holter_kernels import WarmUp
from holter_kernels.warm import is_needed


class KernelWarmUp:
    """Compiles the kernels of one rank's devices."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._work: WarmUp | None = None
        self._is_done = False

    def see(self, module: torch.nn.Module) -> None:
        """Begin to compile for the devices of a model that is called in training, unless that is done or under way."""
        if self._is_done or self._work is not None or accelerator.module() is None:
            return
        tensors = [*module.parameters(), *module.buffers()]
        on = {tensor.device for tensor in tensors if not tensor.is_cpu and not tensor.is_meta}
        if not on:
            return
        on = set(filter(is_needed, on))
        self._is_done = not on
        if on:
            # Losses and norms are float32, whatever the model is.
            self._begin(WarmUp(on, {torch.float32, *(tensor.dtype for tensor in tensors)}))

    def settle(self) -> None:
        """Report, at the beginning of a backward pass, that the thread is over, if it is."""
        if self._work is not None and self._work.is_over:
            self._tell(is_over=True, seconds=self._work.seconds, num_kernels=len(self._work.compiled))
            self._work, self._is_done = None, True

    def _begin(self, work: WarmUp) -> None:
        self._work = work
        self._tell(is_over=False)
        thread = threading.Thread(target=work.run, name="holter-kernels", daemon=True)
        try:
            with without_signals():
                thread.start()
        except RuntimeError:
            # No more threads can be started, so compile here.
            work.run()

    def _tell(self, *, is_over: bool, seconds: float = 0.0, num_kernels: int = 0) -> None:
        told = Preparing(what="kernels", is_over=is_over, seconds=seconds, num=num_kernels)
        self._context.writer.say(self._context.log.step, told)
