"""Memory that the host cannot read, blocks that are reused at once, pinned memory, copies."""

import ctypes
import os
import signal

import fake_cuda
import pytest
import torch

pytestmark = pytest.mark.device


def test_the_host_cannot_read_the_device() -> None:
    child = os.fork()
    if child == 0:
        x = torch.ones(3, device="cuda")
        fake_cuda.drain()
        ctypes.string_at(x.data_ptr(), 4)
        os._exit(0)
    assert -signal.SIGSEGV == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_host_can_read_pinned_memory() -> None:
    host = torch.empty(3, pin_memory=True)
    host.copy_(torch.full((3,), 2.0, device="cuda"), non_blocking=True)
    fake_cuda.drain()
    assert [2.0] * 3 == host.tolist()


def test_freed_memory_is_reused_at_once_by_its_stream() -> None:
    x = torch.ones(1000, device="cuda")
    address = x.data_ptr()
    del x
    assert address == torch.empty(1000, device="cuda").data_ptr()


def test_memory_that_nobody_wrote_holds_nan() -> None:
    assert torch.empty(100, device="cuda").isnan().all().item()
    assert torch.empty(100, device="cuda", dtype=torch.bfloat16).isnan().all().item()


def test_who_reads_freed_memory_sees_nan_and_only_from_then_on() -> None:
    side = torch.cuda.Stream()
    for is_too_late in (False, True):
        x = torch.ones(1000, device="cuda")
        ready = torch.cuda.current_stream().record_event()
        side.wait_event(ready)
        with fake_cuda.closed(side if is_too_late else None):
            with torch.cuda.stream(side):
                total = torch.zeros((), device="cuda")
                total += x.sum()
            if not is_too_late:
                torch.cuda.current_stream().wait_stream(side)
            del x
            if is_too_late:
                torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(side):
            assert is_too_late == total.isnan().item()


def test_record_stream_keeps_a_block_until_the_other_stream_is_through() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(1000, device="cuda")
    address = x.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with fake_cuda.closed(side):
        with torch.cuda.stream(side):
            total = x.sum()
        x.record_stream(side)
        del x
        assert address != torch.empty(1000, device="cuda").data_ptr()
        torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(side):
        assert 1000.0 == total.item()
    assert address in {block.data_ptr() for block in [torch.empty(1000, device="cuda") for _ in range(2)]}


def test_memory_is_accounted_as_torch_does_it() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000, device="cuda")
    assert 4096 == torch.cuda.memory_allocated() - before
    del x
    assert before == torch.cuda.memory_allocated()
    assert 4096 <= torch.cuda.max_memory_allocated()


def test_seven_billion_elements_need_no_memory_until_they_are_written() -> None:
    x = torch.empty(7_000_000_000, dtype=torch.bfloat16, device="cuda")
    x[-3:] = 1
    assert 3.0 == x[-3:].sum().item()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(20_000_000_000, dtype=torch.bfloat16, device="cuda")


def test_pinned_memory_is_rounded_cached_and_counted() -> None:
    before = fake_cuda.count()
    x = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
    address = x.data_ptr()
    assert x.is_pinned()
    assert x[500:].is_pinned()
    assert not torch.empty(10).is_pinned()
    del x
    assert address == torch.empty(600, dtype=torch.uint8).pin_memory().data_ptr()
    grown = {name: value - before[name] for name, value in fake_cuda.count().items()}
    assert {"pinned_requests": 2, "pinned_allocations": 1, "pinned_bytes": 1024}.items() <= grown.items()


def test_copies_from_pinned_memory_do_not_wait_and_read_when_they_run() -> None:
    host = torch.ones(5).pin_memory()
    fake_cuda.syncs()
    with fake_cuda.closed():
        x = host.to("cuda", non_blocking=True)
        host.fill_(7)
    assert [] == fake_cuda.syncs()
    assert [7.0] * 5 == x.tolist()


def test_a_pinned_block_stays_until_its_copy_is_through() -> None:
    host = torch.ones(5).pin_memory()
    with fake_cuda.closed():
        x = host.to("cuda", non_blocking=True)
        del host
        torch.full((5,), 9.0).pin_memory()
    assert [1.0] * 5 == x.tolist()


@pytest.mark.parametrize("way", ["to the device", "to the host"])
def test_copies_of_pageable_memory_wait(way: str) -> None:
    x = torch.ones(5, device="cuda")
    fake_cuda.syncs()
    if way == "to the device":
        x.copy_(torch.zeros(5), non_blocking=True)
    else:
        torch.zeros(5).copy_(x, non_blocking=True)
    assert [f"copy {way.replace('the ', '')}"] == fake_cuda.syncs()


def test_bytes_over_the_bus_are_counted() -> None:
    before = fake_cuda.count()
    torch.ones(100).to("cuda").cpu()
    after = fake_cuda.count()
    assert 400 == after["bytes_to_device"] - before["bytes_to_device"]
    assert 400 == after["bytes_to_host"] - before["bytes_to_host"]


def test_storages_are_resized_as_fsdp_does_it() -> None:
    x = torch.arange(10.0, device="cuda")
    x.untyped_storage().resize_(0)
    assert 0 == x.untyped_storage().size()
    x.untyped_storage().resize_(40)
    x.fill_(3)
    assert 30.0 == x.sum().item()
    x.resize_(20)
    assert 30.0 == x[:10].sum().item()


def test_two_devices_have_their_own_memory_and_streams() -> None:
    a, b = torch.ones(4, device="cuda:0"), torch.full((4,), 2.0, device="cuda:1")
    assert (0, 1) == (a.device.index, b.device.index)
    assert b.tolist() == b.to("cuda:0").tolist()
    with pytest.raises(RuntimeError, match="same device"):
        a + b
    with torch.cuda.device(1):
        assert 1 == torch.empty(1, device="cuda").device.index
        assert 1 == torch.cuda.current_stream().device_index
    with fake_cuda.closed(torch.cuda.default_stream(0)):
        a += 1
        assert [4.0] * 4 == (b * 2).tolist()
        c = a.to("cuda:1")
        assert 0 < fake_cuda.num_waiting(torch.cuda.default_stream(1))
    assert [2.0] * 4 == c.tolist()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:2")


def test_torch_accelerator_answers_for_it() -> None:
    assert torch.device("cuda") == torch.accelerator.current_accelerator()
    assert (2, 0) == (torch.accelerator.device_count(), torch.accelerator.current_device_index())
    torch.accelerator.set_device_index(1)
    assert 1 == torch.ones(1, device=torch.accelerator.current_accelerator()).device.index
    torch.accelerator.synchronize()
    assert "cuda" == torch.accelerator.current_stream().device.type
