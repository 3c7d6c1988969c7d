"""Keeps a bad step out of the weights on a device without waiting for the device: a flag in its memory, which the optimizer's own kernels obey.

    host      step 6: read, give flag   step 7: …            step 8: asks, learns of 6, is held
    device    … read 6 ─▶ flag 1 ─▶ step 6 left out    step 7 left out    (step 8 is never given to it)
              the weights are those from before step 6, and stay so until the host has decided

torch's fused optimizers take `found_inf`, a float32 tensor on their device, and leave the step out if it is 1; if it is 0 they end with the same bits as
without it (the kernel returns early or does all it does otherwise; the count of steps has 1 added and 0 subtracted). torch made it for loss scalers. We set ours
before each step and remove it after it. Beside a scaler's own flag:

    the scaler found something      the step is left out as without us; what we read of those gradients says nothing
    it found nothing, and we do     gradients went bad after it looked: our flag is 1

The flag is sticky: once set, all later steps are left out too. It is copied to pinned memory at every step, where the host finds the first step that was not
finite when it next asks. The host waits only for the copies of steps `RUN_AHEAD` ago. A device that is that far behind should still have a whole step queued and
not be slowed by this wait (not measured), while all ranks learn of a bad step before the same later one: otherwise the first rank to be held would keep the others
waiting in the next collective, where no hook asks.

Each rank's flag is computed from its own gradients. Replicas have the same gradients. Shards have not, and do not rely on the flag: see `finite_guard`.
"""

import operator
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holter.rank.undo.side_stream import wait_until
from holter_kernels import SeenTensors
from holter_kernels.devices import current_stream, is_past, obeys_flag, recorded

_device = operator.attrgetter("device")

RUN_AHEAD = 2
"""Number of steps after which the host waits for a device's answer, and after which several ranks act on it."""
NUM_SLOTS = 64
"""Number of answers that may be under way; if a device is further behind, its first bad step may be reported too late."""
TAKING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@dataclass(frozen=True)
class LeftOut:
    """The first step that the device left out."""

    step: int
    is_torn: bool
    """Whether another optimizer of the same step had been applied before."""


@dataclass
class _Answer:
    step: int
    is_torn: bool
    device: torch.device
    place: torch.Tensor
    event: Any
    then: Callable[[], None]

    def is_there(self) -> bool:
        return bool(is_past(self.event, self.device))


def takes_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer obeys the flag, which is so if all of its groups are fused (the other implementations refuse it)."""
    return (
        isinstance(optimizer, TAKING)
        and getattr(optimizer, "_step_supports_amp_scaling", False) is True
        and all(group.get("fused") is True for group in optimizer.param_groups)
    )


def device_of(gradients: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the device on which all of these lie, if its optimizers obey the flag; else None."""
    if type(gradients) is SeenTensors:
        # These lie in host memory.
        return None
    found = set(map(_device, gradients))
    return found.pop() if len(found) == 1 and all(map(obeys_flag, found)) else None


def flag_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor that is 1 if a gradient is not finite, else 0, computed by torch's own operations if none of our kernels has done so."""
    parts = [torch.view_as_real(g) if g.is_complex() else g for g in gradients if g.numel()]
    norms = torch._foreach_norm(parts, torch.inf)  # noqa: SLF001
    bad = torch.stack([~torch.isfinite(norm.float()) for norm in norms])
    return bad.any().to(torch.float32)


