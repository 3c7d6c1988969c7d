"""A rank worn in this very process: a real page, a real monitor, and the reader a sidecar would use."""

import weakref
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch.distributed as dist
from torch import nn

from holter.frameworks.all import ALL
from holter.page import PageReader, PageWriter
from holter.rank import search
from holter.rank.context import ObservationWriter
from holter.rank.monitor import Monitor
from holter.rank.readings.fused_pass import Readings
from holter.records import Observation
from holter_kernels import Pass, Reading


class LateReading:
    """Answers at the fifth question, as a device that still computes."""

    def __init__(self, reading: Reading) -> None:
        self._reading, self._num_asked = reading, 0
        self.flag, self.device_s = None, reading.device_s

    def poll(self):
        self._num_asked += 1
        return self._reading.poll() if self._num_asked >= 5 else None


class LatePass(Pass):
    """A pass over a device that still computes."""

    def start(self, tensors):
        return LateReading(super().start(tensors))


class Worn:
    """A monitor and what it has said so far."""

    def __init__(self, *, world_size: int = 1, budget: float = 1e9, **settings: object) -> None:
        self.page = PageWriter.create(rank=0, world_size=world_size, pid=1, started_ticks=1, ring_bytes=4 << 20)
        self.reader = PageReader.open(self.page.fd)
        self.monitor = Monitor(
            ObservationWriter(self.page, 0),
            world_size=world_size,
            budget=budget,
            floor_s=0.0,
            **{"frameworks": ALL, **settings},
        )
        self.monitor.install()
        self._decoder = msgspec.msgpack.Decoder(Observation)
        self._said: list[Observation] = []

    def answer_late(self) -> None:
        """From now on readings are answered as a busy device answers them."""
        self.monitor.context.readings = Readings(LatePass)

    def said(self, kind: type) -> list[Observation]:
        """Observations of one kind, in order."""
        self._said += [self._decoder.decode(payload) for payload in self.reader.read(100_000)]
        return [observation for observation in self._said if isinstance(observation.body, kind)]

    def forget(self) -> None:
        """Begin to listen anew."""
        self.said(object)
        self._said = []

    def close(self) -> None:
        self.monitor.uninstall()
        self.reader.close()
        self.page.close()


@pytest.fixture
def swept(monkeypatch) -> None:
    """Models that other tests have left would be found among the interpreter's objects: of models, only those made from now on are."""
    others = {id(model): weakref.ref(model) for model in search.living(nn.Module)}
    living = search.living

    def of_this_test(*kinds: type) -> list[object]:
        return [each for each in living(*kinds) if id(each) not in others or others[id(each)]() is not each]

    monkeypatch.setattr(search, "living", of_this_test)


@pytest.fixture
def worn() -> Iterator[Worn]:
    made = Worn()
    yield made
    made.close()
    assert not made.monitor.context.guard.failures


@pytest.fixture
def wear() -> Iterator[Callable[..., Worn]]:
    """Put a monitor on when the test says so; what it fails at is the test's to look at."""
    made: list[Worn] = []

    def put_on(**how: float) -> Worn:
        made.append(Worn(**how))
        return made[-1]

    yield put_on
    for each in reversed(made):
        each.close()


@pytest.fixture
def gloo() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
