"""Forward and evaluation: calls of the watched models, with their inputs kept until the step is done.

Hooks sit on the outermost module of a model only: one on every module would cost a step its speed. They leave no trace in what the
script makes of the model: pickled or copied they become a call that does nothing, torch.compile folds them away, and TorchScript,
which would compile them, gets the model without them.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from holter.probes import batches
from holter.probes.context import Context
from holter.records import Phase


class _Hook:
    """A module's hook that does not survive in its copies."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # The standard library's, so that the copy loads where there is no holter: an audit event that nobody hears.
        return functools.partial, (sys.audit, "holter.detached")


class CallProbe:
    """Follows the calls of models."""

    def __init__(self, context: Context, on_training_call: Callable[[], None]) -> None:
        self._context = context
        self._on_training_call = on_training_call
        self._registration: Any = None
        self._handles: list[Any] = []
        self._followed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._wrapped: list[weakref.ref[torch.nn.Module]] = []

    def install(self) -> None:
        """See DDP take its module; step aside for TorchScript."""
        notice = self._context.guard.wrap(self._notice)
        self._registration = register_module_module_registration_hook(notice)
        for name in ("script", "trace"):
            self._context.patches.replace(torch.jit, name, self._without_hooks)

    def uninstall(self) -> None:
        """Hear nothing more."""
        if self._registration is not None:
            self._registration.remove()
        self._let_go()

    def follow(self, module: torch.nn.Module | None) -> None:
        """Watch the calls of one model's own module."""
        if module is None or module in self._followed:
            return
        self._followed.add(module)
        wrap = self._context.guard.wrap
        self._handles += [
            module.register_forward_pre_hook(_Hook(wrap(self._begin)), with_kwargs=True),
            module.register_forward_hook(_Hook(wrap(self._end)), always_call=True),
        ]

    def find_wrapped(self) -> None:
        """Count what DDP has taken since the last look among the models."""
        while self._wrapped:
            root = self._wrapped.pop(0)()
            if root is not None:
                self._context.models.add(root)

    def _notice(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        if name == "module" and isinstance(parent, DistributedDataParallel):
            # DDP is still in its constructor: its attributes are read when its module is first called.
            self._wrapped.append(weakref.ref(parent))
            self.follow(child)

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.find_wrapped()
        is_training = module.training and torch.is_grad_enabled()
        self._context.enter(Phase.FORWARD if is_training else Phase.EVALUATION)
        if is_training:
            self._context.inputs = batches.capture(weakref.ref(module), args, kwargs)
            self._on_training_call()

    def _end(self, *_: Any) -> None:
        self._context.enter(Phase.OTHER)

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _without_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def plain(*args: Any, **kwargs: Any) -> Any:
            self._let_go()
            return original(*args, **kwargs)

        return plain
