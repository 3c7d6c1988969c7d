"""Reads a pickle that holds containers and scalars, and nothing else: never imports, never calls, never builds an object.

A pickle is a program. Torch's dumps need only the instructions that make strings, numbers, lists, tuples and dicts, so the reader knows no
others, and `find_class` refuses too. It is Python's own slow reader: its memo is a dict, while the fast one would reserve whatever
memory a forged index asks for.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar, Never

from holter.errors import FlightError

FIRST_BYTE = pickle.PROTO
MAX_BYTES = 256 * 1024 * 1024
MAX_ITEMS = 20_000_000
"""Sizes and dtypes of all entries, counted as often as they are referred to."""

_ALLOWED = [
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "POP",
    "POP_MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "FLOAT",
    "BINFLOAT",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "LIST",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_DICT",
    "DICT",
    "SETITEM",
    "SETITEMS",
    "GET",
    "BINGET",
    "LONG_BINGET",
    "PUT",
    "BINPUT",
    "LONG_BINPUT",
    "MEMOIZE",
]


class _Reader(pickle._Unpickler):  # noqa: SLF001  # the C one's table of instructions cannot be cut
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: pickle._Unpickler.dispatch[code]  # noqa: SLF001
        for code in (getattr(pickle, name)[0] for name in _ALLOWED)
    }

    def find_class(self, module: str, name: str) -> Never:
        raise FlightError(f"this pickle wants {module}.{name}; a Flight Recorder dump holds plain data only")


def read(data: bytes) -> Any:
    """The data, checked to be small enough to be gone through."""
    if len(data) > MAX_BYTES:
        raise FlightError(f"this pickle has {len(data)} bytes; more than {MAX_BYTES} are not read")
    try:
        value = _Reader(io.BytesIO(data)).load()
    except FlightError:
        raise
    except KeyError as error:
        raise FlightError(f"this pickle does more than hold plain data (instruction {error}); it is not read") from None
    except Exception as error:  # noqa: BLE001  # a broken pickle can raise anything
        raise FlightError(f"this pickle is broken: {type(error).__name__}: {error}") from None
    _refuse_bombs(value)
    return value


def _refuse_bombs(value: Any) -> None:
    """A few bytes can refer to one list a million times from a million places."""
    entries = value.get("entries") if isinstance(value, dict) else None
    num = 0
    for entry in entries if isinstance(entries, list) else []:
        for item in entry.values() if isinstance(entry, dict) else ():
            if isinstance(item, list | tuple):
                num += len(item) + sum(len(part) for part in item if isinstance(part, list | tuple))
        if num > MAX_ITEMS:
            raise FlightError(f"this pickle unfolds to more than {MAX_ITEMS} items; it is not read")
