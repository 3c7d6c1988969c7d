"""The models of the script: found by us, without the script naming them.

    DDP(model)          seen when DDP takes its module, so that even the first forward pass is watched
    anything else       top-level modules with trainable parameters, looked for when an optimizer with unknown ones is met
    frozen components   top-level modules that do not train, counted once training calls them at every step
    holter.watch(...)   named by the script

Whether ranks must agree is known tensor by tensor, never guessed (`holter.rank.mesh`): DDP keeps what it does not ignore equal; a DTensor says
how it is placed; and a gradient that the script itself reduces over all ranks makes its parameter a replica.
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
"""FSDP's first kind: what it trains are flat shards."""
REDUCING_WRAPPERS = frozenset({FLAT, "DeepSpeedEngine"})
"""Wrappers whose `.grad` is reduced, sharded or gone by the end of backward."""
_gradient, _dtype = attrgetter("grad"), attrgetter("dtype")
_tensor = itemgetter(1)
MAX_LEFT_OUT = 0.125
"""Of the parameters that train: what a script leaves out by mistake is little; the cut layers of a hand-made split are many."""
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
        """The thread that we watch has called or optimized it. Another thread's gradients must not even be looked at: autograd
        writes them without the interpreter's lock."""
        self.is_trained = True
        """False for a frozen component."""
        self.was_optimized = False
        """An optimizer holds some of its parameters, or did."""
        self.parameters: list[tuple[str, torch.nn.Parameter]] = []
        self.tensors: list[torch.nn.Parameter] = []
        """The same without names."""
        self.buffers: list[tuple[str, torch.Tensor]] = []
        self.holders: dict[int, Holders] = {}
        """Id of a parameter or buffer -> which ranks hold the same bytes, where that is known."""
        self.replicas: set[int] = set()
        """Ids of the parameters and buffers that must be equal on all ranks."""
        self.whole_shapes: dict[int, torch.Size] = {}
        """Id of a parameter that shows only this rank's part -> the shape of all of it."""
        self.policies: dict[int, str] = {}
        """Id of a parameter -> dtypes that `fully_shard` casts it to, to compute with and to reduce in."""
        self.axes: list[MeshAxis] = []
        """Of the mesh that its parameters lie on."""
        self.span: tuple[int, ...] = ()
        """Ranks that hold some part of it; empty: not known."""
        self.reduced_by_hand: set[str] = set()
        """Parameters whose gradients the script itself reduces."""
        self._local_buffers = tuple(local_buffers)
        self._signature: list[Any] = []
        self._tables: list[dict[str, Any]] = []
        """Where its modules keep their submodules, parameters and buffers."""
        self._parts: list[Any] = []
        self._kinds: Any = []
        self._buffer_dtypes: list[torch.dtype] = []
        self._is_placed = False
        """Some parameters are DTensors."""
        self._called = (-1, 0)
        self.refresh()

    def _forget(self, _: Any) -> None:
        # The script let go of its model, perhaps to make room for another: its memory is not ours to hold.
        self.parameters, self.tensors, self.buffers, self._signature, self.replicas = [], [], [], [], set()
        self.holders, self.whole_shapes = {}, {}
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
        return self._inner() if self._root() is not None else None

    @property
    def ddp(self) -> Any:
        """Its DDP wrapper; None if there is none."""
        return self._ddp() if self._ddp is not None else None

    @property
    def is_replicated(self) -> bool:
        """Whether some of its tensors must be equal on all ranks."""
        return bool(self.replicas)

    def is_compared(self, tensor: torch.Tensor, *, with_own: bool = False) -> bool:
        """Whether other ranks are known to hold the same bytes; with what is this rank's own, whether anything is known."""
        found = self.holders.get(id(tensor))
        return found is not None and (with_own or found.axis != OWN)

    def shared_by_all(self) -> set[int]:
        """Ids of what all ranks of the job hold, each the whole or a part of it."""
        if len(self.span) < world_size():
            return set(self.replicas)
        return {key for key, found in self.holders.items() if not is_ignored(found.axis)}

    def scope_of(self, tensor: torch.Tensor) -> str:
        """What a tensor is compared over; empty: all ranks, or nothing is known."""
        found = self.holders.get(id(tensor))
        return found.scope if found is not None else ""

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
        """The script reduces this parameter's gradient over all ranks."""
        self.reduced_by_hand.add(name)
        self.replicas.add(id(parameter))
        self.holders[id(parameter)] = EVERYONE

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

    def _find_holders(self, ddp: Any) -> None:
        """Who holds the same bytes of each tensor; what is not known stays out."""
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
        """DDP keeps what it does not ignore equal in its group; ZeRO's first two stages keep whole weights."""
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
        """Plain parameters that nothing above has spoken of: the user's word, or that a wrapper was told to leave them alone."""
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
        """Trainable parameters that the script does not reduce where it reduces nearly all others by itself, or more of the same module: a layer that is cut keeps its weight."""
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
        """Ids of parameters that are not marked as cut along the tensor-parallel axis, where others are."""
        cut = {id(p) for _, p in self.parameters if mesh.is_marked_cut(p)}
        return {id(p) for _, p in self.parameters} - cut if cut else set()

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

    def named_parts(self) -> list[tuple[str, torch.nn.Module]]:
        """Its modules by name."""
        inner = self.inner
        return list(inner.named_modules()) if inner is not None else []

    def names_in_graphs(self) -> Iterator[tuple[int, str]]:
        """Id of a parameter, as the graph of a forward pass holds it -> its name: where `fully_shard` gathers, that is another tensor."""
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
        """Ranks that hold a copy or a part, as far as anything says so."""
        return num_replicas(getattr(self.ddp, "process_group", None)) if self.ddp is not None else len(self.span)


