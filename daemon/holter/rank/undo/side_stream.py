"""Does our work on a device beside the training's: restoring, saving and reading back a state, and the copies of snapshots.

    held      training   … backward of the step ──▶│                    │◀── the next work, if the run goes on
              side                                 └▶ restore save read ─┘
    rescue    training   … a collective that hangs                            none of our work is queued behind it
              side       restore save read                                    or waits for it

A copy to the host waits for all work that its stream was given before: on a stream that hangs, as long as the hang. And what is written beside a stream
that still has work may be overwritten by that work. So a whole save is done inside `beside_training`, whichever framework writes it: meanwhile the thread's
current stream, which `.cpu()`, torch.save and the frameworks' own functions use, is ours.

We make the stream ourselves and take none of torch's pool, from which NCCL takes its own: one of those may be the very stream that hangs.

A held step waits for queued work for `PATIENCE_S` at most: a device that has not finished by then hangs, whatever its host thinks.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

import torch

from holter import clock
from holter.errors import SaveError
from holter_kernels import side_stream
from holter_kernels.devices import current_stream, has_streams, on_stream, recorded

PATIENCE_S = 60.0
POLL_S = 0.002


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices on which these tensors lie, without those that have no streams."""
    return sorted({each.device for each in tensors if has_streams(each.device)}, key=str)


@contextlib.contextmanager
def beside_training(devices: Iterable[torch.device], *, is_hung: bool) -> Iterator[None]:
    """Have this thread use streams of our own; nested use changes nothing.

    `is_hung`: the training's streams may never finish, so we neither wait for them nor make them wait. Otherwise raises SaveError if one does not
    finish in time. On leaving, waits until the work done here is finished.
    """
    pairs = []
    with contextlib.ExitStack() as inside:
        for device in devices:
            training, side = current_stream(device), side_stream(device, "rescue")
            if training == side:
                continue
            if not is_hung:
                queued = recorded(device)
                if not wait_until(queued.query, PATIENCE_S):
                    raise SaveError(f"{device} has not finished what was queued within {PATIENCE_S:.0f} s: it hangs")
                side.wait_event(queued)
            inside.enter_context(on_stream(side, device))
            pairs.append((device, training))
        try:
            yield
        finally:
            for device, training in pairs:
                done = recorded(device)
                if not is_hung:
                    training.wait_event(done)
                wait_until(done.query, PATIENCE_S)


def wait_until(is_true: Callable[[], bool], seconds: float, *, poll_s: float = POLL_S) -> bool:
    """Wait until the condition is true; return False after so many seconds. Only the condition itself may call the device, so that other threads go on."""
    until_s = clock.monotonic_s() + seconds
    while not is_true():
        if clock.monotonic_s() > until_s:
            return False
        threading.Event().wait(poll_s)
    return True
