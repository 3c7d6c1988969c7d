"""The weights against their own history: what a step changes, and what changes without one.

    begin of backward     what is left in the gradients
    before the optimizer  the gradients that it gets; weights; a sample of both
    after the optimizer   weights again, and what became of the sample

Each rank looks at its own tensors. Most steps only take a glance; a step of comparison looks for gradients that are None; every fourth of those, or
fewer, is a vital step, which reads the values. Vital steps are frequent at first, then as rare as their share of the budget demands, and ranks take
turns. `records.Vitals` says what is reported.
"""

import contextlib
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from holter import clock
from holter.rank.context import Context
from holter.rank.models import has_none, held_by
from holter.rank.readings.checkup import (
    Checkup,
    CheckupMemory,
    UnheldParameters,
    rates_of,
    readable,
    resting_by_schedule,
    trained_by,
)
from holter.rank.readings.fused_pass import TableOutline
from holter.rank.readings.histories import TOLD_CHECKS, FingerprintHistory, IdleParameters, LeftoverGradients, prints
from holter.rank.readings.samples import is_plain_moment, local, strided
from holter.rank.search import living

LEAST_FROZEN_BYTES = 16 << 20
"""Bytes of frozen tensors that are read at a vital step, if the trained ones have fewer."""
NUM_DENSE = 8
"""Number of the first comparisons that are all vital, if that does not cost too much: what is wrong from the start is seen at the start."""
LEAST_STRIDE = 4
"""Number of comparisons from one vital step to the next, while comparisons are not rare themselves."""
RARE_STEPS = 64
MAX_STRIDE = 1024
MAX_SPEAKERS = 64
"""Number of ranks that report their vitals at one step."""
BUDGET_SHARE = 0.1
"""Share of the budget that the vitals may take."""
DENSE_FACTOR = 4.0
"""What a vital step may take at the start, as a multiple of one step's whole budget."""
NUM_FLOORS = 4.0
"""Least time that counts as one step's budget, in floors of the budget: a run of very short steps is looked at too."""
MAX_RESTING, NUM_RESTING = 64, 256
"""Number of tensors held by no optimizer whose movement is followed, and the number of elements sampled of each."""
UNHELD_STEPS = 8
"""Number of steps after which an optimizer that has not stepped is looked for."""
NUM_WARM = 2
"""Number of vital steps before their cost is known."""
NUM_COSTS = 5
NUM_STEPS = 32