class SaidMesh:
    """What the user says of plain parameters; understood when the job's group is there."""

    def __init__(self, said: Any = None) -> None:
        self.said = said
        self._found: tuple[int, mesh.DeclaredMesh | None] | None = None

    def get(self) -> "mesh.DeclaredMesh | None":
        """As a layout of the job's ranks; None: nothing was said, or it does not fit them."""
        if self.said and (self._found is None or self._found[0] != world_size()):
            self._found = world_size(), mesh.declare(self.said)
            if self._found[1] is None and world_size() > 1:
                logger.warning("holter: the mesh %s is no layout of %d ranks and is not used", self.said, world_size())
        return self._found[1] if self._found is not None else None


class _Layout:
    """How the parameters of one model lie on a mesh of ranks, as DTensors, flat shards and ZeRO's partitions tell."""

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
        """Id of a mesh that was cut out of a larger one -> that one, and its axes along which nothing is reduced."""
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
            # Parts of it lie on meshes of their own, as the stages of a pipeline do: nothing is said of the whole.
            layout.span = ()
        if layout.span and meshes:
            layout.learn_axes(placed)
        return layout

    def learn_axes(self, placed: Sequence[Any]) -> None:
        """Which axes carry parts of one result: those that parameters are cut along, and not by `fully_shard`."""
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
        """Of one parameter; None: not known."""
        if id(p) in self._flat:
            return self._flat[id(p)][0]
        if hasattr(p, "ds_id"):
            return Holders(OWN, (_rank(),), "zero=S(0)")
        found = mesh.of_dtensor(p)
        known = mesh.axis_names(p.device_mesh) if found is not None else ()
        missing = [name for name in self._tensor_axes if name not in known]
        if not missing or not self.span:
            return self._along_forgotten(p, found)
        # Ranks of a tensor-parallel group compute it from the same inputs, so that each of them holds what it has.
        mine = found.ranks or self.span if found is not None else (_rank(),)
        ranks = mesh.spread(self._whole, mine, missing)
        axis = "+".join([*([found.axis] if found is not None and found.axis != OWN else []), *sorted(missing)])
        words = [found.placements] if found is not None else []
        return mesh.of_group(axis, ranks, ",".join([*words, *(f"{name}=R" for name in sorted(missing))]))

    def _along_forgotten(self, p: Any, found: Holders | None) -> Holders | None:
        """The same, or what nobody reduces along an axis of the mesh that its own was cut out of."""
        if found is None:
            return None
        whole, axes = self._forgotten.get(id(p.device_mesh)) or (None, [])
        if not axes:
            return found
        ranks = mesh.spread(whole, found.ranks or tuple(p.device_mesh.mesh.reshape(-1).tolist()), axes)
        return Holders(f"{IGNORED}:{'+'.join(axes)}", ranks, found.placements)


def pipeline_stages() -> list[Any]:
    """This rank's stages of torch's pipelines."""
    kind = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return living(kind) if kind is not None else []


def staged_parameters() -> set[int]:
    """Ids of the parameters of this rank's stages: no other stage has them."""
    return {id(p) for stage in pipeline_stages() for p in torch.nn.Module.parameters(stage.submod)}


def _has_flat(root: torch.nn.Module) -> bool:
    return any(type(part).__name__ == FLAT for part in torch.nn.Module.modules(root))


def fsdp_groups(root: torch.nn.Module | None) -> Iterator[Any]:
    """What `fully_shard` gathers and reduces together."""
    for module in torch.nn.Module.modules(root) if root is not None else ():
        if mesh.is_fully_sharded(module):
            state: Any = module._get_fsdp_state()  # noqa: SLF001
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
            yield from (group for group in groups if group)


def _policy(group: Any) -> str:
    """In words, empty if nothing is cast."""
    cast = [getattr(group.mp_policy, name, None) for name in ("param_dtype", "reduce_dtype")]
    return ",".join(str(dtype).removeprefix("torch.") for dtype in cast) if any(cast) else ""


