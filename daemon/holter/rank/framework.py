"""What a rank asks of a training framework, with the answers of one that has nothing to say.

    holter.frameworks.all.ALL     the implementations, one folder each
    Context.frameworks            hands them to the hooks, which know none by name

Nothing is imported for a framework: it is asked only once the script has imported `module`. Nothing is registered for a save either: the
framework's own object (Trainer, engine, Accelerator) is looked for among all living objects when it is needed.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from holter.records import Phase

if TYPE_CHECKING:
    import torch

    from holter.rank.context import Context
    from holter.rank.monitor import Monitor
    from holter.rank.undo.rewind import Rewound
    from holter.rank.undo.state_parts import Source

STATE = "state"
"""What the framework itself writes lies here, in the checkpoint's directory."""


@dataclass(frozen=True)
class LibraryFunction:
    """Where a function of a library is found."""

    module: str
    """Full name of the module."""
    owner: str
    """Class in that module; empty: the module itself."""
    name: str
    also: str = ""
    """Another module that has the same function; empty: none."""


Sought = TypeVar("Sought", bound=LibraryFunction)


class LateImports(Generic[Sought]):
    """Functions whose modules the script has not imported yet; a look costs next to nothing while no module was imported since the last."""

    def __init__(self, functions: Iterable[Sought]) -> None:
        self._waiting = list(functions)
        self._num_modules = 0

    def come(self) -> Iterator[tuple[Sought, list[Any]]]:
        """Each function whose module was imported since the last look, with all owners that have it by its name."""
        if len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        for function in list(self._waiting):
            module = sys.modules.get(function.module)
            owner = getattr(module, function.owner, None) if function.owner else module
            if owner is not None and hasattr(owner, function.name):
                self._waiting.remove(function)
                yield function, [owner, *([sys.modules[function.also]] if function.also in sys.modules else [])]


@dataclass(frozen=True, kw_only=True)
class SaveFunction(LibraryFunction):
    """A function of a library that is a save, or an evaluation, as a whole."""

    phase: Phase = Phase.CHECKPOINT
    checkpoint: str = ""
    """The format of the finished checkpoint; empty: none that a run goes on from, or one that is not finished when the call returns."""
    where: Callable[[tuple[Any, ...], Mapping[str, Any], Any], str] | None = None
    """Arguments and result of a call -> where it saved; empty: nowhere that we know. It may raise."""


