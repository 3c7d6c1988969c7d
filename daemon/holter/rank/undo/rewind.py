"""Keeps random states and buffers as the step began, so that a halt can save the state from before a step that it does not apply.

By the time a fault is seen the step has drawn random numbers for its batch and its dropout, and changed normalisation buffers. A resumed run
starts from the moment at which the loop asked for the step's first batch:

    step k - 1 closed   evaluation …   iter(loader)   next   transfer   forward …
    candidate                          candidate      candidate         chosen: the first time that a loader of the step was asked
                                       (before it draws its seed)       also kept: random states as of here

Which loaders the step reads is known at the first forward pass: the one that was asked last, and those that training is known to read.
Until then the first time that a loader known to feed the training was asked counts, or else the end of the step before.

If a forward pass is not seen (torch.compile may fold our hooks away, a script may call a part of its model), buffers are copied at the
candidates of the next steps. If nothing was copied for a step, restoring it does not pretend that nothing had changed.

Whatever is known is published on the page at each change, so that the sidecar can save it for a rank that is dead. This costs, on a quiet
3 GHz core, 15 us to take the states and 5 us to publish them, three times a step; for buffers see `buffers`.

What the script has its framework save with the state (`accelerator.register_for_checkpointing(progress)`: counts of batches, positions,
running means) is also kept as the step began: saved after a step that a halt undoes, it would be ahead of the weights. Only plain values are
kept, by reading attributes. `state_dict` is the script's own code, which may call a collective, and is left to the save.
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
    # The extension was not built, because there was no compiler.
    def _kept(address: int, num_bytes: int, last: bytes) -> bytes:
        """Return the bytes at an address; the object `last` itself if they are the same."""
        found = ctypes.string_at(address, num_bytes)
        return last if found == last else found


MAX_ENTRIES = 64
"""Number of entries up to which a container is kept."""
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_CONTAINERS = _MAPPINGS | {list, tuple, set, frozenset, deque}

PlainAttributes = Mapping[int, dict[str, Any]]
"""Id of an object -> its attributes with plain values, by name."""
_PYTHON_BYTES = 624 * 4 + 4
"""Size of CPython's Mersenne twister: the position in its words, then its words."""
_IS_CPYTHON = sys.implementation.name == "cpython"
_LEGACY = "MT19937"
_LEGACY_BYTES = 624 * 4 + 4
"""Size of numpy's Mersenne twister: its words, then the position in them."""


class Python(NamedTuple):
    """State of the generator behind `random.random` and the like, without the Gaussian number that it keeps for the next call."""

    version: int
    words: bytes


class Numpy(msgspec.Struct, frozen=True, array_like=True):
    """State of the legacy generator behind `numpy.random.rand` and the like."""

    words: bytes
    place: int
    has_gauss: int
    gauss: float


