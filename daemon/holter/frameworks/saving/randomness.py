"""Random states as frameworks store them, from what a rewind kept of them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holter.errors import PartlySavedError
from holter.rank.framework import Task

if TYPE_CHECKING:
    from holter.rank.undo.generators import RandomStates
    from holter.rank.undo.rewind import Rewound


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


def check(task: Task, ranks: Iterable[int]) -> None:
    """Say whose random state could not be written."""
    missing = [rank for rank in ranks if rank not in task.rewinds]
    if missing:
        named = ", ".join(map(str, missing))
        raise PartlySavedError(f"the random state of rank {named} is not known: resumed, it draws other numbers")