class VitalsProbe:
    """Looks at what a step changes, and at what changes between steps."""

    def __init__(
        self, context: Context, *, budget: float = 1.0, floor_s: float = 0.0, on_idle: Callable[[], None] = lambda: None
    ) -> None:
        self._context = context
        self._on_idle = on_idle
        self._idle = IdleParameters()
        self._leftovers = LeftoverGradients(context)
        self._schedule = VitalsSchedule(
            rank=context.writer.rank, world_size=context.world_size, budget=budget, floor_s=floor_s
        )
        self._memory = CheckupMemory(self._idle, self._leftovers, FingerprintHistory(), FingerprintHistory())
        self._checkup: Checkup | None = None
        self._vital_step = -2
        self._remembered_step = -1
        """The step after which the state history is read, even if no model shows the trained tensors: ZeRO's partitions are in none."""
        self._frozen_place = 0
        self._known_optimizers: set[weakref.ref[torch.optim.Optimizer]] = set()
        self._ever_held: set[int] = set()
        self._resting: set[int] | None = None
        """Ids of parameters held by optimizers that had not stepped when they were searched for; None before that search."""
        self._rested: dict[int, torch.Tensor] = {}
        """Samples of parameters that no optimizer holds, as they were first seen, by the parameter's id."""
        self._moved_by_hand: set[int] = set()
        self._told_news: set[str] = set()
        self._spent_s = self._device_s = 0.0
        self._trained_state: list[int] = []
        self._trained_list: list[tuple[str, Any]] = []
        context.models.on_forget.append(self._forget)

    def see_gradients(self, named: Callable[[], Sequence[tuple[str, Any]]], table: Any, seen: TableOutline) -> None:
        """Look for zero gradients in a table that another probe has read."""
        if seen.has_zero or self._idle.has_zero:
            self._idle.see(self._context.log.step, named(), table)

    def begin_backward(self) -> None:
        """Read what is left in the gradients when the first backward pass of a step begins."""
        if self._context.schedule.plan.is_check(self._context.log.step):
            self._leftovers.take()

    def glance(self, optimizers: Sequence[torch.optim.Optimizer], *, is_check: bool) -> None:
        """Take a glance at any step that is about to be applied."""
        context = self._context
        step = context.log.step
        self._checkup = None
        context.readings.kept.clear()
        self._schedule.tick()
        self._idle.glance()
        self._learn_optimizers(optimizers)
        if is_check:
            return
        if self._vital_step == step - 1:
            with self._timed():
                self._look_between(step, optimizers)
        if self._has_news(step) and context.log.micro_step and not self._is_skipping(optimizers):
            self._begin(optimizers)

    def before_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Look for missing gradients at a step of comparison that is about to be applied, and begin a checkup if one is due."""
        context = self._context
        step = context.log.step
        # Without a backward pass before it, the step computes its gradients itself, in a closure.
        if not context.log.now.passes.num_done:
            return
        is_vital = self._schedule.is_vital(step, context.schedule.plan.check_interval)
        self._remembered_step = step if is_vital else -1
        if self._is_skipping(optimizers):
            return
        answers, is_missing = context.gradient_answers, False
        for each in optimizers:
            is_missing |= has_none(answers.applied_by(each))
        self._idle.look(step, self._trained(optimizers), has_none=is_missing)
        self._leftovers.judge(optimizers)
        if self._has_news(step) or is_vital:
            self._begin(optimizers)

    def _is_skipping(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether a fused optimizer will do nothing because the loss scaler found a non-finite gradient, or may: on a device nobody knows yet."""
        for optimizer in optimizers:
            if getattr(optimizer, "found_inf", None) is None:
                continue
            flag = self._context.hold.flags.of_scaler(optimizer)
            if isinstance(flag, torch.Tensor) and (not flag.is_cpu or bool(flag)):
                return True
        return False

    def _begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        trained = trained_by(self._context.models, optimizers) if is_plain_moment() else []
        if trained:
            with self._timed():
                frozen = self._frozen(trained, optimizers)
                self._checkup = Checkup(self._context, self._memory, trained, frozen, rates_of(optimizers))
                self._checkup.unheld = self._unheld(trained)
                self._checkup.resting = resting_by_schedule(optimizers)
                self._checkup.begin()

    def after_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """End the checkup after the step was applied, and read the state history if that is due."""
        step = self._context.log.step
        checkup, self._checkup = self._checkup, None
        is_ours, is_remembered = checkup is not None and checkup.step == step, self._remembered_step == step
        if not is_ours and not is_remembered:
            return
        with self._timed():
            if checkup is not None and is_ours:
                checkup.end()
                self._vital_step = step
            if is_remembered:
                self._remember(step, optimizers)
        # A device's time is known when it has answered; this is mostly the time of the last vital step.
        device_s = self._context.readings.vitals_s
        self._schedule.spend(self._spent_s + device_s - self._device_s)
        self._spent_s, self._device_s = 0.0, device_s

    def _remember(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read a part of the state after this step, for a halt that may come."""
        history = self._context.state_history
        chosen = history.choose(self._context.models, optimizers) if is_plain_moment() else []
        if chosen:
            entries = [entry for entry, _ in chosen]
            self._context.read(
                "vitals.state", [t for _, t in chosen], lambda table: history.learn(step, entries, table)
            )

    def _learn_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if (reference := weakref.ref(optimizer)) not in self._known_optimizers:
                self._known_optimizers = {known for known in self._known_optimizers if known() is not None} | {
                    reference
                }
                self._ever_held |= held_by([optimizer])

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Measure the time that vitals take. They have their own schedule; the main one counts it as reading, not as a cost of every step."""
        context = self._context
        started, reading_s = clock.thread_s(), context.reading_s
        try:
            yield
        finally:
            elapsed = clock.thread_s() - started
            self._spent_s += elapsed
            context.reading_s = max(context.reading_s, reading_s + elapsed)

    def _has_news(self, step: int) -> bool:
        """Whether there is something to report that there was not at the last look."""
        news = {"idle"} if self._idle.is_long(step) else set()
        if news:
            self._on_idle()
        if (num_checks := self._leftovers.num_checks) >= TOLD_CHECKS[0]:
            news |= {f"uncleared {num}" for num in TOLD_CHECKS if num_checks >= num}
        if self._memory.moved_names:
            news.add("moved")
        is_new = bool(news - self._told_news)
        self._told_news = news
        return is_new

    def _look_between(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read, after a vital step, whether the weights that it left are still unchanged."""
        trained = trained_by(self._context.models, optimizers)
        chosen = [(name, p) for name, p in trained if readable(p)]
        if not chosen:
            return

        # A device answers later, and the script may free its parameters before that.
        left = [(name, weakref.ref(p)) for name, p in chosen]

        def learn(table: Any) -> None:
            moved = self._memory.trained.moved_since(step, [p() for _, p in left], prints(table))
            self._memory.moved_names += [left[place][0] for place in moved]

        self._context.read("vitals.between", [p for _, p in chosen], learn)

    def _trained(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, Any]]:
        """Return the parameters that these optimizers train; they are looked for again when models or optimizers have changed."""
        models = self._context.models
        state = models.outline(optimizers)
        if state != self._trained_state:
            self._trained_state, self._trained_list = state, trained_by(models, optimizers)
        return self._trained_list

    def _forget(self) -> None:
        """Drop all parameters, because the script let go of a model: we must not hold its memory."""
        self._trained_state, self._trained_list = [], []
        self._rested.clear()
        self._moved_by_hand.clear()

    def _unheld(self, trained: Sequence[tuple[str, Any]]) -> UnheldParameters:
        """Return the parameters with a gradient that no optimizer which ever stepped holds, in a model that is trained or wrapped for training."""
        held = {id(p) for _, p in trained}
        found: dict[int, str] = {}
        wrapped: dict[int, str] = {}
        for model in self._context.models.active():
            is_trained = any(id(p) in held for _, p in model.parameters)
            # Whoever wraps a model wants it trained; parameters of a narrow dtype may have their master copies in an optimizer.
            if is_trained or (model.ddp is not None and not any(id(p) in self._ever_held for p in model.tensors)):
                (found if is_trained else wrapped).update(
                    (id(p), name)
                    for name, p in model.parameters
                    if p.requires_grad
                    and p.grad is not None
                    and id(p) not in self._ever_held
                    and (is_trained or p.dtype is torch.float32)
                    and self._rests(p)
                )
        if self._context.log.step < UNHELD_STEPS or not (found or wrapped):
            return UnheldParameters(tuple(found.values()))
        # A search takes a fraction of a second: one is enough, once every optimizer has had its turn.
        if self._resting is None:
            self._resting = held_by(living(torch.optim.Optimizer)) - self._ever_held
        if not found:
            unheld = tuple(name for key, name in wrapped.items() if key not in self._resting)
            return UnheldParameters(unheld, None, is_wrapped=bool(unheld))
        return UnheldParameters(tuple(found.values()), bool(found.keys() & self._resting))

    def _rests(self, p: Any) -> bool:
        """Whether a parameter has a nonzero gradient and does not move; True for one on a device, which is not asked.

        A parameter that the script moves by hand, or that the loss weighs with zero, is left out on purpose.
        """
        if id(p) in self._moved_by_hand:
            return False
        is_followed = id(p) in self._rested or len(self._rested) < MAX_RESTING
        if not is_followed or not p.is_cpu or p.grad.is_sparse or not p.numel():
            return True
        sample = strided(local(p.detach()), NUM_RESTING).clone()
        last = self._rested.setdefault(id(p), sample)
        if last.shape == sample.shape and not torch.equal(last, sample):
            self._moved_by_hand.add(id(p))
            return False
        return bool(local(p.grad).count_nonzero())

    def _frozen(
        self, trained: Sequence[tuple[str, Any]], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[tuple[str, Any]]:
        """Return this step's share of the frozen parameters; those that rest while another optimizer steps are not among them."""
        held = held_by(optimizers)
        every = [
            (name, p)
            for model in self._context.models.all()
            for name, p in model.parameters
            if not p.requires_grad and (id(p) in held or id(p) not in self._ever_held) and readable(p)
        ]
        room = max(sum(p.numel() * p.element_size() for _, p in trained), LEAST_FROZEN_BYTES)
        start = self._frozen_place if self._frozen_place < len(every) else 0
        chosen: list[tuple[str, Any]] = []
        for name, p in every[start:] + every[:start]:
            room -= p.numel() * p.element_size()
            if room < 0 and chosen:
                break
            chosen.append((name, p))
        self._frozen_place = (start + len(chosen)) % max(len(every), 1)
        return chosen


class VitalsSchedule:
    """Decides at which steps of comparison the vitals are taken, by their measured cost."""

    def __init__(self, *, rank: int, world_size: int, budget: float, floor_s: float) -> None:
        self._rank = rank
        self._turns = -(-world_size // MAX_SPEAKERS)
        self._budget, self._floor_s = budget, floor_s
        self._costs_s: deque[float] = deque(maxlen=NUM_COSTS)
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._last_s: float | None = None
        self._num_checks = 0

    def tick(self) -> None:
        """Measure the time between two steps, at the beginning of each."""
        now = clock.monotonic_s()
        if self._last_s is not None:
            self._steps_s.append(now - self._last_s)
        self._last_s = now

    def spend(self, seconds: float) -> None:
        """Learn how long one vital step took."""
        self._costs_s.append(seconds)

    def is_vital(self, step: int, check_interval: int) -> bool:
        """Whether this step of comparison is vital; must be called once at each of them."""
        self._num_checks += 1
        number, stride = step // check_interval, max(min(LEAST_STRIDE, RARE_STEPS // check_interval), 1)
        if self._num_checks > NUM_DENSE and len(self._costs_s) >= NUM_WARM and number % stride:
            return False
        room_s = max(self._budget * statistics.median(self._steps_s or [0.0]), NUM_FLOORS * self._floor_s)
        cost_s = min(self._costs_s, default=0.0)
        # The cost of the first vital steps is mostly work that is done once, and says little about the others.
        if len(self._costs_s) < NUM_WARM or (self._num_checks <= NUM_DENSE and cost_s <= DENSE_FACTOR * room_s):
            return number % self._turns == self._rank % self._turns
        while stride < MAX_STRIDE and cost_s > BUDGET_SHARE * room_s * stride * check_interval:
            stride *= 2
        return number % stride == 0 and number // stride % self._turns == self._rank % self._turns
