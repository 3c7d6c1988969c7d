"""The models of the script: found by us, without the script naming them.

    DDP(model)          seen when DDP takes its module, so that even the first forward pass is watched
    anything else       top-level modules with trainable parameters, looked for when an optimizer with unknown ones is met
    frozen components   top-level modules that do not train, counted once training calls them at every step
    holter.watch(...)   named by the script

Whether ranks must agree is known tensor by tensor, never guessed: DDP keeps what it does not ignore equal; a DTensor says how it is
placed; and a gradient that the script itself reduces over all ranks makes its parameter a replica.
"""

import fnmatch
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holter.rank.search import parameters_of, top_level, unique, variable_of
from holter.records import View

FLAT = "FullyShardedDataParallel"
"""FSDP's first kind: what it trains are flat shards."""
REDUCING_WRAPPERS = frozenset({FLAT, "DeepSpeedEngine"})
"""Wrappers whose `.grad` is reduced, sharded or gone by the end of backward."""
CALLED_STEPS = 3
"""A component counts when training has called it at this many steps in a row: an average that is evaluated now and then is one rank's own."""


class Model:
    """One model of the script, with its tensors by name, in a fixed order."""

    def __init__(
        self,
        root: torch.nn.Module,
        prefix: str,
        local_buffers: Sequence[str] = (),
        on_forget: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._on_forget = on_forget
        self._root = weakref.ref(root, self._forget)
        self.prefix = prefix
        self.wrapper = type(root).__name__
        self.is_active = False
        """The thread that we watch has called or optimized it. Another thread's gradients must not even be looked at: autograd
        writes them without the interpreter's lock."""
        self.is_trained = True
        """False for a frozen component."""
        self.was_optimized = False
        """An optimizer holds some of its parameters, or did."""
        self.parameters: list[tuple[str, torch.nn.Parameter]] = []
        self.buffers: list[tuple[str, torch.Tensor]] = []
        self.replicas: set[int] = set()
        """Ids of the parameters and buffers that must be equal on all ranks."""
        self.reduced_by_hand: set[str] = set()
        """Parameters whose gradients the script itself reduces."""
        self._local_buffers = tuple(local_buffers)
        self._signature: list[Any] = []
        self._tables: list[dict[str, Any]] = []
        """Where its modules keep their submodules, parameters and buffers."""
        self._parts: list[Any] = []
        self._kinds: list[tuple[bool, torch.dtype]] = []
        self._buffer_dtypes: list[torch.dtype] = []
        self._is_placed = False
        """Some parameters are DTensors."""
        self._called = (-1, 0)
        self.refresh()

    def _forget(self, _: Any) -> None:
        # The script let go of its model, perhaps to make room for another: its memory is not ours to hold.
        self.parameters, self.buffers, self._signature, self.replicas = [], [], [], set()
        self._tables, self._parts, self._kinds, self._buffer_dtypes = [], [], [], []
        for call in self._on_forget:
            call()

    @property
    def root(self) -> torch.nn.Module | None:
        """What the script calls; None once it is gone."""
        return self._root()

    @property
    def inner(self) -> torch.nn.Module | None:
        """The script's own module, without its wrapper."""
        return _inner(self._root())

    @property
    def ddp(self) -> Any:
        """Its DDP wrapper; None if there is none."""
        return _ddp(self._root())

    @property
    def is_replicated(self) -> bool:
        """Whether some of its tensors must be equal on all ranks."""
        return bool(self.replicas)

    def refresh(self) -> bool:
        """Read the tensors again; True if some came, went, froze, thawed, or changed their dtype."""
        inner, ddp = self.inner, self.ddp
        if inner is None:
            return False
        parts = _parts(self._tables, ddp, self.reduced_by_hand)
        if parts == self._parts and not self.has_thawed():
            return False
        self._tables = [
            held
            for module in inner.modules()
            for held in (module._modules, module._parameters, module._buffers)  # noqa: SLF001
        ]
        self._parts = _parts(self._tables, ddp, self.reduced_by_hand)
        parameters = [(self.prefix + name, p) for name, p in inner.named_parameters()]
        buffers = [(self.prefix + name, b) for name, b in inner.named_buffers()]
        signature: list[Any] = [(name, id(p), p.requires_grad, p.dtype) for name, p in parameters]
        signature += [(name, b.dtype) for name, b in buffers]
        self._kinds = [(p.requires_grad, p.dtype) for _, p in parameters]
        self._buffer_dtypes = [b.dtype for _, b in buffers]
        changed = signature != self._signature
        self._signature, self.parameters, self.buffers = signature, parameters, buffers
        self._is_placed = any(hasattr(p, "placements") for _, p in parameters)
        self.replicas = self._find_replicas(ddp)
        return changed

    def has_thawed(self) -> bool:
        """Whether a parameter froze, thawed or was cast since the last refresh: cheap to ask."""
        kinds = [(p.requires_grad, p.dtype) for _, p in self.parameters]
        return kinds != self._kinds or [b.dtype for _, b in self.buffers] != self._buffer_dtypes

    def learn_reduced(self, name: str, parameter: torch.Tensor) -> None:
        """The script reduces this parameter's gradient over all ranks."""
        self.reduced_by_hand.add(name)
        self.replicas.add(id(parameter))

    def note_call(self, step: int) -> None:
        """Training called this component."""
        last, in_a_row = self._called
        if step != last:
            self._called = (step, in_a_row + 1 if step == last + 1 else 1)
            self.is_active |= self._called[1] >= CALLED_STEPS

    def shows_local_gradients(self) -> bool:
        """Whether `.grad` at the end of backward is still the rank's own, and will be reduced in this backward.

        With `gradient_as_bucket_view` the gradient lies in the bucket that is being reduced while backward still runs.
        """
        ddp = self.ddp
        if ddp is None:
            return self.wrapper not in REDUCING_WRAPPERS and not self._is_placed
        return bool(ddp.require_backward_grad_sync) and not ddp.gradient_as_bucket_view

    def _find_replicas(self, ddp: Any) -> set[int]:
        found = {id(p) for name, p in self.parameters if name in self.reduced_by_hand or is_replica(p)}
        if ddp is None or not spans_world(getattr(ddp, "process_group", None)):
            return found
        ignored = {self.prefix + name for name in getattr(ddp, "parameters_to_ignore", ())}
        found |= {id(p) for name, p in self.parameters if name not in ignored and not is_sharded(p)}
        return found | {id(b) for name, b in self.buffers if name not in ignored and not self._is_local(name)}

    def unshared(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters that nothing says another rank holds too, whole or in parts."""
        if self.wrapper in REDUCING_WRAPPERS or any(
            type(part).__name__ == FLAT for part in (self.root.modules() if self.root is not None else ())
        ):
            return []
        return [
            (name, p)
            for name, p in self.parameters
            if id(p) not in self.replicas and not is_sharded(p) and not hasattr(p, "placements")
        ]

    def _is_local(self, name: str) -> bool:
        own = name.removeprefix(self.prefix)
        return any(fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(own, glob) for glob in self._local_buffers)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold a copy, as far as anything says so."""
        return num_replicas(getattr(self.ddp, "process_group", None)) if self.ddp is not None else 0


class Models:
    """All models, in the order they were found; frozen components apart, in the order of their names."""

    def __init__(self, local_buffers: Sequence[str] = (), declared_frozen: Sequence[str] = ()) -> None:
        self.declared_frozen = tuple(declared_frozen)
        """Patterns of names that the user's settings declare frozen."""
        self.averages: weakref.WeakSet[Any] = weakref.WeakSet()
        """What the script has logged as an average of its weights."""
        self._models: list[Model] = []
        self._components: list[Model] = []
        self._local_buffers = local_buffers
        self._has_lost = False
        self.on_forget: list[Callable[[], None]] = [self._note_lost]
        """Called when the script has let go of a model, by those who hold its tensors."""
        self.generation = 0
        """Grows whenever the list of tensors changed."""

    def __iter__(self) -> Iterator[Model]:
        if self._has_lost:
            self._drop_lost()
        return iter(self._models)

    def active(self) -> list[Model]:
        """Those that the watched thread trains."""
        return [model for model in self if model.is_active]

    def components(self) -> list[Model]:
        """Frozen modules that training calls at every step, in the order of their names."""
        if self._has_lost:
            self._drop_lost()
        return [model for model in self._components if model.is_active]

    def all(self) -> list[Model]:
        """What the census is taken of: trained models, then components."""
        return [*self, *self.components()]

    def _note_lost(self) -> None:
        # Called in any thread, at any moment: the lists are put right by those who next go through them.
        self._has_lost = True

    def _drop_lost(self) -> None:
        self._has_lost = False
        models = [model for model in self._models if model.root is not None]
        components = [model for model in self._components if model.root is not None]
        counted = len(self._models) + sum(model.is_active for model in self._components)
        self.generation += counted != len(models) + sum(model.is_active for model in components)
        self._models, self._components = models, components

    def has_flat(self, ids: AbstractSet[int]) -> bool:
        """Whether one of these parameters is a flat shard of FSDP's first kind."""
        return any(model.wrapper == FLAT and any(id(p) in ids for _, p in model.parameters) for model in self)

    def of(self, module: torch.nn.Module) -> Model | None:
        """The model whose own module this is."""
        return next((model for model in self if model.inner is module), None)

    def note_call(self, module: torch.nn.Module, step: int) -> bool:
        """Training called a frozen component; False if this module is none."""
        component = next((model for model in self._components if model.root is module), None)
        if component is not None and not component.is_active:
            component.note_call(step)
            self.generation += component.is_active
        return component is not None

    def add(self, root: torch.nn.Module) -> Model | None:
        """Watch a model; None if it, or what it wraps, is watched already."""
        for model in self:
            if model.root is root or model.inner is root:
                return None
        # A model that was found bare and has been wrapped since is the wrapper's from now on.
        inner = _inner(root)
        self._models = [model for model in self if model.inner is not inner]
        self._components = [model for model in self._components if model.inner is not inner]
        model = Model(root, self._prefix(root, inner), self._local_buffers, self.on_forget)
        self._models.append(model)
        self.generation += 1
        return model

    def add_component(self, root: torch.nn.Module) -> Model:
        """Follow a module that does not train, until it is known whether training calls it."""
        name = variable_of(root) or type(root).__name__.lower()
        name = unique(name, {model.prefix[:-1] for model in (*self._models, *self._components)})
        component = Model(root, f"{name}.", on_forget=self.on_forget)
        component.is_trained = False
        self._components = sorted([*self._components, component], key=lambda model: model.prefix)
        return component

    def refresh(self) -> None:
        """Notice parameters that were added, replaced, frozen or thawed."""
        changed = [model.refresh() for model in self.all()]
        if any(changed):
            self.generation += 1

    def has_thawed(self) -> bool:
        """Whether a trained model's parameter froze or thawed since the last refresh."""
        return any(model.has_thawed() for model in self)

    def discover(self) -> list[Model]:
        """Look through the interpreter's objects for top-level modules that train; a fraction of a second."""
        known = {id(p) for model in self for _, p in model.parameters}
        found = []
        for module in top_level():
            trainable = [p for p in parameters_of(module) if p.requires_grad]
            if trainable and not any(id(p) in known for p in trainable):
                model = self.add(module)
                if model is not None:
                    found.append(model)
                    known.update(id(p) for p in trainable)
        return found

    def discover_components(self) -> list[Model]:
        """Look through the interpreter's objects for top-level modules that do not train."""
        known = {id(p) for model in (*self, *self._components) for _, p in model.parameters}
        found = []
        for module in top_level():
            parameters = parameters_of(module)
            if parameters and not any(p.requires_grad or id(p) in known for p in parameters):
                found.append(self.add_component(module))
                known.update(id(p) for p in parameters)
        return found

    def _prefix(self, root: torch.nn.Module, inner: torch.nn.Module | None) -> str:
        """The first model's tensors are called as it calls them; the others' begin with their variable."""
        if not self._models:
            return ""
        taken = {model.prefix[:-1] for model in (*self._models, *self._components)}
        name = variable_of(root, inner) or f"model{len(self._models)}"
        return unique(name, taken) + "."


def wrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The DDP wrapper that was put around this module before anybody watched; the module itself if there is none."""
    for thing in gc.get_objects():
        if type(thing) is DistributedDataParallel and _part(thing, "module") is module:
            return thing
    return module


def _part(module: Any, name: str) -> Any:
    """A submodule by name. Not by getattr, which costs 50 us for a name that is not there."""
    parts = getattr(module, "_modules", None)
    return parts[name] if parts is not None and name in parts else None


def _inner(module: Any) -> torch.nn.Module | None:
    while module is not None:
        is_wrapper = isinstance(module, DistributedDataParallel) or type(module).__name__ == "DeepSpeedEngine"
        below = _part(module, "module" if is_wrapper else "_orig_mod")
        if below is None:
            break
        module = below
    return module


def _ddp(root: Any) -> Any:
    """The DDP wrapper that the script calls, also below torch.compile's; None if there is none."""
    if isinstance(root, DistributedDataParallel):
        return root
    below = _part(root, "_orig_mod")
    return below if isinstance(below, DistributedDataParallel) else None


def _parts(tables: Sequence[dict[str, Any]], ddp: Any, reduced_by_hand: AbstractSet[str]) -> list[Any]:
    """What is another list as soon as a part of a model came, went, was renamed or replaced: a tenth of the cost of asking for all names."""
    parts: list[Any] = [id(ddp), id(getattr(ddp, "process_group", None)), len(reduced_by_hand)]
    for held in tables:
        if type(held) is not dict:
            # TorchScript's: nothing is known of it, and so nothing is ever equal to it.
            parts.append(object())
        elif held:
            parts += held
            parts += map(id, held.values())
    return parts


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Ids of the parameters that these optimizers hold."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def gradient_view(models: Sequence[Model]) -> View:
    """Which gradients the optimizers of these models are given: the rank's own, reduced ones, or shards of those."""
    for model in models:
        if model.wrapper in REDUCING_WRAPPERS or any(hasattr(p, "placements") for _, p in model.parameters):
            return "sharded"
    return "replicated" if any(model.is_replicated for model in models) else "local"


def is_replica(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor of which every rank of the job holds a whole copy."""
    placements = getattr(tensor, "placements", None)
    if not placements or not all(placement.is_replicate() for placement in placements):
        return False
    mesh: Any = getattr(tensor, "device_mesh", None)
    return mesh is not None and bool(mesh.size() == world_size())


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of it: a DTensor's shard, FSDP's flat parameter, or ZeRO's."""
    placements = getattr(tensor, "placements", None)
    if placements:
        return not all(placement.is_replicate() for placement in placements)
    return hasattr(tensor, "ds_id") or type(tensor).__name__ == "FlatParameter"


def is_split(tensor: torch.Tensor) -> bool:
    """Whether several ranks hold different parts of it, and so may find different things in its gradient."""
    placements: Any = getattr(tensor, "placements", None)
    if not placements:
        return is_sharded(tensor)
    mesh: Any = getattr(tensor, "device_mesh", None)
    return any(not placement.is_replicate() and mesh.size(axis) > 1 for axis, placement in enumerate(placements))


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether this is one addend of a DTensor that nobody has summed yet."""
    placements: Any = getattr(tensor, "placements", None)
    return bool(placements) and any(placement.is_partial() for placement in placements)


def spans_world(group: Any) -> bool:
    """Whether a process group (None: the default one) holds all ranks of the job."""
    return group is None or num_replicas(group) == world_size()


def num_replicas(group: Any) -> int:
    """Ranks of a process group."""
    try:
        return int(group.size()) if group is not None else world_size()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return 0


def world_size() -> int:
    """Ranks of the job; 1 without a process group."""
    is_there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_there else 1