class RandomStates(msgspec.Struct, frozen=True):
    """States of torch's, Python's, numpy's and the accelerator's generators at one moment, in a form that can be sent.

    The properties have the forms that torch, Python and numpy take back.
    """

    torch_words: bytes
    python_version: int
    python_words: bytes
    python_gauss: float | None
    numpy: Numpy | None
    """None if the script has replaced numpy's legacy bit generator by another."""
    device_type: str
    """Type of the accelerator; empty if there is none."""
    device_words: list[bytes]
    """One state for each device of the accelerator."""

    @property
    def torch_state(self) -> torch.Tensor:
        """The argument for `torch.set_rng_state`."""
        return _tensor(self.torch_words)

    @property
    def python_state(self) -> tuple[int, tuple[int, ...], float | None]:
        """The argument for `random.setstate`."""
        return self.python_version, tuple(array.array("I", self.python_words)), self.python_gauss

    @property
    def numpy_state(self) -> tuple[str, np.ndarray, int, int, float] | None:
        """The argument for `numpy.random.set_state`; None if the script uses another bit generator."""
        kept = self.numpy
        if kept is None:
            return None
        return _LEGACY, np.frombuffer(kept.words, np.uint32).copy(), kept.place, kept.has_gauss, kept.gauss

    @property
    def device_states(self) -> list[torch.Tensor]:
        """The argument for `torch.cuda.set_rng_state_all` and the like."""
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
    """Reads the generators' states repeatedly; draws no numbers and never waits, because a device's generator is counted on the host."""

    def __init__(self) -> None:
        self._numpy: Numpy | None = None
        self._numpy_raw = b""
        self._python: Python | None = None
        self._python_raw = b""
        self._is_python_raw = False
        self._last: RandomStates | None = None

    def take(self, state: torch.Tensor | None = None) -> RandomStates:
        """Return the present states; the object of the last call itself if they are the same.

        `state` is that of torch's own generator, if the caller has just read it.
        """
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
        """Return the state of Python's generator.

        `getstate` makes 625 integers, which takes 30 us; comparing its words in memory with the last ones takes 1 us, but works only if they
        are laid out as in CPython.
        """
        twister: Any = random._inst  # noqa: SLF001
        raw = _kept(id(twister) + object.__basicsize__, _PYTHON_BYTES, self._python_raw) if _IS_CPYTHON else b""
        if self._python is None or raw is not self._python_raw or not self._is_python_raw:
            version, state, _ = random.getstate()
            words = array.array("I", state).tobytes()
            self._python, self._python_raw = Python(version, words), raw
            # In memory the position comes before the words, in `getstate` after them.
            self._is_python_raw = raw == words[-4:] + words[:-4]
        return self._python

    def _take_numpy(self) -> Numpy | None:
        """Return the state of numpy's legacy generator; None if another bit generator is in use.

        `get_state` takes 60 us, comparing its words in memory with the last ones 1 us. If numpy keeps a Gaussian number for the next call,
        using that up does not change the words, so `get_state` is called.
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
    """Copies and puts back the plain attributes of registered objects, in about 0.3 us for each; `find` is set to a framework's function that lists the objects."""

    def __init__(self) -> None:
        self.find: Callable[[], Iterable[Any]] | None = None

    def take(self) -> PlainAttributes:
        """Return copies of the present attributes."""
        return {} if self.find is None else {id(each): _plain(each) for each in self.find()}

    def put(self, attributes: PlainAttributes) -> None:
        """Put attributes back as they were; attributes that were added since stay."""
        for each in () if self.find is None else self.find():
            _attributes(each).update(attributes.get(id(each), {}))


def _attributes(thing: Any) -> dict[str, Any]:
    found = getattr(thing, "__dict__", None)
    return found if type(found) is dict else {}


def _plain(thing: Any) -> dict[str, Any]:
    # A list is made first, because another thread of the script may add attributes.
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
    """Random states at the beginning of a step; `at_forward` has those at its first forward pass."""

    step: int
    forward: RandomStates | None
    num_skipped: int = 0
    """Number of rounds of this step that a loss scaler had skipped by then."""
    given: dict[str, bytes] = msgspec.field(default_factory=dict)
    """Rank 0 only: the buffers that DDP gives to all, as the step before left them (`MovingBuffers.given`)."""

    @property
    def at_forward(self) -> RandomStates:
        """The states at the first forward pass; those at the beginning if no forward pass has begun or nothing was drawn before it."""
        return self.forward or self


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Rewound).decode
"""Decodes what `encode` made; raises msgspec.MsgspecError for anything else."""


