"""The models of the script, which are found without the script naming them.

    DDP(model)          seen when DDP takes its module, so that even the first forward pass is watched
    anything else       top-level modules with trainable parameters, looked for when an optimizer with unknown parameters is met
    frozen components   top-level modules that do not train, counted once training calls them at several steps in a row
    holter.watch(...)   named by the script

Whether ranks must agree on a tensor is known for each tensor and never guessed (`holter.rank.mesh`): DDP keeps what it does not ignore equal; a
DTensor says how it is placed; and a gradient that the script itself reduces over all ranks makes its parameter a replica.
"""

import fnmatch
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holter.rank import mesh
from holter.rank.mesh import EVERYONE, IGNORED, OWN, Holders
from holter.rank.search import living, parameters_of, top_level, unique, variable_of
from holter.records import MeshAxis, View
from holter.records.rank import is_ignored
from holter_kernels import SeenTensors, kinds, see

logger = logging.getLogger("holter")
FLAT = "FullyShardedDataParallel"
"""Class name of FSDP's first version, which trains flat shards."""
REDUCING_WRAPPERS = frozenset({FLAT, "DeepSpeedEngine"})
"""Wrappers whose `.grad` is reduced, sharded or gone by the end of backward."""
_gradient, _dtype = attrgetter("grad"), attrgetter("dtype")
_tensor = itemgetter(1)
MAX_LEFT_OUT = 0.125
"""Largest share of the trainable parameters that a script may leave out by mistake; the cut layers of a hand-made split are more."""
CALLED_STEPS = 3
"""Number of steps in a row at which training must call a component to count it: an average that is evaluated now and then is not compared."""


