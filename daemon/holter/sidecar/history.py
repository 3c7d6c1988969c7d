"""The last steps' fingerprints, kept beside the rank so that the coordinator need not ask at once; bounded in bytes."""

import struct
from collections import OrderedDict

from holter.records import Census, Observation, PackedTable, Table

MAX_BYTES = 4 << 20


class History:
    """Tables by (class, step), oldest forgotten first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._tables: OrderedDict[tuple[str, int], Observation] = OrderedDict()
        self._names: dict[str, list[str]] = {"parameters": [], "buffers": []}
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
        """Remember a table."""
        table = observation.body
        assert isinstance(table, PackedTable)
        self._num_bytes += _size(observation) - _size(self._tables.pop((table.tensor_class, observation.step), None))
        self._tables[table.tensor_class, observation.step] = observation
        while self._num_bytes > self._max_bytes and len(self._tables) > 1:
            self._num_bytes -= _size(self._tables.popitem(last=False)[1])

    def table(self, tensor_class: str, step: int) -> Observation | None:
        """The table with its names; None if it is forgotten, or the names are not known."""
        kept = self._tables.get((tensor_class, step))
        if kept is None:
            return None
        packed = kept.body
        assert isinstance(packed, PackedTable)
        fingerprints = struct.unpack(f"<{len(packed.fingerprints) // 8}Q", packed.fingerprints)
        norms = struct.unpack(f"<{len(packed.norms) // 4}f", packed.norms)
        names = self._names[packed.over]
        if packed.keys:
            names = [f"{name}.{key}" for key in packed.keys for name in names]
        if len(fingerprints) != len(names):
            return None
        body = Table(
            tensor_class=tensor_class,
            root=packed.root,
            names=names,
            fingerprints=list(fingerprints),
            norms=list(norms),
        )
        return Observation(rank=kept.rank, step=kept.step, at_ns=kept.at_ns, body=body)


def _size(observation: Observation | None) -> int:
    body = observation.body if observation is not None else None
    return len(body.fingerprints) + len(body.norms) if isinstance(body, PackedTable) else 0
