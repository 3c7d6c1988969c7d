"""Random states of every rank, from what a rewind kept of them, as frameworks store them; and their way back.

    state/random_states_<rank>.pkl    {"step", "random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed" (or another accelerator's), "buffers"}

The file and its shape are accelerate's. `buffers` are this rank's own: running statistics that nobody keeps equal, of which a checkpoint has
those of one rank.

An iterator of a DataLoader draws a seed. Where a run is resumed within a pass, the halted run drew it long ago:

    halted run    iter(loader) draws a seed   step 28   step 29   step 30 …        state when step 30 began: S
    resumed       load_state   iter(loader) draws a seed            step 30 …      S only if what was loaded lies a seed before S

So a framework that resumes in this order is given the state from before that seed, for every loader that has no generator of its own. At the
beginning of a pass the run has drawn its seed after S, and S is what is loaded. torch's CPU generator, a Mersenne twister, is drawn from
backwards for that:

    words   0 … … … … … … 623     a block, twisted from the one before when all its words are used
                  ^ place         a seed is two words; before the block's first word lies the last one of the block before

What a state holds besides words and place (a normal sample that is kept for later) is not touched. A result is tried before it is given:
seeds are drawn from it by torch itself, and what that leaves must be the given state.
"""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holter.errors import PartlySavedError, SaveError, VaultError
from holter.frameworks import place
from holter.frameworks.loop import named_state
from holter.halting.vault import manifest
from holter.rank import accelerator
from holter.rank.framework import STATE, Task
from holter.rank.models import Model

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.undo.rewind import Rewound

AT_STEP = "torch_at_step"
"""Key under which a file of random states also has S, for those who set it after the loader has drawn."""
WORDS = 624
SHIFT = 397
WORDS_OF_A_SEED = 2
_UPPER, _LOWER, _MATRIX = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
_LAYOUT = np.dtype([("seed", "<u8"), ("left", "<i4"), ("is_seeded", "<i4"), ("next", "<u8"), ("words", "<u8", WORDS)])
"""Layout of the beginning of `torch.get_rng_state`."""


def num_seeds_ahead(context: "Context", rewound: "Rewound") -> int:
    """Return how many seeds a resumed loop draws from torch's generator before the step, but the halted run did not draw after it began."""
    feeding = context.data.under_way(context.undo.rewind.fed_by)
    drawn = [seeds for loader, seeds in feeding if loader.generator is None]
    own = set(next_seeds(rewound.torch_state, len(drawn)))
    return sum(own.isdisjoint(seeds) for seeds in drawn)


def as_loaded(state: torch.Tensor, num_seeds: int) -> dict[str, torch.Tensor]:
    """Return torch's entries for a file in accelerate's format: the state to load, and S if that differs."""
    before = before_seeds(state, num_seeds) if num_seeds else None
    return {"torch_manual_seed": state} if before is None else {"torch_manual_seed": before, AT_STEP: state}


def check_all_known(task: Task, ranks: Iterable[int]) -> None:
    """Raise PartlySavedError if the random state of some rank could not be written."""
    missing = [rank for rank in ranks if rank not in task.rewinds]
    if missing:
        named = ", ".join(map(str, missing))
        raise PartlySavedError(f"the random state of rank {named} is not known: resumed, it draws other numbers")


def write(task: Task, buffers: Mapping[str, torch.Tensor]) -> list[int]:
    """Write this rank's states; the first saver also writes those of ranks that do not save.

    Returns the ranks whose states it had to write, known or not.
    """
    ranks = {task.rank}
    if task.savers and task.rank == task.savers[0]:
        ranks |= set(range(task.world_size)) - set(task.savers)
    for rank in sorted(ranks & set(task.rewinds)):
        states = task.rewinds[rank]
        content = {
            "step": task.completed,
            "random_state": states.python_state,
            "numpy_random_seed": states.numpy_state,
            "torch_manual_seed": states.torch_state,
        }
        if states.device_words:
            content[device_key(states.device_type)] = states.device_states
        if buffers and rank == task.rank:
            content["buffers"] = dict(buffers)
        torch.save(content, _path(task.state, rank))
    return sorted(ranks)