def _data_group(engine: Any) -> Any:
    """The ranks among which a DeepSpeed engine reduces."""
    return getattr(engine, "seq_data_parallel_group", None) or getattr(engine, "data_parallel_group", None)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Models:
    """All models, in the order they were found; frozen components apart, in the order of their names."""

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
        """What the script has logged as an average of its weights."""
        self._models: list[Model] = []
        self._components: list[Model] = []
        self._local_buffers = local_buffers
        self.has_lost = False
        """The script let go of one: the lists are put right when somebody goes through them."""
        self.on_forget: list[Callable[[], None]] = [self._note_lost]
        """Called when the script has let go of a model, by those who hold its tensors."""
        self.generation = 0
        """Grows whenever the list of tensors changed."""

    def __iter__(self) -> Iterator[Model]:
        if self.has_lost:
            self._drop_lost()
        return iter(self._models)

    def outline(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[int]:
        """What changes whenever other tensors are watched, or held by these optimizers."""
        if self.has_lost:
            self._drop_lost()
        found = [self.generation]
        for optimizer in optimizers:
            found.append(id(optimizer))
            for group in optimizer.param_groups:
                found.append(len(group["params"]))  # noqa: PERF401 - a generator is a call for each
        return found

    def active(self) -> list[Model]:
        """Those that the watched thread trains."""
        return [model for model in self if model.is_active]

    def components(self) -> list[Model]:
        """Frozen modules that training calls at every step, in the order of their names."""
        if self.has_lost:
            self._drop_lost()
        return [model for model in self._components if model.is_active]

    def all(self) -> list[Model]:
        """What the census is taken of: trained models, then components."""
        return [*self, *self.components()]

    def _note_lost(self) -> None:
        # Called in any thread, at any moment: the lists are put right by those who next go through them.
        self.has_lost = True

    def _drop_lost(self) -> None:
        self.has_lost = False
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
        if self.has_lost:
            self._drop_lost()
        for model in self._models:
            if model._root() is module or model.inner is module:  # noqa: SLF001
                return model
        return None

    def note_call(self, module: torch.nn.Module, step: int) -> bool:
        """Training called a frozen component; False if this module is none."""
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
        # A model that was found bare and has been wrapped since is the wrapper's from now on.
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
    return next((each for each in living(DistributedDataParallel) if _part(each, "module") is module), module)


def _part(module: Any, name: str) -> Any:
    """A submodule by name. Not by getattr, which costs 50 us for a name that is not there."""
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
    """The DDP wrapper that the script calls, also below torch.compile's; None if there is none."""
    if _is_ddp(root):
        return root
    below = _part(root, "_orig_mod")
    return below if _is_ddp(below) else None


def _is_ddp(module: Any) -> bool:
    # isinstance() takes a microsecond: its class has a metaclass that is asked, in Python.
    return DistributedDataParallel in type(module).__mro__


_DICT = frozenset({dict})
_values = methodcaller("values")


def _parts(tables: Sequence[dict[str, Any]], ddp: Any, reduced_by_hand: AbstractSet[str]) -> list[Any]:
    """What is another list as soon as a part of a model came, went, was renamed or replaced: a tenth of the cost of asking for all names."""
    outline: list[Any] = [id(ddp), id(getattr(ddp, "process_group", None)), len(reduced_by_hand)]
    if not _DICT.issuperset(map(type, tables)):
        # TorchScript's: nothing is known of it, and so nothing is ever equal to it.
        return [object()]
    return [
        *outline,
        *map(len, tables),
        *chain.from_iterable(tables),
        *map(id, chain.from_iterable(map(_values, tables))),
    ]


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Ids of the parameters that these optimizers hold."""
    return set(map(id, chain.from_iterable(group["params"] for each in optimizers for group in each.param_groups)))


def gradients_of(parameters: Iterable[torch.Tensor]) -> Sequence[Any]:
    """The gradient of each, None where there is none. Asked for once: one that nobody holds gets a new Python object each time."""
    owners = parameters if type(parameters) is list else list(parameters)
    seen = see(owners, gradients=True)
    return seen if seen is not None else list(map(_gradient, owners))


def applied_to(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters that this optimizer holds."""
    groups: list[dict[str, list[Any]]] = optimizer.param_groups
    return groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]


def has_none(gradients: Sequence[Any]) -> bool:
    """Whether one of them is missing."""
    return type(gradients) is not SeenTensors and type(None) in map(type, gradients)


def gradient_view(models: Sequence[Model]) -> View:
    """Which gradients the optimizers of these models are given: the rank's own, reduced ones, or shards of those."""
    for model in models:
        if model.wrapper in REDUCING_WRAPPERS or any(hasattr(p, "placements") for _, p in model.parameters):
            return "sharded"
    return "replicated" if any(model.is_replicated for model in models) else "local"


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
