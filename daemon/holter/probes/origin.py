"""Where a NaN was born: the first module that made one out of finite inputs.

The step's batch is run through the model once more, under hooks.

Nothing is left behind: no gradient is recorded, random states and buffers are put back bit for bit. The wrapper is not called, so
no collective runs. Weights are still those of the forward pass: the optimizer has not stepped.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch

from holter.probes.batches import Inputs, leaves
from holter.records import Origin


def find(inputs: Inputs | None, prefix: str) -> Origin:
    """Replay the captured call; says why if that cannot be done."""
    module = inputs.model() if inputs is not None else None
    if inputs is None or module is None:
        return _unknown("the inputs of the step were not seen")
    obstacle = _obstacle(inputs)
    if obstacle:
        return _unknown(obstacle)
    births: list[Origin] = []
    is_cast, dtype = inputs.autocast
    with (
        _left_as_it_was(module, inputs),
        _watching(module, prefix, births),
        torch.no_grad(),
        torch.autocast("cpu", dtype=dtype, enabled=is_cast),
    ):
        try:
            module(*inputs.args, **inputs.kwargs)
        except _FoundError:
            return births[0]
        except Exception as error:  # noqa: BLE001  the script's module may not bear a second call
            return _unknown(f"the replay raised {type(error).__name__}: {error}")
    if births:
        return births[0]
    reason = "replayed with the same batch and random state: every module's output is finite"
    return Origin(module="", module_class="", is_input_finite=True, input_absmax=0.0, replayed=True, reason=reason)


def _obstacle(inputs: Inputs) -> str:
    if any(t.device.type != "cpu" for _, t, _ in inputs.leaves):
        return "the model is on a device: a replay would have to wait for it"
    if any(t._version != version for _, t, version in inputs.leaves):  # noqa: SLF001
        return "an input was changed in place since: the replay would not see what the model saw"
    return ""


class _FoundError(Exception):
    """The first non-finite output was seen; the rest of the forward pass is not needed."""


def _unknown(reason: str) -> Origin:
    return Origin(module="", module_class="", is_input_finite=False, input_absmax=0.0, replayed=False, reason=reason)


@contextlib.contextmanager
def _watching(module: torch.nn.Module, prefix: str, births: list[Origin]) -> Iterator[None]:
    names = {id(child): prefix + name for name, child in module.named_modules()}

    def judge(child: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not any(not _is_finite(t) for _, t in leaves(output, "")):
            return
        taken = [t for _, t in leaves((args, kwargs), "") if t.is_floating_point()]
        if not all(_is_finite(t) for t in taken):
            return
        is_sound = all(_is_finite(p) for p in child.parameters(recurse=False))
        absmax = max((float(t.abs().max()) for t in taken if t.numel()), default=0.0)
        births.append(
            Origin(
                module=names.get(id(child), ""),
                module_class=type(child).__name__,
                is_input_finite=True,
                input_absmax=absmax,
                replayed=True,
                reason="first module whose output is not finite while its inputs are"
                + ("" if is_sound else "; its own weights are not finite"),
            )
        )
        # Children end before their parents: the first birth is the innermost.
        raise _FoundError

    handles = [child.register_forward_hook(judge, with_kwargs=True) for child in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _left_as_it_was(module: torch.nn.Module, inputs: Inputs) -> Iterator[None]:
    """Random states as they were when the model was called; buffers replaced by copies, so that the real ones are not touched."""
    now = torch.random.get_rng_state(), random.getstate()
    torch.random.set_rng_state(inputs.random_state)
    swapped = []
    for owner in module.modules():
        for name, buffer in owner._buffers.items():  # noqa: SLF001
            if buffer is not None:
                swapped.append((owner, name, buffer))
                owner._buffers[name] = buffer.detach().clone()  # noqa: SLF001
    try:
        yield
    finally:
        for owner, name, buffer in swapped:
            owner._buffers[name] = buffer  # noqa: SLF001
        torch.random.set_rng_state(now[0])
        random.setstate(now[1])


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
