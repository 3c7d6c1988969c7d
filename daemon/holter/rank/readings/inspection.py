"""One training pass under hooks on every module: which modules were called, in which dtype, whether with gradients, and with how many zeros.

    first       at step 2, once a run
    idle        when parameters have had no gradient for long, at most three times
    changed     every 32 steps (less often for models of many modules): only dtypes, and outside of autocast whether values went through a
                narrower one; reported if something is not as it was at step 2

The hooks stay until the backward pass is over: reentrant checkpointing calls its modules first without gradients, and in backward again with
them. A model is left alone if torch.compile or TorchScript has compiled any part of it.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from holter.rank.context import Context
from holter.rank.hooks.model_calls import UncopiedHook
from holter.rank.readings.samples import is_plain_moment, is_readable, strided
from holter.records import Inspection, Named, Witness

FIRST_STEP = 2
MAX_IDLE = 3
AGAIN_EVERY, MODULES_AGAIN = 32, 64
"""Steps between two looks at the dtypes for a model of up to so many modules; twice the steps for twice the modules.

It depends on the modules, not on the time that a look takes, so that all ranks look at the same steps.
"""
MAX_CHANGED = 4
"""Number of changes of dtypes that are reported."""
MAX_WITNESSES, MAX_PLACES = 256, 512
MAX_NAMES = 32
MAX_DEPTH = 3
NUM_ELEMENTS = 4096
MAX_NODES = 64
"""Number of operations between two modules that are followed back."""
MAX_FOLLOWED = 8192
"""Number of hooks on operations. More calls than that before a backward pass belong to a rollout, and their gradients are not reported."""
_SEEN = "holter"
"""Key in an operation's metadata for the module whose output it made; a reference the other way round would keep the graph alive."""
MIN_ROUNDED = 16
"""Number of different values from which on short mantissas are no coincidence."""
OF_INPUT = " (input)"
LOW_BITS = 0x1FFF
"""The mantissa bits of float32 that neither float16 nor bfloat16 has."""
KINDS = ("Linear", "Conv", "Embedding", "Norm")
"""Parts of the class names of modules that are looked at even if they have children."""
FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Outside of training these modules take a fused path with other rounding, on which no hook is called."""
UNCALLED = (nn.ParameterList, nn.ParameterDict)
"""Modules that are never called, by design."""


@dataclass
class _Seen:
    module: "weakref.ref[nn.Module]"
    num_calls: int = 0
    dtype: str = ""
    output_zeros: float = math.nan
    input_zeros: float = math.nan
    was_gradient_on: bool = False
    has_gradient_path: bool = False
    is_rounded: bool | None = None
    has_gradient: bool | None = None
    """Whether the gradient of its output had anything but zeros; None if it was not seen."""
    gives_gradient: bool | None = None
    """The same for the gradient of its input."""
    feeders: "list[_Seen]" = field(default_factory=list)
    """The modules whose results its input was made of."""


@dataclass
class _Pass:
    reason: Literal["first", "idle", "changed"]
    seen: dict[str, _Seen] = field(default_factory=dict)
    roots: list[nn.Module] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    of_roots: list[Any] = field(default_factory=list)
    autocast_dtype: str = ""
    num_modules: int = 0
    called: dict[int, int] = field(default_factory=dict)
    """Place of each module, by its id, in the order of first calls."""
    rounded: dict[str, bool] = field(default_factory=dict)
    """Whether values at a place (a module's name, perhaps with ` (input)`) went through a narrower dtype."""
    hooks: list[Any] = field(default_factory=list)
    """Hooks on operations of the graph."""
    is_followed: bool = True
    """Whether the gradients of all calls could be followed; False if there were too many calls."""


class InspectionProbe:
    """Puts hooks on the modules for one pass, and removes them again."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._open: _Pass | None = None
        self._left: list[Any] = []
        """Hooks on the roots that could not be removed when a pass raised."""
        self._is_first_due = True
        self._is_asked = False
        self._num_idle = 0
        self._asked_step = -1
        self._dtypes: dict[str, str] = {}
        self._rounded: dict[str, bool] = {}
        self._again_every = 0
        self._num_changed = 0

    def ask(self) -> None:
        """Inspect the next pass, to find out why parameters are idle."""
        step = self._context.log.step
        # The wait doubles with each look: a branch that is idle on purpose is not worth three looks in a row.
        if self._num_idle < MAX_IDLE and step >= self._asked_step << self._num_idle:
            self._is_asked = True

    def begin(self, module: nn.Module) -> None:
        """Put hooks on a model that is called in training, if an inspection is due or under way."""
        log = self._context.log
        while self._left:
            self._left.pop().remove()
        if self._open is None:
            is_first = self._is_first_due and log.step >= FIRST_STEP
            is_again = (
                self._again_every and log.step % self._again_every == FIRST_STEP and self._num_changed < MAX_CHANGED
            )
            if not (self._is_asked or is_first or is_again) or log.micro_step:
                return
            self._open = _Pass("idle" if self._is_asked else "first" if is_first else "changed")
            self._is_first_due, self._num_idle = self._is_first_due and self._is_asked, self._num_idle + self._is_asked
            if self._open.reason != "changed":
                self._asked_step, self._is_asked = max(log.step, 1), False
        if any(root is module for root in self._open.roots) or is_compiled(module):
            return
        self._open.roots.append(module)
        self._put_on(self._open, module)

    def failed(self) -> None:
        """End the inspection if the model's call that is over raised."""
        if self._open is not None and sys.exc_info()[0] is not None:
            # Torch is iterating over the root's hooks now: removing one would raise.
            self._left, self._open.of_roots = self._left + self._open.of_roots, []
            self.end(is_complete=False)

    def end(self, *, is_complete: bool = True) -> None:
        """Remove the hooks when the backward pass, the step or the run is over, and report what was seen if it is complete."""
        inspected, self._open = self._open, None
        if inspected is None:
            return
        for handle in (*inspected.handles, *inspected.of_roots, *inspected.hooks):
            handle.remove()
        if is_complete and inspected.called and self._is_news(inspected):
            self._context.writer.say(self._context.log.step, _record_of(inspected))

    def _is_news(self, inspected: _Pass) -> bool:
        """Whether the pass is worth reporting: a look at dtypes only if they differ from the first inspection, any other always."""
        dtypes = {name: seen.dtype for name, seen in inspected.seen.items() if seen.dtype}
        rounded = {name: seen.is_rounded for name, seen in inspected.seen.items() if seen.is_rounded is not None}
        rounded |= inspected.rounded
        if inspected.reason == "first":
            doublings = max(0, (inspected.num_modules - 1) // MODULES_AGAIN).bit_length()
            self._dtypes, self._rounded, self._again_every = dtypes, rounded, AGAIN_EVERY << doublings
        if inspected.reason != "changed":
            return True
        is_changed = any(self._dtypes.get(name, dtype) != dtype for name, dtype in dtypes.items()) or any(
            self._rounded.get(name, is_short) != is_short for name, is_short in rounded.items()
        )
        self._num_changed += is_changed
        return is_changed

    def _put_on(self, inspected: _Pass, root: nn.Module) -> None:
        model = self._context.models.of(root)
        prefix = model.prefix if model is not None else ""
        _note_autocast(inspected, root)
        for name, module in _parts(root):
            inspected.num_modules += 1
            seen = None
            if len(inspected.seen) < MAX_WITNESSES and _is_witness(module):
                seen = inspected.seen[prefix + name] = _Seen(weakref.ref(module))
            elif isinstance(module, UNCALLED) or (module is root and not _own(module)):
                continue
            wrap = self._context.guard.wrap
            hook = UncopiedHook(wrap(_watch(inspected, seen, prefix + name, wrap), "any"))
            handles = inspected.of_roots if module is root else inspected.handles
            handles.append(module.register_forward_hook(hook))


def is_compiled(root: nn.Module) -> bool:
    """Whether TorchScript compiled a part of this model, or torch.compile anything in this process: hooks would make it recompile."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    if counters.get("stats", {}).get("unique_graphs", 0):
        return True
    return any(
        isinstance(module, torch.jit.ScriptModule)
        or "_orig_mod" in module._modules  # noqa: SLF001
        or module._compiled_call_impl is not None  # noqa: SLF001
        for module in root.modules()
    )


def _parts(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules with their names, without those that must not have a hook."""
    shut: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(prefix) for prefix in shut):
            continue
        if isinstance(module, FAST_PATHS):
            if not module.training:
                shut.append(f"{name}." if name else "")
                continue
            if isinstance(module, nn.MultiheadAttention):
                # Attention reads its children's parameters and does not call them.
                shut.append(f"{name}.")
        yield name, module


def _is_witness(module: nn.Module) -> bool:
    kind = type(module).__name__
    return not isinstance(module, UNCALLED) and (not module._modules or any(part in kind for part in KINDS))  # noqa: SLF001


def _own(module: nn.Module) -> bool:
    return bool(module._parameters) and not isinstance(module, UNCALLED)  # noqa: SLF001


def _watch(inspected: _Pass, seen: _Seen | None, name: str, wrap: Callable[..., Any]) -> Any:
    def watch(module: nn.Module, args: Any, output: Any) -> None:
        inspected.called.setdefault(id(module), len(inspected.called))
        if seen is None:
            if name and is_plain_moment() and not inspected.autocast_dtype:
                _note_rounded(inspected, name, _first(output))
            return
        seen.num_calls += 1
        seen.was_gradient_on |= torch.is_grad_enabled()
        first = _first(output)
        if first is None:
            return
        _note_autocast(inspected, module, first.device.type)
        seen.has_gradient_path |= first.requires_grad
        seen.dtype = str(first.dtype).removeprefix("torch.")
        if not is_plain_moment():
            return
        if inspected.reason != "changed":
            seen.output_zeros = _zeros(first)
            seen.input_zeros = _zeros(_first(args))
        if inspected.reason == "idle":
            _follow(inspected, seen, _first(args), first, wrap)
        if _own(module) and not inspected.autocast_dtype:
            seen.is_rounded = _is_rounded(first)
            _note_rounded(inspected, f"{name}{OF_INPUT}", _first(args))

    return watch


def _follow(
    inspected: _Pass, seen: _Seen, given: torch.Tensor | None, output: torch.Tensor, wrap: Callable[..., Any]
) -> None:
    """Follow the gradients of a module's output and input through the backward pass, and note which modules feed it."""
    if len(inspected.hooks) >= MAX_FOLLOWED:
        inspected.is_followed = False
        return

    def of_output(gradient: torch.Tensor) -> None:
        seen.has_gradient = seen.has_gradient or _is_any(gradient)

    def of_input(gradient: torch.Tensor) -> None:
        seen.gives_gradient = seen.gives_gradient or _is_any(gradient)

    for tensor, note in ((output, of_output), (given, of_input)):
        if tensor is not None and tensor.grad_fn is not None:
            # The hook is on the operation: a script's tensor with a hook could not be saved or sent without a warning.
            inspected.hooks.append(tensor.grad_fn.register_prehook(wrap(_of_one(tensor.output_nr, note), "any")))
    if given is not None and given.grad_fn is not None and not seen.feeders:
        seen.feeders = _feeders(given)
    if output.grad_fn is not None:
        output.grad_fn.metadata[_SEEN] = seen


def _of_one(number: int, note: Callable[[torch.Tensor], None]) -> Callable[[Any], None]:
    def hook(gradients: Any) -> None:
        if gradients[number] is not None:
            note(gradients[number])

    return hook


def _feeders(given: torch.Tensor) -> list[_Seen]:
    """Return the modules from whose results a few operations made this input; empty if any other trained tensor went into it."""
    found: list[_Seen] = []
    known: set[Any] = set()
    todo: list[Any] = [given.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if len(known) > MAX_NODES or hasattr(node, "variable"):
            return []
        if (made := node.metadata.get(_SEEN)) is not None:
            found.append(made)
        else:
            todo += [before for before, _ in node.next_functions]
    return found


def _is_any(gradient: torch.Tensor) -> bool | None:
    """Whether a gradient in host memory has anything but zeros; None for one that is not read, such as on a device."""
    if not gradient.is_cpu or type(gradient) is not torch.Tensor or not is_readable(gradient):
        return None
    return bool(gradient.any())


def _lost_before(seen: _Seen, *, has_parameters: bool) -> list[_Seen]:
    """Return the feeders of a module if they all got zero gradients although a gradient went through it; else an empty list.

    For a module without parameters, it is enough that a gradient came to its output.
    """
    is_arriving = seen.gives_gradient if has_parameters else seen.has_gradient
    feeders = [feeder for feeder in seen.feeders if feeder is not seen]
    return feeders if is_arriving and all(feeder.has_gradient is False for feeder in feeders) else []


def _first(thing: Any, depth: int = 0) -> torch.Tensor | None:
    """Return the first floating-point tensor of a module's arguments or results; None if there is none."""
    if isinstance(thing, torch.Tensor):
        return thing if thing.is_floating_point() else None
    parts = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple)) else ()
    found = (_first(part, depth + 1) for part in parts) if depth < MAX_DEPTH else ()
    return next((tensor for tensor in found if tensor is not None), None)


