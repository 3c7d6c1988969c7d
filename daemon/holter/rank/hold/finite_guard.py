"""The guard checks on every rank, before every step, whether everything that an optimizer is about to apply is finite.

What a rank read of its own gradients says nothing about what its peers added in the reduction, and a large model's gradients are read in
turns. So the guard reads all gradients that this optimizer applies, unless they were read since they were last written (`GradientAnswers`),
somebody has shown them to be finite (`KnownFinite`), or a loss scaler has just checked them: it calls the optimizer only if they are finite, or lets a
fused one leave the step out by itself. If the script has unscaled them itself (`unscale_`), the scaler checked them then, and what was written since is read.

Host memory is read at once, at the speed of memory. On a device the pass is started, and its answer comes when the device gets there:

    torch's fused optimizers             we do not wait: the device itself leaves the step out (`device_flags`), and the rank is held when it learns of it
    all others, and shards               we wait for the answer, `wait_s` at most; if it is not there by then, the step is applied, and if it was not
                                         finite, the weights are poisoned and the last snapshot is the state to keep

A rank that applies a shard sees only its own: `Shards` asks the other ranks before the step is applied. That concerns DTensors that are split
over some axis of their mesh, FSDP's flat parameters and ZeRO's partitions. All ranks of the job agree, which is simplest, although replicas of a
shard say the same twice. Replicated models are not asked and pay nothing; nor is anybody asked about a step that a loss scaler has checked. Whether a
rank is asked depends on the script's code and on how its model is laid out on the ranks, not on what the rank has seen: all are asked before the same
steps. The docstring of `peers` says what this costs. On a device too they agree over sockets, before the step, and share no flag by a collective: one of
ours that a single rank does not join, because a hook of ours failed there, would hang the job for good, while a socket gives up after two seconds; and a
communicator of our own beside the job's may deadlock with it.

An optimizer that is given a closure computes its gradients inside its step: it is held, or given the flag, after the closure (`hooks.closures`). LBFGS and
optimizers that are not torch's may change weights before they call it: they cannot be held, and a NaN of theirs is reported when the step is over.
"""

import functools
import operator
import statistics
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holter import clock
from holter.rank import mesh
from holter.rank.context import Context
from holter.rank.guard import say
from holter.rank.hold.device_flags import RUN_AHEAD, LeftOut, device_of, flag_of, takes_flag
from holter.rank.models import has_none, is_split
from holter.rank.readings.batches import Inputs
from holter.rank.readings.fused_pass import has_nonfinite
from holter.rank.readings.gradient_answers import GradientAnswer, are_plain
from holter.rank.readings.samples import local
from holter.rank.undo.side_stream import wait_until
from holter.records import SightLost
from holter_kernels import SeenTensors
from holter_kernels.devices import is_capturing, obeys_flag, recorded, warming

WARM_S = 60.0
"""Seconds that a non-finite step is held until the kernels that read it are compiled."""
ASK_S = 0.0002
"""Seconds between two questions whether a device has answered, which is as long as the device may be idle because of them."""
SAID_AFTER = 16
"""Number of steps after which the log says how long each of them waited."""
MAX_KEPT_BYTES = 16 << 20
"""Largest size of a model call's inputs that are kept until a device has decided on its step, two or three steps later."""
END_S = 1.0
"""Seconds that the end of the script waits to learn what the device has left out."""


