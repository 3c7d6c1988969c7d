"""Where a NaN was born: the first module that made one out of finite inputs.

The step's batch is run through the model once more, under hooks. Nothing is left behind: no gradient is recorded; random states are put
back; buffers and what modules keep in plain attributes are copies meanwhile. The wrapper is not called, and a collective that the
model calls itself ends the replay: one rank alone would wait for its peers for ever. Weights are still those of the forward pass:
the optimizer has not stepped.
"""

import contextlib
import io
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holter.probes.batches import Inputs, leaves
from holter.records import Origin

COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_dtensor"})
PLAIN = (list, dict, set)


def find(inputs: Inputs | None, prefix: str) -> Origin:
    """Replay the captured call; says why if that cannot be done."""
    module = inputs.model() if inputs is not None else None
    if inputs is None or module is None:
        return _unknown("the inputs of the step were not seen")
    obstacle = _obstacle(inputs, module)
    if obstacle:
        return _unknown(obstacle)
    births: list[Origin] = []
    try:
        _replay(module, inputs, prefix, births)
    except _FoundError:
        return births[0]
    except _CollectiveError as collective:
        return _unknown(f"the model communicates ({collective}): one rank cannot replay it alone")
    except Exception as error:  # noqa: BLE001  the script's module may not bear a second call
        return _unknown(f"the replay raised {type(error).__name__}: {error}")
    reason = "replayed with the same batch and random state: every module's output is finite"
    return Origin(module="", module_class="", is_input_finite=True, input_absmax=0.0, replayed=True, reason=reason)


def _replay(module: torch.nn.Module, inputs: Inputs, prefix: str, births: list[Origin]) -> None:
    is_cast, dtype = inputs.autocast
    with (
        _left_as_it_was(module),
        _watching(module, prefix, births),
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(io.StringIO()),
        torch.no_grad(),
        torch.autocast("cpu", dtype=dtype, enabled=is_cast),
        _Alone(),
    ):
        torch.random.set_rng_state(inputs.random_state)
        module(*inputs.args, **inputs.kwargs)


def _obstacle(inputs: Inputs, module: torch.nn.Module) -> str:
    if any(t.device.type != "cpu" for _, t, _ in inputs.leaves):
        return "the model is on a device: a replay would have to wait for it"
    if any(t._version != version for _, t, version in inputs.leaves):  # noqa: SLF001
        return "an input was changed in place since: the replay would not see what the model saw"
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return "a part of the model is compiled by TorchScript and takes no hooks"
    return ""


class _FoundError(Exception):
    """The first non-finite output was seen; the rest of the forward pass is not needed."""


class _CollectiveError(Exception):
    """The model calls a collective."""


class _Alone(TorchDispatchMode):  # type: ignore[misc]
    """Lets everything pass but what needs other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise _CollectiveError(func.name())
        return func(*args, **(kwargs or {}))


def _unknown(reason: str) -> Origin:
    return Origin(module="", module_class="", is_input_finite=False, input_absmax=0.0, replayed=False, reason=reason)


@contextlib.contextmanager
def _watching(module: torch.nn.Module, prefix: str, births: list[Origin]) -> Iterator[None]:
    names = {id(child): prefix + name for name, child in module.named_modules()}

    def judge(child: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if all(_is_finite(t) for _, t in leaves(output, "")):
            return
        taken = [t for _, t in leaves((args, kwargs), "") if t.is_floating_point()]
        if not all(_is_finite(t) for t in taken):
            return
        is_sound = all(_is_finite(p) for p in child.parameters(recurse=False))
        births.append(
            Origin(
                module=names.get(id(child), ""),
                module_class=type(child).__name__,
                is_input_finite=True,
                input_absmax=max((float(t.abs().max()) for t in taken if t.numel()), default=0.0),
                replayed=True,
                reason="first module whose output is not finite while its inputs are"
                + ("" if is_sound else "; its own weights are not finite"),
            )
        )
        # Children end before their parents: the first birth is the innermost.
        raise _FoundError

    handles = []
    try:
        for child in module.modules():
            handles.append(child.register_forward_hook(judge, with_kwargs=True))  # noqa: PERF401  some are on when one fails
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _left_as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """Random states, buffers and plain attributes, all put back at the end."""
    now = torch.random.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    parts = list(module.modules())
    buffers = [(part, dict(part._buffers)) for part in parts]  # noqa: SLF001
    attributes = [(part, {k: v for k, v in part.__dict__.items() if not k.startswith("_")}) for part in parts]
    contents = [(v, v.copy()) for _, kept in attributes for v in kept.values() if type(v) in PLAIN]
    try:
        for part, kept in buffers:
            part._buffers.update({name: b.detach().clone() for name, b in kept.items() if b is not None})  # noqa: SLF001
        yield
    finally:
        for part, kept in buffers:
            part._buffers.update(kept)  # noqa: SLF001
        for part, kept in attributes:
            part.__dict__.update(kept)
            for name in [k for k in part.__dict__ if not k.startswith("_") and k not in kept]:
                del part.__dict__[name]
        for container, before in contents:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        torch.random.set_rng_state(now[0])
        random.setstate(now[1])
        np.random.set_state(now[2])  # noqa: NPY002


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
