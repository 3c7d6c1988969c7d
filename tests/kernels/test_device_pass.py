"""The pass on the device of the tests: nothing waits, nothing is lost, nothing is held, and what travels is small."""

import ctypes
import gc
import time
import warnings
import weakref
from unittest import mock

import fake_cuda
import numpy as np
import pytest
import torch

from holter_kernels import Pass, Table, devices, fingerprint, gpu, pinned, side_stream, torch_pass
from holter_kernels.layout import FORMATS
from holter_kernels.sources import look
from holter_kernels.testing import check, from_bytes

InterpretedFunction = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
pytestmark = pytest.mark.device
LONG_S = 120.0


def answered(reading: object) -> Table:
    assert reading is not None
    table = reading.wait(LONG_S)
    assert table is not None
    return table


def agree(host: list[torch.Tensor], table: Table) -> None:
    for k, (tensor, row) in enumerate(zip(host, table, strict=True)):
        check(tensor.contiguous(), row, None if table.histogram is None else table.histogram[k])


def no_triton() -> mock._patch:
    return mock.patch.object(devices, "_triton_failed", ["not here"])


def host_list() -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    tensors = [from_bytes(rng.bytes(900 * fmt.bits // 8), dtype) for dtype, fmt in FORMATS.items()]
    whole = torch.randn(3000)
    return [*tensors, whole, whole[1:], whole.view(30, 100).t(), torch.empty(0), torch.tensor(2.0), torch.zeros(40_000)]


@pytest.mark.parametrize("reads", ["triton", "torch"])
def test_every_dtype_size_and_layout_is_read_as_on_the_cpu(reads: str) -> None:
    host = host_list()
    whole = host[-6].cuda()
    there = [
        *(tensor.cuda() for tensor in host[:-6]),
        whole,
        whole[1:],
        whole.view(30, 100).t(),
        *(x.cuda() for x in host[-3:]),
    ]
    with no_triton() if reads == "torch" else mock.patch.object(gpu, "SEGMENT", 2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = Pass(there)
        fake_cuda.syncs()
        for _ in range(2):
            reading = fused.start(there)
            agree(host, answered(reading))
        assert [] == fake_cuda.syncs()
        assert 1.0 == reading.flag.item()
        assert () == reading.flag.shape
        assert reading.device_s() > 0


@pytest.mark.parametrize("reads", ["triton", "torch"])
def test_the_flag_is_one_if_anything_is_not_finite(reads: str) -> None:
    with no_triton() if reads == "torch" else mock.patch.object(gpu, "SEGMENT", 1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [
            torch.ones(10, device="cuda"),
            torch.ones(20_000, device="cuda"),
            torch.ones(5, device="cuda", dtype=torch.float16),
        ]
        fused = Pass(tensors, "off")
        for bad in (0.0, float("nan"), float("inf"), -float("inf")):
            tensors[1].fill_(1)
            first = fused.start(tensors)
            tensors[1][17_000] = bad
            second = fused.start(tensors)
            assert (0.0, float(bad != 0.0)) == (first.flag.item(), second.flag.item())


def test_a_device_that_stands_still_is_not_waited_for() -> None:
    x = torch.ones(1000, device="cuda")
    fused = Pass([x], "off")
    answered(fused.start([x]))
    fake_cuda.syncs()
    with fake_cuda.closed():
        began = time.monotonic()
        reading = fused.start([x])
        assert reading.poll() is None
        assert reading.device_s() is None
        assert reading.wait(0.05) is None
        assert time.monotonic() - began < 5
    assert 1000.0 == answered(reading).sum[0]
    assert [] == fake_cuda.syncs()


def test_the_first_reading_is_not_waited_for_either() -> None:
    x = torch.ones(1000, device="cuda")
    fake_cuda.drain()
    fake_cuda.syncs()
    reading = Pass([x], "off").start([x])
    assert [] == fake_cuda.syncs()
    assert 1000.0 == answered(reading).sum[0]


def test_each_reading_keeps_its_own_answer_and_what_finds_no_slot_is_counted() -> None:
    made = [torch.full((100 + k,), float(k), device="cuda") for k in range(10)]
    fused = Pass(made[:1], "off")
    answered(fused.start(made[:1]))
    same = [torch.full((100,), float(k), device="cuda") for k in range(10)]
    fake_cuda.drain()
    with fake_cuda.closed():
        readings = [fused.start([x]) for x in same]
    assert [False] * 8 + [True] * 2 == [reading is None for reading in readings]
    assert {"under way": 2} == dict(fused.declined)
    for k in (5, 0, 7, 1):
        assert float(k) == answered(readings[k]).max[0]
    for k in range(20):
        later = fused.start([same[k % 10]])
        assert float(k % 10) == answered(later).max[0]
    assert [float(k) for k in range(8)] == [answered(reading).max[0] for reading in readings[:8]]


def test_an_answer_that_nobody_fetched_outlives_its_slot() -> None:
    x = torch.zeros(100, device="cuda")
    fused = Pass([x], "off")
    first = fused.start([x])
    for k in range(1, 12):
        x.fill_(k)
        answered(fused.start([x]))
    assert 0.0 == answered(first).max[0]


def test_memory_that_is_freed_after_the_start_is_read_as_it_was() -> None:
    fused = Pass([], "off")
    fake_cuda.drain()
    with fake_cuda.closed():
        readings = []
        for k in range(4):
            gradients = [
                torch.full((5000,), float(k), device="cuda"),
                torch.full((60, 70), float(k), device="cuda").t(),
            ]
            readings.append(fused.start(gradients))
            del gradients
    assert [[float(k)] * 2 for k in range(4)] == [answered(reading).max.tolist() for reading in readings]


def test_after_the_third_step_nothing_is_allocated_and_only_addresses_travel() -> None:
    fused, num_tensors = Pass([], "off"), 291  # a 7B model's
    kept: list[list[torch.Tensor]] = []

    def step() -> dict[str, int]:
        gradients = [torch.ones(32, device="cuda", dtype=torch.bfloat16) for _ in range(num_tensors)]
        kept.append(gradients)  # so that the next ones lie elsewhere
        fake_cuda.drain()
        before = fake_cuda.count()
        answered(fused.start(gradients))
        after = fake_cuda.count()
        return {name: after[name] - before[name] for name in after}

    with mock.patch.object(gpu, "run_kernels"):  # the interpreter takes a minute for them
        steps = [step() for _ in range(5)]
    quiet = ("pinned_requests", "pinned_allocations", "pool_streams", "external_streams", "allocations")
    assert (
        dict.fromkeys(quiet, 0) == {name: steps[-1][name] for name in quiet} == {name: steps[3][name] for name in quiet}
    )
    assert num_tensors * 8 == steps[-1]["bytes_to_device"] <= 4096
    assert num_tensors * 128 == steps[-1]["bytes_to_host"]


def test_what_is_read_several_times_a_step_has_one_table_and_is_sent_once() -> None:
    passes = [Pass([], "off") for _ in range(2)]
    kept: list[list[torch.Tensor]] = []

    def step(value: float) -> tuple[int, list[list[float]]]:
        gradients = [torch.full((9,), value + k, device="cuda") for k in range(2)]
        kept.append(gradients)
        fake_cuda.drain()
        before = fake_cuda.count()["bytes_to_device"]
        with fake_cuda.closed():
            readings = [one.start(gradients) for one in passes]
            sent = fake_cuda.count()["bytes_to_device"] - before
        return sent, [answered(reading).max.tolist() for reading in readings]

    step(0.0)
    # More often than a ring has slots, so that addresses which another pass has sent are overwritten.
    for k in range(1, 10):
        assert (16, [[float(k), float(k + 1)]] * 2) == step(float(k))
    assert 1 == len({id(lane._tables) for one in passes for lane in one._parts[0][1]._lanes.values()})
    # What lay there some steps ago is found no more, or is as it was.
    for gradients in kept[::3]:
        assert gradients[0].tolist()[0] == answered(passes[0].start(gradients)).max[0]


def test_there_are_two_launches_for_a_dtype_and_one_more_for_each_other_however_its_tensors_lie() -> None:
    whole = torch.ones(2000, device="cuda", dtype=torch.bfloat16)
    aligned = [torch.ones(32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    misaligned = [whole[1:40], whole[3:1900]]
    other = [torch.ones(5, device="cuda"), torch.ones(9, device="cuda")[1:]]
    lists = ((aligned, 2), ([*aligned, *misaligned], 2), (misaligned, 2), ([*aligned, *misaligned, *other], 3))
    for mine, expected in lists:
        fused = Pass(mine, "off")
        answered(fused.start(mine))
        with fake_cuda.launches() as launched:
            answered(fused.start(mine))
        assert expected == len([name for name in launched if name.startswith("triton")]), launched


def test_a_launch_of_both_kinds_reads_as_the_definition_says() -> None:
    rng = np.random.default_rng(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        host = from_bytes(rng.bytes(70_000 * FORMATS[dtype].bits // 8), dtype)
        there = host.cuda()
        places = [slice(0, 40_000), slice(1, 39_000), slice(3, 10), slice(8, 66_000), slice(69_999, 70_000)]
        table = answered(Pass([]).start([there[place] for place in places]))
        agree([host[place] for place in places], table)


LLAMA_7B = [(32_000, 4096), (32_000, 4096), (4096,), *[(4096, 4096)] * 128, *[(11_008, 4096)] * 96, *[(4096,)] * 64]
"""The 291 tensors of a model of 6.7 billion parameters."""


def test_seven_billion_gradients_cost_little_more_than_their_own_bytes() -> None:
    counts = np.array([int(np.prod(shape)) for shape in LLAMA_7B], np.int64)
    runs = np.zeros(len(counts), look([torch.ones(3)]).table().dtype)
    runs["count"], runs["row"], runs["code"] = counts, np.arange(len(counts)), FORMATS[torch.bfloat16].code
    tables = gpu.Tables(runs, np.zeros(len(counts), np.int64), len(counts))
    assert (291, 1) == (len(counts), len(tables.launches))
    gradients, row = int(counts.sum()) * 2, 128
    of_a_job = (
        tables.jobs.itemsize + tables.runs.strides[0] + 8 + 2 * row
    )  # what a program looks up, its partial row written and read again
    read = gradients + len(tables.jobs) * of_a_job + len(tables.segments) * (tables.segments.strides[0] + 3 * row)
    assert read < 1.01 * gradients


def test_nothing_is_held_after_the_start() -> None:
    x = torch.randn(200, 300, device="cuda")
    fused = Pass([x.t()], "off")
    reading = fused.start([x.t()])
    answered(reading)
    fake_cuda.drain()
    before = fake_cuda.count()["bytes"]
    views = [x.t()]
    held = weakref.ref(views[0])
    answered(fused.start(views))
    del views
    gc.collect()
    fake_cuda.drain()
    assert held() is None
    assert before == fake_cuda.count()["bytes"]


def test_inside_a_capture_nothing_is_started_and_the_replay_is_the_users() -> None:
    x = torch.zeros(100, device="cuda")
    fused = Pass([x], "off")
    earlier = fused.start([x])
    answered(earlier)
    unanswered = fused.start([x])
    fake_cuda.drain()
    graph = torch.cuda.CUDAGraph()
    before = fake_cuda.count()["pinned_requests"]
    with torch.cuda.graph(graph), fake_cuda.launches() as launched:
        x.add_(1)
        assert fused.start([x]) is None
        assert Pass([x]).start([x]) is None
        assert unanswered.poll() is None  # to query an event would spoil the capture
    assert {"capturing": 1} == dict(fused.declined)
    assert before == fake_cuda.count()["pinned_requests"]
    assert not [name for name in launched if name.startswith("triton")]
    for _ in range(3):
        graph.replay()
    assert 3.0 == answered(fused.start([x])).max[0]
    assert 0.0 == earlier.poll().max[0] == answered(unanswered).max[0]


def test_passes_on_two_streams_do_not_mix() -> None:
    x, y = torch.full((40_000,), 1.0, device="cuda"), torch.full((40_000,), 2.0, device="cuda")
    fused, other = Pass([x], "off"), torch.cuda.Stream()
    fake_cuda.drain()
    with fake_cuda.delayed(0.002):
        readings = []
        for _ in range(3):
            readings.append(fused.start([x]))
            with torch.cuda.stream(other):
                readings.append(fused.start([y]))
    assert [1.0, 2.0] * 3 == [answered(reading).max[0] for reading in readings]


def test_a_pass_that_is_dropped_under_way_leaves_its_memory_alone_until_the_device_is_done() -> None:
    x, y = torch.full((100,), 1.0, device="cuda"), torch.full((100,), 2.0, device="cuda")
    second = Pass([y], "off")
    answered(second.start([y]))
    fake_cuda.drain()
    with fake_cuda.closed():
        first = Pass([x], "off")
        first.start([x])
        del first
        gc.collect()
        others = [Pass([y], "off") for _ in range(5)]
        readings = [one.start([y]) for one in others]
    assert [2.0] * 5 == [answered(reading).max[0] for reading in readings]


def test_a_tensor_that_is_no_longer_aligned_is_still_read() -> None:
    whole = torch.arange(70_000.0, device="cuda")
    fused = Pass([], "off")
    for start in (0, 4, 1, 3, 8):
        part = whole[start : start + 60_000]
        assert fingerprint(part.cpu()) == int(answered(fused.start([part])).fingerprint[0])


def test_a_list_over_two_devices_and_the_host_is_joined() -> None:
    host = [torch.randn(50), torch.randn(70), torch.randn(90)]
    there = [host[0].to("cuda:1"), host[1], host[2].to("cuda:0")]
    fused = Pass(there)
    for _ in range(2):
        reading = fused.start(there)
        agree(host, answered(reading))
        assert reading.flag is None


def test_where_triton_fails_torch_operations_read_the_same_and_it_is_said_once() -> None:
    host = [torch.randn(300), torch.tensor([1.0, float("nan")])]
    there = [tensor.cuda() for tensor in host]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    with (
        mock.patch.object(devices, "_triton_failed", []),
        mock.patch.object(gpu, "run_kernels", fail),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            for one in (Pass(there), Pass(there, "exact")):
                reading = one.start(there)
                assert [fingerprint(tensor) for tensor in host] == answered(reading).fingerprint.tolist()
                assert 1.0 == reading.flag.item()
        assert "torch" == devices.implementation(torch.device("cuda", 0))
    assert 1 == len([w for w in caught if "Failed to find C compiler" in str(w.message)])


def test_an_interpreter_that_takes_the_devices_addresses_for_the_hosts_is_not_used() -> None:
    x = torch.full((100,), 3.0, device="cuda")
    del InterpretedFunction.reads_devices
    with pytest.warns(RuntimeWarning, match="TRITON_INTERPRET=1"):
        table = answered(Pass([x], "off").start([x]))
    assert 3.0 == table.max[0]


def test_a_tensor_that_operations_cannot_read_is_left_out_alone() -> None:
    x, y = torch.ones(5, device="cuda"), torch.ones(7, device="cuda", dtype=torch.float16)

    def fail(fmt: object, *rest: object) -> object:
        if fmt is FORMATS[torch.float16]:
            raise NotImplementedError("not on this device")
        return observe(fmt, *rest)

    observe = torch_pass._observe
    with no_triton(), mock.patch.object(torch_pass, "_observe", fail), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = answered(Pass([x, y, x], "off").start([x, y, x]))
    assert ([5, 0, 5], 1) == (table.numel.tolist(), table.left_out)


def test_a_device_without_float64_is_read_in_float32() -> None:
    host = [torch.randn(1000), torch.randn(50).bfloat16(), torch.arange(7)]
    there = [tensor.cuda() for tensor in host]
    with (
        no_triton(),
        mock.patch.object(torch_pass, "float_dtype", return_value=torch.float32),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        table = answered(Pass(there, "off").start(there))
    assert [fingerprint(tensor) for tensor in host] == table.fingerprint.tolist()
    assert [float(tensor.max()) for tensor in host] == table.max.tolist()
    assert np.allclose([float(tensor.double().sum()) for tensor in host], table.sum, rtol=1e-4)


def test_pinned_memory_is_one_slab_for_many_passes() -> None:
    tensors = [torch.ones(3, device="cuda") for _ in range(8)]
    before = fake_cuda.count()["pinned_allocations"]
    passes = [Pass([x], "off") for x in tensors]
    for one, x in zip(passes, tensors, strict=True):
        answered(one.start([x]))
    assert fake_cuda.count()["pinned_allocations"] - before <= 1
    assert pinned.SLAB_BYTES == pinned.PINNED.num_bytes


def test_without_room_for_results_a_start_is_declined() -> None:
    x = torch.ones(3, device="cuda")
    with mock.patch.object(gpu, "Ring", side_effect=MemoryError):
        fused = Pass([x])
        assert fused.start([x]) is None
        assert {"out of memory": 1} == dict(fused.declined)
    assert 3.0 == answered(fused.start([x])).sum[0]


def test_the_side_stream_is_made_once_by_the_runtime_outside_of_the_pool_and_does_not_wait_for_the_default_one() -> (
    None
):
    device, asked = torch.device("cuda", 1), []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
    def create(place: object, flags: int) -> int:
        """`cudaStreamCreateWithFlags`, as the runtime has it."""
        asked.append((torch.cuda.current_device(), flags))
        place[0] = fake_cuda.make_external_stream(1).cuda_stream
        return 0

    made = fake_cuda.count()
    with (
        mock.patch.object(devices, "_stream_function", return_value=create),
        mock.patch.object(torch.version, "cuda", "13.0"),
    ):
        mine = side_stream(device, "a purpose")
        assert mine is side_stream(device, "a purpose")
        assert mine is not side_stream(device, "another")
    assert (2, 0) == tuple(fake_cuda.count()[name] - made[name] for name in ("external_streams", "pool_streams"))
    assert [(1, devices.NON_BLOCKING)] * 2 == asked
    with fake_cuda.closed(torch.cuda.default_stream(device)), torch.cuda.stream(mine):
        done = torch.ones(3, device=device).add_(1)
        mine.synchronize()
    assert [2.0] * 3 == done.tolist()


def test_where_the_runtime_cannot_be_reached_the_pool_will_do() -> None:
    made = fake_cuda.count()
    for function in (lambda: None, lambda: lambda *_: 2):
        with mock.patch.object(devices, "_stream_function", function), mock.patch.object(torch.version, "cuda", "13.0"):
            assert side_stream(torch.device("cuda", 0), str(id(function))) is not None
    assert (0, 2) == tuple(fake_cuda.count()[name] - made[name] for name in ("external_streams", "pool_streams"))


def test_while_kernels_are_compiled_a_start_is_declined() -> None:
    x = torch.ones(3, device="cuda")
    fused = Pass([x])
    with mock.patch.object(devices, "warming", {x.device}):
        assert fused.start([x]) is None
    assert {"warming up": 1} == dict(fused.declined)
    assert 3.0 == answered(fused.start([x])).sum[0]


def test_a_large_tensor_is_combined_by_several_programs_into_the_same_row() -> None:
    with mock.patch.object(gpu, "SEGMENT", 2):  # of 1024, which the interpreter would take minutes for
        x = torch.randn(100_000)
        agree([x], answered(Pass([x.cuda()], "sampled").start([x.cuda()])))
        made = gpu.Tables(look([x]).table(), np.zeros(1, np.int64), 1)
    assert made.num_partials > 2
    assert -(-made.num_partials // 2) == len(made.segments)


def test_dtypes_without_statistics_are_read_as_bytes_beside_others() -> None:
    odd = (
        torch.float8_e8m0fnu,
        torch.float8_e4m3fnuz,
        torch.float4_e2m1fn_x2,
        torch.uint16,
        torch.uint32,
        torch.complex32,
    )
    host = [torch.randn(64), *(torch.arange(64, dtype=torch.uint8).view(dtype) for dtype in odd)]
    table = answered(Pass([], "off").start([tensor.cuda() for tensor in host]))
    assert [fingerprint(tensor) for tensor in host] == table.fingerprint.tolist()
    assert 0.0 < table.square_sum[0] < 1000.0
