"""Kernels are compiled before they are needed, by Triton's own just-in-time path, for a driver that has no device."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

DRIVER = """
import contextlib, torch, warnings
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

class Nowhere:
    def get_current_device(self): return 0
    def get_current_stream(self, _): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Nowhere())
from holter_kernels import devices, gpu, triton_kernels, warm_up
from holter_kernels.sources import look
devices.on = lambda _: contextlib.nullcontext()
HERE = torch.device("cuda", 0)
def num_compiled(): return sum(len(k.device_caches[0][0]) for k in (triton_kernels.read_pass, triton_kernels.combine_rows))
"""

NOTHING_LEFT = """
said = []
found = warm_up([HERE, torch.device("cpu")], [torch.float32, torch.complex64], lambda *what: said.append(what), passes=[("off", True)])
assert [None] * 3 == [variant.error for variant in found], found
assert [(0, 3), (1, 3), (2, 3), (3, 3)] == [what[:2] for what in said], said
assert not devices.warming
before = num_compiled()
assert before == 3
run = jit.JITFunction.run
jit.JITFunction.run = lambda self, *args, warmup, **kwargs: run(self, *args, warmup=True, **kwargs)
gpu.upload = lambda _, *arrays: [torch.from_numpy(array) for array in arrays]
import numpy as np
from holter_kernels.slots import Ring
from unittest import mock
whole = torch.randn(200_003)
for tensors in ([whole], [whole, whole[1:], whole[2:5]], [whole[:7]] * 5):
    sources = look(tensors)
    tables = gpu.DeviceTables(gpu.Tables(sources.table(), np.array(sources.bases), len(tensors)), torch.device("cpu"), len(tensors))
    with mock.patch("holter_kernels.pinned.torch.zeros", lambda *a, pin_memory=False, **k: torch.empty(*a, **k)), mock.patch.object(devices, "new_event"):
        ring = Ring(torch.device("cpu"), len(tensors), has_bins=False)
    for slot in ring._slots:
        gpu.run_kernels(tables, slot.bases, rows=slot.rows, bins=None, flag=slot.flag, statistics=True, histogram="off")
assert before == num_compiled(), "a launch compiled another variant"
"""

GIVEN_UP = """
from triton.compiler import compiler
def fail(*_, **__): raise RuntimeError("Failed to find C compiler")
jit.JITFunction.run = fail
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = warm_up([HERE], [torch.float32, torch.bfloat16])
assert 1 == len(found) and "C compiler" in found[0].error, found
assert devices.implementation(HERE) == "torch" and not devices.warming
assert 1 == len(caught), caught
"""

TEMPORARY_CACHE = """
import os
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2): devices.prepare_triton_cache()
assert "holter-triton-" in os.environ["TRITON_CACHE_DIR"]
assert 1 == len(caught) and "cannot be written" in str(caught[0].message), caught
"""


def run(program: str, cache: Path) -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER + program], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_after_a_warm_up_no_launch_compiles_anything(tmp_path: Path) -> None:
    run(NOTHING_LEFT, tmp_path)


@pytest.mark.slow
def test_what_does_not_compile_is_told_and_triton_given_up(tmp_path: Path) -> None:
    run(GIVEN_UP, tmp_path)


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_replaced_for_this_process(tmp_path: Path) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file, where root too cannot make a directory")
    in_the_way.chmod(stat.S_IRUSR)
    run(TEMPORARY_CACHE, in_the_way)


def test_triton_is_imported_by_who_asks_and_not_in_the_thread():
    code = "import sys, torch; from holter_kernels import WarmUp; WarmUp([torch.device('cuda', 0)], [torch.float32]); print('holter_kernels.triton_kernels' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert "True\n" == ended.stdout
