"""Reads a pickle with stand-ins: nothing that it names is imported or run, and what it unfolds to is bounded.

A stand-in keeps the arguments and the state that the file gives an object, which is all that a reader of tensors needs.
Names of code that would run if somebody else loaded the file are kept in `named_code`: here they did nothing.
"""

import collections
import io
import pickle
import pickletools
from collections.abc import Callable, Sized
from typing import Any, Self

from holter.errors import VaultError

ROOM = 1_000_000
"""Number of items that any file may unfold to, in addition to one for each of its bytes."""
_RUNS = frozenset({
    "os", "posix", "nt", "subprocess", "sys", "runpy", "importlib", "socket", "shutil", "ctypes", "pty", "code", "codeop", "webbrowser",
    "commands", "signal", "pickle", "marshal", "timeit", "cProfile", "pdb", "bdb", "pip",
})  # fmt: skip
"""Modules whose names have no place in a checkpoint, because their functions act when they are called."""
_BUILTINS = frozenset({"eval", "exec", "compile", "__import__", "open", "apply", "execfile", "breakpoint", "input"})


class Inert:
    """Stand-in for an object whose class must not be run."""

    def __new__(cls, *arguments: Any, **_: Any) -> Self:
        """Accept and keep any arguments."""
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **_: Any) -> "Inert":
        """Return another stand-in for what a call would make."""
        return Inert(self, *arguments)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state

    def append(self, item: Any) -> None:
        """Keep an item, as for an instance of a list's subclass."""
        self.__dict__.setdefault("items", []).append(item)

    def extend(self, items: Any) -> None:
        """Keep items, as for an instance of a list's subclass."""
        self.__dict__.setdefault("items", []).extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("entries", {})[key] = value


class InertUnpickler(pickle.Unpickler):
    """Unpickles with stand-ins; raises VaultError, or whatever error a damaged pickle causes."""

    def __init__(self, content: bytes) -> None:
        _refuse_large_memo(content)
        super().__init__(io.BytesIO(content))
        self.named_code: list[str] = []
        """Names of code that would act if it were called."""
        self._room = len(content) + ROOM
        self._plain: dict[tuple[str, str], Callable[..., Any]] = {
            # A real one, because a state_dict carries its versions as an attribute.
            ("collections", "OrderedDict"): self._bounded(collections.OrderedDict),
            ("builtins", "set"): self._bounded(set),
            ("builtins", "frozenset"): self._bounded(frozenset),
            ("builtins", "bytearray"): self._bytes,
            ("builtins", "complex"): complex,
            ("torch", "Size"): self._bounded(tuple),
            ("collections", "defaultdict"): lambda *_: {},
            ("_codecs", "encode"): self._bytes,
        }

    def plain(self, module: str, name: str) -> Any:
        """Return the meaning of a harmless name; None if a stand-in must be used."""
        return self._plain.get((module, name))

    def find_class(self, module: str, name: str) -> Any:
        """Return what replaces this name."""
        module = "builtins" if module == "__builtin__" else module  # as old protocols, torch's among them, call it
        found = self.plain(module, name)
        if found is not None:
            return found
        if module.partition(".")[0] in _RUNS or (module == "builtins" and name in _BUILTINS):
            self.named_code.append(f"{module}.{name}")
        # A class for each name, so that a debugger tells them apart.
        return type(name.rpartition(".")[2] or "Inert", (Inert,), {})

    def persistent_load(self, key: Any) -> Any:
        """Refuse references to outside objects; a plain pickle has none."""
        raise VaultError(f"it refers to {key!r}, which is not in it")

    def _bounded(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a constructor with a limit.

        A few bytes can refer to one long list a million times, and each copy takes its own memory.
        """

        def made(*parts: Any) -> Any:
            self._spend(sum(len(part) for part in parts if isinstance(part, Sized)))
            return make(*parts)

        return made

    def _bytes(self, content: Any = b"", encoding: Any = "latin1") -> bytes:
        """Return the content as bytes.

        Anything else is refused: a number would ask for that much empty memory, another codec for a multiple of it.
        """
        if isinstance(content, str) and encoding in {"latin1", "latin-1", "utf-8", "ascii"}:
            content = content.encode(encoding)
        if not isinstance(content, bytes | bytearray):
            raise VaultError(f"it makes bytes of {type(content).__name__}, as no checkpoint does")
        self._spend(len(content))
        return bytes(content)

    def _spend(self, num: int) -> None:
        self._room -= num
        if self._room < 0:
            raise VaultError("it unfolds to far more than it holds")


def _refuse_large_memo(content: bytes) -> None:
    """Refuse a pickle that names a far memo place.

    The unpickler reserves memory for every lower place: five bytes could ask for gigabytes.
    """
    if not any(code in content for code in (b"r", b"p")):
        return
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in {"LONG_BINPUT", "PUT"} and int(argument or 0) > len(content):
            raise VaultError("it keeps an object at a place that no pickle of its size has")
