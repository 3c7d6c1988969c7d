"""Streams run later, in order, as their gates let them; events tell how far they are."""

import time

import fake_cuda
import pytest
import torch

pytestmark = pytest.mark.device


def test_nothing_runs_while_the_gate_is_closed_and_the_host_goes_on() -> None:
    x = torch.ones(1000, device="cuda")
    with fake_cuda.closed():
        event = (x + 1, torch.cuda.current_stream().record_event())[1]
        time.sleep(0.05)
        assert not event.query()
        assert fake_cuda.num_waiting() > 0
    fake_cuda.drain()
    assert event.query()


def test_one_stream_hangs_while_another_works() -> None:
    hung, free = torch.cuda.Stream(), torch.cuda.Stream()
    with fake_cuda.closed(hung):
        with torch.cuda.stream(hung):
            x = torch.ones(3, device="cuda")
        with torch.cuda.stream(free):
            assert 3.0 == torch.ones(3, device="cuda").sum().item()
        assert not hung.query()
    hung.synchronize()
    assert 3.0 == x.sum().item()


def test_a_stream_that_waits_for_another_sees_its_work() -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(10, device="cuda")
    with fake_cuda.delayed(0.001):
        for _ in range(20):
            x += 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
    side.synchronize()
    assert [40.0] * 10 == y.cpu().tolist()


def test_a_stream_that_does_not_wait_reads_too_early() -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(10, device="cuda")
    fake_cuda.drain()
    with fake_cuda.closed(torch.cuda.default_stream()):
        x += 1
        with torch.cuda.stream(side):
            y = x * 2
        side.synchronize()
        with torch.cuda.stream(side):
            assert [0.0] * 10 == y.cpu().tolist()


def test_a_lagging_device_is_slow_and_the_host_is_not() -> None:
    x = torch.zeros(10, device="cuda")
    fake_cuda.drain()
    with fake_cuda.delayed(0.05):
        begin = time.monotonic()
        for _ in range(20):
            x += 1
        assert fake_cuda.num_waiting() > 5
        torch.cuda.synchronize()
        assert time.monotonic() - begin > 1.0


def test_timing_events_measure_the_stream() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(30_000_000)
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        start.elapsed_time(end)
    fake_cuda.drain()
    assert 29 < start.elapsed_time(end) < 10_000


def test_events_without_time_have_none() -> None:
    events = [torch.cuda.current_stream().record_event() for _ in range(2)]
    fake_cuda.drain()
    with pytest.raises(ValueError, match="enable_timing"):
        events[0].elapsed_time(events[1])


def test_streams_come_from_a_pool_of_32_and_external_ones_do_not() -> None:
    taken = [torch.cuda.Stream() for _ in range(33)]
    assert taken[0].stream_id == taken[32].stream_id
    assert 32 == len({stream.stream_id for stream in taken})
    external = [fake_cuda.make_external_stream() for _ in range(40)]
    assert 72 == len({stream.stream_id for stream in (*taken, *external)})
    with torch.cuda.stream(external[0]):
        assert 2.0 == torch.ones(2, device="cuda").sum().item()
    assert {"pool_streams": 33, "external_streams": 40}.items() <= fake_cuda.count().items()


def test_synchronisations_are_counted_by_name() -> None:
    x = torch.ones(3, device="cuda")
    pinned = torch.empty(3, pin_memory=True)
    fake_cuda.syncs()
    x.item if x.numel() == 1 else x.sum().item()
    x.cpu()
    torch.ones(3).to("cuda")
    torch.cuda.synchronize()
    torch.cuda.current_stream().synchronize()
    event = torch.cuda.current_stream().record_event()
    event.synchronize()
    x.nonzero()
    pinned.copy_(x, non_blocking=True)
    event.query()
    expected = ["item", "copy to host", "copy to device", "torch.cuda.synchronize", "Stream.synchronize"]
    assert [*expected, "Event.synchronize", "aten::nonzero"] == fake_cuda.syncs()


def test_synchronising_can_be_made_an_error() -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        x.sum().item()
    x += 1
    torch.cuda.set_sync_debug_mode("default")
    assert 6.0 == x.sum().item()


def test_what_an_operation_raises_is_told_at_the_next_synchronisation() -> None:
    x = torch.ones(3, device="cuda")
    x.index_select(0, torch.tensor([7], device="cuda"))
    with pytest.raises(RuntimeError, match="CUDA error: aten::index_select"):
        torch.cuda.synchronize()
    torch.cuda.synchronize()