class FiniteGuard:
    """Reads whether the gradients that a rank's optimizers are about to apply are finite; there is one for each rank."""

    def __init__(self, context: Context, wait_s: float = 0.0) -> None:
        self._context = context
        self._wait_s = wait_s
        self._numbers: dict[weakref.ref[torch.optim.Optimizer], int] = {}
        self._owed: list[tuple[int, GradientAnswer]] = []
        """(step, reading) of each reading that a device has not answered yet."""
        self.flags = context.hold.flags
        self._has_said = False
        self._waits_s: list[float] = []
        self._num_scaling = 0
        self._is_unscaled = False
        """Whether, in the scaler's call that is running, the script has unscaled the gradients before."""
        self.before_scaled: Callable[[], None] = lambda: None
        """Called before a loss scaler decides whether to call an optimizer."""

    def install(self) -> None:
        """Patch the loss scaler's `step`, so that we know when it calls the optimizer."""
        self._context.patches.replace("step", self._around_step, torch.amp.GradScaler)

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            is_scaling = scaler._enabled  # noqa: SLF001
            if is_scaling:
                self.before_scaled()
            was_unscaled, self._is_unscaled = self._is_unscaled, is_scaling and _is_unscaled(scaler, args, kwargs)
            self._num_scaling += is_scaling
            try:
                return original(scaler, *args, **kwargs)
            finally:
                self._num_scaling -= is_scaling
                self._is_unscaled = was_unscaled

        return step

    def is_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a loss scaler checks the gradients of this step."""
        return self._num_scaling > 0 or getattr(optimizer, "found_inf", None) is not None

    def _is_answered_for(self, optimizer: torch.optim.Optimizer, *, is_flagged: bool) -> bool:
        """Whether a loss scaler has checked the gradients as they are now; not if the script has unscaled them and may have written to them since."""
        if getattr(optimizer, "found_inf", None) is not None:
            # The optimizer leaves the step out by itself; only the device knows whether it does.
            return not (is_flagged and getattr(optimizer, "grad_scale", None) is None)
        return self._num_scaling > 0 and not self._is_unscaled

    def finds(self, optimizer: torch.optim.Optimizer, *, is_torn: bool = False, is_flagged: bool = False) -> bool:
        """Whether something that is not finite is about to be applied, as far as is known before it is.

        If `is_flagged`, the device is usually given the flag, by which it leaves the step out by itself; the result is then False.
        """
        if self._is_answered_for(optimizer, is_flagged=is_flagged):
            return False
        held = self._held(optimizer)
        known = self._context.gradient_answers.find(held) if type(held) is SeenTensors or held else None
        if known is not None and known.table is not None and not has_nonfinite(known.table):
            return False
        gradients = self._unshown(held)
        if type(gradients) is not SeenTensors and not gradients:
            if is_flagged:
                self._give(optimizer, None, [], is_torn=is_torn)
            return False
        tables: list[Any] = []
        number = self._numbers.setdefault(weakref.ref(optimizer), len(self._numbers))
        context = self._context
        answer = context.gradient_answers.read(context, f"applied{number}", gradients, tables.append)
        device = device_of(gradients)
        if answer is None and device is not None and (device in warming or not is_flagged):
            return self._finds_by_operations(f"applied{number}", gradients, device)
        if is_flagged and device is not None:
            self._give(optimizer, answer, gradients, is_torn=is_torn)
            return False
        if answer is not None and not tables:
            self._wait_for(answer, tables)
        return bool(tables) and has_nonfinite(tables[0])

    def _finds_by_operations(self, name: str, gradients: Sequence[torch.Tensor], device: torch.device) -> bool:
        """Do the same with torch's own operations, and wait for them; then read the tensors, if possible, should one not be finite.

        This is for when no reading could be begun: kernels are being compiled, or the device is full or too far behind.
        """
        place = torch.empty((), dtype=torch.float32, pin_memory=True)
        place.copy_(flag_of(gradients), non_blocking=True)
        event, began_s = recorded(device), clock.monotonic_s()
        is_bad = wait_until(event.query, self._wait_s) and bool(place.item())
        if is_bad:
            wait_until(lambda: device not in warming, WARM_S)
        self._context.guard.own_s -= clock.monotonic_s() - began_s
        if is_bad:
            tables: list[Any] = []
            answer = self._context.gradient_answers.read(self._context, name, gradients, tables.append)
            if answer is not None and not tables:
                self._wait_for(answer, tables)
        return is_bad

    def is_flagged(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a device leaves this optimizer's steps out by itself."""
        if not takes_flag(optimizer):
            return False
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        return first is not None and obeys_flag(first.device) and not is_capturing(first.device)

    def _give(
        self,
        optimizer: torch.optim.Optimizer,
        answer: GradientAnswer | None,
        gradients: Sequence[torch.Tensor],
        *,
        is_torn: bool,
    ) -> None:
        device = device_of(gradients) or next(p.device for group in optimizer.param_groups for p in group["params"])
        flag = None
        if answer is not None and answer.mark is not None and len(answer.mark.addresses) == 8 * len(gradients):
            # The flag must be of exactly these gradients: others may belong to another optimizer, or to none.
            flag = getattr(answer.reading, "flag", None)
        if flag is None and gradients:
            flag = flag_of(gradients)
        step, inputs = self._context.log.now, self._context.inputs
        step.num_owed += 1
        step.suspects.call = kept_call(inputs.suspect or inputs.last)

        def known() -> None:
            step.num_owed -= 1

        self.flags.give(optimizer, device, flag, step=step.step, is_torn=is_torn, then=known)

    def _wait_for(self, answer: GradientAnswer, tables: list[Any]) -> None:
        """Wait for a device's answer before the step is applied; if it does not come in time, `late` asks for it at later steps."""
        context, began_s = self._context, clock.monotonic_s()

        def is_there() -> bool:
            context.readings.poll()
            return bool(tables)

        if self._wait_s > 0:
            wait_until(is_there, self._wait_s, poll_s=ASK_S)
        # The device works meanwhile, and the step would have to wait for it in the end.
        waited_s = clock.monotonic_s() - began_s
        context.guard.own_s -= waited_s
        if tables:
            self._say_cost(waited_s)
            return
        self._owed.append((context.log.step, answer))
        if self._wait_s > 0 and not self._has_said:
            self._has_said = True
            say(
                f"rank {context.writer.rank}: the device did not answer within guard_wait_s ({self._wait_s:g} s) whether step "
                f"{context.log.step} is finite: it is applied, and if it is not, the weights are poisoned"
            )

    def _say_cost(self, waited_s: float) -> None:
        """Log once how long the first steps waited; only rank 0 does, because all ranks make the same steps."""
        if len(self._waits_s) >= SAID_AFTER:
            return
        self._waits_s.append(waited_s)
        if len(self._waits_s) == SAID_AFTER and self._context.writer.rank == 0:
            say(
                f"each step waits for the device to say that its gradients are finite, {1e3 * statistics.median(self._waits_s):.1f} ms so far: the host cannot run ahead of it "
                "there. A fused optimizer (fused=True) of a model that is not sharded needs no wait; HOLTER_GUARD_WAIT_S=0 turns it off, and a NaN may then reach the weights"
            )

    def left_out(self, step: int) -> LeftOut | None:
        """Return the first step that the device left out, if `step` is the one before which to act on it; else None."""
        if not self.flags.has_given:
            return None
        began_s = clock.monotonic_s()
        if self._wait_s > 0:
            self.flags.wait(step - RUN_AHEAD, self._wait_s)
        self._context.guard.own_s -= clock.monotonic_s() - began_s
        found = self.flags.left_out()
        if found is None or (self._context.world_size > 1 and step < found.step + RUN_AHEAD):
            return None
        return found

    def end(self) -> None:
        """Stop guarding, at the end of the script: log a step that was left out and not reported yet."""
        self.flags.take_back_all()
        if self.flags.wait(self._context.log.step, END_S) and (found := self.flags.left_out()) is not None:
            self.flags.act()
            say(
                f"rank {self._context.writer.rank}: gradients of step {found.step} were not finite: it and the steps after it "
                f"were left out, the weights are those of {found.step} completed steps"
            )

    def late(self) -> int | None:
        """Return the first step about which a device has answered too late that it was not finite: it is in the weights. Else None."""
        if not self._owed:
            return None
        self._context.readings.poll()
        answers = [(step, answer, answer.table) for step, answer in self._owed]
        self._owed = [(step, answer) for step, answer, table in answers if table is None]
        return next((step for step, _, table in answers if table is not None and has_nonfinite(table)), None)

    def _held(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        lent = self._context.frameworks.lent.get(optimizer)
        if lent is not None:
            return [gradient for _, gradient in lent]
        applied = self._context.gradient_answers.applied_by(optimizer)
        return [g for g in applied if g is not None] if has_none(applied) else applied

    def _unshown(self, held: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        unshown = self._context.hold.known_finite.unshown(held)
        if type(unshown) is SeenTensors:
            return unshown
        if are_plain(unshown) and all(dtype.is_floating_point for dtype in set(map(_dtype, unshown))):
            return unshown
        return [part for part in map(_part, unshown) if _is_dense_float(part) or part.is_complex()]


def _is_unscaled(scaler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    optimizer = args[0] if args else kwargs.get("optimizer")
    state = scaler._per_optimizer_states.get(id(optimizer), {})  # noqa: SLF001
    return getattr(state.get("stage"), "name", "") == "UNSCALED"


_dtype = operator.attrgetter("dtype")


def _is_dense_float(part: torch.Tensor) -> bool:
    return part.layout is torch.strided and part.is_floating_point()


def _part(gradient: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a gradient, as a dense tensor."""
    part = local(gradient) if hasattr(gradient, "placements") else gradient
    return part._values() if part.is_sparse else part  # noqa: SLF001


def kept_call(call: Inputs | None) -> Inputs | None:
    """Return the call if its tensors are small enough to be kept, else None."""
    is_small = call is not None and sum(t.nbytes for _, t, _ in call.leaves) <= MAX_KEPT_BYTES
    return call if is_small else None


class Shards:
    """Asks the other ranks, which have other shards or other stages of a pipeline, whether their part is finite; there is one for each rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._split: dict[weakref.ref[torch.optim.Optimizer], tuple[int, bool]] = {}
        """Optimizer -> the number of its parameters, and whether one of them was split when this was read."""
        self._is_stage = False
        """Whether this rank trains a stage of a pipeline, which another stage's NaN need not reach."""
        self._asked_step = -1

    def agree(self, optimizer: torch.optim.Optimizer, bad_step: int | None) -> int | None:
        """Return the first step that is not finite on any rank, as far as is known before this one is applied; None if there is none.

        `bad_step` is this rank's own.
        """
        context = self._context
        peers = context.hold.peers
        if peers is None:
            return bad_step
        if peers.is_over or not (self._is_split(optimizer) or self._is_first_of_stage()):
            self._tell_loss()
            return bad_step
        self._asked_step = context.log.step
        waited_s = peers.waited_s
        first = peers.agree(context.log.step, bad_step)
        context.guard.own_s -= peers.waited_s - waited_s
        self._tell_loss()
        return first

    def leave(self) -> None:
        """Leave the agreement, because steps are not held any more, so that no rank waits for our word."""
        if self._context.hold.peers is not None:
            self._context.hold.peers.leave()

    def concern(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ranks of this job apply different parts of a step."""
        return self._context.world_size > 1 and self._is_split(optimizer)

    def _is_first_of_stage(self) -> bool:
        """Whether this rank trains a stage and has not asked in this step yet.

        It asks once per step: other stages may have fewer optimizers, and would not answer a second time.
        """
        return self._has_stages() and self._asked_step != self._context.log.step

    def _has_stages(self) -> bool:
        """Whether torch's pipelining calls the model, or the user has named an axis of stages."""
        if not self._is_stage and self._context.world_size > 1:
            said = self._context.models.said.get()
            is_named = said is not None and any(axis.name in mesh.PIPELINE_NAMES for axis in said.axes)
            self._is_stage = self._context.inputs.stage is not None or is_named
        return self._is_stage

    def _is_split(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer in self._context.frameworks.partitioned:
            return True
        num_parameters = 0
        for group in optimizer.param_groups:
            num_parameters += len(group["params"])
        known = self._split.get(weakref.ref(optimizer))
        if known is None or known[0] != num_parameters:
            held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
            known = num_parameters, any(map(is_split, held.values())) or self._context.models.has_flat(held.keys())
            self._split[weakref.ref(optimizer)] = known
        return known[1]

    def _tell_loss(self) -> None:
        context = self._context
        peers = context.hold.peers
        assert peers is not None, "they are asked"
        if not peers.loss:
            return
        what, peers.loss = f"shards are not agreed on any more: {peers.loss}", ""
        say(f"rank {context.writer.rank}: {what}; one that is not finite is held on its own rank alone")
        context.writer.say(context.log.step, SightLost(what=what, dropped=context.writer.page.dropped))