@dataclass(frozen=True, kw_only=True)
class LogFunction(LibraryFunction):
    """A function by which scripts log."""

    read: Callable[..., Any]
    """Given the call's arguments: what they say, by name; anything but a mapping says nothing."""


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
    """Saves one rank's part of a halted run, in the framework's own format."""

    framework: str
    """What its checkpoints are called in a manifest (`Framework.checkpoint`)."""
    rescues_alone: bool
    """While ranks are blocked, one of them writes the files of all."""

    def save(self, task: Task) -> None:
        """Write `task.state`; whatever it raises says what is not saved."""

    def live(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Every tensor that must be found again, bit for bit, in what this rank wrote; the names are for messages."""


class Framework:
    """One framework. Each method has a harmless answer: a new one overrides what it knows."""

    name = ""
    checkpoint = ""
    """What its checkpoints are called in a manifest."""
    resume = ""
    """How a script goes on from its checkpoint, for a person; `{path!r}` is where that lies."""
    module = ""
    """The script uses this framework if it has imported this module."""
    owner = ""
    """Class in that module whose objects hold the optimizers."""
    saves: tuple[SaveFunction, ...] = ()
    """Its functions that save or evaluate, followed once they are imported."""
    logs: tuple[LogFunction, ...] = ()
    """Its functions that log, followed likewise."""

    def attach(self, monitor: "Monitor") -> None:
        """The rank begins to watch: patch or follow what else this framework needs."""

    def count_steps(self, optimizer: Any) -> int | None:
        """Optimizer steps that the run has completed over all its lives: frameworks restore that with their checkpoints. None: not counted."""

    def registered(self, optimizer: Any) -> Callable[[], Iterable[Any]] | None:
        """A function that returns the objects which the script has this framework save too; None: it takes none, or does not hold this optimizer."""

    def counters(self, optimizers: Sequence[Any]) -> "Iterable[Source]":  # noqa: ARG002
        """What it counts of a run, for snapshots: a halt may undo several steps."""
        return ()

    def sharded(self, root: Any) -> Mapping[tuple[int, str], Any]:  # noqa: ARG002
        """By module and name: parameters that the optimizer steps, where the module may show others in their place."""
        return {}

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper | None:
        """What saves the run that steps these optimizers; None: they are not this framework's. The place to import it."""

    def optimizers_of(self, owner: Any) -> Sequence[Any]:
        """Those that one of its objects holds, wrapped or not."""
        return [getattr(owner, "optimizer", None)]

    def owners(self, optimizers: Sequence[Any]) -> Iterator[Any]:
        """Its living objects that hold one of these optimizers; a fraction of a second."""
        kind = getattr(sys.modules.get(self.module), self.owner, None)
        if kind is None:
            return
        from holter.rank.search import innermost, living  # noqa: PLC0415  imports torch, which a command that names frameworks has not

        ours = {id(innermost(each)) for each in optimizers}
        for owner in living(kind):
            if ours & {id(innermost(each)) for each in self.optimizers_of(owner)}:
                yield owner


@dataclass
class Frameworks:
    """All frameworks, and what they have told the hooks of this process."""

    known: Sequence[Framework] = ()
    """The outermost first: a Trainer has an Accelerator inside, which may have an engine of DeepSpeed's."""
    lent: "weakref.WeakKeyDictionary[Any, list[tuple[tuple[str, Any], Any]]]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """By optimizer: gradients that it will apply and does not hold yet, by the names of their parameters."""
    partitioned: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    """Optimizers of which each rank applies a part, whether it is finite or not."""
    trains: "weakref.WeakKeyDictionary[Any, frozenset[int]]" = field(default_factory=weakref.WeakKeyDictionary)
    """By optimizer that holds partitions: ids of the models' parameters that are made from them."""
    partitions: "weakref.WeakKeyDictionary[Any, list[tuple[str, Any]]]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """By optimizer: what it steps in the models' place, by name, each this rank's own."""

    def count_steps(self, optimizer: Any) -> tuple[int, str] | None:
        """Completed steps of the run, and the class that counted them; None: nobody counts."""
        for framework in self.known:
            if (count := framework.count_steps(optimizer)) is not None:
                return count, framework.owner
        return None

    def registered(self, optimizer: Any) -> Callable[[], Iterable[Any]] | None:
        """A function that returns the objects which the script has its framework save too; None: the framework takes none."""
        found = (framework.registered(optimizer) for framework in self.known)
        return next((give for give in found if give is not None), None)

    def counters(self, optimizers: Sequence[Any]) -> "Iterator[Source]":
        """What frameworks count of a run, for snapshots."""
        for framework in self.known:
            yield from framework.counters(optimizers)

    def sharded(self, root: Any) -> dict[tuple[int, str], Any]:
        """By module and name: parameters that the optimizer steps, where the module may show others in their place."""
        return {key: shard for framework in self.known for key, shard in framework.sharded(root).items()}

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper:
        """Of the outermost framework that steps these optimizers; the last of all takes every loop."""
        found = (framework.keeper(context, optimizers) for framework in self.known)
        return next(keeper for keeper in found if keeper is not None)


def absolute(where: Any) -> str:
    """A path from the root, an address as it is; empty for what is neither."""
    if not isinstance(where, (str, os.PathLike)) or not (text := os.fspath(where)) or not isinstance(text, str):
        return ""
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - links stay as the user wrote them
