"""What a rank tells of each step, and the look at its sidecar that goes with it.

before the first step    how many steps the run had completed before this process
when it has changed      the census: which tensors and optimizers there are
a step is complete       StepDone
after every step         what the sidecar orders, what it wants said, and whether it is still there
"""

import os
import select
from collections.abc import Collection, Sequence
from typing import Any

import torch

from holter import clock
from holter.page import CONTROL_THIN, PageWriter
from holter.rank.context import Context
from holter.rank.guard import say
from holter.rank.publish.step_log import OpenStep
from holter.rank.readings.census import CensusTaker
from holter.records import FirstStep, SightLost, StepDone

SILENT_S = 10.0
STARTUP_S = 30.0


class StepReporter:
    """Tells steps and census; one for a rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sidecar = SidecarLink(context.writer.page)
        self._census = CensusTaker(context.models.declared_frozen)
        self._told_census: Any = None
        self._outline: Any = None

    def tell_ready(self) -> None:
        """Steps that are over and whose readings have been answered."""
        for step in self._context.log.ready():
            if not step.is_told:
                self.tell(step)

    def tell(self, step: OpenStep) -> None:
        """One step, with what is known of it by now."""
        assert step.times is not None, "it is over, or held"
        context, step.is_told = self._context, True
        context.writer.say(
            step.step,
            StepDone(
                seconds=step.times.seconds,
                phase_seconds=step.times.phase_seconds,
                micro_steps=step.passes.num_done,
                loss=step.losses.mean(),
                gradient_norm=step.gradients.norm(step.losses.scale),
                learning_rate=step.learning_rate,
                batch=step.batch,
                roots=step.roots,
                nonfinite=step.suspects.tensors if step.suspects.is_applied else [],
                overhead_ratio=context.schedule.overhead_ratio,
                check_interval=context.schedule.plan.check_interval,
                view=step.gradients.view,
                numbers=step.numbers,
            ),
        )

    def tell_census(
        self, optimizers: Sequence[torch.optim.Optimizer], ready_order: Collection[int], *, is_thorough: bool
    ) -> None:
        """If it changed. A thorough look compares identities; between two, only numbers are compared with the last."""
        models = self._context.models
        known = len(list(models)), models.generation, len(ready_order)
        outline = known, [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        if outline == self._outline and not is_thorough:
            return
        self._outline = outline
        held = {frozenset([id(p) for g in optimizer.param_groups for p in g["params"]]) for optimizer in optimizers}
        if (known, held) == self._told_census or not known[0]:
            return
        self._told_census = known, held
        for part in self._census.take(models, optimizers, list(ready_order)):
            self._context.writer.say(self._context.log.step, part)

    def heed_sidecar(self) -> None:
        """Do what it orders, print what it wants printed, and say so once if nobody watches any more."""
        context = self._context
        context.schedule.thin(self._sidecar.thinning())
        notice = self._sidecar.notice()
        if notice:
            say(notice)
        loss = self._sidecar.loss()
        if loss:
            say(f"rank {context.writer.rank} trains unobserved: {loss}")
            context.writer.say(context.log.step, SightLost(what=loss, dropped=context.writer.page.dropped))


def tell_completed_before(context: Context, optimizer: torch.optim.Optimizer) -> None:
    """How far the run had come before this process made its first optimizer step; told once, before that step is applied.

    A script that goes on from a checkpoint says it to nobody. The Trainer and DeepSpeed count steps, skipped ones included. Else it is the count
    that most optimizers keep with their moments, which comes back with them; a step that a scaler skips is in no such count, nor in ours.
    Nothing is guessed: an optimizer without a count, or with one on a device, which we would have to wait for, says nothing.
    """
    found = context.frameworks.count_steps(optimizer)
    count, source = found if found is not None else (_own_count(optimizer), type(optimizer).__name__)
    context.writer.say(context.log.step, FirstStep(completed=count, source=source if count is not None else ""))


def _own_count(optimizer: torch.optim.Optimizer) -> int | None:
    """The largest count in its state: what was frozen for a while has counted less. None: it counts nothing."""
    counts: list[Any] = [
        state.get("step") for state in (*optimizer.state.values(), *optimizer.param_groups) if isinstance(state, dict)
    ]
    return max((int(value) for value in counts if _is_count(value)), default=None)


def _is_count(value: Any) -> bool:
    if type(value) is torch.Tensor:
        if not value.is_cpu or value.numel() != 1 or value.is_complex():
            return False
        value = value.item()
    # NaN and infinity are equal to no floor of theirs.
    return type(value) in (int, float) and value >= 0 and value == value // 1


class SidecarLink:
    """Reads what the sidecar left on the page; a few microseconds."""

    def __init__(self, page: PageWriter) -> None:
        self._page = page
        self._began = clock.monotonic_s()
        self._pid = 0
        self._poll: select.poll | None = None
        self._is_lost = False

    def thinning(self) -> int:
        """How many doublings less often the rank shall compare."""
        code, argument = self._page.control()
        return argument if code == CONTROL_THIN else 0

    def notice(self) -> str | None:
        """A sentence for the job's log."""
        return self._page.take_notice()

    def loss(self) -> str | None:
        """Why nobody watches any more; said once, until it is watched again."""
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
        """By a descriptor, so that the number cannot be taken for another process's."""
        self._pid, self._poll = pid, None
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
