"""What a rank asks of a training framework, with default answers for a framework that knows nothing.

    holter.frameworks.all.ALL     the implementations, one folder each
    Context.frameworks            gives them to the hooks, which know none by name

holter imports no framework: it is asked only once the script has imported its `module`. Nothing is registered for a save either: the
framework's own object (Trainer, engine, Accelerator) is searched for among all living objects when it is needed.
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
"""Name of the folder, in the checkpoint's directory, for the files that the framework itself writes."""


@dataclass(frozen=True)
class LibraryFunction:
    """Where to find a function of a library."""

    module: str
    """Full name of the module."""
    owner: str
    """Class in that module; empty for a function of the module itself."""
    name: str
    also: str = ""
    """Another module that has the same function; empty if there is none."""


Sought = TypeVar("Sought", bound=LibraryFunction)


class LateImports(Generic[Sought]):
    """Functions whose modules the script has not imported yet; a look is almost free unless something was imported since the last."""

    def __init__(self, functions: Iterable[Sought]) -> None:
        self._waiting = list(functions)
        self._num_modules = 0

    def come(self) -> Iterator[tuple[Sought, list[Any]]]:
        """Yield each function whose module was imported since the last look, with all owners that have it by its name."""
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
    """A function of a library that does a whole save, or a whole evaluation."""

    phase: Phase = Phase.CHECKPOINT
    checkpoint: str = ""
    """Format of the finished checkpoint; empty if a run cannot go on from it, or if it is not finished when the call returns."""
    where: Callable[[tuple[Any, ...], Mapping[str, Any], Any], str] | None = None
    """Given the arguments and the result of a call, returns where it saved, or an empty string if that is not known. It may raise."""


@dataclass(frozen=True, kw_only=True)
class LogFunction(LibraryFunction):
    """A function with which scripts log."""

    read: Callable[..., Any]
    """Given the call's arguments, returns the logged values by name; anything but a mapping is ignored."""


@dataclass(frozen=True)
class Task:
    """What one rank has to save, and how."""

    directory: Path
    """The framework's files go below `directory / STATE`."""
    step: int
    """Number of completed optimizer steps since attach."""
    rank: int
    world_size: int
    savers: tuple[int, ...]
    lost: tuple[int, ...]
    is_rescue: bool
    """Whether the save runs in a thread while main threads are blocked: no collective may be called, and the process ends afterwards."""
    writes_shared: bool
    """Whether this rank writes what all ranks share. In a held save every rank calls the framework's function, and the framework decides."""
    rewinds: "Mapping[int, Rewound]"
    """How the step began, by rank: always this rank's, and those of others that were found."""
    base_step: int = 0
    """Number of completed steps before attach."""
    deadline_s: float = 300.0
    """Seconds that the save may take."""
    is_snapshot: bool = False
    """Whether a snapshot was put back, with the counters of its step, so that nothing of an undone step has to be taken back."""

    @property
    def completed(self) -> int:
        """Number of completed steps of the run, including those before it was resumed."""
        return self.base_step + self.step

    @property
    def state(self) -> Path:
        """Directory for the framework's own files."""
        return self.directory / STATE


