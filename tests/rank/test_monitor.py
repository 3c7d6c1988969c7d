"""Put on, taken off, and left behind by a forked child."""

import os
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holter.records import StepDone

PATCHED = [
    (torch, "save"),
    (torch.jit, "script"),
    (torch.jit, "trace"),
    (torch.autograd, "backward"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "update"),
    (torch, "clear_autocast_cache"),
    (torch.nn.utils, "clip_grad_norm_"),
    (_BaseDataLoaderIter, "__next__"),
    (sys, "excepthook"),
]


def hooks() -> list[int]:
    registries = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        torch_module._global_module_registration_hooks,
    ]
    return [len(registry) for registry in registries]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_taking_it_off_leaves_torch_as_it_was(wear):
    before, before_hooks = [getattr(owner, name) for owner, name in PATCHED], hooks()
    model = nn.Linear(4, 1)
    worn = wear()
    worn.monitor.add_model(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert all(was is not getattr(owner, name) for was, (owner, name) in zip(before, PATCHED, strict=True))
    worn.monitor.uninstall()
    assert all(was == getattr(owner, name) for was, (owner, name) in zip(before, PATCHED, strict=True))
    assert before_hooks == hooks()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_after_it_is_taken_off_nothing_is_said(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    beat, num_said = worn.reader.heartbeat(), len(worn.said(object))
    worn.monitor.uninstall()
    train(model, optimizer)
    assert (beat, num_said) == (worn.reader.heartbeat(), len(worn.said(object)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_writes_nothing(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    beat, num_said = worn.reader.heartbeat(), len(worn.said(object))
    child = os.fork()
    if child == 0:
        try:
            train(model, optimizer, 3)
            torch.save({}, os.devnull)
        finally:
            os._exit(0)
    assert 0 == os.waitpid(child, 0)[1]
    assert (beat, num_said) == (worn.reader.heartbeat(), len(worn.said(object)))
    train(model, optimizer)
    assert 2 == len(worn.said(StepDone))


def test_a_model_is_found_without_being_told(worn):
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    assert model in [found.root for found in worn.monitor.context.models]
    assert not any(found.root in (model[0], model[1]) for found in worn.monitor.context.models)
    assert model._forward_hooks


def test_a_model_told_twice_is_one(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    worn.monitor.add_model(model)
    assert 1 == len(list(worn.monitor.context.models))
    assert 1 == len(model._forward_hooks)


def test_what_is_watched_is_not_kept_alive(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    weight = weakref.ref(model.weight)
    del model, optimizer
    assert weight() is None, "its memory is the script's to use again, before any hook runs"
    assert [] == list(worn.monitor.context.models)
    assert [] == worn.monitor.steps.optimizers


def test_a_script_without_a_module_is_not_searched_at_every_step(worn):
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    searches = []
    worn.monitor.context.models.discover = lambda: searches.append(1) or []
    for _ in range(6):
        weight.sum().backward()
        optimizer.step()
    assert len(searches) <= 3


THREADS = """
    import sys, threading, torch
    from holter.page import PageWriter
    from holter.rank.monitor import Monitor
    from holter.rank.context import ObservationWriter

    page = PageWriter.create(rank=0, world_size=1, pid=1, started_ticks=1, ring_bytes=1 << 20)
    Monitor(ObservationWriter(page, 0), world_size=1, budget=1.0, floor_s=0.0).install()

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(400):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    model = lambda: torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
    threads = [threading.Thread(target=train, args=(model(),)) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print("trained")
"""


@pytest.mark.release
@pytest.mark.slow
def test_training_in_several_threads_survives():
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(THREADS)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (0, "trained\n") == (ended.returncode, ended.stdout)


def test_a_thread_that_does_not_train_disturbs_nothing(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    stop = threading.Event()

    def idle() -> None:
        while not stop.wait(0.001):
            torch.ones(3).sum()

    thread = threading.Thread(target=idle)
    thread.start()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 20)
    stop.set()
    thread.join()
    assert list(range(20)) == [observation.step for observation in worn.said(StepDone)]


def test_nothing_grows_with_the_number_of_steps(wear):
    # A budget that is never reached: the dials stay where they are, and so does what is read.
    worn = wear(budget=1e9)
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    context = worn.monitor.context

    def sizes() -> list[int]:
        kept = [context.readings._passes, context.readings._open, context.log._untold, worn.monitor._calls._handles]
        return [len(each) for each in [*kept, worn.monitor.steps._known]]

    train(model, optimizer, 70)
    early = sizes()
    train(model, optimizer, 500)
    assert early == sizes()
