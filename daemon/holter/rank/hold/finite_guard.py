"""The guard: is everything that an optimizer is about to apply finite? Asked on every rank at every step, before it is applied.

What a rank read of its own gradients says nothing about what its peers added in the reduction, and of a large model they are read in
turns. So the gradients that this optimizer applies are read, all of them, unless they were since they were last written (`GradientAnswers`),
somebody has shown them to be finite (`KnownFinite`), or a loss scaler calls the optimizer: it calls it only then, or lets a fused one skip the step by itself.

Host memory is read at once, at the speed of memory. On a device the pass is started and never waited for: the step is held if the
answer is there by the time the hook is left, which it is where the loop itself has synchronised; else the step is applied and the
answer comes at a later step. The weights are poisoned by then, and the last snapshot is the state to keep.

A rank that applies a shard sees its own alone: `Shards` asks the other ranks before the step is applied. That concerns DTensors that are split
over some axis of their mesh, FSDP's flat parameters and ZeRO's partitions. All ranks of the job agree, which is simplest: replicas of a shard
say the same twice. Replicated models are not asked and pay nothing; neither is a step that a loss scaler answers for. Whether a rank is asked
depends on the script's code and on how its model lies on the ranks, not on what the rank has seen: all are asked before the same steps. What
it costs is said in `peers`.

An optimizer that is given a closure computes its gradients inside its step: it cannot be held before.
"""

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from holter.rank.context import Context
from holter.rank.guard import say
from holter.rank.models import is_split
from holter.rank.readings.fused_pass import has_nonfinite
from holter.rank.readings.gradient_answers import PLAIN, GradientAnswer
from holter.rank.readings.samples import local
from holter.records import SightLost


class FiniteGuard:
    """Reads what is applied; one for a rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._owed: list[tuple[int, GradientAnswer]] = []
        """Readings that a device has not answered, with their steps."""
        self._num_scaling = 0
        self.before_scaled: Callable[[], None] = lambda: None
        """Called before a loss scaler decides whether to call an optimizer."""

    def install(self) -> None:
        """Know when a loss scaler calls the optimizer."""
        self._context.patches.replace("step", self._around_step, torch.amp.GradScaler)

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            is_scaling = scaler._enabled  # noqa: SLF001
            if is_scaling:
                self.before_scaled()
            self._num_scaling += is_scaling
            try:
                return original(scaler, *args, **kwargs)
            finally:
                self._num_scaling -= is_scaling

        return step

    def is_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a loss scaler answers for this step."""
        return self._num_scaling > 0 or getattr(optimizer, "found_inf", None) is not None

    def finds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether something that is not finite is about to be applied, as far as is known without waiting."""
        if self.is_scaled(optimizer):
            return False
        held = self._held(optimizer)
        known = self._context.gradient_answers.find(held) if held else None
        if known is not None and known.table is not None and not has_nonfinite(known.table):
            return False
        gradients = self._unshown(held)
        if not gradients:
            return False
        tables: list[Any] = []
        number = self._numbers.setdefault(optimizer, len(self._numbers))
        context = self._context
        answer = context.gradient_answers.read(context, f"applied{number}", gradients, tables.append)
        if answer is not None and not tables:
            self._owed.append((context.log.step, answer))
        return bool(tables) and has_nonfinite(tables[0])

    def late(self) -> int | None:
        """The first step of which a device has answered since that it was not finite; it is in the weights."""
        if not self._owed:
            return None
        self._context.readings.poll()
        answers = [(step, answer, answer.table) for step, answer in self._owed]
        self._owed = [(step, answer) for step, answer, table in answers if table is None]
        return next((step for step, _, table in answers if table is not None and has_nonfinite(table)), None)

    def _held(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        lent = self._context.frameworks.lent.get(optimizer)
        if lent is not None:
            return [gradient for _, gradient in lent]
        # Asked for once: a gradient that nobody holds gets a new Python object each time.
        return [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]

    def _unshown(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
        unshown = self._context.hold.known_finite.unshown(held)
        is_plain = set(map(type, unshown)) <= PLAIN and set(map(_layout, unshown)) <= {torch.strided}
        if is_plain and all(dtype.is_floating_point for dtype in set(map(_dtype, unshown))):
            return unshown
        return [part for part in map(_part, unshown) if _is_dense_float(part) or part.is_complex()]


_layout, _dtype = operator.attrgetter("layout"), operator.attrgetter("dtype")


def _is_dense_float(part: torch.Tensor) -> bool:
    return part.layout is torch.strided and part.is_floating_point()


def _part(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, dense."""
    part = local(gradient) if hasattr(gradient, "placements") else gradient
    return part._values() if part.is_sparse else part  # noqa: SLF001


class Shards:
    """Asks the other ranks; one for a rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._split: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        """By optimizer: the number of its parameters, and whether one of them was split then."""

    def agree(self, optimizer: torch.optim.Optimizer, bad_step: int | None) -> int | None:
        """The first step that is not finite on any rank, as far as is known before this one is applied; `bad_step` is our own."""
        context = self._context
        peers = context.hold.peers
        if peers is None or peers.is_over or not self._is_split(optimizer):
            self._tell_loss()
            return bad_step
        waited_s = peers.waited_s
        first = peers.agree(context.log.step, bad_step)
        context.guard.own_s -= peers.waited_s - waited_s
        self._tell_loss()
        return first

    def leave(self) -> None:
        """Steps are not held any more: nobody is to wait for our word."""
        if self._context.hold.peers is not None:
            self._context.hold.peers.leave()

    def _is_split(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer in self._context.frameworks.partitioned:
            return True
        num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._split.get(optimizer)
        if known is None or known[0] != num_parameters:
            held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
            known = num_parameters, any(map(is_split, held.values())) or self._context.models.has_flat(held.keys())
            self._split[optimizer] = known
        return known[1]

    def _tell_loss(self) -> None:
        context = self._context
        peers = context.hold.peers
        if peers is None or not peers.loss:
            return
        what, peers.loss = f"shards are not agreed on any more: {peers.loss}", ""
        say(f"rank {context.writer.rank}: {what}; one that is not finite is held on its own rank alone")
        context.writer.say(context.log.step, SightLost(what=what, dropped=context.writer.page.dropped))
