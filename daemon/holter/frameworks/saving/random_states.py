"""Random states of every rank, from what a rewind kept of them, as frameworks store them; and their way back.

    state/random_states_<rank>.pkl    {"step", "random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed", "buffers"}

The file and its shape are accelerate's. `buffers` are this rank's own: running statistics that nobody keeps equal, of which a checkpoint has
those of one rank.

An iterator of a DataLoader draws a seed. Where a run is resumed within a pass, the halted run drew it long ago:

    halted run    iter(loader) draws a seed   step 28   step 29   step 30 …        state when step 30 began: S
    resumed       load_state   iter(loader) draws a seed            step 30 …      S only if what was loaded lies a seed before S

So a framework that resumes in this order is given the state from before that seed, for every loader that has no generator of its own. At the
beginning of a pass the run has drawn its seed after S, and S is what is loaded.
"""

import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holter.errors import PartlySavedError, SaveError, VaultError
from holter.frameworks import place
from holter.frameworks.loop import named_state
from holter.frameworks.saving import twister
from holter.halting.vault import manifest
from holter.rank.framework import STATE, Task
from holter.rank.models import Model

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.undo.rewind import RandomStates, Rewound

AT_STEP = "torch_at_step"
"""Under this name a file of random states has S as well, for those who set it when the loader has drawn."""


class States(NamedTuple):
    """What `random.setstate`, `numpy.random.set_state`, `torch.set_rng_state` and `torch.cuda.set_rng_state_all` take."""

    python: Any
    numpy: Any
    """None: the script put a generator in its place that is not numpy's own."""
    torch: torch.Tensor
    cuda: list[torch.Tensor]


def at_beginning(rewound: "Rewound") -> States:
    """As they were when the step before was over."""
    return _states(rewound)


def at_forward(rewound: "Rewound") -> States:
    """As the step's first forward pass found them, its batch fetched."""
    return _states(rewound.at_forward)


def _states(kept: "RandomStates") -> States:
    return States(kept.python_state, kept.numpy_state, kept.torch_state, kept.cuda_states)


def num_seeds_ahead(context: "Context", rewound: "Rewound") -> int:
    """How many seeds a resumed loop draws from torch's generator before the step, that the halted run did not draw after it began."""
    feeding = context.data.under_way(context.undo.rewind.fed_by)
    drawn = [seeds for loader, seeds in feeding if loader.generator is None]
    own = set(twister.seeds(rewound.torch_state, len(drawn)))
    return sum(own.isdisjoint(seeds) for seeds in drawn)


def as_loaded(state: torch.Tensor, num_seeds: int) -> dict[str, torch.Tensor]:
    """What torch has in a file in accelerate's shape: what is loaded, and S where that is another."""
    before = twister.before_seeds(state, num_seeds) if num_seeds else None
    return {"torch_manual_seed": state} if before is None else {"torch_manual_seed": before, AT_STEP: state}


def check_all_known(task: Task, ranks: Iterable[int]) -> None:
    """Say whose random state could not be written."""
    missing = [rank for rank in ranks if rank not in task.rewinds]
    if missing:
        named = ", ".join(map(str, missing))
        raise PartlySavedError(f"the random state of rank {named} is not known: resumed, it draws other numbers")


def write(task: Task, buffers: Mapping[str, torch.Tensor]) -> list[int]:
    """This rank's own; the first saver writes those of ranks that do not save. Returns whose it was to write, known or not."""
    ranks = {task.rank}
    if task.savers and task.rank == task.savers[0]:
        ranks |= set(range(task.world_size)) - set(task.savers)
    for rank in sorted(ranks & set(task.rewinds)):
        content = {"step": task.completed, **_as_saved(task.rewinds[rank])}
        if buffers and rank == task.rank:
            content["buffers"] = dict(buffers)
        torch.save(content, _path(task.state, rank))
    return sorted(ranks)


def _as_saved(rewound: "Rewound") -> dict[str, Any]:
    states = at_beginning(rewound)
    kept = {"random_state": states.python, "numpy_random_seed": states.numpy, "torch_manual_seed": states.torch}
    return kept | ({"torch_cuda_manual_seed": states.cuda} if states.cuda else {})


def restore(directory: str | Path, model: torch.nn.Module | None = None) -> int:
    """See `holter.restore`."""
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
        import numpy as np  # noqa: PLC0415  kept where the run had it

        np.random.set_state(kept["numpy_random_seed"])  # noqa: NPY002  the global generator is what was kept
    torch.set_rng_state(kept.get(AT_STEP, kept["torch_manual_seed"]))
    if kept.get("torch_cuda_manual_seed"):
        torch.cuda.set_rng_state_all(kept["torch_cuda_manual_seed"])
    try:
        return manifest.read(state.parent).step
    except VaultError:
        return int(kept["step"])


def _path(state: Path, rank: int) -> Path:
    return state / f"random_states_{rank}.pkl"


def _set_buffers(model: torch.nn.Module, kept: Mapping[str, torch.Tensor]) -> None:
    """By the names that checkpoints have: the model may be wrapped by now, or may not have been then."""
    inner = Model(model, "").inner
    assert inner is not None
    with torch.no_grad():
        for name, buffer in inner.named_buffers():
            if (value := kept.get(named_state.plain(name))) is not None:
                buffer.copy_(value)


def _numpy_parts() -> list[Any]:
    """What a pickled state of numpy's generator is made of."""
    if "numpy" not in sys.modules:
        return []
    import numpy as np  # noqa: PLC0415
    from numpy._core import multiarray  # noqa: PLC0415

    return [multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]  # noqa: SLF001
