"""Encodes observations and writes them to the shared page, in microseconds, waiting for nobody."""

import msgspec

from holter import clock
from holter.page import PageWriter
from holter.records import Body, Observation, Phase


class ObservationWriter:
    """Writes the observations of one rank."""

    def __init__(self, page: PageWriter, rank: int) -> None:
        self.page = page
        self.rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def say(self, step: int, body: Body) -> bool:
        """Write one observation; False: the ring was full, the page counted it."""
        observation = Observation(rank=self.rank, step=step, at_ns=clock.wall_ns(), body=body)
        return self.page.write(self._encoder.encode(observation))

    def beat(self, step: int, phase: Phase, micro_step: int) -> None:
        """Show the sidecar where the main thread is now."""
        self.page.beat(step, phase, micro_step, clock.wall_ns())