class Model:
    """One model of the script, and its tensors with names, in a fixed order."""

    def __init__(
        self,
        root: torch.nn.Module,
        prefix: str,
        local_buffers: Sequence[str] = (),
        on_forget: Sequence[Callable[[], None]] = (),
        said: "SaidMesh | None" = None,
    ) -> None:
        self._on_forget = on_forget
        self._said = said or SaidMesh()
        self._root = weakref.ref(root, self._forget)
        self.prefix = prefix
        self.wrapper = type(root).__name__
        ddp = _ddp(root)
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._inner = weakref.ref(_inner(root) or root)
        self.is_active = False
        """Whether the watched thread has called or optimized the model. Gradients of another thread must not even be looked at, because
        autograd writes them without the interpreter's lock."""
        self.is_trained = True
        """False for a frozen component."""
        self.was_optimized = False
        """Whether an optimizer holds, or once held, some of its parameters."""
        self.parameters: list[tuple[str, torch.nn.Parameter]] = []
        self.tensors: list[torch.nn.Parameter] = []
        """The parameters without their names."""
        self.buffers: list[tuple[str, torch.Tensor]] = []
        self.holders: dict[int, Holders] = {}
        """Which ranks hold the same bytes of a parameter or buffer, by its id; only those for which that is known."""
        self.replicas: set[int] = set()
        """Ids of the parameters and buffers that must be equal on all ranks."""
        self.whole_shapes: dict[int, torch.Size] = {}
        """Whole shape of each parameter that shows only this rank's part, by its id."""
        self.policies: dict[int, str] = {}
        """Dtypes in which `fully_shard` computes with a parameter and reduces its gradient, by its id; only those that are cast."""
        self.axes: list[MeshAxis] = []
        """Axes of the mesh on which its parameters lie."""
        self.span: tuple[int, ...] = ()
        """Ranks that hold some part of the model; empty if that is not known."""
        self.reduced_by_hand: set[str] = set()
        """Names of parameters whose gradients the script itself reduces."""
        self._local_buffers = tuple(local_buffers)
        self._signature: list[Any] = []
        self._tables: list[dict[str, Any]] = []
        """The dictionaries in which its modules keep their submodules, parameters and buffers."""
        self._parts: list[Any] = []
        self._kinds: Any = []
        self._buffer_dtypes: list[torch.dtype] = []
        self._is_placed = False
        """Whether some parameters are DTensors."""
        self._called = (-1, 0)
        self.refresh()

    def _forget(self, _: Any) -> None:
        # The script freed its model, perhaps to make room for another: we must not hold its memory.
        self.parameters, self.tensors, self.buffers, self._signature, self.replicas = [], [], [], [], set()
        self.holders, self.whole_shapes = {}, {}
        self._tables, self._parts, self._kinds, self._buffer_dtypes = [], [], [], []
        for call in self._on_forget:
            call()

    @property
    def root(self) -> torch.nn.Module | None:
        """The module that the script calls; None once it is gone."""
        return self._root()

    @property
    def inner(self) -> torch.nn.Module | None:
        """The script's own module, without its wrapper; None once it is gone."""
        return self._inner() if self._root() is not None else None

    @property
    def ddp(self) -> Any:
        """The model's DDP wrapper; None if there is none."""
        return self._ddp() if self._ddp is not None else None

    @property
    def is_replicated(self) -> bool:
        """Whether some of its tensors must be equal on all ranks."""
        return bool(self.replicas)

    def is_compared(self, tensor: torch.Tensor, *, with_own: bool = False) -> bool:
        """Whether it is known which ranks hold the same bytes; tensors that only this rank holds count with `with_own` alone."""
        found = self.holders.get(id(tensor))
        return found is not None and (with_own or found.axis != OWN)

    def shared_by_all(self) -> set[int]:
        """Return the ids of the tensors that all ranks of the job hold, whole or in parts."""
        if len(self.span) < world_size():
            return set(self.replicas)
        return {key for key, found in self.holders.items() if not is_ignored(found.axis)}

    def scope_of(self, tensor: torch.Tensor) -> str:
        """Return the scope over which a tensor is compared; empty for all ranks, or if nothing is known."""
        found = self.holders.get(id(tensor))
        return found.scope if found is not None else ""

    def refresh(self) -> bool:
        """Read the tensors again, and return whether some came, went, froze, thawed, or changed their dtype."""
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
        self._buffer_dtypes = [b.dtype for _, b in buffers]
        changed = signature != self._signature
        self._signature, self.parameters, self.buffers = signature, parameters, buffers
        self.tensors = [p for _, p in parameters]
        self._kinds = kinds(self.tensors)
        self._is_placed = any(hasattr(p, "placements") for _, p in parameters)
        self._find_holders(ddp)
        return changed

    def has_thawed(self) -> bool:
        """Whether a parameter froze, thawed or was cast since the last refresh: cheap to ask."""
        return (
            kinds(self.tensors) != self._kinds or list(map(_dtype, map(_tensor, self.buffers))) != self._buffer_dtypes
        )

    def learn_reduced(self, name: str, parameter: torch.Tensor) -> None:
        """Learn that the script reduces this parameter's gradient over all ranks."""
        self.reduced_by_hand.add(name)
        self.replicas.add(id(parameter))
        self.holders[id(parameter)] = EVERYONE

    def note_call(self, step: int) -> None:
        """Note that training called this component, which becomes active after enough steps in a row."""
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

    def _find_holders(self, ddp: Any) -> None:
        """Find which ranks hold the same bytes of each tensor; a tensor for which that is not known is left out."""
        layout = _Layout.of(self)
        self.axes, self.span, self.whole_shapes = layout.axes, layout.span, layout.shapes
        self.policies = layout.policies
        self.holders = {}
        for name, p in self.parameters:
            found = EVERYONE if name in self.reduced_by_hand else layout.holders(p)
            if found is not None:
                self.holders[id(p)] = found
        self._learn_from_wrapper(ddp)
        if ddp is None and self.span:
            whole = mesh.of_group("mesh", self.span)
            self.holders |= {id(b): whole for name, b in self.buffers if not self._is_local(name)}
        self._learn_plain(ddp)
        self.replicas = {key for key, found in self.holders.items() if not found.axis}

    def _learn_from_wrapper(self, ddp: Any) -> None:
        """Learn the replicas from the wrapper: DDP keeps what it does not ignore equal in its group; ZeRO's stages 1 and 2 keep whole weights."""
        engine = self.root if self.wrapper == "DeepSpeedEngine" else None
        if ddp is None and engine is None:
            return
        ranks = mesh.group_ranks(_data_group(engine) if ddp is None else getattr(ddp, "process_group", None))
        if not ranks:
            return
        self.span = ranks
        shared = mesh.of_group("dp", ranks)
        ignored = {self.prefix + name for name in getattr(ddp, "parameters_to_ignore", ())}
        for name, p in self.parameters:
            if name not in ignored and not is_sharded(p) and getattr(p, "allreduce", True):
                self.holders[id(p)] = shared
        for name, b in self.buffers:
            if name not in ignored and not self._is_local(name):
                self.holders[id(b)] = shared

    def _learn_plain(self, ddp: Any) -> None:
        """Learn who holds the plain parameters that are left: by the mesh that the user declared, or because nobody reduces them."""
        layout, whole, staged = self._said.get(), self._whole_by_marks(), staged_parameters()
        left_out = self._left_out()
        for name, p in self.parameters:
            known = self.holders.get(id(p))
            if is_sharded(p):
                continue
            if layout is not None and (known is None or (id(p) in whole and known.axis == "dp")):
                self.holders[id(p)] = layout.holders(_rank(), is_whole=id(p) in whole)
            elif known is not None:
                continue
            elif (ddp is not None or mesh.is_fully_sharded(self.inner)) and self.span and "expert" not in name.lower():
                self.holders[id(p)] = Holders(IGNORED, self.span)
            elif id(p) in staged:
                self.holders[id(p)] = Holders(OWN, (_rank(),))
            elif name in left_out and "expert" not in name.lower():
                self.holders[id(p)] = Holders(IGNORED, tuple(range(world_size())))

    def _left_out(self) -> set[str]:
        """Return trainable parameters that a script which reduces gradients itself leaves out, by mistake as it seems.

        It seems so if they are few, or if the script reduces a larger parameter of the same module: of a cut layer, the weight is left out too.
        """
        if not self.reduced_by_hand:
            return set()
        trained = {name: p.numel() for name, p in self.parameters if p.requires_grad}
        found = trained.keys() - self.reduced_by_hand
        if len(found) <= MAX_LEFT_OUT * len(trained):
            return set(found)
        reduced: dict[str, int] = {}
        for name in trained.keys() & self.reduced_by_hand:
            module = name.rpartition(".")[0]
            reduced[module] = max(reduced.get(module, 0), trained[name])
        return {name for name in found if trained[name] < reduced.get(name.rpartition(".")[0], 0)}

    def _whole_by_marks(self) -> set[int]:
        """Return the ids of parameters that are not marked as cut along the tensor-parallel axis; empty if none is marked."""
        cut = {id(p) for _, p in self.parameters if mesh.is_marked_cut(p)}
        return {id(p) for _, p in self.parameters} - cut if cut else set()

    def unshared(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters of which no other rank is known to hold a copy or a part."""
        if self.wrapper in REDUCING_WRAPPERS or any(
            type(part).__name__ == FLAT for part in (self.root.modules() if self.root is not None else ())
        ):
            return []
        return [
            (name, p)
            for name, p in self.parameters
            if id(p) not in self.replicas and not is_sharded(p) and not hasattr(p, "placements")
        ]

    def named_parts(self) -> list[tuple[str, torch.nn.Module]]:
        """Return the model's modules with their names."""
        inner = self.inner
        return list(inner.named_modules()) if inner is not None else []

    def names_in_graphs(self) -> Iterator[tuple[int, str]]:
        """Yield the id and name of each parameter as a forward pass's graph holds it; with `fully_shard` that is the gathered tensor."""
        names = {id(p): name for name, p in self.parameters}
        yield from names.items()
        for group in fsdp_groups(self.root):
            for held in group.fsdp_params:
                gathered = getattr(held, "_unsharded_param", None)
                if gathered is not None and (name := names.get(id(held.sharded_param))):
                    yield id(gathered), name

    def _is_local(self, name: str) -> bool:
        own = name.removeprefix(self.prefix)
        return any(fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(own, glob) for glob in self._local_buffers)

    @property
    def num_replicas(self) -> int:
        """Number of ranks that are known to hold a copy or a part of the model."""
        return num_replicas(getattr(self.ddp, "process_group", None)) if self.ddp is not None else len(self.span)


class SaidMesh:
    """The mesh that the user declares for plain parameters; it is interpreted once the job's process group exists."""

    def __init__(self, said: Any = None) -> None:
        self.said = said
        self._found: tuple[int, mesh.DeclaredMesh | None] | None = None

    def get(self) -> "mesh.DeclaredMesh | None":
        """Return the declared mesh; None if nothing was declared, or it does not fit the job's ranks."""
        if self.said and (self._found is None or self._found[0] != world_size()):
            self._found = world_size(), mesh.declare(self.said)
            if self._found[1] is None and world_size() > 1:
                logger.warning("holter: the mesh %s is no layout of %d ranks and is not used", self.said, world_size())
        return self._found[1] if self._found is not None else None


class _Layout:
    """How the parameters of one model lie on a mesh of ranks, according to its DTensors, flat shards and ZeRO partitions."""

    def __init__(
        self, meshes: Sequence[Any], fsdp_axes: AbstractSet[str], flat: dict[int, tuple[Holders, Any]]
    ) -> None:
        self._whole = max(meshes, key=lambda one: one.size(), default=None)
        self._flat = flat
        self.shapes = {key: shape for key, (_, shape) in flat.items() if shape is not None}
        self.span: tuple[int, ...] = ()
        self.axes: list[MeshAxis] = []
        self._tensor_axes: set[str] = set()
        self._forgotten: dict[int, tuple[Any, list[str]]] = {}
        """For each mesh, by its id, the larger mesh that it was cut out of, and that one's axes along which nothing is reduced."""
        self.policies: dict[int, str] = {}
        if self._whole is not None:
            self.span = tuple(sorted(self._whole.mesh.reshape(-1).tolist()))
            self._fsdp_axes = fsdp_axes
        elif flat:
            self.span = tuple(range(world_size()))

    @staticmethod
    def of(model: Model) -> "_Layout":
        placed = [p for _, p in model.parameters if getattr(p, "placements", None)]
        meshes = list({id(p.device_mesh): p.device_mesh for p in placed}.values())
        root = model.root
        flat = mesh.of_flat(root) if root is not None and _has_flat(root) else {}
        groups = list(fsdp_groups(root)) if meshes else []
        layout = _Layout(meshes, {name for one in groups for name in mesh.axis_names(one.mesh_info.mesh)}, flat)
        layout.policies = {
            id(held.sharded_param): word for one in groups if (word := _policy(one)) for held in one.fsdp_params
        }
        layout._forgotten = {id(one): mesh.forgotten_axes(one, _rank()) for one in meshes}
        if any(not set(one.mesh.reshape(-1).tolist()) <= set(layout.span) for one in meshes):
            # Parts of the model lie on separate meshes, as the stages of a pipeline do: nothing is known of the whole.
            layout.span = ()
        if layout.span and meshes:
            layout.learn_axes(placed)
        return layout

    def learn_axes(self, placed: Sequence[Any]) -> None:
        """Learn which axes carry parts of one result: those along which parameters are cut, except by `fully_shard`."""
        cut = {
            name
            for p in placed
            for name, placement in zip(mesh.axis_names(p.device_mesh), p.placements, strict=True)
            if not placement.is_replicate()
        }
        self._tensor_axes = cut - self._fsdp_axes
        for axis in mesh.axes_of(self._whole):
            kind = "tensor" if axis.name in self._tensor_axes else "data" if axis.name in self._fsdp_axes else ""
            self.axes.append(MeshAxis(axis.name, axis.size, axis.stride, kind))

    def holders(self, p: torch.Tensor) -> Holders | None:
        """Return which ranks hold the same bytes of a parameter; None if that is not known."""
        if id(p) in self._flat:
            return self._flat[id(p)][0]
        if hasattr(p, "ds_id"):
            return Holders(OWN, (_rank(),), "zero=S(0)")
        found = mesh.of_dtensor(p)
        known = mesh.axis_names(p.device_mesh) if found is not None else ()
        missing = [name for name in self._tensor_axes if name not in known]
        if not missing or not self.span:
            return self._along_forgotten(p, found)
        # The ranks of a tensor-parallel group compute the parameter from the same inputs, so each of them holds the same bytes.
        mine = found.ranks or self.span if found is not None else (_rank(),)
        ranks = mesh.spread(self._whole, mine, missing)
        axis = "+".join([*([found.axis] if found is not None and found.axis != OWN else []), *sorted(missing)])
        words = [found.placements] if found is not None else []
        return mesh.of_group(axis, ranks, ",".join([*words, *(f"{name}=R" for name in sorted(missing))]))

    def _along_forgotten(self, p: Any, found: Holders | None) -> Holders | None:
        """Return the same holders, or `ignored` ones if nobody reduces along an axis of the mesh that the parameter's was cut out of."""
        if found is None:
            return None
        whole, axes = self._forgotten.get(id(p.device_mesh)) or (None, [])
        if not axes:
            return found
        ranks = mesh.spread(whole, found.ranks or tuple(p.device_mesh.mesh.reshape(-1).tolist()), axes)
        return Holders(f"{IGNORED}:{'+'.join(axes)}", ranks, found.placements)


def pipeline_stages() -> list[Any]:
    """Return this rank's stages of torch's pipelines."""
    kind = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return living(kind) if kind is not None else []


def staged_parameters() -> set[int]:
    """Return the ids of the parameters of this rank's stages, which no other stage has."""
    return {id(p) for stage in pipeline_stages() for p in torch.nn.Module.parameters(stage.submod)}


def _has_flat(root: torch.nn.Module) -> bool:
    return any(type(part).__name__ == FLAT for part in torch.nn.Module.modules(root))


def fsdp_groups(root: torch.nn.Module | None) -> Iterator[Any]:
    """Yield the groups of parameters that `fully_shard` gathers and reduces together."""
    for module in torch.nn.Module.modules(root) if root is not None else ():
        if mesh.is_fully_sharded(module):
            state: Any = module._get_fsdp_state()  # noqa: SLF001
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
            yield from (group for group in groups if group)


def _policy(group: Any) -> str:
    """Return the dtypes of a group's mixed-precision policy as text; empty if nothing is cast."""
    cast = [getattr(group.mp_policy, name, None) for name in ("param_dtype", "reduce_dtype")]
    return ",".join(str(dtype).removeprefix("torch.") for dtype in cast) if any(cast) else ""


def _data_group(engine: Any) -> Any:
    """Return the process group in which a DeepSpeed engine reduces gradients."""
    return getattr(engine, "seq_data_parallel_group", None) or getattr(engine, "data_parallel_group", None)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Models:
    """All models in the order in which they were found, and separately the frozen components in the order of their names."""

    def __init__(
        self,
        local_buffers: Sequence[str] = (),
        declared_frozen: Sequence[str] = (),
        said: Any = None,
    ) -> None:
        self.said = SaidMesh(said)
        self.declared_frozen = tuple(declared_frozen)
        """Patterns of names that the user's settings declare frozen."""
        self.averages: weakref.WeakSet[Any] = weakref.WeakSet()
        """Objects that the script has logged as averages of its weights."""
        self._models: list[Model] = []
        self._components: list[Model] = []
        self._local_buffers = local_buffers
        self.has_lost = False
        """Whether the script has freed a model; the lists are corrected when they are read next."""
        self.on_forget: list[Callable[[], None]] = [self._note_lost]
        """Functions that are called when the script has freed a model; whoever holds its tensors adds one."""
        self.generation = 0
        """A number that grows whenever the list of tensors changes."""

    def __iter__(self) -> Iterator[Model]:
        if self.has_lost:
            self._drop_lost()
        return iter(self._models)

    def outline(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[int]:
        """Return numbers that change whenever the watched tensors change, or those that these optimizers hold."""
        if self.has_lost:
            self._drop_lost()
        found = [self.generation]
        for optimizer in optimizers:
            found.append(id(optimizer))
            for group in optimizer.param_groups:
                found.append(len(group["params"]))  # noqa: PERF401 - a generator is a call for each
        return found

    def active(self) -> list[Model]:
        """Return the models that the watched thread trains."""
        return [model for model in self if model.is_active]

    def components(self) -> list[Model]:
        """Return the frozen components that training calls, in the order of their names."""
        if self.has_lost:
            self._drop_lost()
        return [model for model in self._components if model.is_active]

    def all(self) -> list[Model]:
        """Return the models that the census covers: trained models, then components."""
        return [*self, *self.components()]

    def _note_lost(self) -> None:
        # This is called in any thread, at any moment, so the lists are only corrected when they are read next.
        self.has_lost = True

    def _drop_lost(self) -> None:
        self.has_lost = False
        models = [model for model in self._models if model.root is not None]
        components = [model for model in self._components if model.root is not None]
        counted = len(self._models) + sum(model.is_active for model in self._components)
        self.generation += counted != len(models) + sum(model.is_active for model in components)
        self._models, self._components = models, components

    def has_flat(self, ids: AbstractSet[int]) -> bool:
        """Whether one of these parameters is a flat shard of FSDP's first version."""
        return any(model.wrapper == FLAT and any(id(p) in ids for _, p in model.parameters) for model in self)

    def of(self, module: torch.nn.Module) -> Model | None:
        """Return the model of this module, wrapped or not; None if it is not watched."""
        if self.has_lost:
            self._drop_lost()
        for model in self._models:
            if model._root() is module or model.inner is module:  # noqa: SLF001
                return model
        return None

    def note_call(self, module: torch.nn.Module, step: int) -> bool:
        """Note that training called a frozen component; return False if this module is not one."""
        if not self._components:
            return False
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
        # A model that was found bare and has since been wrapped belongs to its wrapper from now on.
        inner = _inner(root)
        self._models = [model for model in self if model.inner is not inner]
        self._components = [model for model in self._components if model.inner is not inner]
        model = Model(root, self._prefix(root, inner), self._local_buffers, self.on_forget, self.said)
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
        """Whether a parameter of a trained model froze, thawed or was cast since the last refresh."""
        return any(model.has_thawed() for model in self)

    def discover(self) -> list[Model]:
        """Search all living objects for top-level modules that train, and watch them. It takes a fraction of a second."""
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
        """Search all living objects for top-level modules that do not train, and follow them as components."""
        known = {id(p) for model in (*self, *self._components) for _, p in model.parameters}
        found = []
        for module in top_level():
            parameters = parameters_of(module)
            if parameters and not any(p.requires_grad or id(p) in known for p in parameters):
                found.append(self.add_component(module))
                known.update(id(p) for p in parameters)
        return found

    def _prefix(self, root: torch.nn.Module, inner: torch.nn.Module | None) -> str:
        """Return the prefix of a model's tensor names: none for the first model, for others the name of their variable."""
        if not self._models:
            return ""
        taken = {model.prefix[:-1] for model in (*self._models, *self._components)}
        name = variable_of(root, inner) or f"model{len(self._models)}"
        return unique(name, taken) + "."


def wrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the DDP wrapper that was put around this module before it was watched; the module itself if there is none."""
    return next((each for each in living(DistributedDataParallel) if _part(each, "module") is module), module)


def _part(module: Any, name: str) -> Any:
    """Return a submodule by name, None if there is none; getattr would take 50 us for a missing name."""
    parts = getattr(module, "_modules", None)
    return parts[name] if parts is not None and name in parts else None


def _inner(module: Any) -> torch.nn.Module | None:
    while module is not None:
        is_wrapper = _is_ddp(module) or type(module).__name__ == "DeepSpeedEngine"
        below = _part(module, "module" if is_wrapper else "_orig_mod")
        if below is None:
            break
        module = below
    return module


def _ddp(root: Any) -> Any:
    """Return the DDP wrapper that the script calls, even inside torch.compile's; None if there is none."""
    if _is_ddp(root):
        return root
    below = _part(root, "_orig_mod")
    return below if _is_ddp(below) else None


def _is_ddp(module: Any) -> bool:
    # isinstance() takes a microsecond, because the class has a metaclass with a check in Python.
    return DistributedDataParallel in type(module).__mro__


_DICT = frozenset({dict})
_values = methodcaller("values")


def _parts(tables: Sequence[dict[str, Any]], ddp: Any, reduced_by_hand: AbstractSet[str]) -> list[Any]:
    """Return a list that changes when a part of a model comes, goes, is renamed or replaced; it costs a tenth of asking for all names."""
    outline: list[Any] = [id(ddp), id(getattr(ddp, "process_group", None)), len(reduced_by_hand)]
    if not _DICT.issuperset(map(type, tables)):
        # A part is TorchScript's, whose changes cannot be seen: return a list that is equal to no other.
        return [object()]
    return [
        *outline,
        *map(len, tables),
        *chain.from_iterable(tables),
        *map(id, chain.from_iterable(map(_values, tables))),
    ]


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the ids of the parameters that these optimizers hold."""
    return set(map(id, chain.from_iterable(group["params"] for each in optimizers for group in each.param_groups)))


def gradients_of(parameters: Iterable[torch.Tensor]) -> Sequence[Any]:
    """Return the gradient of each parameter, None where there is none; each is read once, as each read may create a new Python object."""
    owners = parameters if type(parameters) is list else list(parameters)
    seen = see(owners, gradients=True)
    return seen if seen is not None else list(map(_gradient, owners))


def applied_to(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters that this optimizer holds."""
    groups: list[dict[str, list[Any]]] = optimizer.param_groups
    return groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]


def has_none(gradients: Sequence[Any]) -> bool:
    """Whether one of the gradients is missing."""
    return type(gradients) is not SeenTensors and type(None) in map(type, gradients)


def gradient_view(models: Sequence[Model]) -> View:
    """Return which gradients the optimizers of these models get: the rank's own, reduced ones, or shards of reduced ones."""
    for model in models:
        if model.wrapper in REDUCING_WRAPPERS or any(hasattr(p, "placements") for _, p in model.parameters):
            return "sharded"
    return "replicated" if any(model.is_replicated for model in models) else "local"


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank may hold only a part of the tensor: a DTensor's shard, or a parameter of FSDP's first version or of ZeRO-3."""
    placements = getattr(tensor, "placements", None)
    if placements:
        return not all(placement.is_replicate() for placement in placements)
    return hasattr(tensor, "ds_id") or type(tensor).__name__ == "FlatParameter"


def is_split(tensor: torch.Tensor) -> bool:
    """Whether several ranks hold different parts of the tensor, and so may find different things in its gradient."""
    placements: Any = getattr(tensor, "placements", None)
    if not placements:
        return is_sharded(tensor)
    mesh: Any = getattr(tensor, "device_mesh", None)
    return any(not placement.is_replicate() and mesh.size(axis) > 1 for axis, placement in enumerate(placements))


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor's partial value, one of several addends that have not been summed yet."""
    placements: Any = getattr(tensor, "placements", None)
    return bool(placements) and any(placement.is_partial() for placement in placements)


def spans_world(group: Any) -> bool:
    """Whether a process group (None: the default one) holds all ranks of the job."""
    return group is None or num_replicas(group) == world_size()


def num_replicas(group: Any) -> int:
    """Return the number of ranks in a process group (None: the default one); 0 if it cannot be asked."""
    try:
        return int(group.size()) if group is not None else world_size()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return 0


def world_size() -> int:
    """Return the number of ranks of the job; 1 without a process group."""
    is_there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_there else 1
