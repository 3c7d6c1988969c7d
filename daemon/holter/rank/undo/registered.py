"""What a script has its framework save with the state, as the step began: counts of batches, positions, running means.

    accelerator.register_for_checkpointing(progress)
    for batch in loader:
        progress.batches += 1          # of a step that a halt undoes: saved, it would be ahead of the weights

Plain values are kept, by looking at attributes: numbers, texts, and small containers of them. `state_dict` is the script's own code, which may
call a collective, and is left to the save. About 0.3 us an attribute, once a step.
"""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAX_ENTRIES = 64
"""Of a container that is kept."""
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_CONTAINERS = _MAPPINGS | {list, tuple, set, frozenset, deque}

Tally = Mapping[int, dict[str, Any]]
"""By the id of an object: its plain attributes."""


class Registered:
    """Takes and puts back; which objects there are is told by an integration."""

    def __init__(self) -> None:
        self.find: Callable[[], Iterable[Any]] = lambda: ()

    def take(self) -> Tally:
        """As they are now."""
        return {id(each): _plain(each) for each in self.find()}

    def put(self, tally: Tally) -> None:
        """As they were; what has come since stays."""
        for each in self.find():
            _attributes(each).update(tally.get(id(each), {}))


def _attributes(thing: Any) -> dict[str, Any]:
    found = getattr(thing, "__dict__", None)
    return found if type(found) is dict else {}


def _plain(thing: Any) -> dict[str, Any]:
    # A list: another thread of the script may add to it.
    found = list(_attributes(thing).items())
    return {name: copy.copy(value) for name, value in found if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind not in _CONTAINERS or len(value) > MAX_ENTRIES:
        return False
    entries = list(value.values()) if kind in _MAPPINGS else list(value)
    return all(type(entry) in _PLAIN for entry in entries)
