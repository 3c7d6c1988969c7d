"""One step while it is observed, and what a rank reports of it once it is over and its readings have been answered.

    OpenStep        passes, losses, gradients, suspects, cost; filled by the hooks
    StepLog         counts steps, and hands out those that can be reported
    StepReporter    when it has changed      reports the census: which tensors and optimizers there are
                    a step is complete       reports StepDone
                    after every step         heeds the sidecar's orders, prints its notices, and notices when it is gone

`tell_completed_before` reports, before the first step, how many steps the run had completed before this process.
"""

import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holter import clock
from holter.page import CONTROL_THIN, PageWriter
from holter.rank.guard import Guard, say
from holter.rank.models import held_by
from holter.rank.readings.batches import read
from holter.rank.readings.census import CensusTaker
from holter.records import FirstStep, Nonfinite, Phase, SightLost, StepDone, View

if TYPE_CHECKING:
    from holter.rank.context import Context

MAX_UNTOLD = 8
"""A step is reported without its outstanding readings when a device has not answered them after this many further steps."""
ANSWERS_S = 2.0
"""Seconds to wait for outstanding readings when a step is held, or the script ends."""
MAX_SUSPECTS = 16
"""Number of suspects kept of each kind: a NaN is soon in every tensor, and the first tensors show where it began."""
PHASE_NAMES = [phase.name.lower() for phase in Phase]
_ENDS_EVALUATION = frozenset({Phase.EVALUATION, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER})
"""Phases that end an evaluation: another call of it, or training."""
HEED_S = 0.02
SILENT_S = 10.0
STARTUP_S = 30.0


class BackwardPasses(msgspec.Struct):
    """Number of backward passes in the step, and of those that a loss scaler discarded."""

    num_done: int = 0
    num_dropped: int = 0
    """Number of these passes whose gradients a loss scaler threw away."""
    num_skipped_rounds: int = 0
    """How often a loss scaler has skipped the optimizer since the step before; the step then starts again under its number."""


class Losses(msgspec.Struct):
    """The loss of each micro-step, as the script computed it."""

    values: list[float] = msgspec.field(default_factory=list)
    scale: float | None = 1.0
    """The factor by which a scaler multiplied the loss; None if only a device knows it."""

    def mean(self) -> float | None:
        """Return the mean over the micro-steps; not finite if one of them was not, None if there are none."""
        odd = [loss for loss in self.values if not math.isfinite(loss)]
        if odd or not self.values:
            return odd[0] if odd else None
        return math.fsum(self.values) / len(self.values)


class GradientReading(msgspec.Struct):
    """What was read of a step's gradients."""

    view: View = "local"
    """Which gradients the norm covers: the rank's own, reduced ones, or shards of those."""
    square_sums: dict[tuple[str, int], float] = msgspec.field(default_factory=dict)
    """Sums of squares by model's prefix and id of the optimizer that gets the gradients (0: before any reduction); NaN if a gradient was not finite.

    A later reading replaces an earlier one of the same key.
    """
    is_local_read: bool = False
    """Whether the rank's own gradients were read before any reduction."""
    is_local_whole: bool = False
    """Whether all of them were read: then a rank that found nothing is not to blame."""
    was_clipped_finite: bool | None = None
    """Whether this rank's shards were finite whenever the script clipped them by the norm over all ranks; None if it did not clip."""

    def norm(self, loss_scale: float | None) -> float | None:
        """Return the L2 norm over all models, without the scaler's factor; None if nothing was read or the factor is not known."""
        if not self.square_sums or loss_scale is None:
            return None
        square_sum = sum(self.square_sums.values())
        return math.sqrt(square_sum) / loss_scale if math.isfinite(square_sum) else math.nan