def _zeros(tensor: torch.Tensor | None) -> float:
    """Return the share of zeros in a sample; NaN if the tensor is not in host memory, for a device is never waited for."""
    if tensor is None or not tensor.is_cpu or type(tensor) not in (torch.Tensor, nn.Parameter):
        return math.nan
    tensor = tensor.detach()
    if not is_readable(tensor):
        return math.nan
    return float((strided(tensor, NUM_ELEMENTS) == 0).float().mean())


def _note_rounded(inspected: _Pass, place: str, tensor: torch.Tensor | None) -> None:
    is_short = _is_rounded(tensor) if tensor is not None and len(inspected.rounded) < MAX_PLACES else None
    if is_short is not None:
        inspected.rounded[place] = is_short


def _is_rounded(tensor: torch.Tensor) -> bool | None:
    """Whether a sample of float32 numbers has the short mantissas of a narrower dtype; None if too few values tell, or none can be read."""
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or type(tensor) is not torch.Tensor:
        return None
    tensor = tensor.detach()
    if not is_readable(tensor):
        return None
    bits = strided(tensor, NUM_ELEMENTS).view(torch.int32)
    if bool((bits & LOW_BITS).any()):
        return False
    return True if len(bits[bits != 0].unique()) >= MIN_ROUNDED else None


