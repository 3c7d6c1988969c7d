"""The one list of checks, for the process that starts them; it can be imported without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedCheck:
    """One check, which is one line of the report."""

    name: str
    asks: str
    """What it checks, as the report words it."""
    where: str
    """`module:function` in this package."""
    deadline_s: float
    """Seconds after which the check's process is killed, so that a device that hangs does not hang the doctor."""
    num_devices: int = 1


ALL = (
    PlannedCheck(
        "environment", "driver, torch, Triton, compiler, cache, NVML, Flight Recorder", "environment:look", 60
    ),
    PlannedCheck("kernels", "every variant compiles; time, registers, spills", "kernels:compile_all", 300),
    PlannedCheck("numbers", "every dtype, size and layout: bit-equal with the definition", "kernels:agree", 300),
    PlannedCheck("waiting", "no hook waits for the device, even behind a busy stream", "training:never_waits", 120),
    PlannedCheck("memory", "as much memory with holter as without, nothing held", "training:holds_nothing", 120),
    PlannedCheck("graphs", "captured and replayed steps train as without holter", "training:captures", 120),
    PlannedCheck("compile", "torch.compile(mode='reduce-overhead') trains as without holter", "training:compiles", 240),
    PlannedCheck("cost", "a GPT's steps with and without holter, by turns: device and wall", "cost:compare", 240),
    PlannedCheck("snapshot", "a snapshot is restored although work is queued", "holding:restores", 120),
    PlannedCheck("nan", "a NaN does not reach the weights: fused, and foreach with the wait", "holding:holds_nan", 240),
    PlannedCheck("skipped_call", "two ranks: a skipped all_reduce is named", "two_devices:names_skipped", 240, 2),
    PlannedCheck("rescue", "two ranks: saved while a stream hangs", "two_devices:rescues", 240, 2),
    PlannedCheck("sharded", "two ranks: fully_shard trains to the same bits", "two_devices:shards", 240, 2),
    PlannedCheck("killed", "two ranks: a killed one is named", "two_devices:names_killed", 240, 2),
)
NAMES = tuple(check.name for check in ALL)


def find(name: str) -> PlannedCheck:
    """Return the check of this name."""
    return next(check for check in ALL if check.name == name)
