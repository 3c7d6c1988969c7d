"""The models that are being trained: found, not told.

    DDP(model)          seen when DDP takes its module, so that even the first forward pass is watched
    anything else       top-level modules with trainable parameters, looked for when an optimizer with unknown ones is met
    holter.watch(...)   told

What the script calls says whether replicas must agree: DDP keeps them equal by construction; nothing else is assumed to.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

REDUCING_WRAPPERS = frozenset({"FullyShardedDataParallel", "DeepSpeedEngine"})
"""Wrappers whose `.grad` is reduced, sharded or gone by the end of backward."""


class Model:
    """One model of the script, with its tensors by name, in a fixed order."""

    def __init__(self, root: torch.nn.Module, prefix: str) -> None:
        self._root = weakref.ref(root, self._forget)
        self.prefix = prefix
        self.wrapper = type(root).__name__
        self.is_replicated = _ddp(root) is not None
        self.is_active = False
        """The thread that we watch has called or optimized it. Another thread's gradients must not even be looked at: autograd
        writes them without the interpreter's lock."""
        self._signature: list[Any] = []
        self.parameters: list[tuple[str, torch.nn.Parameter]] = []
        self.buffers: list[tuple[str, torch.Tensor]] = []
        self.refresh()

    def _forget(self, _: Any) -> None:
        # The script let go of its model, perhaps to make room for another: its memory is not ours to hold.
        self.parameters, self.buffers, self._signature = [], [], []

    @property
    def root(self) -> torch.nn.Module | None:
        """What the script calls; None once it is gone."""
        return self._root()

    @property
    def inner(self) -> torch.nn.Module | None:
        """The script's own module, without its wrapper."""
        module = self._root()
        while module is not None:
            wrapped = _part(module, "module" if isinstance(module, DistributedDataParallel) else "_orig_mod")
            if wrapped is None:
                break
            module = wrapped
        return module

    def refresh(self) -> bool:
        """Read the tensors again; True if parameters came, went, froze or thawed."""
        inner = self.inner
        if inner is None:
            return False
        ignored = set(getattr(_ddp(self.root), "parameters_to_ignore", ()))
        parameters = [(self.prefix + name, p) for name, p in inner.named_parameters() if name not in ignored]
        signature = [(name, id(p), p.requires_grad, p.dtype) for name, p in parameters]
        changed = signature != self._signature
        self._signature = signature
        self.parameters = parameters
        self.buffers = [(self.prefix + name, b) for name, b in inner.named_buffers()]
        return changed

    def shows_local_gradients(self) -> bool:
        """Whether `.grad` at the end of backward is still the rank's own, and will be reduced in this backward.

        With `gradient_as_bucket_view` the gradient lies in the bucket that is being reduced while backward still runs.
        """
        ddp = _ddp(self.root)
        if ddp is None:
            return self.wrapper not in REDUCING_WRAPPERS and not any(_is_sharded(p) for _, p in self.parameters)
        return bool(ddp.require_backward_grad_sync) and not ddp.gradient_as_bucket_view


class Models:
    """All of them, in the order they were found."""

    def __init__(self) -> None:
        self._models: list[Model] = []
        self.generation = 0
        """Grows whenever the list of tensors changed."""

    def __iter__(self) -> Iterator[Model]:
        alive = [model for model in self._models if model.root is not None]
        self.generation += len(alive) != len(self._models)
        self._models = alive
        return iter(alive)

    def active(self) -> list[Model]:
        """Those that the watched thread trains."""
        return [model for model in self if model.is_active]

    def of(self, module: torch.nn.Module) -> Model | None:
        """The model whose own module this is."""
        return next((model for model in self if model.inner is module), None)

    def add(self, root: torch.nn.Module) -> Model | None:
        """Watch a model; None if it, or what it wraps, is watched already."""
        for model in self:
            if model.root is root or model.inner is root:
                return None
        # A model that was found bare and has been wrapped since is the wrapper's from now on.
        inner = Model(root, prefix="").inner
        self._models = [model for model in self if model.inner is not inner]
        model = Model(root, prefix=f"model{len(self._models)}." if self._models else "")
        self._models.append(model)
        self.generation += 1
        return model

    def refresh(self) -> None:
        """Notice parameters that were added, replaced, frozen or thawed."""
        changed = [model.refresh() for model in self]
        if any(changed):
            self.generation += 1

    def discover(self) -> list[Model]:
        """Look through the interpreter's objects for top-level modules that train; a fraction of a second."""
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
        children = {id(child) for module in modules for child in _children(module)}
        known = {id(p) for model in self for _, p in model.parameters}
        found = []
        for module in modules:
            trainable = [] if id(module) in children else _trainable(module)
            if trainable and not any(id(p) in known for p in trainable):
                model = self.add(module)
                if model is not None:
                    found.append(model)
                    known.update(id(p) for p in trainable)
        return found


def wrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The DDP wrapper that was put around this module before anybody watched; the module itself if there is none."""
    for thing in gc.get_objects():
        if type(thing) is DistributedDataParallel and _part(thing, "module") is module:
            return thing
    return module


def _children(module: Any) -> list[Any]:
    # Modules that are half built, lazy or compiled are met here too, and answer in their own ways.
    try:
        return [child for child in module._modules.values() if child is not None]  # noqa: SLF001
    except (AttributeError, RuntimeError, TypeError):
        return []


def _trainable(module: Any) -> list[Any]:
    try:
        return [p for p in module.parameters() if p.requires_grad and not isinstance(p, UninitializedParameter)]
    except (AttributeError, RuntimeError, TypeError):
        return []


def _part(module: Any, name: str) -> Any:
    """A submodule by name. Not by getattr, which costs 50 us for a name that is not there."""
    parts = getattr(module, "_modules", None)
    return parts[name] if parts is not None and name in parts else None


def _ddp(root: Any) -> Any:
    """The DDP wrapper that the script calls, also below torch.compile's; None if there is none."""
    if isinstance(root, DistributedDataParallel):
        return root
    below = _part(root, "_orig_mod")
    return below if isinstance(below, DistributedDataParallel) else None


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "placements")
