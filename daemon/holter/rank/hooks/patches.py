"""Functions of torch that are called through ours; taken back as they were."""

from collections.abc import Callable
from typing import Any


class Patches:
    """Replaced attributes, newest last."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, name: str, make: Callable[[Any], Any], *owners: Any) -> None:
        """`owner.name = make(the original)`, one and the same in every place that it is known by, so that it can be pickled."""
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
