"""A table of calls for each group: which rank made which call at which sequence number, and how far it has come.

group 0     sequence 41            42            43
rank 0      all_reduce [10]        barrier       all_reduce [10], not over
rank 1      all_reduce [10]        barrier
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from holter.flight.digests import signature
from holter.flight.reading import DEFAULT_DESCRIPTION
from holter.records import Call, Flight, Group


@dataclass(slots=True)
class Track:
    """The progress of one rank in one group."""

    last: int = -1
    """The highest sequence number that the rank has entered; -1 if none."""
    open: dict[int, Call] = field(default_factory=dict)
    """Calls that the rank has entered and that are not over, by sequence number."""


@dataclass(slots=True)
class CallTable:
    """All calls of one group."""

    name: str
    description: str
    members: tuple[int, ...] = ()
    tracks: dict[int, Track] = field(default_factory=dict)
    rows: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """Sequence number -> signature -> ranks. Ranks whose recorder no longer holds the number are left out."""
    has_messages: bool = False

    def last(self, rank: int) -> int:
        """Return the highest sequence number that a rank is known to have entered; -1 if none."""
        track = self.tracks.get(rank)
        return track.last if track else -1


@dataclass(slots=True)
class _Place:
    """The table and the latest call of one rank in one group.

    The latest call is written only when the next one arrives, because calls that were coalesced share a sequence
    number.
    """

    table: CallTable
    track: Track
    sequence: int = -1
    number: int = -1

    def write(self, rank: int) -> None:
        """Write the latest call into the table."""
        if self.sequence < 0:
            return
        self.track.last = max(self.track.last, self.sequence)
        row = self.table.rows.get(self.sequence)
        if row is None:
            row = self.table.rows[self.sequence] = {}
        ranks = row.get(self.number)
        if ranks is None:
            row[self.number] = [rank]
        else:
            ranks.append(rank)


class Board:
    """The call tables of all groups."""

    def __init__(self, flights: Mapping[int, Flight], world_size: int) -> None:
        self.flights = flights
        self.tables: dict[str, CallTable] = {}
        self.texts: list[str] = []
        """Text of each signature, by its number."""
        self.inside: set[int] = set()
        """Ranks that are inside some call."""
        self.senders: set[int] = set()
        """Ranks that send or receive messages."""
        self._numbers: dict[object, int] = {}
        self._listed: dict[str, list[tuple[int, Group]]] = {}
        for rank, flight in flights.items():
            self._list(rank, flight)
        for rank, flight in flights.items():
            self._enter(rank, flight)
        said = (rank for table in self._listed.values() for _, group in table for rank in group.ranks)
        self.world_size = max(world_size, max(flights, default=-1) + 1, max(said, default=-1) + 1)
        for table in self.tables.values():
            table.members = self._members(table)
            self._believe_status(table)

    def number(self, call: Call) -> int:
        """Return a small number for the call's signature, the same for equal signatures."""
        key = (call.operation, call.sizes, call.dtypes or call.output_dtypes)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._text(signature(call))
        return number

    def sequence(self, rank: int, table: CallTable) -> dict[int, int]:
        """Return the signatures of a rank's calls in a group by sequence number, as far as its recorder still holds them."""
        called: dict[int, int] = {}
        for call in self.flights[rank].calls:
            if call.group == table.name and not call.is_p2p:
                before = called.get(call.sequence)
                number = self.number(call)
                called[call.sequence] = number if before is None else self._joined(before, number)
        return called

    def _text(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return number

    def _joined(self, before: int, number: int) -> int:
        return self._text(f"{self.texts[before]} + {self.texts[number]}")

    def _list(self, rank: int, flight: Flight) -> None:
        for group in flight.groups:
            self._listed.setdefault(group.name, []).append((rank, group))
            if group.name not in self.tables:
                self.tables[group.name] = CallTable(group.name, group.description)
        for name in {call.group for call in flight.calls}:
            if name not in self.tables:
                self.tables[name] = CallTable(name, "")

    def _enter(self, rank: int, flight: Flight) -> None:
        """Write all calls of a rank into the tables. Performance matters: the loop may run millions of times."""
        places: dict[str, _Place] = {}
        numbers = self._numbers
        for call in flight.calls:
            place = places.get(call.group)
            if place is None:
                table = self.tables[call.group]
                place = places[call.group] = _Place(table, table.tracks.setdefault(rank, Track()))
            is_open = not (call.is_retired or call.state == "completed")
            if is_open:
                self.inside.add(rank)
            if call.is_p2p:
                place.table.has_messages = True
                self.senders.add(rank)
                continue
            number = numbers.get((call.operation, call.sizes, call.dtypes or call.output_dtypes))
            if number is None:
                number = self.number(call)
            if call.sequence == place.sequence:
                number = self._joined(place.number, number)
            else:
                place.write(rank)
            place.sequence, place.number = call.sequence, number
            if is_open:
                place.track.open[call.sequence] = call
        for place in places.values():
            place.write(rank)

    def _members(self, table: CallTable) -> tuple[int, ...]:
        """Return the ranks of a group: as some rank lists them, else inferred.

        It is every rank if all recorders know the group and they are the majority; else the ranks that know it.
        """
        listed = self._listed.get(table.name, [])
        for _, group in listed:
            if group.ranks:
                return tuple(sorted(group.ranks))
        known = {rank for rank, _ in listed} | table.tracks.keys()
        is_everyones = len(known) == len(self.flights) and 2 * len(known) > self.world_size
        if table.description == DEFAULT_DESCRIPTION or is_everyones:
            return tuple(range(self.world_size))
        return tuple(sorted(known))

    def _believe_status(self, table: CallTable) -> None:
        """Use the recorder's own count of a rank's progress where its calls are not recorded, if it counts the same calls.

        In groups with messages, NCCL's count includes the messages and cannot be used.
        """
        listed = self._listed.get(table.name, [])
        if table.has_messages or any(
            group.last_entered != table.last(rank)
            for rank, group in listed
            if group.last_entered >= 0 and table.last(rank) >= 0
        ):
            return
        for rank, group in listed:
            track = table.tracks.setdefault(rank, Track())
            track.last = max(track.last, group.last_entered)