class Suspects(msgspec.Struct):
    """Tensors that are not finite. They matter only if a gradient that the optimizer applies is not finite either."""

    tensors: list[Nonfinite] = msgspec.field(default_factory=list)
    is_applied: bool = False
    """Whether the optimizer was given a gradient that is not finite: neither a scaler nor the script held it back."""
    inputs: list[Nonfinite] = msgspec.field(default_factory=list)
    """Inputs on a device that are not finite; they are read in every step."""
    fetched: list[tuple[str, torch.Tensor, int]] = msgspec.field(default_factory=list)
    """Tensors in host memory that loaders gave, with their versions then.

    Labels do not go through the model, and when a device reports a NaN, the batch would be gone.
    """
    odd: set[str] = msgspec.field(default_factory=set)
    """Paths of tensors of the batch in host memory that are not finite; if the step turns out to be finite, that is their nature."""
    call: Any = None
    """The model's last call (`Inputs`) while a device decides on the step; if the device leaves the step out, the call is replayed."""
    is_questioned: bool = False
    """Whether the batch was examined and the call replayed, as far as either was possible."""
    is_skipped: bool = False
    """Whether a scaler skipped the step, or may have: that training went on then says nothing about the batch."""

    def add(self, nonfinite: Nonfinite) -> None:
        """Add a tensor; of each kind only `MAX_SUSPECTS` are kept, of gradients those nearest to the loss."""
        self.tensors.append(nonfinite)
        alike = [entry for entry in self.tensors if entry.where == nonfinite.where]
        if len(alike) > MAX_SUSPECTS:
            self.tensors.remove(max(alike, key=lambda entry: entry.order))


class ReadingCost(msgspec.Struct):
    """Seconds of the training thread that went into readings."""

    gradients_s: float = 0.0
    check_s: float = 0.0
    guard_s: float = 0.0
    """Seconds of the guard, which reads at every step, whatever is planned."""


class StepTimes(msgspec.Struct):
    """The times of a step, which are fixed when it ends or is held."""

    seconds: float
    phase_seconds: dict[str, float]


class OpenStep(msgspec.Struct, weakref=True, eq=False):
    """What was seen of one step so far."""

    step: int
    passes: BackwardPasses = msgspec.field(default_factory=BackwardPasses)
    losses: Losses = msgspec.field(default_factory=Losses)
    gradients: GradientReading = msgspec.field(default_factory=GradientReading)
    suspects: Suspects = msgspec.field(default_factory=Suspects)
    cost: ReadingCost = msgspec.field(default_factory=ReadingCost)
    batch: int = 0
    """Signature of the batch; 0 if nothing of it can be signed."""
    learning_rate: float | None = None
    roots: dict[str, int] = msgspec.field(default_factory=dict)
    """For each class of tensors, the fingerprint over all tensors that must be equal on all replicas."""
    numbers: dict[str, float] = msgspec.field(default_factory=dict)
    """Other figures, by the names of `records.NUMBERS`."""
    num_owed: int = 0
    """Number of readings that have not been answered yet."""
    times: StepTimes | None = None
    is_told: bool = False

    def acquit(self, *, is_skipped: bool = False) -> None:
        """Drop the suspects, because they never reached the weights.

        A loss that was not finite is still reported, unless its gradients were thrown away by a scaler that skipped the step, or by the
        script, which then went on to another backward pass.
        """
        losses = self.losses
        has_gradient = any(entry.where == "gradient" for entry in self.suspects.tensors)
        was_dropped = has_gradient and math.isfinite((losses.values or [0.0])[-1])
        self.suspects.tensors.clear()
        if is_skipped:
            self.suspects.inputs.clear()
            self.suspects.is_skipped = True
        if is_skipped or was_dropped:
            losses.values = [loss for loss in losses.values if math.isfinite(loss)]


class OwedAnswer:
    """Hands a reading's table to `then`, which may raise without harm; if a step is given, the step waits for the answer."""

    __slots__ = ("_guard", "_step", "_then")

    def __init__(self, guard: Guard, step: OpenStep | None, then: Callable[[Any], None]) -> None:
        self._guard, self._step, self._then = guard, step, then
        if step is not None:
            step.num_owed += 1

    def __call__(self, table: Any) -> None:
        """Hand on the table of a reading that was answered."""
        step, self._step = self._step, None
        if step is not None:
            step.num_owed -= 1
        self._guard.attempt(self._then, table)

    def settle(self) -> None:
        """Let the step wait no longer, because the reading will never be answered."""
        step, self._step = self._step, None
        if step is not None:
            step.num_owed -= 1


