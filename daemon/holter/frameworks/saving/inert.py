"""Pickles read without running what they say: whatever is not a plain value becomes a stand-in that does nothing.

A checkpoint may name any class or function of any library. None of them is imported: an object is kept as the arguments and the state
that the file gives it, which is all that a reader of tensors needs.
"""

import codecs
import collections
import io
import pickle
from typing import Any, Self

from holter.errors import VaultError

_PLAIN = {
    # As it is: a state_dict carries its versions as an attribute.
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("torch", "Size"): tuple,
    ("collections", "defaultdict"): lambda *_: {},
    ("_codecs", "encode"): codecs.encode,
}


class Inert:
    """Stands for an object of a class that is not to be run."""

    def __new__(cls, *arguments: Any, **_: Any) -> Self:
        """Any arguments will do."""
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **_: Any) -> "Inert":
        """What it would make is as inert as itself."""
        return Inert(self, *arguments)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state

    def append(self, item: Any) -> None:
        """Of a list's subclass."""
        self.__dict__.setdefault("items", []).append(item)

    def extend(self, items: Any) -> None:
        """Of a list's subclass."""
        self.__dict__.setdefault("items", []).extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("entries", {})[key] = value


def stand_in(name: str) -> type[Inert]:
    """A class for each name, so that a debugger tells them apart."""
    return type(name.rpartition(".")[2] or "Inert", (Inert,), {})


class Unpickler:
    """Reads pickles; a format that stores some things beside the pickle tells where."""

    def plain(self, module: str, name: str) -> Any:
        """What a name means, if it is harmless; None: a stand-in."""
        return _PLAIN.get((module, name))

    def persistent(self, key: Any) -> Any:
        """What lies beside the pickle."""
        raise VaultError(f"it refers to {key!r}, which is not in it")

    def loads(self, content: bytes) -> Any:
        """What a pickle says, with stand-ins. Raises VaultError, or whatever a damaged one makes the reader stumble over."""
        reader = _Restricted(io.BytesIO(content))
        reader.rules = self
        return reader.load()


class _Restricted(pickle.Unpickler):
    rules: Unpickler

    def find_class(self, module: str, name: str) -> Any:
        found = self.rules.plain(module, name)
        return stand_in(name) if found is None else found

    def persistent_load(self, key: Any) -> Any:
        return self.rules.persistent(key)
