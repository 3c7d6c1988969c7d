"""The native threads: same results whatever their number, safe beside other callers, gone and back after a fork."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from holter_kernels import Pass, set_num_threads, summarize


@pytest.fixture(autouse=True)
def _one_thread_afterwards():
    yield
    set_num_threads(1)


def columns(tensors: list[torch.Tensor]) -> bytes:
    table = summarize(tensors, "exact")
    return np.array(list(table)).tobytes() + table.histogram.tobytes()


def test_results_are_bit_equal_for_any_number_of_threads() -> None:
    tensors = [
        torch.randn(n).to(dtype) for n in (1, 5000, 1_000_003) for dtype in (torch.float32, torch.bfloat16, torch.uint8)
    ]
    expected = columns(tensors)
    for num_threads in (2, 3, 8):
        set_num_threads(num_threads)
        assert expected == columns(tensors)


@pytest.mark.slow
def test_no_more_threads_than_asked_for() -> None:
    program = """
import os, torch, holter_kernels
torch.set_num_threads(1)
x = [torch.randn(4_000_000)]
holter_kernels.summarize(x)
before = len(os.listdir("/proc/self/task"))
holter_kernels.set_num_threads(3)
for _ in range(5): holter_kernels.summarize(x)
after = len(os.listdir("/proc/self/task"))
assert after - before == 2, (before, after)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_callers_on_many_threads_do_not_disturb_each_other() -> None:
    set_num_threads(2)
    tensors = [[torch.full((300_000,), float(k))] for k in range(4)]
    expected = [columns(mine) for mine in tensors]
    wrong: list[int] = []

    def work(k: int) -> None:
        wrong.extend(k for _ in range(20) if columns(tensors[k]) != expected[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert [] == wrong


def test_the_interpreter_lock_is_released() -> None:
    x = torch.randn(30_000_000)
    fused = Pass([x])
    assert 10 < max(
        _ticks_of_another_thread(lambda: fused.start([x])) for _ in range(20)
    )  # a busy machine may leave it no core once
    assert 0 == _ticks_of_another_thread(lambda: sum(range(1_000_000)))


def _ticks_of_another_thread(work: Callable[[], object]) -> int:
    """How often another thread had its turn, where turns are only given up, never taken."""
    ticks, stop, usual_s = 0, threading.Event(), sys.getswitchinterval()

    def count() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)

    ticker = threading.Thread(target=count)
    sys.setswitchinterval(60)
    try:
        ticker.start()
        before = ticks
        work()
        return ticks - before
    finally:
        stop.set()
        sys.setswitchinterval(usual_s)
        ticker.join()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_neither_hangs_nor_lies() -> None:
    set_num_threads(2)
    tensors = [torch.randn(2_000_000)]
    expected = columns(tensors)
    child = os.fork()
    if child == 0:
        try:
            same = columns(tensors) == expected == columns(tensors)
        except BaseException:  # noqa: BLE001
            same = False
        os._exit(0 if same else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hung for 30 s")
    assert 0 == os.waitstatus_to_exitcode(status)
    assert expected == columns(tensors)


def test_fewer_than_one_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        set_num_threads(0)
