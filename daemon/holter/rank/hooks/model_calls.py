"""Follows calls of the watched models, in training and in evaluation, and keeps their inputs until the step is done.

Hooks sit on the outermost module of a model only: one on every module would slow the step down. They do not end up in what the script makes
of its model: they are removed while it is saved or given to TorchScript, and a copy or a pickle of it holds a call that does nothing in
their place. torch.compile may fold them away, so its wrapper has a hook of its own, outside of what is compiled: we must know that a step's
forward pass begins.

Frozen modules beside the model (a text encoder, an autoencoder, a reference model) have no wrapper by which to find them, but training needs
them. All objects of the interpreter are searched for them twice: at the first step, and once more when that costs little compared with the
time that has passed. A module counts as one of them when training calls it at several steps in a row.
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from holter import clock
from holter.rank.accelerator import graph_makers
from holter.rank.context import Context, in_phase
from holter.rank.guard import is_from_signal_handler
from holter.rank.readings import batches
from holter.records import Phase

EVENT = "holter.detached"
FIRST_STEP = 1
SECOND_STEP = 32
LATER_STEPS = 4
"""Number of steps by which the second search is put off each time that it would still cost too much."""
NEVER = sys.maxsize
SECOND_LOOK_SHARE = 0.002
"""Share of the time since the first search that the second one may take."""


class UncopiedHook:
    """A module's hook that copies and pickles of the module do not contain."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the hook, unless torch.compile is tracing or torch.func transforms the call: tensors then have no memory to read."""
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None:  # noqa: SLF001
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy holds a function of the standard library, so that it loads without holter: an audit event that nobody listens to.
        return functools.partial, (sys.audit, EVENT)


