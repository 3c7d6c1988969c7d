"""Which module made the first number that is not finite, read from the graph of a loss. Nothing is replayed, so no other rank is needed.

    up ── silu ── down ── loss = nan      a backward pass is about to begin: the graph still holds what its operations were given
    finite        nan                     `down` was given a NaN, `up` was not: `up`, or what follows it, made it

Operations are numbered in the order of the forward pass, so the first one that holds such a number is known; the module is that of the last parameter
that was used on the way to it. What a hook packed away (activation checkpointing, offloading) is left packed: unpacking computes, and may communicate.
Checkpointing recomputes the forward pass during the backward pass: there each module is looked at as it is called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from holter.rank.readings.samples import local
from holter.records import Origin

MAX_NODES = 8192
MAX_HOPS = 4
"""Most operations (a cast, a transposition, a view) between an operation and the parameter it uses."""
RAW = "_raw_saved_"
REENTRANT = "CheckpointFunction"
CARRIES = ("LogSoftmax", "Softmax")
"""Operations that make no NaN out of finite numbers: one in their results was in their inputs."""


def find(loss: torch.Tensor, names: Mapping[int, str], kinds: Mapping[str, str]) -> Origin | None:
    """Return the module that made the first number that is not finite; None if the graph does not tell.

    `names` gives a parameter's name by its id, as the graph holds it; `kinds` gives a module's class by the module's name.
    """
    nodes = _nodes(loss.grad_fn)
    layers = {node: name for node in nodes if (name := _layer(node, names))}
    if not layers:
        return None
    first = min((node for node in nodes if _is_tainted(node)), key=_order, default=None)
    before = [one for one in _nodes(first) if one in layers and one is not first and not _is_tainted(one)]
    is_inside = first is not None and (
        any(_order(layer) >= _order(first) for layer in layers) or type(first).__name__.startswith(CARRIES)
    )
    if not before or not is_inside or any(map(_is_packed, nodes)):
        # After the last layer, the script's own loss may have made it; and what is packed may hold an earlier one.
        return None
    culprit = max(before, key=_order)
    place = sorted(map(_order, layers)).index(_order(culprit))
    return _origin(layers[culprit], kinds, culprit, layers.get(first, ""), place)


def is_recomputed(loss: torch.Tensor) -> bool:
    """Whether the backward pass will recompute parts of the forward pass, or unpack saved tensors."""
    return any(map(_is_packed, _nodes(loss.grad_fn)))


class RecomputedForward:
    """Looks at each module without submodules that is called during a backward pass whose loss is not finite.

    As in a graph, the culprit is the last module with finite inputs before the first one without. A recomputed region ends as soon as it has
    what the backward pass needs, so that what follows its last module may only be seen in the graph.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        names: Mapping[int, str],
        kinds: Mapping[str, str],
        parts: Mapping[int, str],
        guarded: Callable[[Any], Any],
    ) -> None:
        """Install the hooks. `names` and `kinds` are those of `find`; `parts` gives a module's name by its id, in the order of the model."""
        self._parts, self._kinds = parts, kinds
        layers = [(node, name.rpartition(".")[0]) for node in _nodes(loss.grad_fn) if (name := _layer(node, names))]
        self._order = [module for _, module in sorted(layers, key=lambda layer: _order(layer[0]))]
        self._given_others = {module for node, module in layers if _is_tainted(node)}
        self._found: list[str] = []
        self._given: dict[str, float] = {}
        """Largest magnitude of the input of each module whose inputs were all finite."""
        called = torch.nn.modules.module
        self._hooks = (
            called.register_module_forward_pre_hook(guarded(self._enter)),
            called.register_module_forward_hook(guarded(self._leave)),
        )

    def end(self) -> Origin | None:
        """Remove the hooks, and return the first module whose output was not finite although its inputs were; None if there is none."""
        for hook in self._hooks:
            hook.remove()
        # The graph has the order of the calls, but not of those that reentrant checkpointing hides.
        called = [*(self._order if self._given.keys() & set(self._order) else ()), *self._parts.values()]
        order = {name: place for place, name in reversed(list(enumerate(called)))}
        first = min((order[name] for name in self._given_others), default=-1)
        before = [name for name in self._given if order[name] < first]
        name = min(self._found, key=lambda one: order[one], default="")
        name = name or max(before, key=lambda one: order[one], default="")
        if not name:
            return None
        return Origin(
            module=name,
            module_class=self._kinds.get(name, ""),
            is_input_finite=True,
            input_absmax=self._given[name],
            replayed=False,
            is_by_graph=True,
            place=order[name],
            reason=f"when the backward pass computed the forward pass anew: what {name} was given is finite, what came of it is not",
        )

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        name, given = self._parts.get(id(module), ""), list(_tensors(inputs))
        if not name or not given:
            return
        if any(map(_is_bad, given)):
            self._given_others.add(name)
            self._found += list(self._given)[-1:]
        elif not module._modules:  # noqa: SLF001
            self._given.pop(name, None)
            self._given[name] = max((float(t.abs().max()) for t in given if t.numel()), default=0.0)

    def _leave(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        name = self._parts.get(id(module), "")
        if name in self._given and any(map(_is_bad, _tensors(output))):
            self._found.append(name)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in host memory; of a DTensor, this rank's part."""
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.is_floating_point():
            yield local(value.detach())


def _is_bad(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds NaN or +Inf; a -Inf alone may be a mask."""
    return bool(torch.isnan(tensor).any() | torch.isposinf(tensor).any())


def _order(node: Any) -> int:
    number: int = node._sequence_nr()  # noqa: SLF001
    return number


def _origin(name: str, kinds: Mapping[str, str], node: Any, follower: str, place: int) -> Origin:
    module = name.rpartition(".")[0]
    largest = max((float(t.abs().max()) for t in _held(node) if t.numel()), default=0.0)
    met = (
        f"what {follower.rpartition('.')[0]} was given is not"
        if follower
        else "what the next operation was given is not"
    )
    return Origin(
        module=module,
        module_class=kinds.get(module, ""),
        is_input_finite=True,
        input_absmax=largest,
        replayed=False,
        is_by_graph=True,
        place=place,
        reason=f"by the graph of the loss: what {module} was given is finite, {met}",
    )


def _nodes(first: Any) -> list[Any]:
    """Return an operation and those before it in the forward pass, at most `MAX_NODES` or a few more."""
    found: dict[Any, None] = {first: None} if first is not None else {}
    queue = list(found)
    while queue and len(found) < MAX_NODES:
        for function, _ in queue.pop().next_functions:
            if function is not None and function not in found:
                found[function] = None
                queue.append(function)
    return list(found)


def _layer(node: Any, names: Mapping[int, str]) -> str:
    """Return the name of the parameter that an operation uses; empty if it uses none."""
    if hasattr(node, "variable"):
        return ""
    for function, _ in node.next_functions:
        one, hops = function, 0
        while one is not None and hops < MAX_HOPS:
            if hasattr(one, "variable"):
                if name := names.get(id(one.variable)):
                    return name
                break
            following = one.next_functions
            if len(following) != 1 or _own(one):
                break
            one, hops = following[0][0], hops + 1
    return ""


def _own(node: Any) -> bool:
    """Whether an operation keeps a tensor, and so computes something: casts, transpositions and views keep none."""
    raw = (getattr(node, name, None) for name in dir(node) if name.startswith(RAW))
    return any(bool(one) if isinstance(one, (list, tuple)) else True for one in raw)


def _is_tainted(node: Any) -> bool:
    """Whether an operation holds a tensor with NaN or +Inf."""
    return any(map(_is_bad, _held(node)))


def _held(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation keeps for the backward pass, if they are in host memory, not packed and not freed."""
    for name in dir(node):
        if name.startswith(RAW):
            yield from _unpacked(node, name)


def _unpacked(node: Any, name: str) -> Iterable[torch.Tensor]:
    try:
        raw = getattr(node, name)
        is_function = isinstance(raw, (list, tuple))
        if any(one.unpack_hook is not None for one in (raw if is_function else (raw,))):
            return ()
        # A custom autograd.Function, such as ZeRO-3's layers, keeps a list.
        value = node.saved_tensors if is_function else getattr(node, name.replace(RAW, "_saved_"))
    except (AttributeError, RuntimeError):
        return ()
    return [part for part in _tensors(value) if part.untyped_storage().size()]


def _is_packed(node: Any) -> bool:
    """Whether a hook packed the tensors that an operation keeps, or they will be recomputed."""
    if type(node).__name__.startswith(REENTRANT):
        return True
    raw = (getattr(node, name, None) for name in dir(node) if name.startswith(RAW))
    each = (one for some in raw for one in (some if isinstance(some, (list, tuple)) else (some,)))
    return any(getattr(one, "unpack_hook", None) is not None for one in each)
