"""The states of all random generators of a process: torch's, Python's, numpy's, and those of CUDA devices.

Taking them draws nothing and waits for nothing: a device's generator is counted on the host.
"""

import array
import ctypes
import random
from typing import Any, cast

import msgspec
import numpy as np
import torch

_LEGACY = "MT19937"
_LEGACY_BYTES = 624 * 4 + 4
"""numpy's twister: its words, and the place in them."""


class Numpy(msgspec.Struct, frozen=True, array_like=True):
    """The legacy generator behind `numpy.random.rand` and its like."""

    words: bytes
    place: int
    has_gauss: int
    gauss: float


class RandomStates(msgspec.Struct, frozen=True):
    """Of one moment, in a form that travels; the properties are what torch, Python and numpy take back."""

    torch_words: bytes
    python_version: int
    python_words: bytes
    python_gauss: float | None
    numpy: Numpy | None
    """None: the script put another bit generator in its place."""
    cuda: list[bytes]

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
    def cuda_states(self) -> list[torch.Tensor]:
        """For `torch.cuda.set_rng_state_all`."""
        return [_tensor(words) for words in self.cuda]

    def restore(self) -> None:
        """Set every generator of this process back."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        if (numpy_state := self.numpy_state) is not None:
            np.random.set_state(numpy_state)  # noqa: NPY002  the global generator is what was kept
        for generator, state in zip(_cuda_generators(), self.cuda_states, strict=False):
            generator.set_state(state)


class Generators:
    """Takes the states, again and again."""

    def __init__(self) -> None:
        self._numpy: Numpy | None = None
        self._numpy_raw = b""

    def take(self) -> RandomStates:
        """As they are now."""
        version, words, gauss = random.getstate()
        return RandomStates(
            torch_words=_bytes(torch.default_generator.get_state()),
            python_version=version,
            python_words=array.array("I", words).tobytes(),
            python_gauss=gauss,
            numpy=self._take_numpy(),
            cuda=[_bytes(generator.get_state()) for generator in _cuda_generators()],
        )

    def _take_numpy(self) -> Numpy | None:
        """Asking numpy takes 60 us, looking whether its words are still the same 1 us.

        A gauss that is kept for the next call would be used up without touching the words: then numpy is asked.
        """
        bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # its stubs forget it
        if type(bits).__name__ != _LEGACY:
            return None
        raw = ctypes.string_at(bits.ctypes.state_address, _LEGACY_BYTES)
        if self._numpy is None or self._numpy.has_gauss or raw != self._numpy_raw:
            _, words, place, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
            self._numpy = Numpy(words.tobytes(), int(place), int(has_gauss), float(gauss))
            self._numpy_raw = raw
        return self._numpy


def _cuda_generators() -> list[torch.Generator]:
    """None where no CUDA context was made yet: ours would be the first."""
    found = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []
    return [] if found and torch.cuda.is_current_stream_capturing() else found


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _tensor(words: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)