class StepLog:
    """Counts steps and micro-steps from 0; hands out steps in order once they are complete."""

    def __init__(self) -> None:
        self.now = OpenStep(0)
        self.step = 0
        """Number of completed optimizer steps."""
        self._untold: deque[OpenStep] = deque()

    @property
    def micro_step(self) -> int:
        """Number of completed backward passes of this step."""
        return self.now.passes.num_done

    @property
    def num_backwards(self) -> int:
        """Number of these passes that a halt undoes; those of a round that a scaler skipped are over."""
        return self.now.passes.num_done - self.now.passes.num_dropped

    def drop(self) -> None:
        """Start the step again under its number, because a scaler has skipped it."""
        self.now.passes.num_dropped = self.now.passes.num_done
        self.now.passes.num_skipped_rounds += 1

    def close(self, times: StepTimes) -> None:
        """End the step, and begin the next."""
        self.now.times = times
        self._untold.append(self.now)
        self.step += 1
        self.now = OpenStep(self.step)

    def ready(self) -> list[OpenStep]:
        """Take the steps that can be reported now, in order."""
        out = []
        while self._untold and (self._untold[0].num_owed == 0 or len(self._untold) > MAX_UNTOLD):
            out.append(self._untold.popleft())
        return out

    def rest(self) -> list[OpenStep]:
        """Take all steps that are over and not reported, complete or not, in order."""
        out = list(self._untold)
        self._untold.clear()
        return out

    def until(self, step: int) -> list[OpenStep]:
        """Take the steps up to this one that were not handed out, complete or not, in order."""
        out = []
        while self._untold and self._untold[0].step <= step:
            out.append(self._untold.popleft())
        return out


