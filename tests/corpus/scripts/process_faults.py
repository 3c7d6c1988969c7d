"""One rank is stopped, ends or gets stuck, in the way that the argument says; its peers wait for it in the next collective."""

import ctypes
import os
import re
import signal
import sys
import threading
import time

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start, work
from torch.nn.functional import cross_entropy


def suspend() -> None:
    """As a debugger, or a batch system that makes room."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    """As the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def abort() -> None:
    """As an assertion in native code."""
    os.abort()


def leave() -> None:
    """No exception, no last words."""
    os._exit(7)


def leave_quietly() -> None:
    """As if all were done."""
    os._exit(0)


def spin() -> None:
    """A condition that never comes true."""
    tries = 0
    while tries >= 0:
        tries += 1


def sleep() -> None:
    """A poll for something that nobody writes."""
    while not os.path.exists("/nonexistent/ready"):  # noqa: PTH110
        time.sleep(0.2)


def wait_for_lock() -> None:
    """A lock that this thread holds already."""
    lock = threading.Lock()
    with lock:
        lock.acquire()


def wait_in_native_code() -> None:
    """A library's call that never returns and keeps the interpreter lock."""
    ctypes.PyDLL(None).sleep(3600)


def count_in_native_code() -> None:
    """One builtin that takes for ever: it never lets go of the interpreter lock either."""
    sum(range(10**15))


def match_in_native_code() -> None:
    """A regular expression that tries every way to split the text."""
    re.match(r"(a|aa)+$", "a" * 4000 + "b")


def spin_in_forward() -> None:
    """Inside the model's own code: see the hook below."""


HOWS = (
    suspend, kill, abort, leave, leave_quietly, spin, sleep, wait_for_lock, wait_in_native_code, count_in_native_code,
    match_in_native_code, spin_in_forward,
)  # fmt: skip

if __name__ == "__main__":
    arguments = options(*(how.__name__ for how in HOWS), steps=60)
    rank = start()
    fault = getattr(sys.modules[__name__], arguments.how)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        is_now = step == arguments.at and rank == arguments.culprit and not arguments.healthy
        x, y = batch(rank, step)
        work()
        optimizer.zero_grad()
        if is_now and fault is spin_in_forward:
            net.block.register_forward_pre_hook(lambda *_: spin())
        elif is_now:
            fault()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    finish()