class Keeper(Protocol):
    """Saves one rank's part of a halted run, in the framework's own format."""

    framework: str
    """The name of its checkpoints' format in a manifest (`Framework.checkpoint`)."""
    rescues_alone: bool
    """Whether one rank writes the files of all while ranks are blocked."""

    def save(self, task: Task) -> None:
        """Write `task.state`; an exception says what could not be saved."""

    def live(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield every tensor that must be found, bit for bit, in what this rank wrote; the names are for messages."""


class Framework:
    """One framework. Each method has a harmless default; an implementation overrides those to which it has an answer."""

    name = ""
    checkpoint = ""
    """The name of its checkpoints' format in a manifest."""
    resume = ""
    """How a script goes on from its checkpoint, as text for a person; `{path!r}` stands for the checkpoint's path."""
    module = ""
    """Name of a module; the script uses this framework if it has imported it."""
    owner = ""
    """Class in that module whose objects hold the optimizers."""
    saves: tuple[SaveFunction, ...] = ()
    """Its functions that save or evaluate; they are followed once they are imported."""
    logs: tuple[LogFunction, ...] = ()
    """Its functions that log; they are followed once they are imported."""

    def attach(self, monitor: "Monitor") -> None:
        """Patch or follow what else this framework needs, when the rank begins to watch."""

    def count_steps(self, optimizer: Any) -> int | None:
        """Return how many optimizer steps the run has completed, including those before it was resumed; None if the framework does not count."""

    def registered(self, optimizer: Any) -> Callable[[], Iterable[Any]] | None:
        """Return a function for the further objects that the script has this framework save.

        None if the framework takes none, or does not hold this optimizer.
        """

    def counters(self, optimizers: Sequence[Any]) -> "Iterable[Source]":  # noqa: ARG002
        """Return what the framework counts in a run, for snapshots: a halt may undo several steps."""
        return ()

    def sharded(self, root: Any) -> Mapping[tuple[int, str], Any]:  # noqa: ARG002
        """Return, by module and name, the parameters that the optimizer steps, where the module may show others in their place."""
        return {}

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper | None:
        """Return what saves a run that steps these optimizers; None if they are not this framework's. Import the framework here."""

    def optimizers_of(self, owner: Any) -> Sequence[Any]:
        """Return the optimizers that one of the framework's objects holds, wrapped or not."""
        return [getattr(owner, "optimizer", None)]

    def owners(self, optimizers: Sequence[Any]) -> Iterator[Any]:
        """Yield the framework's living objects that hold one of these optimizers; the search takes a fraction of a second."""
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
    """All frameworks, and what they tell the hooks of this process."""

    known: Sequence[Framework] = ()
    """All frameworks, the outermost first: a Trainer has an Accelerator inside, which may have a DeepSpeed engine."""
    lent: "weakref.WeakKeyDictionary[Any, list[tuple[tuple[str, Any], Any]]]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """For an optimizer, gradients that it will apply but does not hold yet, with names and parameters."""
    partitioned: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    """Optimizers of which each rank steps its own part, and that do not skip a step whose gradients are not finite."""
    trains: "weakref.WeakKeyDictionary[Any, frozenset[int]]" = field(default_factory=weakref.WeakKeyDictionary)
    """For an optimizer that holds partitions, the ids of the models' parameters that are made from them."""
    partitions: "weakref.WeakKeyDictionary[Any, list[tuple[str, Any]]]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """For an optimizer, the partitions that it steps in place of the models' parameters, with names; each belongs to this rank alone."""

    def count_steps(self, optimizer: Any) -> tuple[int, str] | None:
        """Return the number of completed steps of the run, and the class that counted them; None if no framework counts."""
        for framework in self.known:
            if (count := framework.count_steps(optimizer)) is not None:
                return count, framework.owner
        return None

    def registered(self, optimizer: Any) -> Callable[[], Iterable[Any]] | None:
        """Return a function for the further objects that the script has its framework save; None if it takes none."""
        found = (framework.registered(optimizer) for framework in self.known)
        return next((give for give in found if give is not None), None)

    def counters(self, optimizers: Sequence[Any]) -> "Iterator[Source]":
        """Yield what the frameworks count in a run, for snapshots."""
        for framework in self.known:
            yield from framework.counters(optimizers)

    def sharded(self, root: Any) -> dict[tuple[int, str], Any]:
        """Return, by module and name, the parameters that the optimizer steps, where the module may show others in their place."""
        return {key: shard for framework in self.known for key, shard in framework.sharded(root).items()}

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper:
        """Return the keeper of the outermost framework that steps these optimizers; the last framework takes any loop."""
        found = (framework.keeper(context, optimizers) for framework in self.known)
        return next(keeper for keeper in found if keeper is not None)


def absolute(where: Any) -> str:
    """Return a path made absolute, or a URL as it is; empty for anything else."""
    if not isinstance(where, (str, os.PathLike)) or not (text := os.fspath(where)) or not isinstance(text, str):
        return ""
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - links stay as the user wrote them