class PhaseClock:
    """Knows which phase the main thread is in, and adds up the seconds of each phase between two `take`s.

    evaluation   data   evaluation   other   forward        the batches and metrics of an evaluation count as evaluation:
    └──────────── evaluation ────────────┘   forward        what is between its calls, and the script's own code after the last one
    """

    def __init__(self) -> None:
        self.phase = Phase.ATTACH
        self._since = clock.monotonic_s()
        self._seconds = [0.0] * len(PHASE_NAMES)
        self._evaluated: list[float] | None = None
        """Seconds of each phase when the last evaluation's call ended; None if training was seen since."""

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase, and return the one that it interrupts, which is to be entered again afterwards."""
        now = clock.monotonic_s()
        interrupted = self.phase
        self._seconds[interrupted] += now - self._since
        self.phase, self._since = phase, now
        if interrupted is Phase.EVALUATION:
            self._evaluated = self._seconds[:]
        elif self._evaluated is not None and phase in _ENDS_EVALUATION:
            self._join_evaluation(Phase.OTHER)
            if phase is Phase.EVALUATION:
                self._join_evaluation(Phase.DATA)
            self._evaluated = None
        return interrupted

    def _join_evaluation(self, phase: Phase) -> None:
        assert self._evaluated is not None
        spent_s = self._seconds[phase] - self._evaluated[phase]
        self._seconds[phase] -= spent_s
        self._seconds[Phase.EVALUATION] += spent_s

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        self.enter(self.phase)
        seconds, self._seconds, self._evaluated = self._seconds, [0.0] * len(PHASE_NAMES), None
        return {name: spent for name, spent in zip(PHASE_NAMES, seconds, strict=True) if spent}


class StepReporter:
    """Reports the steps and the census of one rank."""

    def __init__(self, context: "Context") -> None:
        self._context = context
        self._sidecar = SidecarLink(context.writer.page)
        self._census = CensusTaker(context.guard, context.models.declared_frozen)
        self._told_census: Any = None
        self._heeded_s = 0.0
        self._outline: Any = None

    def tell_ready(self) -> None:
        """Report the steps that are over and whose readings have been answered."""
        for step in self._context.log.ready():
            self._tell_once(step)

    def tell_until(self, number: int, investigate: Callable[[OpenStep], None]) -> None:
        """Report the steps up to `number`, in order; step `number` is bad, and is investigated before it is reported.

        The device has come past these steps, so that its outstanding answers will come in a moment.
        """
        steps = self._context.log.until(number)
        self._await_answers(steps)
        for step in steps:
            if step.step == number:
                self._context.guard.attempt(investigate, step)
            self._tell_once(step)

    def tell_rest(self) -> None:
        """Report all steps that are over when the script ends, after a short wait for a device's outstanding answers."""
        steps = self._context.log.rest()
        self._await_answers(steps)
        for step in steps:
            self._tell_once(step)

    def _await_answers(self, steps: Sequence[OpenStep]) -> None:
        until_s = clock.monotonic_s() + ANSWERS_S
        while any(step.num_owed > 0 for step in steps) and clock.monotonic_s() < until_s:
            self._context.readings.poll()
            threading.Event().wait(0.001)

    def tell_held(self, step: OpenStep) -> None:
        """Report the current step, which is held and not applied, after all steps before it."""
        for before in self._context.log.rest():
            self._tell_once(before)
        self._tell_once(step)

    def _tell_once(self, step: OpenStep) -> None:
        """Report one step with what is known of it by now; if that fails, report at least that it is done."""
        assert step.times is not None, "it is over, or held"
        if step.is_told:
            return
        step.is_told = True
        if not self._context.guard.attempt(self._tell, step, step.times):
            times = StepTimes(float(step.times.seconds), {})
            self._context.guard.attempt(self._tell, OpenStep(step.step, passes=step.passes), times)

    def _tell(self, step: OpenStep, times: StepTimes) -> bool:
        context = self._context
        context.writer.say(
            step.step,
            StepDone(
                seconds=times.seconds,
                phase_seconds=times.phase_seconds,
                micro_steps=step.passes.num_done,
                loss=step.losses.mean(),
                gradient_norm=step.gradients.norm(step.losses.scale),
                learning_rate=step.learning_rate,
                batch=step.batch,
                roots=step.roots,
                nonfinite=self._blamed(step),
                overhead_ratio=context.schedule.overhead_ratio,
                check_interval=context.schedule.plan.check_interval,
                view=step.gradients.view,
                numbers=step.numbers,
            ),
        )
        return True

    def _blamed(self, step: OpenStep) -> list[Nonfinite]:
        """Return the tensors that were not finite if they were applied; otherwise learn which inputs are never finite, such as masks."""
        healthy_steps, found = self._context.inputs.healthy_steps, step.suspects.inputs
        fetched, step.suspects.fetched, step.suspects.call = step.suspects.fetched, [], None
        if not step.suspects.is_applied:
            if not step.suspects.is_skipped and (found or step.suspects.odd):
                healthy_steps.update({entry.name for entry in found} | step.suspects.odd)
            return []
        if not found and not any(entry.where == "input" for entry in step.suspects.tensors):
            found = read([(path, tensor) for path, tensor, version in fetched if tensor._version == version])  # noqa: SLF001
        known = [msgspec.structs.replace(entry, healthy_steps=healthy_steps[entry.name]) for entry in found]
        return self._staged(step.suspects.tensors + known[:MAX_SUSPECTS])

    def _staged(self, found: list[Nonfinite]) -> list[Nonfinite]:
        """Return the same tensors, with the stage of a pipeline that this rank computes, if it computes one."""
        if self._context.inputs.stage is None:
            return found
        stage, is_first = self._context.inputs.stage
        return [
            msgspec.structs.replace(entry, stage=stage, is_received=entry.where == "input" and not is_first)
            for entry in found
        ]

    def tell_census(
        self, optimizers: Sequence[torch.optim.Optimizer], ready_order: Collection[int], *, is_thorough: bool
    ) -> None:
        """Report the census if it changed. A thorough look compares the tensors' identities, any other only their numbers."""
        models = self._context.models
        outline = [len(ready_order), *models.outline(optimizers)]
        if outline == self._outline and not is_thorough:
            return
        self._outline = outline
        known = len(list(models)), models.generation, len(ready_order)
        held = {frozenset(held_by([optimizer])) for optimizer in optimizers}
        if (known, held) == self._told_census or not known[0]:
            return
        for part in list(self._census.take(models, optimizers, list(ready_order))):
            self._context.writer.say(self._context.log.step, part)
        self._told_census = known, held

    def heed_sidecar(self) -> None:
        """Follow the sidecar's orders, print its notices, and report once if it is gone; this is done at most 50 times a second."""
        context, now_s = self._context, clock.monotonic_s()
        if now_s - self._heeded_s < HEED_S:
            return
        self._heeded_s = now_s
        code, doublings = context.writer.page.control()
        context.schedule.thin(doublings if code == CONTROL_THIN else 0)
        if notice := context.writer.page.take_notice():
            say(notice)
        loss = self._sidecar.loss()
        if loss:
            say(f"rank {context.writer.rank} trains unobserved: {loss}")
            context.writer.say(context.log.step, SightLost(what=loss, dropped=context.writer.page.dropped))


