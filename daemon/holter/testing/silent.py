"""Faults that nobody notices while the job goes on: changed numbers, lost updates, gradients that do not arrive.

What is changed at once (a bit, a value, a gradient) stays changed; what is put into the model or the optimizer returns
an `Injection`.
"""

import itertools
import math
from typing import TYPE_CHECKING, Any

from holter.testing.faults import Injection

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

_WORDS = {2: "int16", 4: "int32", 8: "int64"}
"""Name of the integer dtype for each element size in bytes."""


def flip_bit(tensor: "torch.Tensor", index: int = 0, bit: int = 12) -> None:
    """Flip one bit of one element, as a failing memory module does. In float32, bits 0 to 22 are the mantissa, 23 to 30 the exponent."""
    import torch  # noqa: PLC0415  whoever rehearses has it; importing us must not

    size = tensor.element_size()
    if size not in _WORDS or not 0 <= bit < 8 * size:
        raise ValueError(f"bit must be one of an element of {size} bytes, got {bit}")
    if not 0 <= index < tensor.numel():
        raise ValueError(f"index must be that of one of {tensor.numel()} elements, got {index}")
    dtype = getattr(torch, _WORDS[size])
    words = tensor.detach().view(dtype).view(-1)
    # The top bit is the sign: as a signed number it is the smallest one.
    mask = 1 << bit if bit < 8 * size - 1 else -(1 << bit)
    words[index] ^= mask


def perturb(tensors: "torch.Tensor | Iterable[torch.Tensor]", scale: float = 1e-3, seed: int = 0) -> None:
    """Add noise of `scale` times each tensor's own root mean square (times 1 if it is all zero).

    Draws from a generator of its own.
    """
    import torch  # noqa: PLC0415  whoever rehearses has it; importing us must not

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in _each(tensors):
            size = float(tensor.detach().float().square().mean().sqrt()) or 1.0
            tensor.add_(
                (torch.randn(tensor.shape, generator=generator) * (scale * size)).to(tensor.device, tensor.dtype)
            )


def scale_gradients(parameters: "torch.Tensor | Iterable[torch.Tensor]", factor: float) -> None:
    """Multiply the existing gradients, like a clip that only this rank does."""
    if not math.isfinite(factor):
        raise ValueError(f"factor must be finite, got {factor}")
    for parameter in _each(parameters):
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def round_trip(tensors: "torch.Tensor | Iterable[torch.Tensor]", dtype: "torch.dtype") -> None:
    """Convert values to a narrower dtype and back; the visible dtype stays the same."""
    import torch  # noqa: PLC0415  whoever rehearses has it; importing us must not

    with torch.no_grad():
        for tensor in _each(tensors):
            tensor.copy_(tensor.to(dtype))


def lose_updates(optimizer: "torch.optim.Optimizer", tensors: "torch.Tensor | Iterable[torch.Tensor]") -> Injection:
    """Restore these tensors to their earlier values after each step of this optimizer."""
    import torch  # noqa: PLC0415  whoever rehearses has it; importing us must not

    kept, held = list(_each(tensors)), list[torch.Tensor]()

    def before(*_: Any) -> None:
        held[:] = [tensor.detach().clone() for tensor in kept]

    def after(*_: Any) -> None:
        with torch.no_grad():
            for tensor, was in zip(kept, held, strict=True):
                tensor.copy_(was)

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return Injection(undo)


def detach_output(module: "nn.Module") -> Injection:
    """Detach this module's output, so that no gradient flows back into it; the output must be a tensor."""
    return Injection(module.register_forward_hook(lambda _, __, output: output.detach()).remove)


def spoil_output(module: "nn.Module", value: float = math.nan, times: int = 1) -> Injection:
    """Set one element of this module's output to `value` in its next `times` passes; the output must be a tensor."""
    calls = itertools.count(1)

    def spoil(_: object, __: object, output: Any) -> Any:
        if next(calls) > times:
            return None
        spoilt = output.clone()
        spoilt[(0,) * spoilt.dim()] = value
        return spoilt

    return Injection(module.register_forward_hook(spoil).remove)


def spoil_gradient(module: "nn.Module", value: float = math.inf, times: int = 1) -> Injection:
    """Set one element of the gradient of this module's output to `value` in `times` passes; the forward pass is sound."""
    calls = itertools.count(1)

    def spoil(gradient: Any) -> Any:
        if next(calls) > times:
            return None
        spoilt = gradient.clone()
        spoilt[(0,) * spoilt.dim()] = value
        return spoilt

    def when_called(_: object, __: object, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(spoil)

    return Injection(module.register_forward_hook(when_called).remove)


def leave_autocast(module: "nn.Module", device: str = "cpu") -> Injection:
    """Let this module compute in float32, whatever autocast region it is called in."""
    import torch  # noqa: PLC0415  whoever rehearses has it; importing us must not

    call = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return call(*(value.float() if _is_narrow(value) else value for value in args), **kwargs)

    module.forward = forward

    def undo() -> None:
        if module.__dict__.get("forward") is forward:
            del module.forward

    return Injection(undo)


def _is_narrow(value: Any) -> bool:
    return getattr(value, "is_floating_point", lambda: False)() and value.element_size() == 2  # noqa: PLR2004  bytes


def _each(tensors: "torch.Tensor | Iterable[torch.Tensor]") -> "Iterable[torch.Tensor]":
    return [tensors] if hasattr(tensors, "data_ptr") else list(tensors)
