"""Nothing of ours raises into the training loop, and every second that we take is counted.

A hook is wrapped once; what it raises is counted, said once, and swallowed. KeyboardInterrupt and SystemExit are the user's and pass.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from holter import clock


class Guard:
    """Wraps hooks; knows what they cost and how often they failed."""

    def __init__(self) -> None:
        self.own_s = 0.0
        """Seconds spent in hooks since the start."""
        self.failures: Counter[str] = Counter()
        self.is_on = True
        """False in a forked child and after detaching: every hook is then a no-op."""
        self._depth = 0

    def wrap(self, hook: Callable[..., Any]) -> Callable[..., None]:
        """The same hook, harmless and timed; it returns nothing, because torch takes a hook's result for a new value."""

        @functools.wraps(hook)
        def harmless(*args: Any, **kwargs: Any) -> None:
            if not self.is_on:
                return
            started = clock.monotonic_s()
            self._depth += 1
            try:
                hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  the loop must go on
                self._count(hook.__qualname__, error)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.own_s += clock.monotonic_s() - started

        return harmless

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What we call ourselves is not the script's doing: no hook hears it."""
        self.is_on, before = False, self.is_on
        try:
            yield
        finally:
            self.is_on = before

    def _count(self, name: str, error: Exception) -> None:
        self.failures[name] += 1
        if self.failures[name] == 1:
            say(f"{name} failed and is now blind to part of the run: {type(error).__name__}: {error}")


def say(sentence: str) -> None:
    """One line on the rank's standard error; a closed or full one is not our problem."""
    try:
        sys.stderr.write(f"holter: {sentence}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass
