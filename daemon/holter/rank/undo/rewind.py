"""How the step began: random states and buffers, kept so that a halt can save the state from before a step it does not apply.

By the time a fault is seen the step has drawn random numbers for its batch and its dropout, and moved normalisation buffers. The
moment that a resumed run starts from is the one in which the loop asked for the step's first batch:

    step k - 1 closed   evaluation …   iter(loader)   next   transfer   forward …
    candidate                          candidate      candidate         chosen: the first time that a loader of the step was asked
                                       (before it draws its seed)       also kept: random states as of here

Which loaders the step reads is known at the first forward pass: the one that was asked last, and those that training is known to read.
Until then the latest candidate stands. Without a loader it is the end of the step before.

If a forward pass is not seen (torch.compile may fold our hooks away, a script may call a part of its model), buffers are copied at the
candidates of the next steps. A step of which nothing was copied is not restored as if nothing had moved.

Whatever is known is published on the page at each change, so that the sidecar can write it down for a rank that is dead. Costs, of a
quiet 3 GHz core: 15 us to take the states, 5 us to publish them, three times a step; for buffers see `buffers`.

What the script has its framework save with the state (`accelerator.register_for_checkpointing(progress)`: counts of batches, positions,
running means) is kept as the step began too: saved after a step that a halt undoes, it would be ahead of the weights. Only plain values are kept,
by looking at attributes. `state_dict` is the script's own code, which may call a collective, and is left to the save.
"""

import array
import copy
import ctypes
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import torch

from holter.errors import RewindError
from holter.rank import accelerator
from holter.rank.context import Context
from holter.rank.guard import say
from holter.rank.undo.buffers import MovingBuffers

if TYPE_CHECKING:
    from holter.rank.undo.past_steps import PastSteps

_kept: Callable[[int, int, bytes], bytes]
try:
    from holter.rank._samples import kept as _kept
except ImportError:
    # There was no compiler.
    def _kept(address: int, num_bytes: int, last: bytes) -> bytes:
        """The bytes at an address; the very object that was given if they are the same."""
        found = ctypes.string_at(address, num_bytes)
        return last if found == last else found


MAX_ENTRIES = 64
"""Of a container that is kept."""
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_CONTAINERS = _MAPPINGS | {list, tuple, set, frozenset, deque}

PlainAttributes = Mapping[int, dict[str, Any]]
"""By the id of an object: its plain attributes."""
_PYTHON_BYTES = 624 * 4 + 4
"""CPython's twister: the place in its words, and its words."""
_IS_CPYTHON = sys.implementation.name == "cpython"
_LEGACY = "MT19937"
_LEGACY_BYTES = 624 * 4 + 4
"""numpy's twister: its words, and the place in them."""


class Python(NamedTuple):
    """The generator behind `random.random` and its like, without the gauss that it keeps for the next call."""

    version: int
    words: bytes


class Numpy(msgspec.Struct, frozen=True, array_like=True):
    """The legacy generator behind `numpy.random.rand` and its like."""

    words: bytes
    place: int
    has_gauss: int
    gauss: float


class RandomStates(msgspec.Struct, frozen=True):
    """Of torch's, Python's, numpy's and the accelerator's generators at one moment, in a form that travels; the properties are what torch, Python and numpy take back."""

    torch_words: bytes
    python_version: int
    python_words: bytes
    python_gauss: float | None
    numpy: Numpy | None
    """None: the script put another bit generator in its place."""
    device_type: str
    """Of the accelerator; nothing where there is none."""
    device_words: list[bytes]
    """One of each of its devices."""

    @property
    def torch_state(self) -> torch.Tensor:
        """For `torch.set_rng_state`."""
        return _tensor(self.torch_words)

    @property
    def python_state(self) -> tuple[int, tuple[int, ...], float | None]:
        """For `random.setstate`."""
        return self.python_version, tuple(array.array("I", self.python_words)), self.python_gauss

    @property
    def numpy_state(self) -> tuple[str, np.ndarray, int, int, float] | None:
        """For `numpy.random.set_state`."""
        kept = self.numpy
        if kept is None:
            return None
        return _LEGACY, np.frombuffer(kept.words, np.uint32).copy(), kept.place, kept.has_gauss, kept.gauss

    @property
    def device_states(self) -> list[torch.Tensor]:
        """For `torch.cuda.set_rng_state_all` and its likes."""
        return [_tensor(words) for words in self.device_words]

    def restore(self) -> None:
        """Set every generator of this process back."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        if (numpy_state := self.numpy_state) is not None:
            np.random.set_state(numpy_state)  # noqa: NPY002  the global generator is what was kept
        if self.device_type == accelerator.kind():
            accelerator.set_generators(self.device_states)


class Generators:
    """Takes the states, again and again: draws nothing and waits for nothing, for a device's generator is counted on the host."""

    def __init__(self) -> None:
        self._numpy: Numpy | None = None
        self._numpy_raw = b""
        self._python: Python | None = None
        self._python_raw = b""
        self._is_python_raw = False
        self._last: RandomStates | None = None

    def take(self, state: torch.Tensor | None = None) -> RandomStates:
        """As they are now; the very object that was given last if they are the same. `state` is that of torch's own, if somebody has just asked for it."""
        python, numpy, last = self._take_python(), self._take_numpy(), self._last
        state = torch.default_generator.get_state() if state is None else state
        torch_words = _kept(state.data_ptr(), state.numel(), last.torch_words if last is not None else b"")
        gauss = random._inst.gauss_next  # type: ignore[attr-defined]  # noqa: SLF001  what getstate() gives
        device_type = accelerator.kind()
        device_words = [_bytes(one.get_state()) for one in accelerator.generators()] if device_type else []
        if (
            last is None
            or last.python_words is not python.words
            or last.numpy is not numpy
            or last.python_gauss != gauss
            or last.torch_words is not torch_words
            or last.device_words != device_words
            or last.device_type != device_type
        ):
            last = self._last = RandomStates(
                torch_words=torch_words,
                python_version=python.version,
                python_words=python.words,
                python_gauss=gauss,
                numpy=numpy,
                device_type=device_type,
                device_words=device_words,
            )
        return last

    def _take_python(self) -> Python:
        """Asking Python makes 625 integers, 30 us; looking whether its words are still the same takes 1 us, where they lie as CPython has them."""
        twister: Any = random._inst  # noqa: SLF001
        raw = _kept(id(twister) + object.__basicsize__, _PYTHON_BYTES, self._python_raw) if _IS_CPYTHON else b""
        if self._python is None or raw is not self._python_raw or not self._is_python_raw:
            version, state, _ = random.getstate()
            words = array.array("I", state).tobytes()
            self._python, self._python_raw = Python(version, words), raw
            # The place in the words, then the words.
            self._is_python_raw = raw == words[-4:] + words[:-4]
        return self._python

    def _take_numpy(self) -> Numpy | None:
        """Asking numpy takes 60 us, looking whether its words are still the same 1 us.

        A gauss that is kept for the next call would be used up without touching the words: then numpy is asked.
        """
        bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # its stubs forget it
        if type(bits).__name__ != _LEGACY:
            return None
        raw = _kept(bits.ctypes.state_address, _LEGACY_BYTES, self._numpy_raw)
        if self._numpy is None or self._numpy.has_gauss or raw is not self._numpy_raw:
            _, words, place, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
            self._numpy = Numpy(words.tobytes(), int(place), int(has_gauss), float(gauss))
            self._numpy_raw = raw
        return self._numpy


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _tensor(words: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


class RegisteredObjects:
    """Takes and puts back the plain attributes of registered objects; a framework says which objects there are. About 0.3 us an attribute."""

    def __init__(self) -> None:
        self.find: Callable[[], Iterable[Any]] | None = None

    def take(self) -> PlainAttributes:
        """As they are now."""
        return {} if self.find is None else {id(each): _plain(each) for each in self.find()}

    def put(self, attributes: PlainAttributes) -> None:
        """Put them back as they were; what has come since stays."""
        for each in () if self.find is None else self.find():
            _attributes(each).update(attributes.get(id(each), {}))


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


class Rewound(RandomStates, frozen=True):
    """Random states at the beginning of a step; `at_forward` those that its first forward pass found."""

    step: int
    forward: RandomStates | None
    num_skipped: int = 0
    """Rounds of this step that a loss scaler had skipped by then."""
    given: dict[str, bytes] = msgspec.field(default_factory=dict)
    """Of the first rank: the buffers that DDP gives to all, as the step before left them (`MovingBuffers.given`)."""

    @property
    def at_forward(self) -> RandomStates:
        """The same as at the beginning where no forward pass has begun, and where nothing was drawn before it."""
        return self.forward or self


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Rewound).decode
"""What `encode` made; msgspec.MsgspecError if it is none."""


class Rewind:
    """Knows how the step under way began; the hooks say what happens, a halt restores. One for a rank."""

    def __init__(self, context: Context) -> None:
        self._page = context.writer.page
        self._generators = Generators()
        self.buffers = MovingBuffers(context)
        self.registered = RegisteredObjects()
        self.past: PastSteps | None = None
        """How earlier steps began, where a device may be behind."""
        self._step = 0
        self._beginning: RandomStates | None = None
        self._forward: RandomStates | None = None
        self._asked: dict[int, RandomStates] = {}
        """By number of the loader: when it was first asked since the step before closed, in that order."""
        self._attributes_by_loader: dict[int, PlainAttributes] = {}
        """By number of the loader: the attributes of registered objects at that moment."""
        self._attributes: PlainAttributes = {}
        """The one that was chosen."""
        self._ended: set[int] = set()
        """Of these, those whose pass is over: a new one is asked anew."""
        self._training_loaders: set[int] = set()
        """Of these, those that training is known to read."""
        self._last_asked = -1
        self._is_blind = True
        """The last forward pass was not seen, or not as it should be: the next one may not be seen either."""
        self._log = context.log
        self._given: dict[str, bytes] = {}
        """As the step before left them, until DDP gives them to all; empty on all ranks but the first."""
        self._is_giving = context.writer.rank == 0 and context.world_size > 1
        self._has_said = False
        self._shown: tuple[Any, ...] = ()
        """What the page says."""

    def step_closed(self, step: int, *, is_late: bool = False) -> None:
        """`step` optimizer steps are completed: the next one begins, as far as anybody knows. If late, it has already started, unseen."""
        if step == self._step and self._forward is not None:
            # Its forward pass has begun already.
            return
        self._begin(step, is_late=is_late)

    def begin_anew(self) -> None:
        """A loss scaler has skipped the step: what comes next is its beginning."""
        self._begin(self._step)

    def _begin(self, step: int, *, is_late: bool = False) -> None:
        self._step, self._forward = step, None
        self._asked, self._ended, self._training_loaders, self._last_asked = {}, set(), set(), -1
        self._attributes_by_loader, self._attributes = {}, {}
        self._beginning = None if is_late else self._generators.take()
        self._given = self.buffers.given() if self._is_giving and not is_late else {}
        self.buffers.begin()
        if self._is_blind and not is_late:
            self._keep_if_blind()
        self._publish()

    def _keep_if_blind(self) -> None:
        if self._is_blind and not self._log.num_backwards:
            self.buffers.keep()

    def asking(self, loader: int, *, is_beginning: bool, is_training: bool) -> None:
        """The loop is about to get an iterator of this loader, or its next batch."""
        self._last_asked = loader
        if self._forward is not None or (loader in self._asked and not (is_beginning and loader in self._ended)):
            return
        self._ended.discard(loader)
        # At the end of the order, if it was there before.
        self._asked.pop(loader, None)
        self._attributes_by_loader.pop(loader, None)
        self._asked[loader] = self._generators.take()
        self._attributes_by_loader[loader] = self.registered.take()
        self._keep_if_blind()
        if is_training:
            self._training_loaders.add(loader)
            self._publish()

    def ended(self, loader: int) -> None:
        """A pass over this loader is over. A loader that is read ahead may still give the batch that was asked for."""
        self._ended.add(loader)

    def forward_begins(self, step: int, state: torch.Tensor | None = None) -> bool:
        """A model is called in training; the first time in a step, which is True here, decides when the step began. `state` is torch's random state, if it was just asked for."""
        if step != self._step:
            # Several optimizers: the step before is not closed yet, and this call is the next one's.
            self.step_closed(step)
        if self._forward is not None:
            return False
        self._forward = self._generators.take(state)
        self._training_loaders.add(self._last_asked)
        self._beginning = (self._candidate() if self._asked else self._beginning) or self._forward
        # Without a loader nobody knows what was counted for the step before: most scripts count when it is over.
        if self._asked:
            self._attributes = self._chosen_attributes()
        elif self.registered.find is not None:
            self._attributes = self.registered.take()
        self._is_blind = not self.buffers.keep()
        self._publish()
        return True

    @property
    def has_forward(self) -> bool:
        """Whether a model was called in training since the step before: then DDP has made its buffers those of the first rank."""
        return self._forward is not None

    @property
    def fed_by(self) -> frozenset[int]:
        """Numbers of the loaders that were asked in this step and that training reads."""
        return frozenset(loader for loader in self._asked if loader in self._training_loaders)

    def backward_begins(self) -> None:
        """Of this step, after the one before was closed."""
        self._is_blind |= self._forward is None

    def known(self) -> Rewound | None:
        """How the step that is under way began; None: nothing was seen of it."""
        return self._rewound(*self._found())

    @staticmethod
    def _rewound(
        beginning: RandomStates | None, forward: RandomStates | None, step: int, num_skipped: int
    ) -> Rewound | None:
        if beginning is None:
            return None
        return Rewound(
            beginning.torch_words,
            beginning.python_version,
            beginning.python_words,
            beginning.python_gauss,
            beginning.numpy,
            beginning.device_type,
            beginning.device_words,
            step,
            forward,
            num_skipped,
        )

    def _found(self) -> tuple[RandomStates | None, RandomStates | None, int, int]:
        """The states at the beginning and, if they were others, at the first forward pass; the step, and its rounds that were skipped."""
        beginning = self._candidate() if self._forward is None else self._beginning
        num_skipped = self._log.now.passes.num_skipped_rounds if self._step == self._log.step else 0
        return beginning, self._forward if self._forward is not beginning else None, self._step, num_skipped

    def _candidate(self) -> RandomStates | None:
        if not self._asked:
            return self._beginning
        return next(
            (asked for loader, asked in self._asked.items() if loader in self._training_loaders), self._beginning
        )

    def _chosen_attributes(self) -> PlainAttributes:
        return next(
            (
                attributes
                for loader, attributes in self._attributes_by_loader.items()
                if loader in self._training_loaders
            ),
            {},
        )

    @property
    def step(self) -> int:
        """The step that is under way."""
        return self._step

    @property
    def attributes(self) -> PlainAttributes:
        """Of registered objects, as the step began."""
        return self._attributes if self._forward is not None else self._chosen_attributes()

    def restore(self, step: int) -> Rewound:
        """Set random states and buffers of this process back to the beginning of `step`; after a halt is decided only."""
        known = self.known()
        if step < self._step and self.past is not None and self.past.has(step):
            return self.past.restore(step)
        if known is None or known.step != step:
            heard = "nothing was seen of its beginning" if known is None else f"this rank is in step {known.step}"
            raise RewindError(f"it is not known how step {step} began: {heard}")
        if self._forward is None and self._is_blind:
            self.buffers.check_whole()
        if self._forward is not None or self._is_blind:
            self.buffers.restore()
        self.registered.put(self.attributes)
        known.restore()
        return known

    def _publish(self) -> None:
        is_giving = bool(self._given) and self._forward is None
        found = self._found()
        known = self._rewound(*found) if (is_giving, *found) != self._shown else None
        self._shown = is_giving, *found
        if known is None:
            return
        if is_giving:
            if self._page.publish_rewind(known.step, encode(msgspec.structs.replace(known, given=self._given))):
                return
            # There is more of it than the page takes, at the next step too.
            self._given, self._is_giving = {}, False
        if not self._page.publish_rewind(known.step, encode(known)) and not self._has_said:
            self._has_said = True
            say("the random states of this rank do not fit the shared page: if it dies, they are lost with it")
