"""Functions of torch and of libraries that are replaced by ours, which call the originals; all are put back as they were.

Nothing is imported for us: a function of a library is found once the script has imported it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar


class Patches:
    """Replaced attributes, newest last."""

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


@dataclass(frozen=True)
class LibraryFunction:
    """Where a function of a library is found."""

    module: str
    """Full name of the module."""
    owner: str
    """Class in that module; empty: the module itself."""
    name: str
    also: str = ""
    """Another module that has the same function; empty: none."""


Sought = TypeVar("Sought", bound=LibraryFunction)


class LateImports(Generic[Sought]):
    """Functions whose modules the script has not imported yet; a look costs next to nothing while no module was imported since the last."""

    def __init__(self, functions: Iterable[Sought]) -> None:
        self._waiting = list(functions)
        self._num_modules = 0

    def come(self) -> Iterator[tuple[Sought, list[Any]]]:
        """Each function whose module was imported since the last look, with all owners that have it by its name."""
        if len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        for function in list(self._waiting):
            module = sys.modules.get(function.module)
            owner = getattr(module, function.owner, None) if function.owner else module
            if owner is not None and hasattr(owner, function.name):
                self._waiting.remove(function)
                yield function, [owner, *([sys.modules[function.also]] if function.also in sys.modules else [])]
