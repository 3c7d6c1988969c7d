"""What fails in a hook is counted and said once; the loop goes on. What is not ours passes."""

import signal
import sys
import threading

import pytest
import torch
from torch import nn

from holter.rank.guard import Guard
from holter.records import StepDone


def test_a_failing_probe_is_counted_and_said_once_and_training_goes_on(wear, capsys):
    worn = wear()
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    worn.monitor._losses._on_begin = broken
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert [4] == list(worn.monitor.context.guard.failures.values())
    assert 1 == capsys.readouterr().err.count("ZeroDivisionError: a bug of ours")
    assert 4 == len(worn.said(StepDone))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_passes(kind):
    def hook() -> None:
        raise kind

    with pytest.raises(kind):
        Guard().wrap(hook)()


def test_a_hook_returns_nothing():
    assert Guard().wrap(lambda: 42)() is None


def test_seconds_are_counted_once_however_deep_the_hooks_are_nested():
    guard = Guard()
    inner = guard.wrap(lambda: sum(range(100_000)))
    guard.wrap(lambda: [inner() for _ in range(5)])()
    nested = guard.own_s
    inner()
    assert nested > 2 * (guard.own_s - nested)
    assert nested < 50 * (guard.own_s - nested)


def test_while_paused_no_hook_hears_anything():
    guard, heard = Guard(), []
    hook = guard.wrap(lambda: heard.append(1))
    with guard.paused():
        hook()
    hook()
    assert [1] == heard


def test_what_the_scripts_signal_handler_raises_passes():
    class PreemptedError(Exception):
        pass

    def handler(*_: object) -> None:
        raise PreemptedError

    def hook() -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(PreemptedError):
            Guard().wrap(hook)()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_standard_error_that_raises_is_no_reason_to_raise(monkeypatch):
    class Broken:
        def write(self, _: str) -> int:
            raise RuntimeError("not now")

        def flush(self) -> None:
            pass

    def hook() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys, "stderr", Broken())
    guard = Guard()
    guard.wrap(hook)()
    assert [1] == list(guard.failures.values()), "it is counted all the same"


def test_a_thread_of_the_scripts_that_steps_inside_its_own_backward_is_not_the_training(worn):
    """While the training waits for its backward pass."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    worn.monitor.add_model(first)
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
    first(torch.ones(1, 4)).sum().backward()
    mine.step()

    def train_second() -> None:
        second.weight.register_post_accumulate_grad_hook(lambda _: other.step() and None)
        second(torch.ones(1, 4)).sum().backward()

    def meanwhile(_: torch.Tensor) -> None:
        thread = threading.Thread(target=train_second)
        thread.start()
        thread.join()

    output = first(torch.ones(1, 4))
    output.register_hook(meanwhile)
    output.sum().backward()
    mine.step()
    assert [mine] == worn.monitor.optimizers
    assert 2 == len(worn.said(StepDone))
