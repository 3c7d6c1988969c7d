"""torch's CPU generator, a Mersenne twister, drawn from backwards: the state from which n seeds lead to a given one.

    words   0 … … … … … … 623     a block, twisted from the one before when all its words are used
                  ^ place         a seed is two words; before the block's first word lies the last one of the block before

What a state holds besides words and place (a normal sample that is kept for later) is not touched. A result is tried before it is given:
seeds are drawn from it by torch itself, and what that leaves must be the given state.
"""

import numpy as np
import torch

WORDS = 624
SHIFT = 397
WORDS_OF_A_SEED = 2
_UPPER, _LOWER, _MATRIX = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
_LAYOUT = np.dtype(
    [("seed", "<u8"), ("left", "<i4"), ("is_seeded", "<i4"), ("next", "<u8"), ("words", "<u8", WORDS)],
)
"""How `torch.get_rng_state` begins."""


def seeds(state: torch.Tensor, number: int) -> list[int]:
    """What as many iterators of a DataLoader would draw from here, one after the other."""
    return _drawn(state, number)[0]


def before_seeds(state: torch.Tensor, number: int) -> torch.Tensor | None:
    """The state from which so many seeds lead to this one; None: this is not the generator that we know."""
    found = state.clone()
    head = _head(found)
    words = head["words"][0].astype(np.uint32)
    # Of words that are all used none is left but the twist that comes next.
    place = WORDS + 1 - int(head["left"][0]) - WORDS_OF_A_SEED * number
    if place <= -WORDS:
        return None
    if place <= 0:
        words, place = _untwisted(words), place + WORDS
    head["words"][0], head["left"][0], head["next"][0] = words, WORDS + 1 - place, place
    try:
        is_found = torch.equal(_plain(_drawn(found, number)[1]), _plain(state))
    except RuntimeError:
        return None
    return found if is_found else None


def _drawn(state: torch.Tensor, number: int) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator()
    generator.set_state(state)
    # As `_BaseDataLoaderIter` draws it.
    found = [int(torch.empty((), dtype=torch.int64).random_(generator=generator).item()) for _ in range(number)]
    return found, generator.get_state()


def _head(state: torch.Tensor) -> np.ndarray:
    """The part that we know, to be read and written in place."""
    head: np.ndarray = state.numpy()[: _LAYOUT.itemsize].view(_LAYOUT)
    return head


def _plain(state: torch.Tensor) -> torch.Tensor:
    """A freshly seeded generator stands at the beginning of words that are never used: the same as at their end."""
    found = state.clone()
    head = _head(found)
    if head["left"][0] == 1:
        head["next"][0] = WORDS
    return found


def _untwisted(new: np.ndarray) -> np.ndarray:
    """The block before this one. Of its first word one bit is known; no other is ever used again."""
    mixed = np.empty_like(new)
    rest = WORDS - SHIFT
    mixed[rest:] = _unmixed(new[rest:] ^ new[:SHIFT])
    old = np.empty_like(new)
    old[SHIFT:] = (mixed[SHIFT:] & _UPPER) | (mixed[SHIFT - 1 : -1] & _LOWER)
    mixed[:rest] = _unmixed(new[:rest] ^ old[SHIFT:])
    old[1:] = (mixed[1:] & _UPPER) | (mixed[:-1] & _LOWER)
    old[0] = mixed[0] & _UPPER
    return old


def _unmixed(twisted: np.ndarray) -> np.ndarray:
    """The bits that were shifted: a word's highest, and the lower ones of the word after it."""
    is_odd = twisted >> np.uint32(31)
    found: np.ndarray = ((twisted ^ (is_odd * _MATRIX)) << np.uint32(1)) | is_odd
    return found
