"""The records that a sidecar has still to send. The oldest is dropped when there is no room; identity never is.

    standing   Attached, Census    sent at the start of every connection: a restarted coordinator must hear them again
    stream     everything else     sent once, in order; the oldest is dropped and counted when there is no room
    last       Exam of a dying     sent after the stream, in this order, on every connection from then on
               rank, Exited

Frames are not acknowledged, so what was sent shortly before a connection broke is sent again (`speech`); a receiver
must accept the same record twice.
"""

from collections import deque

from holter.records import Attached, Census, Exam, Exited, Observation

LAST = ("last_breath", "death", "exited")
"""What is sent last, the newest of each, in this order."""
MAX_CENSUSES = 4
"""Number of censuses kept of one model: the first, because a coordinator that is reached late must hear what changed,
and the last ones."""


class Outbox:
    """A bounded queue of observations."""

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self._attached: Observation | None = None
        self._census: dict[int, list[dict[int, Observation]]] = {}
        """For each model, its censuses by step, each by part."""
        self._last: dict[str, Observation] = {}
        self._unsaid_last: set[str] = set()
        self._unsaid: deque[Observation] = deque()
        self._stream: deque[Observation] = deque()

    def __len__(self) -> int:
        return len(self._unsaid) + len(self._stream) + len(self._unsaid_last)

    def put(self, observation: Observation) -> None:
        """Add a record; never refuses, never grows beyond the limit."""
        match observation.body:
            case Attached():
                self._attached = observation
                self._unsaid.append(observation)
            case Census():
                self._keep_census(observation, observation.body)
                self._unsaid.append(observation)
            case Exited() | Exam(reason="death" | "last_breath"):
                self._last[_last_of(observation)] = observation
                self._unsaid_last.add(_last_of(observation))
            case _:
                self._stream.append(observation)
                self._drop_overflow()

    def begin(self) -> None:
        """Prepare for a new connection: identity is sent again, first."""
        self._unsaid.clear()
        if self._attached is not None:
            self._unsaid.append(self._attached)
        for censuses in self._census.values():
            for parts in censuses:
                self._unsaid.extend(parts.values())
        self._unsaid_last = set(self._last)

    def take(self, limit: int) -> list[Observation]:
        """Remove and return the next records to send, at most `limit`."""
        batch: list[Observation] = []
        for queue in (self._unsaid, self._stream):
            while queue and len(batch) < limit:
                batch.append(queue.popleft())
        for name in LAST:
            if name in self._unsaid_last and len(batch) < limit:
                batch.append(self._last[name])
                self._unsaid_last.remove(name)
        return batch

    def put_back(self, batch: list[Observation]) -> None:
        """Put back records that could not be sent; they come first again."""
        stream = []
        for observation in batch:
            match observation.body:
                case Attached() | Census():
                    self._unsaid.append(observation)
                case Exited() | Exam(reason="death" | "last_breath"):
                    self._unsaid_last.add(_last_of(observation))
                case _:
                    stream.append(observation)
        self._stream.extendleft(reversed(stream))
        self._drop_overflow()

    def _keep_census(self, observation: Observation, census: Census) -> None:
        censuses = self._census.setdefault(census.model, [])
        if not censuses or any(kept.step != observation.step for kept in censuses[-1].values()):
            censuses.append({})
        del censuses[1 : len(censuses) - MAX_CENSUSES + 1]
        parts = censuses[-1]
        if any(kept.body.parts != census.parts for kept in parts.values() if isinstance(kept.body, Census)):
            parts.clear()
        parts[census.part] = observation

    def _drop_overflow(self) -> None:
        while len(self._stream) > self._limit:
            self._stream.popleft()
            self.dropped += 1


def _last_of(observation: Observation) -> str:
    return observation.body.reason if isinstance(observation.body, Exam) else "exited"