def tell_completed_before(context: "Context", optimizer: torch.optim.Optimizer) -> None:
    """Report how many steps the run had completed before this process's first optimizer step; call it once, before that step is applied.

    A script that goes on from a checkpoint does not say so. The Trainer and DeepSpeed count steps, including skipped ones. Otherwise the count is
    taken that most optimizers keep and restore with their moments; neither it nor ours includes steps that a scaler skipped. Nothing is guessed:
    an optimizer without a count, or with a count on a device, for which we would have to wait, gives none.
    """
    found = context.frameworks.count_steps(optimizer)
    count, source = found if found is not None else (_own_count(optimizer), type(optimizer).__name__)
    context.writer.say(context.log.step, FirstStep(completed=count, source=source if count is not None else ""))


def _own_count(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the largest step count in the optimizer's state, as a tensor that was frozen for a while has counted less; None if there is none."""
    counts: list[Any] = [
        state.get("step") for state in (*optimizer.state.values(), *optimizer.param_groups) if isinstance(state, dict)
    ]
    return max((int(value) for value in counts if _is_count(value)), default=None)


def _is_count(value: Any) -> bool:
    if type(value) is torch.Tensor:
        if not value.is_cpu or value.numel() != 1 or value.is_complex():
            return False
        value = value.item()
    # NaN and infinity fail the comparison with their floor.
    return type(value) in (int, float) and value >= 0 and value == value // 1


class SidecarLink:
    """Knows whether the sidecar is alive and reads the page; asking takes a few microseconds."""

    def __init__(self, page: PageWriter) -> None:
        self._page = page
        self._began = clock.monotonic_s()
        self._pid = 0
        self._poll: select.poll | None = None
        self._is_lost = False

    def loss(self) -> str | None:
        """Return why nobody watches this rank any more, once each time that happens; None otherwise."""
        why = self._why()
        is_new = why is not None and not self._is_lost
        self._is_lost = why is not None
        return why if is_new else None

    def _why(self) -> str | None:
        pid, seen_ns = self._page.sidecar()
        if not pid:
            is_late = clock.monotonic_s() - self._began > STARTUP_S
            return "its sidecar did not start" if is_late else None
        if pid != self._pid:
            self._hold(pid)
        if self._poll is None or self._poll.poll(0):
            return f"its sidecar (process {pid}) is gone"
        silent_s = (clock.wall_ns() - seen_ns) / 1e9
        return f"its sidecar (process {pid}) has been silent for {silent_s:.0f} s" if silent_s > SILENT_S else None

    def _hold(self, pid: int) -> None:
        """Hold the process by a descriptor, so that its number cannot be mistaken for a later process's."""
        self._pid, self._poll = pid, None
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
