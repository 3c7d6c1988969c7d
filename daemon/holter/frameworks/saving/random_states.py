"""Random states of every rank beside a checkpoint, in the files and the shape that accelerate has for them, and their way back.

    state/random_states_<rank>.pkl    {"step", "random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed", "buffers"}

`buffers` are this rank's own: running statistics that nobody keeps equal, of which a checkpoint has those of one rank.
"""

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from holter.errors import SaveError, VaultError
from holter.frameworks import place
from holter.frameworks.loop import named_state
from holter.frameworks.saving import randomness, seeding
from holter.halting.vault import manifest
from holter.rank.framework import STATE, Task
from holter.rank.models import Model

if TYPE_CHECKING:
    from holter.rank.undo.rewind import Rewound


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
    states = randomness.at_beginning(rewound)
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
    torch.set_rng_state(kept.get(seeding.AT_STEP, kept["torch_manual_seed"]))
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
