"""Where a mixture of experts sends its tokens, as routers and experts show it in one forward pass, now and then.

    module.router(x)          logits, probabilities, chosen experts, or a mask of which token goes where
    module.experts[3](rows)   the rows that an expert was given, after a capacity limit has cut them
    module.aux_loss           a balancing term: does the backward pass reach it?

A router is a module of that name (`router`, `gate`, ...) beside modules that are called experts; the gate of a gated layer is not one. The hooks
stay for one call of the model, at every fourth step and later at every 32nd, and are gone before its backward pass. A device is not waited for: its
counts are reported at the next look.
"""

import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from holter.rank.accelerator import is_capturing
from holter.rank.context import Context
from holter.rank.hooks.model_calls import UncopiedHook
from holter.rank.readings.inspection import is_compiled
from holter.rank.readings.samples import is_plain_moment
from holter.records import Routing

FIRST_STEP, OFTEN, OFTEN_UNTIL, RARELY = 2, 4, 64, 32
"""Step of the first look; steps between two looks; the step until which that holds; and steps between two looks after it."""
MAX_ROUTERS = 16
MAX_EXPERTS = 1024
MAX_SPEAKERS = 16
"""Number of ranks that look, evenly spread over the job."""
ROUTER = re.compile(r"(^|_)(router|gate|gating|gate_network|switch|wg)$", re.IGNORECASE)
EXPERTS = re.compile(r"^(?!.*shared)(.*_)?experts?(_?\d+)?$", re.IGNORECASE)
TERM = re.compile(r"aux|balanc|z_loss", re.IGNORECASE)
TOP_K = ("top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "num_selected_experts", "k")
NUM_EXPERTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "num_moe_experts", "out_features")
"""Names of settings that give the number of experts on all ranks; a router that is a plain linear layer has one output for each."""


@dataclass(frozen=True)
class _Site:
    """A module that holds a router, experts, or both."""

    name: str
    holder: "weakref.ref[nn.Module]"
    router: "weakref.ref[nn.Module] | None"
    experts: "tuple[weakref.ref[nn.Module], ...]"
    num_experts: int
    """Number of experts; 0 if it is the number of columns of the router's result."""
    top_k: int


@dataclass
class _Seen:
    """What one call showed of one site; the tensors stay on the device where they were computed."""

    site: _Site
    num_experts: int = 0
    top_k: int = 1
    num_tokens: int = 0
    counts: torch.Tensor | None = None
    received: list[torch.Tensor | int] = field(default_factory=list)
    term: str = ""
    is_learning: bool = False

    def note_gradient(self, _: Any) -> None:
        """Note that the backward pass has reached the balancing term."""
        self.is_learning = True


