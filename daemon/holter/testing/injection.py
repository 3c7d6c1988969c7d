"""A fault that can be taken back."""

from collections.abc import Callable
from typing import Self


class Injection:
    """Something of the job that was changed; `undo`, or the end of a `with` block, puts it back."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def undo(self) -> None:
        """Put it back; a second time does nothing. Whoever was stalled by it goes on."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def replace(owner: object, name: str, value: object, also: Callable[[], None] = lambda: None) -> Injection:
    """Set an attribute; `also` runs when it is put back. What somebody else has put over it since is left alone."""
    before = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, before)
        also()

    return Injection(undo)