def device_key(kind: str) -> str:
    """Return accelerate's key for the states of an accelerator's generators."""
    return f"torch_{kind}_manual_seed"


def restore(directory: str | Path, model: torch.nn.Module | None = None) -> int:
    """Restore this rank's random states; see `holter.restore`."""
    folder = Path(directory)
    state = folder / STATE if (folder / STATE).is_dir() else folder
    path = _path(state, place.find().rank)
    if not path.is_file():
        raise SaveError(f"{state} has no random states of this rank: {path.name} is not there")
    with torch.serialization.safe_globals(_numpy_parts()):
        kept = torch.load(path, map_location="cpu", weights_only=True)
    if model is not None and kept.get("buffers"):
        _set_buffers(model, kept["buffers"])
    random.setstate(kept["random_state"])
    if kept.get("numpy_random_seed") is not None:
        np.random.set_state(kept["numpy_random_seed"])  # noqa: NPY002  the global generator is what was kept
    torch.set_rng_state(kept.get(AT_STEP, kept["torch_manual_seed"]))
    accelerator.set_generators(kept.get(device_key(accelerator.kind()), ()))
    try:
        return manifest.read(state.parent).step
    except VaultError:
        return int(kept["step"])


def _path(state: Path, rank: int) -> Path:
    return state / f"random_states_{rank}.pkl"


def _set_buffers(model: torch.nn.Module, kept: Mapping[str, torch.Tensor]) -> None:
    """Set buffers by the names that checkpoints use, because the model may be wrapped now or may have been then."""
    inner = Model(model, "").inner
    assert inner is not None
    with torch.no_grad():
        for name, buffer in inner.named_buffers():
            if (value := kept.get(named_state.plain(name))) is not None:
                buffer.copy_(value)


def _numpy_parts() -> list[Any]:
    """Return what a pickled state of numpy's generator consists of."""
    from numpy._core import multiarray  # noqa: PLC0415  not in numpy before 1.26

    return [multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]  # noqa: SLF001


def next_seeds(state: torch.Tensor, number: int) -> list[int]:
    """Return the seeds that so many iterators of a DataLoader would draw from this state, one after the other."""
    return _drawn(state, number)[0]


def before_seeds(state: torch.Tensor, number: int) -> torch.Tensor | None:
    """Return the state from which so many seeds lead to this one; None if it is no generator of the known kind."""
    found = state.clone()
    head = _head(found)
    words = head["words"][0].astype(np.uint32)
    # If all words are used, the next draw twists the block first.
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
    # Drawn in the same way as by `_BaseDataLoaderIter`.
    found = [int(torch.empty((), dtype=torch.int64).random_(generator=generator).item()) for _ in range(number)]
    return found, generator.get_state()


def _head(state: torch.Tensor) -> np.ndarray:
    """Return the known part of the state, to be read and written in place."""
    head: np.ndarray = state.numpy()[: _LAYOUT.itemsize].view(_LAYOUT)
    return head


def _plain(state: torch.Tensor) -> torch.Tensor:
    """Make equal states comparable: a freshly seeded generator stands at the beginning of words that it never uses, which equals their end."""
    found = state.clone()
    head = _head(found)
    if head["left"][0] == 1:
        head["next"][0] = WORDS
    return found


def _untwisted(new: np.ndarray) -> np.ndarray:
    """Return the block before this one. Of its first word only one bit is known, but the others are never used again."""
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
    """Return the bits that were shifted: the highest of each word, and the lower ones of the next word."""
    is_odd = twisted >> np.uint32(31)
    found: np.ndarray = ((twisted ^ (is_odd * _MATRIX)) << np.uint32(1)) | is_odd
    return found