class CallProbe:
    """Follows the calls of models."""

    def __init__(
        self,
        context: Context,
        on_training_call: Callable[[torch.nn.Module], None],
        *,
        on_compiled_call: Callable[[], None] = lambda: None,
        on_call: Callable[[torch.nn.Module, Any], None] = lambda *_: None,
        on_return: Callable[[torch.nn.Module, Any], None] = lambda *_: None,
    ) -> None:
        self._context = context
        self._on_training_call, self._on_compiled_call = on_training_call, on_compiled_call
        self._on_call, self._on_return = on_call, on_return
        self._registration: Any = None
        self._handles: list[Any] = []
        self._followed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.wrapped: list[weakref.ref[torch.nn.Module]] = []
        """DDP wrappers that were made since `find_wrapped` last added them to the models."""
        self._interrupted: list[Phase] = []
        self._removed: list[tuple[dict[int, Any], int, Any]] = []
        self._num_hookless = 0
        # A signal handler of the script may save while the same thread is already saving.
        self._lock = threading.RLock()

    def install(self) -> None:
        """Notice DDP taking its module; remove our hooks for whatever would save, compile or capture them."""
        notice = self._context.guard.wrap(self._notice, "any")
        self._registration = register_module_module_registration_hook(lambda *args: notice(*args))  # noqa: PLW0108
        patches = self._context.patches
        patches.replace("save", self._around_save, torch, torch.serialization)
        patches.replace("script", self._around_script, torch.jit, torch.jit._script)  # noqa: SLF001
        patches.replace("trace", self._around_taking, torch.jit, torch.jit._trace)  # noqa: SLF001
        for owners in graph_makers():
            # These functions refuse modules with hooks.
            patches.replace("make_graphed_callables", self._around_taking, *owners)

    def uninstall(self) -> None:
        """Remove the hooks."""
        if self._registration is not None:
            self._registration.remove()
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Make a new lock in a forked child, where no thread is left that could release the old one."""
        self._lock = threading.RLock()

    def follow(self, module: torch.nn.Module | None) -> None:
        """Watch the calls of one model's own module."""
        if module is None or module in self._followed or isinstance(module, torch.jit.ScriptModule):
            return
        self._followed.add(module)
        wrap = self._context.guard.wrap
        self._handles += [
            module.register_forward_pre_hook(UncopiedHook(wrap(self._begin)), with_kwargs=True),
            module.register_forward_hook(UncopiedHook(wrap(self._end)), always_call=True),
        ]

    def follow_compiled(self, root: torch.nn.Module | None) -> None:
        """Watch when training calls the wrappers that torch.compile made in a model."""
        for wrapper in torch.nn.Module.modules(root) if root is not None else ():
            if _is_compiled(wrapper) and wrapper not in self._followed:
                self._followed.add(wrapper)
                hook = UncopiedHook(self._context.guard.wrap(self._begin_compiled))
                self._handles.append(wrapper.register_forward_pre_hook(hook))

    def find_wrapped(self) -> None:
        """Add to the models what DDP has wrapped since the last call."""
        while self.wrapped:
            root = self.wrapped.pop(0)()
            if root is not None:
                self._context.models.add(root)

    def _notice(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        if name == "module" and isinstance(parent, DistributedDataParallel):
            # DDP is still in its constructor: its attributes are read when its module is first called.
            self.wrapped.append(weakref.ref(parent))
            self.follow(child)
        elif name == "_orig_mod" and _is_compiled(parent):
            self.follow_compiled(parent)

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        context, attempt = self._context, self._context.guard.attempt
        # This comes first: `_end` takes it back, whatever fails in between.
        self._interrupted.append(context.phases.phase)
        if self.wrapped:
            attempt(self.find_wrapped)
        if attempt(context.models.note_call, module, context.log.step):
            # A frozen component's call belongs to the phase of its caller.
            return
        is_training = module.training and torch.is_grad_enabled()
        context.enter(Phase.FORWARD if is_training else Phase.EVALUATION)
        attempt(self._on_call, module, (args, kwargs))
        if is_training:
            context.inputs.see(attempt(batches.capture, weakref.ref(module), args, kwargs))
            self._on_training_call(module)

    def _begin_compiled(self, module: torch.nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._on_compiled_call()

    def _end(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if self._interrupted:
            self._context.enter(self._interrupted.pop())
        self._on_return(module, output)

    @contextlib.contextmanager
    def _without_hooks(self, modules: Iterable[Any]) -> Iterator[None]:
        """Take our hooks, and their stand-ins in copies, out of these modules; put them back when the last of several callers is done."""
        with self._lock:
            self._num_hookless += 1
        try:
            try:
                self._remove(modules)
            except Exception as error:
                if is_from_signal_handler(error):
                    raise
                # Hooks that stay are pickled as calls that do nothing.
                self._context.guard.count("CallProbe._remove", error)
            yield
        finally:
            with self._lock:
                self._num_hookless -= 1
                while self._removed and not self._num_hookless:
                    hooks, key, hook = self._removed.pop(0)
                    hooks[key] = hook

    def _remove(self, modules: Iterable[Any]) -> None:
        with self._lock:
            for module in list(modules):
                # A script may have an attribute of its own called `modules`.
                for part in torch.nn.Module.modules(module) if isinstance(module, torch.nn.Module) else ():
                    for hooks in (part._forward_pre_hooks, part._forward_hooks):  # noqa: SLF001
                        ours = [(key, hook) for key, hook in list(hooks.items()) if _is_ours(hook)]
                        self._removed += [(hooks, key, hook) for key, hook in ours if hooks.pop(key, None) is not None]

    def _around_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        shown = in_phase(self._context, Phase.CHECKPOINT, original)

        @functools.wraps(original)
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            with self._without_hooks(self._followed):
                return shown(obj, *args, **kwargs)

        return save

    def _around_script(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
            # TorchScript looks names up in its caller's frame, so it is told that our frame lies between.
            with self._without_hooks([obj]):
                return original(obj, optimize, _frames_up + 1, *args, **kwargs)

        return script

    def _around_taking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def take(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            with self._without_hooks([each for one in given for each in (one if isinstance(one, tuple) else (one,))]):
                return original(*args, **kwargs)

        return take


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile made this module; judged by its class's name, because importing the class takes seconds."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, UncopiedHook) or (isinstance(hook, functools.partial) and hook.args == (EVENT,))


class ComponentProbe:
    """Searches for frozen components, and has their calls followed."""

    def __init__(self, context: Context, calls: CallProbe) -> None:
        self._context = context
        self._calls = calls
        self.next_step = FIRST_STEP
        """The first step at which `look` has something to do."""
        self._num_looks = 0
        self._took_s = 0.0
        self._looked_at = 0.0

    def look(self) -> None:
        """Search for components if it is time to; called when a step begins."""
        step, started = self._context.log.step, clock.monotonic_s()
        if step < self.next_step:
            return
        if self._num_looks and self._took_s > SECOND_LOOK_SHARE * (started - self._looked_at):
            self.next_step = step + LATER_STEPS
            return
        self._num_looks += 1
        self.next_step = NEVER if self._num_looks > 1 else SECOND_STEP
        for component in self._context.models.discover_components():
            self._calls.follow(component.root)
        self._looked_at = clock.monotonic_s()
        self._took_s = self._looked_at - started
