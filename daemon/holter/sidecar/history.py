"""The last steps' fingerprints, kept beside the rank so that the coordinator need not ask at once; bounded in bytes."""

import struct
from collections import OrderedDict
from typing import Any

from holter.records import Census, Observation, PackedTable, Table

MAX_BYTES = 4 << 20

Names = dict[str, list[str]]
"""Of parameters and of buffers, in the order of the tables."""
NamedTable = tuple[Observation, Names]


class TableHistory:
    """Tables by (class, step), oldest forgotten first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._tables: OrderedDict[tuple[str, int], NamedTable] = OrderedDict()
        self._names: Names = {"parameters": [], "buffers": []}
        self._parts: dict[int, Census] = {}

    def learn_census(self, census: Census) -> None:
        """Names in the order of the tables."""
        if census.part == 0:
            self._parts = {}
        self._parts[census.part] = census
        if len(self._parts) == census.parts:
            entries = [entry for part in sorted(self._parts) for entry in self._parts[part].entries]
            self._names = {
                "parameters": [entry.name for entry in entries if not entry.is_buffer],
                "buffers": [entry.name for entry in entries if entry.is_buffer],
            }

    def keep(self, observation: Observation) -> None:
        """Remember a table, and the names as they are now: the next census may have others."""
        table = observation.body
        assert isinstance(table, PackedTable)
        key = (table.tensor_class, observation.step)
        self._forget(key)
        self._num_bytes += _size(table)
        self._tables[key] = (observation, self._names)
        while self._num_bytes > self._max_bytes and len(self._tables) > 1:
            self._forget(next(iter(self._tables)))

    def table(self, tensor_class: str, step: int) -> Observation | None:
        """The table with its names; None if it is forgotten, or the names are not known."""
        kept = self._tables.get((tensor_class, step)) or self._unchanged(tensor_class, step)
        if kept is None:
            return None
        observation, names_then = kept
        packed = observation.body
        assert isinstance(packed, PackedTable)
        fingerprints = _unpack(packed.fingerprints, "Q")
        # Buffers are read before the census of their step is told.
        fitting = (_names(packed, names) for names in (names_then, self._names))
        names = next((found for found in fitting if len(found) == len(fingerprints)), None)
        if names is None:
            return None
        body = Table(
            tensor_class=tensor_class,
            root=packed.root,
            names=names,
            fingerprints=fingerprints,
            norms=_unpack(packed.norms, "f"),
            sums=_unpack(packed.sums, "d"),
            marks=list(packed.marks),
        )
        return Observation(rank=observation.rank, step=step, at_ns=observation.at_ns, body=body)

    def _unchanged(self, tensor_class: str, step: int) -> NamedTable | None:
        """Hyper-parameters are told when they change: the last ones before this step still held."""
        kept = [key for key in self._tables if key[0] == tensor_class and key[1] < step]
        found = self._tables[max(kept, key=lambda key: key[1])] if kept else None
        return found if found is not None and _is_sent_on_change(found[0]) else None

    def _forget(self, key: tuple[str, int]) -> None:
        kept = self._tables.pop(key, None)
        if kept is not None and isinstance(kept[0].body, PackedTable):
            self._num_bytes -= _size(kept[0].body)


def _is_sent_on_change(observation: Observation) -> bool:
    return isinstance(observation.body, PackedTable) and bool(observation.body.names)


def _names(packed: PackedTable, names: Names) -> list[str]:
    if packed.names:
        return packed.names
    own = names[packed.over]
    return [f"{name}.{key}" for key in packed.keys for name in own] if packed.keys else own


def _unpack(packed: bytes, form: str) -> list[Any]:
    return list(struct.unpack(f"<{len(packed) // struct.calcsize(form)}{form}", packed))


def _size(table: PackedTable) -> int:
    return len(table.fingerprints) + len(table.norms) + len(table.sums) + len(table.marks) + sum(map(len, table.names))
