"""What keeps a step out of the weights on a device without waiting for it: a flag in its memory, which the optimizer's own kernels obey.

    host      step 6: read, give flag   step 7: …            step 8: asks, learns of 6, stands
    device    … read 6 ─▶ flag 1 ─▶ step 6 left out    step 7 left out    (step 8 is never given to it)
              the weights are those from before step 6, and stay so until the host has decided

torch's fused optimizers take `found_inf`, a float32 tensor of their device, and leave the step out where it is 1; where it is 0 they end with the same bits as
without it (the kernel returns early or does all it does otherwise; the count of steps has 1 added and 0 subtracted). It is there for loss scalers. Ours is set
before each step and taken away after it. Beside a scaler's own:

    the scaler found something      it leaves the step out as ever; what we read of those gradients says nothing
    it found nothing, and we do     gradients went bad after it looked: ours is 1

The flag is sticky: once set, all later steps are left out too. It is copied to pinned memory at every step, where the host finds the first step that was not
finite when it next asks; nobody waits for that, but for steps `RUN_AHEAD` ago. A device that is that far behind should have a whole step queued and not notice (not measured),
while all ranks learn of a step before the same later one: the first to stand would else keep the others waiting in the next collective, where no hook asks.

Each rank's flag is of its own gradients. Replicas have the same. Shards have not, and are not left to it: see `finite_guard`.
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
"""Steps after which the answer is waited for, and acted on where there are several ranks."""
NUM_SLOTS = 64
"""Answers that may be under way; of a device further behind the first bad step may be told too late."""
TAKING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@dataclass(frozen=True)
class LeftOut:
    """The first step that the device left out."""

    step: int
    is_torn: bool
    """Another optimizer of the same step had been applied before."""


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
    """Whether this optimizer leaves a step out by itself: all of its groups are fused (the other implementations refuse the flag)."""
    return (
        isinstance(optimizer, TAKING)
        and getattr(optimizer, "_step_supports_amp_scaling", False) is True
        and all(group.get("fused") is True for group in optimizer.param_groups)
    )


def device_of(gradients: Sequence[torch.Tensor]) -> torch.device | None:
    """The one device on which all of them lie and whose optimizers obey the flag; None: there is none."""
    if type(gradients) is SeenTensors:
        # In host memory.
        return None
    found = set(map(_device, gradients))
    return found.pop() if len(found) == 1 and all(map(obeys_flag, found)) else None


def flag_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """1 if one of them is not finite, else 0, by torch's own operations: for when no kernel of ours has written it."""
    parts = [torch.view_as_real(g) if g.is_complex() else g for g in gradients if g.numel()]
    norms = torch._foreach_norm(parts, torch.inf)  # noqa: SLF001
    bad = torch.stack([~torch.isfinite(norm.float()) for norm in norms])
    return bad.any().to(torch.float32)


class DeviceFlags:
    """The sticky flag of each device of a rank, and what the host has not learnt of it yet."""

    def __init__(self) -> None:
        self._sticky: dict[torch.device, torch.Tensor] = {}
        self._slots: dict[torch.device, torch.Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._given: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[torch.Tensor, Any]] = (
            weakref.WeakKeyDictionary()
        )
        """What an optimizer has of ours, and what stood there before."""
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """The last step of each optimizer that its device decides on."""
        self._answers: deque[_Answer] = deque()
        self._num_given = 0
        self.has_given = False
        """Some step was left to a device."""
        self._left_out: LeftOut | None = None
        self._untold: Callable[[], None] = lambda: None
        """Of the step that was left out: who is called once it is acted on."""

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
        """Let the device decide on the step that this optimizer is about to make. `flag`: of its gradients; None: nobody read them.

        `then` is called once the host knows, of a step that was left out first once it is acted on.
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
            # Its place is written again: whether it was the first bad one is not known any more, the next ones tell.
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
            # In place: whoever was given it sees it in stream order.
            torch.maximum(sticky, own, out=sticky)
        return sticky

    def take_back(self, optimizer: torch.optim.Optimizer) -> None:
        """The step is over, however it ended."""
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
        """What a loss scaler has given this optimizer; ours is not it."""
        given, before = self._given.get(optimizer, (None, None))
        found = getattr(optimizer, "found_inf", None)
        return before if found is given else found

    def decides(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Whether it is left to the device what of this optimizer's step is applied: nothing, from the first bad one on."""
        return self._steps.get(optimizer) == step

    def take_back_all(self) -> None:
        """A step raised, or nothing is watched any more."""
        for optimizer in list(self._given):
            self.take_back(optimizer)

    def left_out(self) -> LeftOut | None:
        """The first step that is known to have been left out."""
        while self._answers and self._answers[0].is_there():
            answer = self._answers.popleft()
            if self._left_out is None and bool(answer.place.item()):
                self._left_out, self._untold = LeftOut(answer.step, answer.is_torn), answer.then
            else:
                answer.then()
        return self._left_out

    def act(self) -> None:
        """The rank is about to stand for the step that was left out: it may be told. Earlier, a halt would be ordered for a step that nobody comes to."""
        then, self._untold = self._untold, lambda: None
        then()

    def wait(self, step: int, seconds: float) -> bool:
        """Wait until the host knows of all steps up to this one; False: not in time."""
        due = [answer for answer in self._answers if answer.step <= step]
        return not due or wait_until(due[-1].is_there, seconds)

    def forget(self) -> None:
        """It was decided to go on: the device leaves nothing out any more."""
        self.take_back_all()
        self.act()
        for answer in self._answers:
            answer.then()
        self._answers.clear()
        self._left_out = None
        self._sticky.clear()
