"""Functions of torch that are called through ours; taken back as they were."""

from collections.abc import Callable
from typing import Any


class Patches:
    """Replaced attributes, newest last."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`owner.name = make(the original)`; an owner without that attribute is left alone."""
        original = getattr(owner, name, None)
        if original is None:
            return
        setattr(owner, name, make(original))
        self._undo.append((owner, name, original))

    def restore(self) -> None:
        """Put every original back."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)
