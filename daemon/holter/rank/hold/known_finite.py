"""Gradients that somebody has read already and found finite: the guard need not read them again.

    clip_grad_norm_ returned a finite norm      of all that it was given, as they are after it
    a fused pass of ours over the same memory   of what it read

It holds as long as the gradient is not written to: torch counts that, in place and by a new backward pass alike.
"""

from collections.abc import Iterable
from typing import Any


class KnownFinite:
    """Parameters whose gradients are known to be finite, until the next backward pass."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def note(self, parameters: Iterable[Any], gradients: Iterable[Any] = ()) -> None:
        """The gradients of these, as they are now, are finite; and these, wherever they lie."""
        self._versions.update((id(p), g._version) for p in parameters if (g := p.grad) is not None)  # noqa: SLF001
        self._versions.update((id(g), g._version) for g in gradients)  # noqa: SLF001

    def covers(self, parameter: Any, gradient: Any) -> bool:
        """Whether this gradient is known to be finite."""
        return bool(self._versions.get(id(parameter)) == gradient._version)  # noqa: SLF001

    def clear(self) -> None:
        """A backward pass begins, or the step is over."""
        self._versions.clear()