class DeviceFlags:
    """The sticky flag on each device of a rank, and the answers that the host has not received yet."""

    def __init__(self) -> None:
        self._sticky: dict[torch.device, torch.Tensor] = {}
        self._slots: dict[torch.device, torch.Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._given: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[torch.Tensor, Any]] = (
            weakref.WeakKeyDictionary()
        )
        """Optimizer -> the flag that we gave it, and its `found_inf` before that (None if it had none)."""
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizer -> its last step that was left to its device to decide."""
        self._answers: deque[_Answer] = deque()
        self._num_given = 0
        self.has_given = False
        """Whether any step was left to a device so far."""
        self._left_out: LeftOut | None = None
        self._untold: Callable[[], None] = lambda: None
        """The callback of the step that was left out, to be called once that is acted on."""

    def give(  # noqa: PLR0913 - a step, named
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        flag: torch.Tensor | None,
        *,
        step: int,
        is_torn: bool,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Let the device decide on the step that this optimizer is about to make.

        `flag` tells whether its gradients are bad; None if nobody read them. `then` is called once the host knows the answer; for the first
        step that was left out, once that is acted on.
        """
        scalers = getattr(optimizer, "found_inf", None)
        with torch.no_grad():
            sticky = self._stick(device, flag, scalers)
            given = sticky if scalers is None else torch.where(sticky > 0, sticky, scalers.to(device))
            place = self._slots[device][self._num_given % NUM_SLOTS]
            place.copy_(sticky, non_blocking=True)
        self._num_given += 1
        self.has_given = True
        self._given[optimizer] = given, scalers
        self._steps[optimizer] = step
        optimizer.found_inf = given
        while len(self._answers) >= NUM_SLOTS:
            # Its place will be overwritten, so we lose whether it was the first bad step; the next answers show that there was one.
            self._answers.popleft().then()
        self._answers.append(_Answer(step, is_torn, device, place, recorded(device), then))

    def _stick(self, device: torch.device, flag: torch.Tensor | None, scalers: torch.Tensor | None) -> torch.Tensor:
        stream = current_stream(device)
        if device not in self._sticky:
            self._sticky[device] = torch.zeros((), dtype=torch.float32, device=device)
            self._slots[device] = torch.zeros(NUM_SLOTS, dtype=torch.float32, pin_memory=True)
        elif self._streams[device] != stream:
            stream.wait_event(self._streams[device].record_event())
        self._streams[device] = stream
        sticky = self._sticky[device]
        if flag is not None:
            own = flag.reshape(()).to(torch.float32)
            if scalers is not None:
                own = torch.where(scalers.to(device).reshape(()) > 0, torch.zeros_like(own), own)
            # In place, so that optimizers that were given this tensor see the change in stream order.
            torch.maximum(sticky, own, out=sticky)
        return sticky

    def take_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Take our flag from the optimizer and restore the one before, because the step is over, however it ended."""
        if not self.has_given:
            return
        given, before = self._given.pop(optimizer, (None, None))
        if given is None or getattr(optimizer, "found_inf", None) is not given:
            return
        if before is None:
            del optimizer.found_inf
        else:
            optimizer.found_inf = before

    def of_scaler(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return the `found_inf` that a loss scaler has given this optimizer, not ours; None if there is none."""
        given, before = self._given.get(optimizer, (None, None))
        found = getattr(optimizer, "found_inf", None)
        return before if found is given else found

    def decides(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Whether it is left to the device to apply this optimizer's step, of which it applies nothing from the first bad step on."""
        return self._steps.get(optimizer) == step

    def take_back_all(self) -> None:
        """Take our flag from every optimizer, because a step raised or nothing is watched any more."""
        for optimizer in list(self._given):
            self.take_back(optimizer)

    def left_out(self) -> LeftOut | None:
        """Return the first step that is known to have been left out; None if none is."""
        while self._answers and self._answers[0].is_there():
            answer = self._answers.popleft()
            if self._left_out is None and bool(answer.place.item()):
                self._left_out, self._untold = LeftOut(answer.step, answer.is_torn), answer.then
            else:
                answer.then()
        return self._left_out

    def act(self) -> None:
        """Let the left-out step be reported, because the rank is about to be held for it. Earlier, a halt would be ordered for a step that no rank reaches."""
        then, self._untold = self._untold, lambda: None
        then()

    def wait(self, step: int, seconds: float) -> bool:
        """Wait until the host has the answers for all steps up to this one; return False if they do not come in time."""
        due = [answer for answer in self._answers if answer.step <= step]
        return not due or wait_until(due[-1].is_there, seconds)

    def forget(self) -> None:
        """Reset all flags, because it was decided to go on: the device leaves nothing out any more."""
        self.take_back_all()
        self.act()
        for answer in self._answers:
            answer.then()
        self._answers.clear()
        self._left_out = None
        self._sticky.clear()
