"""How our hooks stand in the training loop: nothing of ours raises into it, every second that we take is counted, and all is put back.

A hook is wrapped once; what it raises is counted, printed once, and swallowed. KeyboardInterrupt and SystemExit are the user's and pass.
So does whatever a signal handler of the script raises while a hook happens to run.

One thread trains: the first that calls backward or an optimizer. Hooks do nothing in the others. On a device a backward pass runs in a thread of autograd's, while
the training thread waits for it: an optimizer that a script calls there, once a gradient is ready, is the training's too.
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
"""Whether a hook makes its thread the one that trains, runs in that one only, or (inside autograd's engine) anywhere; "steps" claims, and runs in autograd's thread for the one that trains."""
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # noqa: SLF001
"""Of the backward pass that this thread computes; -1: none."""


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
        """Seconds spent in hooks since the start."""
        self.computed_s = 0.0
        """Of these, what the hooks themselves computed: on a busy machine the rest is the neighbours'."""
        self.failures: Counter[str] = Counter()
        self.is_on = True
        """False in a forked child and after detaching: every hook is then a no-op."""
        self.is_in_backward = False
        """The training thread waits for its backward pass."""
        self._depth = 0
        self._thread: int | None = None
        self._autograd: int | None = None
        """The thread of autograd's that computes it."""
        if _attempting is not None:
            self.attempt = _attempting(self._failed)  # type: ignore[method-assign]

    def wrap(self, hook: Callable[..., Any], thread: HookThread = "training") -> Callable[..., None]:
        """The same hook, harmless and timed; it returns nothing, because torch takes a hook's result for a new value."""

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
        """One part of a hook by itself: what it raises is counted and said once, and the rest of the hook goes on; None then. Native where there was a compiler."""
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
        """No hook runs meanwhile: what we call ourselves is not the script's doing."""
        self.is_on, before = False, self.is_on
        try:
            yield
        finally:
            self.is_on = before

    def count(self, name: str, error: Exception) -> None:
        """Count a failure; the first of each hook is printed."""
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
        # Of several devices one: two threads at a time would not know of each other.
        if self._autograd is None and not _is_scripts(here):
            self._autograd = here
        return self._autograd == here


def _is_scripts(thread: int) -> bool:
    """Whether Python started it: then it computes a backward pass of its own."""
    own = (each for each in threading.enumerate() if not isinstance(each, threading._DummyThread))  # noqa: SLF001
    return any(each.ident == thread for each in own)


class Patches:
    """Functions of torch and of libraries that are replaced by ours, which call the originals; all are put back as they were."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, name: str, make: Callable[[Any], Any], *owners: Any) -> None:
        """`owner.name = make(the original)`: one function for every owner that has the original, so that it can be pickled."""
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
    """Whether a signal handler of the script raised it: then it is the script's to catch."""
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(getattr(handler, "__code__", None) in frames for handler in handlers if callable(handler))
