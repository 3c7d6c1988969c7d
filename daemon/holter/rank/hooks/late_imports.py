"""Functions of libraries that the script may import, or not: nothing is imported for us, each is found once it is there."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar


@dataclass(frozen=True)
class LibraryFunction:
    """Where a function is known."""

    module: str
    """By its full name."""
    owner: str
    """Class in that module; empty: the module itself."""
    name: str
    also: str = ""
    """Another module that knows the same function; empty: none."""


Sought = TypeVar("Sought", bound=LibraryFunction)


class LateImports(Generic[Sought]):
    """Those that have not come yet; a look costs next to nothing while the interpreter knows no more modules than before."""

    def __init__(self, functions: Iterable[Sought]) -> None:
        self._waiting = list(functions)
        self._num_modules = 0

    def come(self) -> Iterator[tuple[Sought, list[Any]]]:
        """Each that has come since the last look, with everything that holds the function by its name."""
        if len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        for function in list(self._waiting):
            module = sys.modules.get(function.module)
            owner = getattr(module, function.owner, None) if function.owner else module
            if owner is not None and hasattr(owner, function.name):
                self._waiting.remove(function)
                yield function, [owner, *([sys.modules[function.also]] if function.also in sys.modules else [])]
