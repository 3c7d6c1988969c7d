"""The injectors do what they say, and can be taken back."""

import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holter import testing

pytestmark = pytest.mark.slow


def run(code, **how):
    return subprocess.run([sys.executable, "-c", f"from holter import testing\n{code}"], timeout=60, check=False, **how)


def start(code):
    process = subprocess.Popen(
        [sys.executable, "-c", f"from holter import testing\nprint(flush=True)\n{code}"], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    return process


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def seconds_of(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@pytest.fixture
def loader():
    return DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2)


def test_importing_it_imports_no_torch():
    assert run("import sys; sys.exit('torch' in sys.modules)").returncode == 0


def test_every_public_name_is_in_the_page():
    assert [] == [name for name in testing.__all__ if name not in (testing.__doc__ or "")]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("testing.kill()", -signal.SIGKILL),
        ("testing.abort()", -signal.SIGABRT),
        ("import atexit; atexit.register(print, 'words'); testing.leave(7)", 7),
    ],
)
def test_a_process_ends_as_it_says(code, status):
    ended = run(code, capture_output=True)
    assert status == ended.returncode
    assert b"" == ended.stdout


def test_a_suspended_process_is_stopped_until_it_is_resumed():
    process = start("import time; time.sleep(600)")
    testing.suspend(process.pid)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    testing.resume(process.pid)
    until(lambda: psutil.Process(process.pid).status() != psutil.STATUS_STOPPED)
    testing.kill(process.pid)
    assert -signal.SIGKILL == process.wait(timeout=20)


def test_a_whole_group_of_processes_is_refused():
    with pytest.raises(ValueError, match="pid must be that of one process, got 0"):
        testing.kill(0)


@pytest.mark.parametrize("how", ["spin", "sleep_for_ever", "wait_for_lock"])
def test_a_stuck_process_stays_and_its_interpreter_answers(how):
    code = f"import threading, sys\nthreading.Timer(0.5, lambda: print('here', flush=True)).start()\ntesting.{how}()"
    process = start(code)
    assert b"here\n" == process.stdout.readline()
    assert process.poll() is None
    process.kill()
    process.wait()


def test_spinning_takes_as_long_as_it_is_told():
    assert 0.2 <= seconds_of(lambda: testing.spin(0.2))


@pytest.mark.parametrize("is_busy", [False, True])
def test_no_other_thread_runs_while_the_interpreter_lock_is_held(is_busy):
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.005):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.1)
    began = time.perf_counter()
    testing.hold_interpreter_lock(0.6, is_busy=is_busy)
    ended = time.perf_counter()
    stop.set()
    thread.join()
    longest = max(b - a for a, b in zip(ticks, [*ticks[1:], ended], strict=True))
    assert ended - began > 0.2
    assert longest > 0.9 * (ended - began)


def test_a_skipped_collective_is_left_out_once(monkeypatch):
    made = []
    monkeypatch.setattr(dist, "all_reduce", made.append)
    with testing.skip_collective("all_reduce", after=1):
        for number in range(4):
            dist.all_reduce(number)
    dist.all_reduce(4)
    assert [0, 2, 3, 4] == made


def test_an_operation_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no operation 'all_reduces'"):
        testing.skip_collective("all_reduces")


@pytest.mark.slow
def test_forward_and_backward_are_slowed_and_give_the_same_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    x = torch.ones(2, 4)

    def gradients():
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with testing.slow_forward(model[0], 1.5):
        assert seconds_of(lambda: model(x)) >= 1.5
    loss = model(x).sum()
    assert seconds_of(loss.backward) < 1.5
    with testing.slow_backward(model[1], 1.5):
        loss = model(x).sum()
        assert seconds_of(loss.backward) >= 1.5
        assert all(map(torch.equal, expected, gradients()))
    assert seconds_of(gradients) < 1.5


def test_batches_are_slowed_and_stay_the_same(loader):
    expected = [x.tolist() for (x,) in loader]
    with testing.slow_data(loader, 0.05):
        batches = iter(loader)
        assert seconds_of(lambda: next(batches)) >= 0.05
        assert expected == [x.tolist() for (x,) in loader]


def test_workers_are_slowed_too():
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, num_workers=1)
    testing.slow_data(loader, 0.3)
    assert seconds_of(lambda: list(loader)) >= 0.6


def test_a_stalled_loader_waits_until_it_is_let_go(loader):
    injection = testing.stall_loader(loader, after=2)
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(x.tolist() for (x,) in loader))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    injection.undo()
    thread.join(20)
    assert [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]] == seen


def test_a_loader_with_workers_cannot_be_stalled():
    with pytest.raises(ValueError, match="without workers, got one with 2"):
        testing.stall_loader(DataLoader(TensorDataset(torch.arange(4.0)), num_workers=2))


def test_a_stalled_save_hangs_in_its_write_and_saves_when_let_go(tmp_path):
    injection = testing.stall_save(after=1)
    torch.save(1, tmp_path / "first")
    thread = threading.Thread(target=lambda: torch.save({"a": 2}, tmp_path / "second"))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    injection.undo()
    thread.join(20)
    assert {"a": 2} == torch.load(tmp_path / "second")
    torch.save(3, tmp_path / "third")
    assert 3 == torch.load(tmp_path / "third")


def test_what_was_put_over_an_injection_is_left_alone(monkeypatch):
    monkeypatch.setattr(dist, "barrier", lambda: "real")
    injection = testing.skip_collective("barrier")
    inner = dist.barrier
    monkeypatch.setattr(dist, "barrier", lambda: ("over", inner()))
    injection.undo()
    assert ("over", None) == dist.barrier()
    assert ("over", "real") == dist.barrier()
