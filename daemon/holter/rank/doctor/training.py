"""Checks on a small training loop under a monitor that no hook waits, no memory is held, and captured graphs and compiled models train as without it."""

import gc
import warnings
from typing import Any

import torch
from torch import nn

from holter.rank.doctor.outcome import CheckOutcome, Number, Say, duration, judged, skipped
from holter.rank.doctor.subjects import BusyStream, TrainingLoop, failures, small_loop, worn

WARM_STEPS = 4
"""Number of steps until all tables are allocated and every kernel of the readings is loaded."""
WATCHED_STEPS = 3
BUSY_S = 1.0
NUM_TRIALS = 2
GROWTH_STEPS = 3
MAX_SHARE = 0.03
"""Share of the gradients' bytes that holter may hold; the kernels' tables take under one per cent."""
WIDTHS = (32, 64)
NUM_LAYERS = 2
SYNCHRONIZES = "synchronizing"


def never_waits(say: Say) -> CheckOutcome:
    """Check that no hook waits for the device.

    torch's debug mode finds most synchronising calls; because it does not see all, steps are also run behind a busy stream.
    """
    loop = small_loop()
    _train(loop, WARM_STEPS)
    if not _stays_busy(loop):
        return skipped("the loop itself waits for the device, without holter: nothing can be told")
    with worn() as monitor:
        say("first steps")
        _train(loop, WARM_STEPS)
        problems = _warned(loop) + _raised(loop)
        problems += failures(monitor)
        slowest_s = 0.0
        for trial in range(NUM_TRIALS):
            say(f"behind a busy stream, {trial + 1} of {NUM_TRIALS}")
            _train(loop, 1)
            torch.cuda.synchronize()
            own_s = monitor.context.guard.own_s
            has_waited = not _stays_busy(loop)
            slowest_s = max(slowest_s, monitor.context.guard.own_s - own_s)
            if has_waited:
                problems.append(
                    f"a step waited until the stream was done: its hooks took {duration(slowest_s)} behind {duration(BUSY_S)} of work"
                )
                break
    numbers: dict[str, Number] = {
        "hooks_ms_a_step": round(slowest_s * 1e3, 3),
        "busy_s": BUSY_S,
        "problems": len(problems),
    }
    says = f"no synchronisation in {2 * WATCHED_STEPS} steps; behind a busy stream a step's hooks take {duration(slowest_s)}"
    return judged(problems, says, numbers)


def _train(loop: TrainingLoop, num_steps: int) -> None:
    for _ in range(num_steps):
        loop.step()
    torch.cuda.synchronize()


def _warned(loop: TrainingLoop) -> list[str]:
    """Return the file and line of each synchronisation of which torch warns; a hook that swallows errors cannot hide a warning."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(WATCHED_STEPS):
                loop.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    found = {
        f"{_place(one.filename)}:{one.lineno} waits for the device" for one in seen if SYNCHRONIZES in str(one.message)
    }
    return sorted(found)


def _place(path: str) -> str:
    """Return the last three parts of a path, which do not show whose machine it is."""
    return "/".join(path.split("/")[-3:])


def _raised(loop: TrainingLoop) -> list[str]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(WATCHED_STEPS):
            loop.step()
    except RuntimeError as error:
        return [f"a synchronisation is raised into the loop: {str(error).splitlines()[0]}"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return []


def _stays_busy(loop: TrainingLoop) -> bool:
    """Whether a step can be queued behind long work without waiting for it."""
    busy = BusyStream(BUSY_S)
    loop.step()
    is_busy = busy.is_busy
    torch.cuda.synchronize()
    return is_busy


def holds_nothing(say: Say) -> CheckOutcome:
    """Check memory after `zero_grad(set_to_none=True)`: it must not grow from step to step, and holter's own must not grow with the gradients."""
    problems: list[str] = []
    extra, gradients = [], []
    growth = host_growth = 0
    for width in WIDTHS:
        say(f"width {width}")
        plain, _, _ = _allocated(width)
        with worn() as monitor:
            watched, grown, host_grown = _allocated(width)
            problems += failures(monitor)
        growth, host_growth = max(growth, grown), max(host_growth, host_grown)
        extra.append(watched - plain)
        gradients.append(NUM_LAYERS * width * width * 4)
    share = (extra[1] - extra[0]) / (gradients[1] - gradients[0])
    if growth > 0:
        problems.append(f"device memory grows by {growth} bytes in {GROWTH_STEPS} steps")
    if host_growth > 0:
        problems.append(f"pinned memory grows by {host_growth} bytes in {GROWTH_STEPS} steps")
    if share > MAX_SHARE:
        problems.append(f"{share:.0%} of the gradients' memory is still held after zero_grad(set_to_none=True)")
    numbers: dict[str, Number] = {
        "own_bytes": extra[1],
        "held_share": round(share, 4),
        "grown_bytes": growth,
        "grown_pinned_bytes": host_growth,
    }
    says = f"{max(extra) / 1e6:.2f} MB of tables, no growth in {GROWTH_STEPS} steps, {max(share, 0):.1%} of the gradients' memory"
    return judged(problems, says, numbers)


