"""The C code without Python: under sanitizers, and cross-compiled for ARM under an emulator where there is one.

The driver prints a digest of every integer result, which must not depend on the processor.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import holter_kernels

SOURCES = Path(holter_kernels.__file__).parent / "csrc"
DRIVER = Path(__file__).with_name("sanitizer_driver.c")
PARTS = ["run.c", "scalar.c", "threads.c", "isa_generic.c", "isa_avx2.c", "isa_avx512.c"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.release,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]


def digest(program: Path, *flags: str, compiler: str = "gcc", runner: tuple[str, ...] = ()) -> str:
    """Build the driver, run it, and return what it found."""
    sources = [str(DRIVER), *(str(SOURCES / part) for part in PARTS)]
    command = [compiler, "-std=gnu11", "-g", "-pthread", *flags, f"-I{SOURCES}", *sources, "-lm", "-o", str(program)]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}
    run = subprocess.run([*runner, program], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    word, found = run.stdout.split()
    assert word == "clean"
    return found


@pytest.mark.parametrize("sanitizer", ["address,undefined", pytest.param("thread", marks=pytest.mark.release)])
def test_clean_under(sanitizer: str, tmp_path: Path) -> None:
    # ThreadSanitizer of gcc 12 wants a fixed layout of memory.
    runner = ("setarch", "-R") if sanitizer == "thread" and shutil.which("setarch") else ()
    expected = digest(tmp_path / "plain", "-O3")
    assert expected == digest(
        tmp_path / "driver", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", runner=runner
    )


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
    reason="needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user",
)
def test_neon_gives_the_same_integers(tmp_path: Path) -> None:
    arm = digest(tmp_path / "arm", "-O3", "-static", compiler="aarch64-linux-gnu-gcc", runner=("qemu-aarch64",))
    assert digest(tmp_path / "here", "-O3") == arm
