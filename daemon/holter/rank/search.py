"""Finds models, schedulers and loss scalers among all living objects of the interpreter, since nobody registers them, and their names in the script.

A search takes a fraction of a second, so it is made only now and then. A name is the variable or the attribute that holds the object, the same
on every rank:

    encoder = build_encoder()        encoder         a global of the script, or a local of a function that is running
    self.text_encoder = …            text_encoder    an attribute of the script's own object
"""

import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler

_native: Any
try:
    from holter.rank import _living as _native
except ImportError:
    # There was no compiler.
    _native = None

MAX_FRAMES = 64
OURS = "holter"
OWN_REFERENCES = 3
"""Number of references to the mapping of a frame's variables if nobody else holds it: the frame's, ours, and that of the counting call."""
GENERIC = frozenset({"self", "module", "mod", "m", "layer", "child", "root", "obj", "x", "instance"})
"""Names that loops and wrappers use for any module, and that say nothing."""


def living(*kinds: type) -> list[Any]:
    """Return all living objects of these classes and their subclasses.

    They are found by `type`, not `isinstance`, which would ask lazy proxies for their class and wake them up. One native call does it, so that no
    other thread runs while we hold references to all objects (see living.c). Without it, a thread that is filling a tuple may be disturbed.
    """
    wanted = _with_derived(kinds)
    if _native is not None:
        found: list[Any] = _native.of_kinds(list(wanted))
        return found
    return [each for each in gc.get_objects() if type(each) in wanted]


def top_level() -> list[Any]:
    """Return the modules that are not a child of another module."""
    modules = living(torch.nn.Module)
    children = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in children]


def _with_derived(kinds: Iterable[type]) -> set[type]:
    """Return these classes and all their subclasses."""
    found: set[type] = set()
    new: list[type] = list(kinds)
    while new:
        kind = new.pop()
        if kind not in found:
            found.add(kind)
            new += type.__subclasses__(kind)
    return found


def _children(module: Any) -> list[Any]:
    # Half-built, lazy and compiled modules are found too, and may raise.
    try:
        return [child for child in module._modules.values() if child is not None]  # noqa: SLF001
    except (AttributeError, RuntimeError, TypeError):
        return []


def parameters_of(module: Any) -> list[Any]:
    """Return the parameters of a module, without those that are not initialised yet; empty if it raises."""
    try:
        return [p for p in module.parameters() if not isinstance(p, UninitializedParameter)]
    except (AttributeError, RuntimeError, TypeError):
        return []


def innermost(optimizer: Any) -> Any:
    """Return torch's own optimizer inside a framework's wrappers, whose step does the work."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer


def schedulers(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """Return the schedulers of these optimizers, without the parts of a chain of schedulers."""
    ours = {id(innermost(optimizer)) for optimizer in optimizers}
    # The Trainer gives its scheduler accelerate's wrapper of the optimizer.
    found = [each for each in living(LRScheduler) if id(innermost(getattr(each, "optimizer", None))) in ours]
    parts = {id(part) for each in found for part in getattr(each, "_schedulers", ())}
    return [each for each in found if id(each) not in parts]


def scalers() -> list[Any]:
    """Return all loss scalers that are enabled."""
    return [scaler for scaler in living(torch.amp.GradScaler) if scaler.is_enabled()]


def variable_of(*things: Any) -> str:
    """Return the name under which the script holds one of these objects; empty if it has none."""
    wanted = {id(thing) for thing in things if thing is not None}
    for space in _spaces():
        names = sorted(key for key, value in space.items() if id(value) in wanted and _is_name(key))
        if names:
            return names[0]
    return _attribute(things, wanted)


def unique(name: str, taken: Iterable[str]) -> str:
    """Return the name, with a number appended if it is taken."""
    taken = set(taken)
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _spaces() -> Iterator[Mapping[str, Any]]:
    """Yield the namespaces of the script: its globals, then the variables of the running functions, the innermost first."""
    main = sys.modules.get("__main__")
    if main is not None:
        yield dict(vars(main))
    frame: Any = sys._getframe(1)  # noqa: SLF001
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith((OURS, "torch")):
            yield variables(frame)
        frame = frame.f_back


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame, as they are now.

    Before Python 3.13, a function's frame keeps the mapping that `f_locals` returns, which would keep alive a batch that the script has freed. So
    the variables are removed from it again, unless the script holds that mapping too (`locals()`) or a debugger writes it back.
    """
    shown, code = frame.f_locals, frame.f_code
    found = dict(shown)
    is_kept = sys.version_info < (3, 13) and bool(code.co_flags & inspect.CO_OPTIMIZED)
    if is_kept and sys.gettrace() is None and sys.getrefcount(shown) <= OWN_REFERENCES:
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            shown.pop(name, None)
    return found


def _attribute(things: Iterable[Any], wanted: set[int]) -> str:
    names = set()
    for thing in things:
        for holder in _holders(thing) if thing is not None else ():
            space = holder if type(holder) is dict else _vars(holder)
            names |= {key for key, value in list(space.items()) if id(value) in wanted and _is_name(key)}
    return min(names, default="")


_holders: Callable[[Any], list[Any]] = gc.get_referrers if _native is None else _native.holders


def _vars(holder: Any) -> Mapping[str, Any]:
    """Return the attributes of an object; empty for one without any, such as a list, a frame or a cell."""
    try:
        space = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return space if type(space) is dict else {}


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier() and not key.startswith("_") and key not in GENERIC
