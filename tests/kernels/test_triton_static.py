"""What can be known of the GPU kernels without a GPU.

They compile for each target, load 128 bits at a time, spill nothing, and the healthy path is short enough to stay bound by memory.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from holter_kernels import gpu, triton_kernels  # noqa: E402
from holter_kernels.layout import FORMATS  # noqa: E402

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
NVIDIA = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32)}
AMD = GPUTarget("hip", "gfx942", 64)
MAX_PER_WORD = {"float32": 14, "bfloat16": 22}
POINTERS = {
    "jobs": "*i32", "runs": "*i64", "bases": "*i64", "partials": "*i64", "bins": "*i64", "flag": "*fp32", "places": "*i32", "rows": "*i32",
}  # fmt: skip
WORDS_PER_LOAD = 4


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_pass(kind: str, target: GPUTarget, kernel: str = "float") -> Any:
    fmt = next(fmt for fmt in FORMATS.values() if fmt.name == kind)
    name, values, _ = gpu.kernel_of(fmt, kernel, statistics=True, histogram=1)
    function = getattr(triton_kernels, name)
    constants = dict(zip(function.arg_names[len(POINTERS) :], values, strict=True))
    source = ASTSource(function, POINTERS | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    options = gpu.launch_options(is_amd=target.backend == "hip")
    if kernel == "element":
        options = {"num_warps": options["num_warps"]}
    return triton.compile(source, target=target, options=options)


def run_tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def main_loop(sass: str) -> list[str]:
    """The instructions of the first loop that loads 128 bits at a time: the healthy path."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            instructions.append(line)
    for end, line in enumerate(instructions):
        jump = re.search(r"\bBRA\b.*?(\.L\w+)", line)
        if jump and labels.get(jump[1], end + 1) <= end:
            body = instructions[labels[jump[1]] : end + 1]
            if any("LDG.E.128" in one for one in body):
                return body
    raise AssertionError("no loop loads 128 bits at a time")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.release) for arch in ("sm_80", "sm_100"))]
)
@pytest.mark.parametrize(
    "kind", [kind if kind == "float32" else pytest.param(kind, marks=pytest.mark.release) for kind in KINDS]
)
def test_nvidia_healthy_path(kind: str, arch: str, tmp_path: Path) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_pass(kind, NVIDIA[arch]).asm["cubin"])
    usage = run_tool("cuobjdump", "-res-usage", str(cubin))
    sass = run_tool("nvdisasm", "-c", str(cubin))
    body = main_loop(sass)
    loads = [line for line in body if "LDG.E.128" in line]
    per_word = len(body) / (WORDS_PER_LOAD * len(loads))
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    print(f"{arch} {kind}: {per_word:.2f} instructions a word, {registers} registers")
    assert gpu.UNROLL == len(loads)
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers spill"
    assert 96 >= registers
    if arch != "sm_100":
        assert MAX_PER_WORD.get(kind, 24) >= per_word


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("float32", marks=pytest.mark.release)])
def test_where_some_tensors_are_misaligned_the_healthy_path_of_the_others_stays_as_it_is(
    kind: str, tmp_path: Path
) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_pass(kind, NVIDIA["sm_90"], "mixed").asm["cubin"])
    body = main_loop(run_tool("nvdisasm", "-c", str(cubin)))
    assert gpu.UNROLL == len([line for line in body if "LDG.E.128" in line])
    assert MAX_PER_WORD[kind] >= len(body) / (WORDS_PER_LOAD * gpu.UNROLL)
    assert not [line for line in body if re.search(r"\b(STL|LDL)\b", line)], "the healthy path spills"
    assert gpu.MAX_REGISTERS >= int(re.search(r"REG:(\d+)", run_tool("cuobjdump", "-res-usage", str(cubin)))[1])


GPUS = {"A100": (108, 1.41e9, 2.04e12), "H100": (132, 1.755e9, 3.35e12)}
"""Multiprocessors, clock, bytes a second of memory, as the vendor states them; a multiprocessor issues 128 lanes a cycle."""


@pytest.mark.parametrize("name", GPUS)
def test_by_the_roofline_a_pass_over_bfloat16_takes_at_most_a_third_more_than_reading_it(name: str) -> None:
    units, clock_hz, bytes_a_second = GPUS[name]
    word_s = {kind: most / (units * 128 * clock_hz) for kind, most in MAX_PER_WORD.items()}
    assert all(1.3 * 4 / bytes_a_second >= seconds for seconds in word_s.values())


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("kind", KINDS)
def test_amd_healthy_path(kind: str) -> None:
    assembly = compile_pass(kind, AMD).asm["amdgcn"]
    assert gpu.UNROLL <= len(re.findall(r"(?:global|flat|buffer)_load_dwordx4", assembly))
    assert "0" == re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)[1]
    assert "0" == re.search(r"\.sgpr_spill_count:\s+(\d+)", assembly)[1]
    assert 96 >= int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1])


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("target", [*NVIDIA.values(), AMD], ids=[*NVIDIA, "gfx942"])
def test_the_other_kernels_compile(target: GPUTarget) -> None:
    for fmt in FORMATS.values():
        assert compile_pass(fmt.name, target, "element").asm


def compile_combine_rows(target: GPUTarget) -> Any:
    pointers = {
        "partials": "*i64",
        "segments": "*i64",
        "seconds": "*i64",
        "tickets": "*i32",
        "out": "*i64",
        "flag": "*fp32",
    }
    source = ASTSource(
        triton_kernels.combine_rows, pointers | {"CHUNK": "constexpr"}, constexprs={"CHUNK": gpu.COMBINE_TILE}
    )
    return triton.compile(source, target=target, options={"num_warps": gpu.COMBINE_THREADS // target.warp_size})


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.release) for arch in ("sm_80", "sm_100"))]
)
def test_partial_rows_are_added_without_spills(arch: str, tmp_path: Path) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_combine_rows(NVIDIA[arch]).asm["cubin"])
    usage = run_tool("cuobjdump", "-res-usage", str(cubin))
    sass = run_tool("nvdisasm", "-c", str(cubin))
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    print(f"{arch} combine_rows: {registers} registers, {len(re.findall(r'LDG', sass))} loads")
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers spill"
    assert 128 >= registers


@pytest.mark.slow
@pytest.mark.release
def test_partial_rows_are_added_without_spills_on_amd() -> None:
    assembly = compile_combine_rows(AMD).asm["amdgcn"]
    assert "0" == re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)[1]