class Rewind:
    """Knows how the present step began; the hooks call it at each event, and a halt calls `restore`. There is one for each rank."""

    def __init__(self, context: Context) -> None:
        self._page = context.writer.page
        self._generators = Generators()
        self.buffers = MovingBuffers(context)
        self.registered = RegisteredObjects()
        self.past: PastSteps | None = None
        """How earlier steps began, in case a device is behind the host; set by the monitor."""
        self._step = 0
        self._beginning: RandomStates | None = None
        self._forward: RandomStates | None = None
        self._asked: dict[int, RandomStates] = {}
        """Number of a loader -> states when it was first asked since the step before closed, in the order of asking."""
        self._attributes_by_loader: dict[int, PlainAttributes] = {}
        """Number of a loader -> attributes of registered objects at that moment."""
        self._attributes: PlainAttributes = {}
        """Attributes of registered objects at the moment that was chosen as the step's beginning."""
        self._ended: set[int] = set()
        """Numbers of the asked loaders whose pass is over, so that a new pass counts as asked for the first time."""
        self._training_loaders: set[int] = set()
        """Numbers of the asked loaders that training is known to read."""
        self._last_asked = -1
        self._is_blind = True
        """Whether the last forward pass was not seen, or its buffers not copied, so that the next one may not be seen either."""
        self._log = context.log
        self._given: dict[str, bytes] = {}
        """Buffers that DDP will give to all, as the step before left them; empty on all ranks but the first."""
        self._is_giving = context.writer.rank == 0 and context.world_size > 1
        self._has_said = False
        self._shown: tuple[Any, ...] = ()
        """What was last published on the page."""

    def step_closed(self, step: int, *, is_late: bool = False) -> None:
        """Note that `step` optimizer steps are completed and the next step begins; if `is_late`, it has already begun without being seen."""
        if step == self._step and self._forward is not None:
            # The step's forward pass has begun already.
            return
        self._begin(step, is_late=is_late)

    def begin_anew(self) -> None:
        """Note that a loss scaler has skipped the step, which therefore begins anew."""
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
        """Note that the loop is about to get an iterator of this loader (`is_beginning`), or its next batch."""
        self._last_asked = loader
        if self._forward is not None or (loader in self._asked and not (is_beginning and loader in self._ended)):
            return
        self._ended.discard(loader)
        # A loader that was asked before moves to the end of the order.
        self._asked.pop(loader, None)
        self._attributes_by_loader.pop(loader, None)
        self._asked[loader] = self._generators.take()
        self._attributes_by_loader[loader] = self.registered.take()
        self._keep_if_blind()
        if is_training:
            self._training_loaders.add(loader)
            self._publish()

    def ended(self, loader: int) -> None:
        """Note that a pass over this loader is over; if the script reads ahead, a batch of it may still be used."""
        self._ended.add(loader)

    def forward_begins(self, step: int, state: torch.Tensor | None = None) -> bool:
        """Note that a model is called in training; return True if it is the step's first call, which decides when the step began.

        `state` is torch's random state, if the caller has just read it.
        """
        if step != self._step:
            # With several optimizers the step before may not be closed yet, while this call belongs to the next step.
            self.step_closed(step)
        if self._forward is not None:
            return False
        self._forward = self._generators.take(state)
        self._training_loaders.add(self._last_asked)
        self._beginning = (self._candidate() if self._asked else self._beginning) or self._forward
        # Without a loader we cannot tell what was counted for the step before, but most scripts count at the end of a step.
        if self._asked:
            self._attributes = self._chosen_attributes()
        elif self.registered.find is not None:
            self._attributes = self.registered.take()
        self._is_blind = not self.buffers.keep()
        self._publish()
        return True

    @property
    def has_forward(self) -> bool:
        """Whether a model was called in training since the step before, so that DDP has overwritten its buffers with rank 0's."""
        return self._forward is not None

    @property
    def fed_by(self) -> frozenset[int]:
        """Numbers of the loaders that were asked in this step and that training reads."""
        return frozenset(loader for loader in self._asked if loader in self._training_loaders)

    def backward_begins(self) -> None:
        """Note that a backward pass of this step begins; called after the step before was closed."""
        self._is_blind |= self._forward is None

    def known(self) -> Rewound | None:
        """Return how the present step began; None if its beginning was not seen."""
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
        """Return the states at the beginning, those at the first forward pass if they differ, the step, and the number of its skipped rounds."""
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
        """The present step."""
        return self._step

    @property
    def attributes(self) -> PlainAttributes:
        """Attributes of registered objects as the step began."""
        return self._attributes if self._forward is not None else self._chosen_attributes()

    def restore(self, step: int) -> Rewound:
        """Set random states and buffers of this process back to the beginning of `step`; only called after a halt is decided."""
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
            # It is too large for the page, and will be at the next step too.
            self._given, self._is_giving = {}, False
        if not self._page.publish_rewind(known.step, encode(known)) and not self._has_said:
            self._has_said = True
            say("the random states of this rank do not fit the shared page: if it dies, they are lost with it")
