"""How our hooks behave in the training loop: none raises into it, every second that they take is counted, and all is put back at the end.

A hook is wrapped once; what it raises is counted, printed once, and swallowed. KeyboardInterrupt and SystemExit are the user's and pass.
So does whatever a signal handler of the script raises while a hook happens to run.

One thread trains: the first that calls backward or an optimizer. Hooks do nothing in other threads. On a device, a backward pass runs in a thread of
autograd while the training thread waits for it: an optimizer that a script calls there, once a gradient is ready, belongs to the training too.
"""

import contextlib
import functools
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch

from holter import clock

HookThread = Literal["claims", "training", "steps", "any"]
"""In which threads a hook runs.

    claims      in the training thread; the first thread that calls such a hook becomes it
    training    in the training thread only
    steps       like claims, and also in autograd's thread while the training thread waits for its backward pass
    any         in every thread, as inside autograd's engine
"""
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # noqa: SLF001
"""Returns the number of the backward pass that this thread computes; -1 if it computes none."""


Result = TypeVar("Result")
_attempting: Callable[..., Any] | None
try:
    from holter.rank._attempt import attempting as _attempting
except ImportError:
    # There was no compiler.
    _attempting = None


class Guard:
    """Wraps hooks; counts what they cost and how often they failed."""

    def __init__(self) -> None:
        self.own_s = 0.0
        """Seconds spent in hooks since the start; their waiting counts too."""
        self.computed_s = 0.0
        """Seconds of these in which the hooks computed; the rest they waited, for instance because the machine is busy."""
        self.failures: Counter[str] = Counter()
        self.is_on = True
        """False in a forked child and after detaching: every hook is then a no-op."""
        self.is_in_backward = False
        """Whether the training thread is waiting for its backward pass."""
        self._depth = 0
        self._thread: int | None = None
        self._autograd: int | None = None
        """The thread of autograd that computes it; None until a hook has run there."""
        if _attempting is not None:
            self.attempt = _attempting(self._failed)  # type: ignore[method-assign]

    def wrap(self, hook: Callable[..., Any], thread: HookThread = "training") -> Callable[..., None]:
        """Return the same hook, harmless and timed. It returns nothing, because torch would take a hook's result for a new value."""

        @functools.wraps(hook)
        def harmless(*args: Any, **kwargs: Any) -> None:
            if not self.is_on or (self._thread != threading.get_ident() and not self._may_run_in(thread)):
                return
            started = clock.monotonic_s()
            computed = clock.thread_s() if self._depth == 0 else 0.0
            self._depth += 1
            try:
                hook(*args, **kwargs)
            except Exception as error:
                if is_from_signal_handler(error):
                    raise
                self.count(hook.__qualname__, error)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.own_s += clock.monotonic_s() - started
                    self.computed_s += clock.thread_s() - computed

        return harmless

    def attempt(self, call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result | None:
        """Call one part of a hook; if it raises, count the failure, print the first, and return None, so that the rest of the hook goes on.

        Where there was a compiler, native code takes this method's place.
        """
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - what is not ours is raised again
            self._failed(call, error)
            return None

    def _failed(self, call: Callable[..., Any], error: Exception) -> None:
        if is_from_signal_handler(error):
            raise error
        self.count(getattr(call, "__qualname__", type(call).__name__), error)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Switch all hooks off meanwhile, so that what we call ourselves is not taken for the script's doing."""
        self.is_on, before = False, self.is_on
        try:
            yield
        finally:
            self.is_on = before

    def count(self, name: str, error: Exception) -> None:
        """Count a failure, and print the first of each hook."""
        self.failures[name] += 1
        if self.failures[name] == 1:
            say(f"{name} failed and is now blind to part of the run: {type(error).__name__}: {error}")

    def _may_run_in(self, thread: HookThread) -> bool:
        if thread == "any":
            return True
        here = threading.get_ident()
        if self._thread is None and thread in ("claims", "steps"):
            self._thread = here
        if self._thread is None or self._thread == here:
            return True
        if thread != "steps" or not self.is_in_backward or _graph_task() < 0:
            return False
        # With several devices, only the first thread counts: hooks in two threads at a time would not know of each other.
        if self._autograd is None and not _is_scripts(here):
            self._autograd = here
        return self._autograd == here


def _is_scripts(thread: int) -> bool:
    """Whether Python started this thread; then it computes a backward pass of the script's own."""
    own = (each for each in threading.enumerate() if not isinstance(each, threading._DummyThread))  # noqa: SLF001
    return any(each.ident == thread for each in own)


class Patches:
    """Functions of torch and other libraries that are replaced by ours, which call the originals; all are put back at the end."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, name: str, make: Callable[[Any], Any], *owners: Any) -> None:
        """Set `owner.name = make(original)`; every owner that has the original gets the same function, so that it can be pickled."""
        original = getattr(owners[0], name, None)
        if original is None:
            return
        ours = make(original)
        for owner in owners:
            if getattr(owner, name, None) is original:
                setattr(owner, name, ours)
                self._undo.append((owner, name, original))

    def restore(self) -> None:
        """Put every original back."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)


def say(sentence: str) -> None:
    """Print one line on the rank's standard error; never raises."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"holter: {sentence}\n")
        sys.stderr.flush()


def is_from_signal_handler(error: Exception) -> bool:
    """Whether a signal handler of the script raised this error; then the script must get it."""
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(getattr(handler, "__code__", None) in frames for handler in handlers if callable(handler))