class RoutingProbe:
    """Puts hooks on routers and experts for one call, and reports what they counted."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sites: weakref.WeakKeyDictionary[nn.Module, list[_Site]] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._root: weakref.ref[nn.Module] | None = None
        self._seen: list[_Seen] = []
        self._owed: list[tuple[int, Any, torch.Tensor, list[_Seen]]] = []
        """Counts that a device has not delivered yet: step, event, host memory, sites."""
        stride = -(-context.world_size // MAX_SPEAKERS)
        self._is_speaker = context.writer.rank % stride == 0

    @property
    def is_open(self) -> bool:
        """Whether a pass is being followed, or a device still owes its counts."""
        return bool(self._seen or self._owed)

    def begin(self, root: nn.Module) -> None:
        """Put hooks on the routers and experts of a model that is called in training, if a look is due."""
        log = self._context.log
        step = log.step
        is_due = step % (OFTEN if step < OFTEN_UNTIL else RARELY) == FIRST_STEP
        if not is_due or self._seen or log.micro_step or not self._is_speaker:
            return
        sites = self._sites.get(root)
        if sites is None:
            model = self._context.models.of(root)
            prefix = model.prefix if model is not None else ""
            sites = self._sites[root] = [] if is_compiled(root) else list(_sites(root, prefix))[:MAX_ROUTERS]
        if not sites or not is_plain_moment():
            return
        self._root = weakref.ref(root)
        for site in sites:
            self._seen.append(seen := _Seen(site, site.num_experts, site.top_k))
            seen.received = [0] * len(site.experts)
            self._hook(site.router, lambda _module, _args, out, seen=seen: _note_routes(seen, out))
            for place, expert in enumerate(site.experts):
                self._hook(expert, lambda _m, args, _out, seen=seen, place=place: _note_rows(seen, place, args))

    def returned(self, root: nn.Module) -> None:
        """Remove the hooks when the call is over, and follow a balancing term into the backward pass."""
        if not self._seen or self._root is None or self._root() is not root:
            return
        self._remove()
        for seen in self._seen:
            self._handles += _follow_term(seen)

    def end(self) -> None:
        """Report the counts when the backward pass is over; from a device, once it has delivered them."""
        seen, self._seen, self._root = self._seen, [], None
        self._remove()
        if is_capturing():
            return
        self._settle()
        known = [
            one for one in seen if one.counts is not None or any(isinstance(r, torch.Tensor) for r in one.received)
        ]
        if not known:
            return
        with torch.no_grad():
            flat = torch.cat([part for one in known for part in _parts(one)])
        if flat.is_cpu:
            self._tell(self._context.log.step, flat.tolist(), known)
            return
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        event = torch.Event(flat.device)
        event.record()
        self._owed = [*self._owed[-3:], (self._context.log.step, event, host, known)]

    def _settle(self) -> None:
        """Report the counts that a device has delivered meanwhile."""
        while self._owed and self._owed[0][1].query():
            step, _, host, known = self._owed.pop(0)
            self._tell(step, host.tolist(), known)

    def _tell(self, step: int, values: list[int], known: Sequence[_Seen]) -> None:
        for seen in known:
            counts, values = values[: seen.num_experts], values[seen.num_experts :]
            received, values = values[: len(seen.received)], values[len(seen.received) :]
            if seen.counts is None:
                # No router was seen; the rows that experts were given show where tokens went.
                counts, seen.num_tokens = received, sum(received)
            self._context.writer.say(
                step,
                Routing(
                    module=seen.site.name,
                    num_experts=seen.num_experts or len(received),
                    top_k=seen.top_k,
                    num_tokens=seen.num_tokens,
                    counts=counts,
                    received=received if seen.counts is not None and any(received) else [],
                    term=seen.term,
                    is_term_learning=seen.is_learning,
                ),
            )

    def _hook(self, module: "weakref.ref[nn.Module] | None", call: Any) -> None:
        live = module() if module is not None else None
        if live is not None:
            hook = UncopiedHook(self._context.guard.wrap(call, "any"))
            self._handles.append(live.register_forward_hook(hook))

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _sites(root: nn.Module, prefix: str) -> Iterator[_Site]:
    """Yield a site for each module with experts among its children, except those inside of experts."""
    inside: list[str] = []
    for name, holder in root.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        children = {child: part for child, part in holder.named_children() if EXPERTS.match(child)}
        if not children:
            continue
        inside += [f"{name}.{child}." if name else f"{child}." for child in children]
        router = next((part for child, part in holder.named_children() if ROUTER.search(child)), None)
        listed = [one for part in children.values() for one in _listed(part)]
        num = _number(holder, router, NUM_EXPERTS) or (len(listed) if len(listed) > 1 else 0)
        if (router is None and len(listed) < 2) or num > MAX_EXPERTS:  # noqa: PLR2004 - one expert is no mixture
            continue
        experts = tuple(weakref.ref(one) for one in listed)
        top_k = _number(holder, router, TOP_K) or 1
        seen_router = weakref.ref(router) if router is not None else None
        yield _Site(prefix + name, weakref.ref(holder), seen_router, experts, num, top_k)


def _listed(part: nn.Module) -> list[nn.Module]:
    """Return the experts themselves: the entries of a list, or of the list that is all a module holds, else the module."""
    if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
        return list(part.children())
    inner = list(part.named_children())
    if len(inner) == 1 and isinstance(inner[0][1], nn.ModuleList) and not part._parameters:  # noqa: SLF001
        return list(inner[0][1])
    return [part]


def _number(holder: nn.Module, router: nn.Module | None, names: Sequence[str]) -> int:
    """Return the first of these settings on the router, the holder or their configurations; 0 if there is none."""
    for owner in (router, holder, getattr(holder, "config", None), getattr(router, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _note_routes(seen: _Seen, output: Any) -> None:
    """Note, from the output of a router, to which experts its tokens go."""
    found = [part for part in (output if isinstance(output, (tuple, list)) else (output,)) if _is_plain(part)]
    with torch.no_grad():
        for part in found:
            if _is_whole(part) and part.dim() > 1 and part.shape[-1] <= seen.num_experts:
                _add(seen, part.reshape(-1), part.numel() // part.shape[-1], part.shape[-1])
                return
        for part in found:
            is_routing = part.dim() > 1 and part.is_floating_point() and part.shape[-1] > 1
            if is_routing and part.shape[-1] == (seen.num_experts or part.shape[-1]):
                seen.num_experts = part.shape[-1]
                chosen = part.detach().reshape(-1, part.shape[-1]).topk(min(seen.top_k, part.shape[-1])).indices
                _add(seen, chosen.reshape(-1), chosen.shape[0], chosen.shape[1])
                return


def _add(seen: _Seen, chosen: torch.Tensor, num_tokens: int, top_k: int) -> None:
    # bincount would wait for the device.
    counts = torch.zeros(seen.num_experts, dtype=torch.int64, device=chosen.device)
    counts.index_add_(0, chosen.long().clamp(0, seen.num_experts - 1), torch.ones_like(chosen, dtype=torch.int64))
    seen.counts = counts if seen.counts is None else seen.counts + counts
    seen.num_tokens += num_tokens
    seen.top_k = top_k


def _note_rows(seen: _Seen, place: int, args: Any) -> None:
    """Count the rows that an expert was given and that are not padding."""
    given = next((part for part in args if _is_plain(part) and part.is_floating_point() and part.dim() > 1), None)
    if given is not None:
        with torch.no_grad():
            rows = (given.detach() != 0).any(-1).sum()
        seen.received[place] = seen.received[place] + rows


def _parts(seen: _Seen) -> Iterator[torch.Tensor]:
    """Yield the router's counts, if any, then the rows that experts received, as integers on one device."""
    some = seen.counts if seen.counts is not None else next(r for r in seen.received if isinstance(r, torch.Tensor))
    if seen.counts is None:
        seen.num_experts = 0
    else:
        yield seen.counts
    if seen.received:
        yield torch.stack([torch.as_tensor(part, dtype=torch.int64, device=some.device) for part in seen.received])


def _follow_term(seen: _Seen) -> list[Any]:
    """Find a scalar of the graph whose name says that it is a balancing term, and return the hook on the operation that made it, if any."""
    holder, router = seen.site.holder(), seen.site.router() if seen.site.router is not None else None
    for owner in (holder, router):
        for name, value in vars(owner).items() if owner is not None else ():
            if (
                isinstance(value, torch.Tensor)
                and value.numel() == 1
                and value.grad_fn is not None
                and TERM.search(name)
            ):
                seen.term = name
                return [value.grad_fn.register_prehook(seen.note_gradient)]
    return []


def _is_plain(part: Any) -> bool:
    return type(part) is torch.Tensor


def _is_whole(part: torch.Tensor) -> bool:
    return part.dtype in (torch.int64, torch.int32)
