"""Remembers which tensors this rank receives from another within a step: the sender has made what a pipeline's stage is given.

    dist.recv(tensor, src)                    a model that is split by hand
    dist.P2POp(dist.irecv, tensor, peer)      torch's own pipelines, and scripts that call batch_isend_irecv

`dist.irecv` itself is not patched: torch compares functions with it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from holter.rank.context import Context


class ReceiveProbe:
    """Remembers, for the present step, the memory addresses at which tensors of other ranks were received, and from whom."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def install(self) -> None:
        """Patch `recv` and the constructor of `P2POp`."""
        if dist.is_available():
            self._context.patches.replace("recv", self._around_recv, dist, dist.distributed_c10d)
            self._context.patches.replace("__init__", self._around_operation, dist.P2POp)

    def _around_recv(self, original: Callable[..., Any]) -> Callable[..., Any]:
        notice = self._context.guard.wrap(self._notice)

        @functools.wraps(original)
        def recv(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            sender = original(tensor, *args, **kwargs)
            if not torch.compiler.is_compiling():
                notice(tensor, sender)
            return sender

        return recv

    def _around_operation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        notice = self._context.guard.wrap(self._notice)

        @functools.wraps(original)
        def initialise(operation: Any, *args: Any, **kwargs: Any) -> None:
            original(operation, *args, **kwargs)
            if getattr(operation.op, "__name__", "") == "irecv" and not torch.compiler.is_compiling():
                notice(operation.tensor, operation.peer)

        return initialise

    def _notice(self, tensor: torch.Tensor, sender: Any) -> None:
        if isinstance(sender, int) and sender >= 0:
            self._context.inputs.received[tensor.data_ptr()] = sender
