"""What saves a rank's part of a halted run: one keeper a framework, found at halt time only.

In a healthy run nothing is patched and nothing is registered for this: the framework's own object (Trainer, engine, Accelerator) is looked
for among all living objects when the run has been decided to end.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from holter.rank.search import innermost

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.undo.rewind import Rewound

STATE = "state"
"""What the framework itself writes lies here, in the checkpoint's directory."""


@dataclass(frozen=True)
class Task:
    """One rank's part in a save."""

    directory: Path
    """The framework's files go below `directory / STATE`."""
    step: int
    """Completed optimizer steps since attach."""
    rank: int
    world_size: int
    savers: tuple[int, ...]
    lost: tuple[int, ...]
    is_rescue: bool
    """Called in a thread while main threads are blocked: no collective may be called, and the process ends afterwards."""
    writes_shared: bool
    """This rank writes what all ranks share. In a held save every rank calls the framework's function, and the framework decides."""
    rewinds: "Mapping[int, Rewound]"
    """By rank, how the step began: its own always, of others what was found."""
    base_step: int = 0
    """Completed steps before attach."""
    deadline_s: float = 300.0
    """So long the save may take."""
    is_snapshot: bool = False
    """A snapshot was put back, with the counters of its step: nothing of an undone step is left to be taken back."""

    @property
    def completed(self) -> int:
        """Completed steps of the run, over all its lives."""
        return self.base_step + self.step

    @property
    def state(self) -> Path:
        """Where the framework's own files go."""
        return self.directory / STATE


class Keeper(Protocol):
    """One framework's way to save."""

    framework: str
    """accelerate, hf_trainer, deepspeed or dcp."""

    def save(self, task: Task) -> None:
        """Write the framework's own format; whatever it raises says what is not saved."""

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that must be found again, bit for bit, in what this rank wrote; the names are for messages."""


FINDERS = (
    ("transformers.trainer", "holter.frameworks.hf_trainer.keeper"),
    ("deepspeed.runtime.engine", "holter.frameworks.deepspeed.keeper"),
    ("accelerate.accelerator", "holter.frameworks.accelerate.keeper"),
)
"""What the script must have imported, and the module whose `find(context, optimizers)` gives its keeper or None; the outermost
framework first."""


def find(context: "Context", optimizers: Sequence[torch.optim.Optimizer]) -> Keeper:
    """The keeper of the framework that trains with these optimizers; a loop without one is saved by torch.distributed.checkpoint."""
    for imported, finder in FINDERS:
        if imported in sys.modules:
            keeper: Keeper | None = importlib.import_module(finder).find(context, optimizers)
            if keeper is not None:
                return keeper
    distributed: Any = importlib.import_module("holter.frameworks.loop.keeper")
    fallback: Keeper = distributed.keep(context, optimizers)
    return fallback


def shares(theirs: Sequence[Any], ours: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether one of the optimizers that step is among those that a framework prepared."""
    return bool({id(innermost(each)) for each in theirs} & {id(innermost(each)) for each in ours})


def tensors_of(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that a state_dict has, and every tensor in the optimizers' states."""
    for index, model in enumerate(models):
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                # A parameter that trains is told from a buffer, which may well be infinite.
                yield f"model {index}: {name}", value if value.requires_grad else value.detach()
    for index, optimizer in enumerate(optimizers):
        for number, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer {index}: {number}.{key}", value.detach()
