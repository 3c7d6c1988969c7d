"""Measures what holter costs: steps of a GPT with and without it, by turns, timed by the device's clock and the wall clock."""

import statistics
from typing import NamedTuple

import torch

from holter import clock
from holter.rank.doctor.outcome import CheckOutcome, Number, Say, duration, judged, skipped
from holter.rank.doctor.subjects import GptShape, TrainingLoop, failures, gpt_loop, worn

SHAPES = (
    GptShape(layers=1, width=32, heads=2, vocabulary=64, length=16, batch=2),
    GptShape(layers=6, width=384, heads=6, vocabulary=8192, length=256, batch=8),
    GptShape(layers=12, width=768, heads=12, vocabulary=50304, length=512, batch=4),
    GptShape(layers=24, width=1024, heads=16, vocabulary=50304, length=512, batch=4),
)
"""Models from the smallest to the largest, which has 355 M parameters."""
BYTES_A_PARAMETER = 30
"""Approximate memory per parameter: weights, gradients and moments in float32, a bfloat16 copy, and activations."""
LONGEST_STEP_S = 0.05
"""A model whose step takes longer is large enough: the next larger one has about ten times as much to compute."""
BUDGET, FLOOR_S = 0.01, 0.0005
"""A job's defaults from `config.py`, which this package may not import; a test keeps them equal."""
NUM_PAIRS = 4
ENOUGH_S = 40.0
"""Seconds after which no further pair is begun."""
BLOCK_S = 1.5
NUM_STEPS = (3, 20)
WARM_STEPS = 4
MAX_RATIO = 1.05
MAX_EXTRA_S = 0.0015
"""Growth of a step below which its ratio is ignored, because for short steps the ratio says little."""


class StepTime(NamedTuple):
    """Seconds that one step takes, by either clock."""

    wall: float
    device: float


def compare(say: Say) -> CheckOutcome:
    """Time steps without and with holter in pairs, so that a machine that slows down slows both; the median of the pairs counts."""
    loop, shape = _largest(say)
    num_steps = round(min(max(BLOCK_S / _timed(loop, 2).wall, NUM_STEPS[0]), NUM_STEPS[1]))
    pairs: list[tuple[StepTime, StepTime]] = []
    problems: list[str] = []
    began_s = clock.monotonic_s()
    for number in range(NUM_PAIRS):
        if pairs and clock.monotonic_s() - began_s > ENOUGH_S:
            break
        say(f"{shape.num_parameters / 1e6:.3g} M parameters, pair {number + 1} of {NUM_PAIRS}")
        plain = _timed(loop, num_steps)
        with worn(budget=BUDGET, floor_s=FLOOR_S) as monitor:
            _timed(loop, WARM_STEPS)
            pairs.append((plain, _timed(loop, num_steps)))
            problems += failures(monitor)
    return _judge(pairs, shape, problems)


def _judge(pairs: list[tuple[StepTime, StepTime]], shape: GptShape, problems: list[str]) -> CheckOutcome:
    wall = statistics.median(watched.wall / plain.wall for plain, watched in pairs)
    device = statistics.median(watched.device / plain.device for plain, watched in pairs)
    plain_s = statistics.median(plain.wall for plain, _ in pairs)
    extra_s = statistics.median(watched.wall - plain.wall for plain, watched in pairs)
    noise = max(plain.wall for plain, _ in pairs) / min(plain.wall for plain, _ in pairs)
    numbers: dict[str, Number] = {
        "parameters": shape.num_parameters,
        "step_ms": round(plain_s * 1e3, 3),
        "wall_ratio": round(wall, 4),
        "device_ratio": round(device, 4),
        "extra_ms": round(extra_s * 1e3, 3),
        "noise": round(noise, 4),
        "pairs": len(pairs),
    }
    says = (
        f"{shape.num_parameters / 1e6:.3g} M parameters, steps of {duration(plain_s)}: wall {wall:.3f} times, "
        f"device {device:.3f} times; {extra_s * 1e3:+.2f} ms a step (steps without holter differ by {noise - 1:.1%} among themselves)"
    )
    if _is_interpreted():
        return (
            skipped(f"kernels are interpreted here, so this says nothing of a GPU: {says}", numbers)
            if not problems
            else judged(problems, says, numbers)
        )
    if wall > MAX_RATIO * max(1.0, min(noise, MAX_RATIO)) and extra_s > MAX_EXTRA_S:
        problems.append(f"steps take too much longer under holter: {says}")
    return judged(problems, says, numbers)


def _largest(say: Say) -> tuple[TrainingLoop, GptShape]:
    """Return the largest model that fits into memory, stopping at one whose steps are long enough.

    Return the smallest if kernels are interpreted, because any other would take minutes.
    """
    chosen = SHAPES[0]
    for shape in SHAPES if not _is_interpreted() else SHAPES[:1]:
        say(f"how large a model: {shape.num_parameters / 1e6:.3g} M parameters")
        free, _ = torch.cuda.mem_get_info()
        if shape.num_parameters * BYTES_A_PARAMETER > free:
            break
        chosen = shape
        loop = gpt_loop(shape)
        _timed(loop, 2)
        if _timed(loop, 2).wall > LONGEST_STEP_S or shape is SHAPES[-1]:
            return loop, shape
        del loop
        torch.cuda.empty_cache()
    return gpt_loop(chosen), chosen


def _timed(loop: TrainingLoop, num_steps: int) -> StepTime:
    torch.cuda.synchronize()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began_s = clock.monotonic_s()
    began.record()
    for _ in range(num_steps):
        loop.step()
    ended.record()
    torch.cuda.synchronize()
    wall = (clock.monotonic_s() - began_s) / num_steps
    return StepTime(wall, began.elapsed_time(ended) / 1e3 / num_steps)


def _is_interpreted() -> bool:
    from triton import knobs  # noqa: PLC0415 - may be missing

    return bool(knobs.runtime.interpret)
