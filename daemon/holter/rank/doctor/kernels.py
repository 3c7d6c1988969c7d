"""Checks that the kernels compile, and that their results are those of the definition."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from holter import clock
from holter.rank.doctor.outcome import CheckOutcome, Number, Say, duration, failed, judged, skipped
from holter_kernels import Pass, devices, fingerprint
from holter_kernels.layout import FORMATS
from holter_kernels.testing import check, from_bytes

ANSWER_S = 60.0
MAY_SPILL = "read_pass_of_both"
"""A kernel for jobs with dtypes that are read fast and ones that are read slowly; only the slow path may spill registers (`triton_kernels`)."""
FAST = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 3, 7, 1023, 1025, 2049, 5001)
"""Numbers of elements around the edges of a word, a tile and a block."""
LONG = 40_001
"""Number of elements that needs more than one program."""
ENOUGH_S = 20.0
"""Seconds after which no further case is tried; the report says how many were. A GPU needs a second or two for all."""
SPECIAL = (float("nan"), float("inf"), -float("inf"), 1e-41, -1e-41, 0.0, -0.0)


class Variant(NamedTuple):
    """One way in which a kernel is compiled."""

    dtype: torch.dtype
    is_aligned: bool
    histogram: str
    statistics: bool

    def __str__(self) -> str:
        what = f"histogram {self.histogram}" if self.statistics else "fingerprint alone"
        where = ", any alignment" if self.dtype in FAST and not self.is_aligned else ""
        return f"{_short(self.dtype)}, {what}{where}"


def variants() -> Iterator[Variant]:
    """Yield all variants that training uses, and those with an exact histogram of the fast dtypes, which `summarize` offers."""
    for dtype, fmt in FORMATS.items():
        for is_aligned in (True, False) if dtype in FAST else (False,):
            histograms = ("sampled", "off", "exact") if is_aligned else ("sampled", "off")
            for histogram in histograms if fmt.is_float else ("off",):
                yield Variant(dtype, is_aligned, histogram, statistics=True)
            yield Variant(dtype, is_aligned, "off", statistics=False)


def compile_all(say: Say) -> CheckOutcome:
    """Launch every variant once; variants for any alignment read a tensor that is offset by one element."""
    wanted = list(variants())
    times: list[tuple[float, Variant]] = []
    for number, variant in enumerate(wanted):
        say(f"{number} of {len(wanted)} variants")
        whole = torch.ones(65, device="cuda").to(variant.dtype)
        part = whole[:64] if variant.is_aligned else whole[1:]
        began_s = clock.monotonic_s()
        answered = _answered(Pass([part], variant.histogram, statistics=variant.statistics), [part])
        times.append((clock.monotonic_s() - began_s, variant))
        if not devices.has_triton():
            return failed(f"{variant} does not compile or run: {_why_given_up()}", {"variants": number})
        if answered is None:
            return failed(f"{variant} gave no answer within {duration(ANSWER_S)}", {"variants": number})
    return _compiled(times)


def _compiled(times: list[tuple[float, Variant]]) -> CheckOutcome:
    spent_s, (slowest_s, slowest) = sum(seconds for seconds, _ in times), max(times)
    numbers: dict[str, Number] = {
        "variants": len(times),
        "seconds": round(spent_s, 3),
        "slowest_s": round(slowest_s, 3),
    }
    numbers["slowest"] = str(slowest)
    from holter_kernels import triton_kernels  # noqa: PLC0415 - needs triton

    usage = [
        (f"{name}_of_both" if _reads_both(function, kernel) else name, kernel.n_regs, kernel.n_spills)
        for name in ("read_pass", "combine_rows")
        for function in (getattr(triton_kernels, name),)
        for kernel in _in_cache(function)
    ]
    if not usage:
        ran = f"{len(times)} variants ran in Triton's interpreter (TRITON_INTERPRET=1), none was compiled"
        return skipped(f"{ran}: registers and spills are not known", numbers)
    for name in {name for name, _, _ in usage}:
        numbers[f"{name}_registers"] = max(registers for kernel, registers, _ in usage if kernel == name)
        numbers[f"{name}_spills"] = max(spills for kernel, _, spills in usage if kernel == name)
    problems = [f"{name} spills {spills} registers" for name, _, spills in usage if spills and name != MAY_SPILL]
    registers = max(registers for _, registers, _ in usage)
    says = (
        f"{len(usage)} kernels for {len(times)} variants in {duration(spent_s)} (slowest {duration(slowest_s)}: {slowest}), "
        f"at most {registers} registers, no spills"
        + (" but in reads of any alignment" if any(s for *_, s in usage) else "")
    )
    return judged(problems, says, numbers)


def _reads_both(function: Any, kernel: Any) -> bool:
    constants = getattr(getattr(kernel, "src", None), "constants", {})
    names = getattr(function, "arg_names", [])
    return all(name in names and constants.get((names.index(name),)) for name in ("HAS_FAST", "HAS_SLOW"))


def _in_cache(kernel: Any) -> Iterator[Any]:
    """Yield the compiled forms of a kernel that Triton has loaded in this process."""
    for cache in getattr(kernel, "device_caches", {}).values():
        yield from (one for one in cache[0].values() if getattr(one, "n_regs", None) is not None)


class ReadingCase(NamedTuple):
    """A tensor to read, and the plain CPU tensor that has the same elements in the same order."""

    name: str
    given: torch.Tensor
    expected: torch.Tensor
    histogram: str = "sampled"


def agree(say: Say) -> CheckOutcome:
    """Compare, for every case, what the device computes with the definition on the host."""
    began_s, problems, num_tried, num_cases, num_elements = clock.monotonic_s(), [], 0, 0, 0
    with _one_rank():
        for case in cases():
            num_cases += 1
            if clock.monotonic_s() - began_s > ENOUGH_S:
                continue
            say(case.name)
            num_tried, num_elements = num_tried + 1, num_elements + case.expected.numel()
            if (problem := _disagreement(case)) is not None:
                problems.append(f"{case.name}: {problem}")
    numbers: dict[str, Number] = {"cases": num_tried, "of": num_cases, "elements": num_elements, "wrong": len(problems)}
    if not devices.has_triton():
        problems.insert(0, f"Triton gave up on the way: {_why_given_up()}")
    tried = f"{num_tried} cases" if num_tried == num_cases else f"{num_tried} of {num_cases} cases (the device is slow)"
    says = f"{tried}: counts, extremes, histograms and fingerprints bit-equal, sums within the bound"
    return judged(problems, says, numbers)


def cases() -> Iterator[ReadingCase]:
    """Yield the cases, the most difficult first: special values, then layouts, then sizes, each for every dtype."""
    rng = np.random.default_rng(0)
    floats = [dtype for dtype, fmt in FORMATS.items() if fmt.is_float]
    for dtype in FORMATS:
        yield _case(f"any bits, {_short(dtype)}", _random(rng, dtype, 5001))
    for dtype in floats:
        yield _case(f"NaN, Inf and subnormals, {_short(dtype)}", _special(rng, dtype))
    for dtype in FORMATS:
        for skip in (1, 3):
            whole = _random(rng, dtype, 4099)
            yield ReadingCase(f"misaligned by {skip}, {_short(dtype)}", whole.cuda()[skip:], whole[skip:])
    for dtype in FORMATS:
        grid = _random(rng, dtype, 64 * 33).view(64, 33)
        yield ReadingCase(f"transposed, {_short(dtype)}", grid.cuda().t(), grid.t().contiguous())
    for dtype in FAST:
        grid = _random(rng, dtype, 96 * 33).view(96, 33)
        yield ReadingCase(f"DTensor, {_short(dtype)}", _sharded(grid), grid)
        image = _random(rng, dtype, 2 * 3 * 15 * 17).view(2, 3, 15, 17)
        laid_out = image.cuda().to(memory_format=torch.channels_last)
        yield ReadingCase(f"channels_last, {_short(dtype)}", laid_out, image)
    yield from _sizes(rng)


def _sizes(rng: np.random.Generator) -> Iterator[ReadingCase]:
    for size in SIZES:
        for dtype in FORMATS:
            yield _case(f"{size} elements, {_short(dtype)}", _random(rng, dtype, size))
    for dtype in FAST:
        healthy = torch.from_numpy(rng.standard_normal(LONG)).to(dtype)
        for histogram in ("sampled", "exact", "off"):
            yield _case(f"{LONG} elements, {_short(dtype)}, histogram {histogram}", healthy, histogram)
        yield _case(f"tiny, {_short(dtype)}", healthy * 1e-6)


def _case(name: str, tensor: torch.Tensor, histogram: str = "sampled") -> ReadingCase:
    return ReadingCase(name, tensor.cuda(), tensor, histogram)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _random(rng: np.random.Generator, dtype: torch.dtype, numel: int) -> torch.Tensor:
    return from_bytes(rng.bytes(numel * FORMATS[dtype].bits // 8), dtype)


def _special(rng: np.random.Generator, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(rng.standard_normal(4100)).to(dtype)
    for place, value in enumerate(SPECIAL):
        tensor[place * 311 + 5 :: 997] = torch.tensor(value, dtype=torch.float64).to(dtype)
    return tensor


def _sharded(grid: torch.Tensor) -> torch.Tensor:
    mesh = init_device_mesh("cuda", (1,))
    return DTensor.from_local(grid.cuda(), mesh, [Shard(0)], run_check=False)


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Make a process group of this process alone, which DTensors need; nothing is ever sent."""
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if is_ours:
            dist.destroy_process_group()


def _disagreement(case: ReadingCase) -> str | None:
    table = _answered(Pass([case.given], case.histogram), [case.given])
    if table is None:
        return f"no answer within {duration(ANSWER_S)}"
    if table.left_out:
        return "it was not read at all"
    bins = None if table.histogram is None else table.histogram[0]
    try:
        check(case.expected, next(iter(table)), bins, histogram=case.histogram)
    except AssertionError as error:
        return str(error)
    of_host = fingerprint(case.expected)
    if int(table.fingerprint[0]) != of_host:
        return f"fingerprint {int(table.fingerprint[0]):016x} is not {of_host:016x}, which the host has"
    return None


def _why_given_up() -> str:
    """Return why the pass fell back to torch operations in this process."""
    return "; ".join(devices._triton_failed) or "it is not installed"  # noqa: SLF001 - said in a warning only, once


def _answered(reader: Pass, tensors: list[torch.Tensor]) -> Any:
    reading = reader.start(tensors)
    return None if reading is None else reading.wait(ANSWER_S)
