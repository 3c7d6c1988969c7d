"""Keeps what is requested often, so that it is made once for all: reading must not starve judging.

    ten scrapers, twenty readers ──▶ one rendering ──▶ judging goes on

A rendering is used again for RESTS times as long as it took to make, at most LONGEST_S: for two ranks that is a few
milliseconds and nobody notices, for sixteen thousand it is seconds. So each kind of page takes at most one part in
RESTS of the coordinator's time, however many read it.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from holter import clock

RESTS = 20.0
LONGEST_S = 5.0
MAX_KEPT = 64
"""Largest number of renderings that are kept; reports of single incidents are among them."""

T = TypeVar("T")


class Renderings:
    """Renderings by name, each with the time until which it is used."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[float, object]] = OrderedDict()

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Return the kept rendering, or make a new one if it is too old. One name stands for one kind of value."""
        began_s = clock.monotonic_s()
        until_s, kept = self._kept.get(name, (0.0, None))
        if began_s < until_s:
            return kept  # type: ignore[return-value]
        made = make()
        now_s = clock.monotonic_s()
        self._kept[name] = (now_s + min(RESTS * (now_s - began_s), LONGEST_S), made)
        self._kept.move_to_end(name)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return made

    def forget(self, name: str) -> None:
        """Forget a rendering, because something happened that the next reader will look for."""
        self._kept.pop(name, None)
