"""Which module made the first number that is not finite, by the graph of a loss: no replay, so that it works where one would need other ranks.

    up ── silu ── down ── loss = nan      a backward pass is about to begin: the graph still holds what its operations were given
    finite        nan                     `down` was given a NaN, `up` was not: `up`, or what follows it, made it

Operations are numbered in the order of the forward pass, so that the first that holds such a number is known; the module is that of the last parameter
that was used on the way to it. What a hook packed away (activation checkpointing, offloading) is left packed: to unpack it computes, and may communicate.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from holter.rank.readings.samples import local
from holter.records import Origin

MAX_NODES = 8192
MAX_HOPS = 4
"""From an operation to the parameter it uses: a cast, a transposition, a view."""
RAW = "_raw_saved_"
CARRIES = ("LogSoftmax", "Softmax")
"""Operations that make no NaN of finite numbers: what they hold was given to them."""


def find(loss: torch.Tensor, names: Mapping[int, str], kinds: Mapping[str, str]) -> Origin | None:
    """`names`: id of a parameter as the graph holds it -> its name; `kinds`: module -> its class. None: the graph does not tell."""
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
        # Behind the last layer the script's own loss may have made it; what is packed may have been earlier.
        return None
    culprit = max(before, key=_order)
    place = sorted(map(_order, layers)).index(_order(culprit))
    return _origin(layers[culprit], kinds, culprit, layers.get(first, ""), place)


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
    """The operations behind one, itself among them."""
    found: dict[Any, None] = {first: None} if first is not None else {}
    queue = list(found)
    while queue and len(found) < MAX_NODES:
        for function, _ in queue.pop().next_functions:
            if function is not None and function not in found:
                found[function] = None
                queue.append(function)
    return list(found)


def _layer(node: Any, names: Mapping[int, str]) -> str:
    """The parameter that an operation uses; empty: none."""
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
    """Whether it computes something: casts, transpositions and views keep no tensor."""
    return any(isinstance(t, torch.Tensor) for t in _held(node))


def _is_tainted(node: Any) -> bool:
    """Whether it holds NaN or +Inf; a -Inf alone may be a mask."""
    return any(bool(torch.isnan(t).any() | torch.isposinf(t).any()) for t in _held(node))


def _held(node: Any) -> Iterator[torch.Tensor]:
    """What it keeps for the backward pass and can be looked at: in host memory, not packed, not given back."""
    for name in dir(node):
        if name.startswith(RAW):
            yield from _unpacked(node, name)


def _unpacked(node: Any, name: str) -> Iterable[torch.Tensor]:
    try:
        raw = getattr(node, name)
        if isinstance(raw, (list, tuple)) or raw.unpack_hook is not None:
            return ()
        value = getattr(node, name.replace(RAW, "_saved_"))
    except (AttributeError, RuntimeError):
        return ()
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.device.type != "cpu":
        return ()
    # Of a DTensor this rank's part.
    part = local(value)
    return (part,) if part.untyped_storage().size() else ()


def _is_packed(node: Any) -> bool:
    """Whether a hook has put away what it keeps."""
    raw = (getattr(node, name, None) for name in dir(node) if name.startswith(RAW))
    return any(getattr(one, "unpack_hook", None) is not None for one in raw)
