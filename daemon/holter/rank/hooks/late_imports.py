"""Functions of libraries that the script may import, or not: nothing is imported for us, each is found once it is there."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar


class FunctionPlace(Protocol):
    """Where a function is known."""

    @property
    def module(self) -> str:
        """By its full name."""

    @property
    def owner(self) -> str:
        """Class in that module; empty: the module itself."""

    @property
    def name(self) -> str:
        """Of the function."""

    @property
    def also(self) -> str:
        """Another module that knows the same function; empty: none."""


Sought = TypeVar("Sought", bound=FunctionPlace)


class LateImports(Generic[Sought]):
    """Those that have not come yet; a look costs next to nothing while the interpreter knows no more modules than before."""

    def __init__(self, places: Iterable[Sought]) -> None:
        self._waiting = list(places)
        self._num_modules = 0

    def come(self) -> Iterator[tuple[Sought, list[Any]]]:
        """Each that has come since the last look, with everything that holds the function by its name."""
        if len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        for place in list(self._waiting):
            module = sys.modules.get(place.module)
            owner = getattr(module, place.owner, None) if place.owner else module
            if owner is not None and hasattr(owner, place.name):
                self._waiting.remove(place)
                yield place, [owner, *([sys.modules[place.also]] if place.also in sys.modules else [])]
