"""Census parts of many ranks, joined; equal ones share one object: 16,000 replicas of a model cost one. Pure."""

import hashlib

import msgspec

from holter.records import Census, TensorEntry

MAX_PARTS = 4096
"""A census in more parts than this is not believed."""


class CensusBook:
    """The first model of every rank."""

    def __init__(self) -> None:
        self.joined: dict[int, Census] = {}
        """Rank -> its first model, parts joined."""
        self._parts: dict[int, dict[int, Census]] = {}
        self._distinct: dict[bytes, Census] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def add(self, rank: int, part: Census) -> bool:
        """Take one part; True when it completed a census."""
        known = self.joined.get(rank)
        if not 0 <= part.part < part.parts <= MAX_PARTS or (known is not None and known.model < part.model):
            return False
        parts = self._parts.setdefault(rank, {})
        if any((other.model, other.parts) != (part.model, part.parts) for other in parts.values()):
            if part.model > next(iter(parts.values())).model:
                return False
            parts.clear()
        parts[part.part] = part
        if len(parts) < part.parts:
            return False
        self.joined[rank] = self._shared([parts[number] for number in range(part.parts)])
        del self._parts[rank]
        return True

    def _shared(self, parts: list[Census]) -> Census:
        entries: list[TensorEntry] = [entry for part in parts for entry in part.entries]
        # The backward order speaks of the whole model and travels with part 0.
        whole = msgspec.structs.replace(parts[0], part=0, parts=1, entries=entries)
        digest = hashlib.blake2b(self._encoder.encode(whole), digest_size=16).digest()
        return self._distinct.setdefault(digest, whole)