def _note_autocast(inspected: _Pass, module: nn.Module, device: str = "") -> None:
    if inspected.autocast_dtype:
        return
    if not device:
        parameter = next(module.parameters(), None)
        device = parameter.device.type if parameter is not None else "cpu"
    if torch.is_autocast_enabled(device):
        inspected.autocast_dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _record_of(inspected: _Pass) -> Inspection:
    """Return the record, with the witnesses in the order of their calls: unlike the order of construction, it shows which module feeds which."""
    witnesses, uncalled = [], []
    never = len(inspected.called)
    lost: dict[int, str] = {}
    for name, seen in inspected.seen.items() if inspected.is_followed else ():
        module = seen.module()
        for feeder in _lost_before(seen, has_parameters=module is not None and _own(module)):
            lost.setdefault(id(feeder), name)
    for name, seen in sorted(
        inspected.seen.items(), key=lambda item: inspected.called.get(id(item[1].module()), never)
    ):
        module = seen.module()
        if module is None:
            continue
        if not seen.num_calls:
            uncalled += [name] if _own(module) else []
            continue
        witnesses.append(
            Witness(
                name,
                type(module).__name__,
                seen.num_calls,
                seen.dtype,
                seen.output_zeros,
                seen.input_zeros,
                seen.was_gradient_on,
                seen.has_gradient_path,
                _own(module),
                seen.is_rounded,
                seen.has_gradient if inspected.is_followed else None,
                lost.get(id(seen), ""),
            )
        )
    return Inspection(
        reason=inspected.reason,
        autocast_dtype=inspected.autocast_dtype,
        witnesses=witnesses,
        num_modules=inspected.num_modules,
        uncalled=Named(len(uncalled), uncalled[:MAX_NAMES]),
        rounded=inspected.rounded,
    )