def _allocated(width: int) -> tuple[int, int, int]:
    """Return the allocated bytes after a loop's steps, and the growth of these and of the pinned bytes in the second half of the steps."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device="cuda") for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.ones(4, width, device="cuda")
    levels = []
    for _ in range(2):
        for _ in range(GROWTH_STEPS):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        gc.collect()
        levels.append((torch.cuda.memory_allocated(), _pinned_bytes()))
    return levels[1][0], levels[1][0] - levels[0][0], levels[1][1] - levels[0][1]


def _pinned_bytes() -> int:
    """Return the bytes of pinned memory of this process; 0 if this torch does not tell."""
    ask: Any = getattr(torch.cuda, "host_memory_stats", None)
    if ask is None or not hasattr(torch._C, "_cuda_hostMemoryStats"):  # noqa: SLF001 - whether the build has it
        return 0
    return int(ask().get("allocated_bytes.current", 0))


def captures(say: Say) -> CheckOutcome:
    """Check that a whole step, captured and replayed, gives the same weights bit for bit with a monitor as without."""
    try:
        expected = _replayed()
    except Exception as error:  # noqa: BLE001 - a capture does not work here even without us
        return skipped(f"a step cannot be captured here without holter: {_first_line(error)}")
    say("with holter")
    with worn() as monitor:
        found = _replayed()
        problems = failures(monitor)
    return _same_bits(problems, expected, found, f"a step captured and replayed {WATCHED_STEPS} times")


def _replayed() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True, fused=True)
    inputs = torch.randn(16, 32, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(WATCHED_STEPS):
        graph.replay()
    torch.cuda.synchronize()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def compiles(say: Say) -> CheckOutcome:
    """Check the same for a compiled model, whose forward and backward passes are CUDA graphs made by inductor."""
    say("without holter")
    try:
        expected = _compiled_steps()
    except Exception as error:  # noqa: BLE001 - inductor raises whatever it likes
        return skipped(f"torch.compile(mode='reduce-overhead') does not work here without holter: {_first_line(error)}")
    say("with holter")
    with worn() as monitor:
        found = _compiled_steps()
        problems = failures(monitor)
    return _same_bits(problems, expected, found, f"{WARM_STEPS + WATCHED_STEPS} steps compiled with reduce-overhead")


def _compiled_steps() -> list[torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    compiled = torch.compile(model, mode="reduce-overhead")
    inputs = torch.randn(16, 32, device="cuda")
    for _ in range(WARM_STEPS + WATCHED_STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _same_bits(problems: list[str], expected: list[torch.Tensor], found: list[torch.Tensor], what: str) -> CheckOutcome:
    num_other = sum(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    if num_other:
        problems.insert(
            0, f"{what} ends with other weights under holter: {num_other} of {len(expected)} tensors differ"
        )
    return judged(problems, f"{what}: the same weights, bit for bit", {"tensors": len(expected), "differ": num_other})


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
