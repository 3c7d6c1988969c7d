"""Ranks that the others wait for."""

from holter.faults.family import CauseEntry, DetectorEntry, Family, Row, Stage
from holter.faults.slowness.slow_rank import SlowRank
from holter.faults.slowness.slow_stage import SlowStage
from holter.records import Fix

_STEPS_TO_BE_WELL = 25
"""More steps than the detector looks at to see that a rank is well again."""
_WORK = "ranks whose work can be compared: the late one has larger batches, more micro-steps or another part of the model, so that it may need the time"
_BOTH = "a step without the wait for data: batches come late on this rank and its device is held down as well"

SLOW_COMPUTE = CauseEntry(
    cause="slow_compute",
    happened="A rank takes longer than the others for the same forward and backward pass.",
    mechanism=(
        "The rank reaches the step's collectives after all others, although its batches come in time; the others wait inside the "
        "reduction, so that every rank's step lasts as long as the slowest one's. What slows one rank alone is most often around it: "
        "another process on its cores or its device, threads pinned to the wrong cores, a host whose memory or bus is busy; seldom code "
        "that only this rank runs (logging, metrics, a profiler, a debug flag)."
    ),
    would_refute="The named rank has more to do than the others: larger batches, more micro-steps, or another part of the model.",
    refuting_fact="has_other_work",
    is_refuted_by=True,
    passes_after_steps=_STEPS_TO_BE_WELL,
    rows=(
        Row("slow_rank", 0.93, "observation", absent=("is_in_data", "is_device_throttled"), unless=("has_other_work",)),
        Row("slow_rank", 0.90, "observation", absent=("is_in_data",), unknown=("is_device_throttled",), unless=("has_other_work",)),
        Row("slow_rank", 0.35, "inference", missing=_WORK),
        Row("slow_stage", 0.85, "documented"),
    ),
    fix=Fix(
        do=(
            "On the named rank's host: `top` and `nvidia-smi` for processes that do not belong to the job, `nvidia-smi topo -m` and "
            "`taskset -cp PID` for threads far from their device, `numastat -p PID` for memory on the other socket. In the script: look "
            "for work behind `if rank == N`. `py-spy record --pid PID` on this rank and on a fast one shows where they part. If it is the "
            "host, take it out of the job at the next restart."
        ),
        changes="Nothing in the numbers: only the time a step takes.",
        does_not_fix="Time that the job loses elsewhere: when this rank is as fast as the others, the next slowest sets the pace.",
        expect="Steps become shorter by about the time named in the evidence, on all ranks at once.",
        verify="`holter_collective_lag_seconds` of this rank falls to what the other ranks show, and this incident is not opened again.",
        otherwise=(
            "Swap the rank's host with another one: if the lag goes with the host, it is the machine (device, memory, cooling: run a "
            "burn-in test); if it stays with the rank, it is what this rank is given to do, such as sequences that are always longer."
        ),
    ),
)  # fmt: skip

SLOW_INPUT = CauseEntry(
    cause="slow_input",
    happened="A rank waits for its batches longer than the others, and all wait for it.",
    mechanism=(
        "The rank's data loader does not keep up: fewer or slower worker processes, a shard on slower storage, samples that take longer to "
        "decode, a host whose processors are busy. The main thread sits in the loader while the peers wait in the next reduction."
    ),
    would_refute="The named rank spends no more time in its data loader than the others.",
    refuting_fact="is_in_data",
    is_refuted_by=False,
    passes_after_steps=_STEPS_TO_BE_WELL,
    rows=(
        Row("slow_rank", 0.93, "observation", seen=("is_in_data",), unless=("has_other_work",)),
        Row("slow_rank", 0.40, "inference", seen=("has_other_work", "is_in_data"), missing=_WORK),
    ),
    fix=Fix(
        do=(
            "On the named rank's host, see whether the loader's workers are busy (`top`: raise `num_workers`, move decoding off the host or "
            "cache it) or asleep waiting for storage (`iostat -x`, the network mount: copy the shard to local disk, raise "
            "`prefetch_factor`). Compare this rank's shard with the others': file sizes, compression, number of small files."
        ),
        changes="Nothing in the numbers, as long as the order of samples stays: more workers keep it.",
        does_not_fix="A loader that is too slow on every rank: once all wait alike, no rank is late, and the job is still slow.",
        expect="Time in the data phase becomes the same on all ranks; steps become shorter by the time named in the evidence.",
        verify="`holter_collective_lag_seconds` of this rank falls to what the other ranks show, and this incident is not opened again.",
        otherwise=(
            "Give this rank another rank's shard: if the lag goes with the shard, it is the data; if it stays, it is the host. If "
            "workers are idle and storage is too, look for a lock or a download inside the dataset."
        ),
    ),
)  # fmt: skip

SLOW_DEVICE = CauseEntry(
    cause="slow_device",
    happened="A rank is late because its device runs at a lower clock than it should.",
    mechanism=(
        "The device's driver holds its clock down, for heat, for power or because the hardware asks for it, while most other ranks' "
        "devices run freely. The same kernels take longer there, and every step of the job lasts as long as on this device."
    ),
    would_refute="The device's own readings show that nothing holds its clock down, or no more than the others'.",
    refuting_fact="is_device_throttled",
    is_refuted_by=False,
    passes_after_steps=_STEPS_TO_BE_WELL,
    rows=(
        Row("slow_rank", 0.92, "observation", seen=("is_device_throttled",), absent=("is_in_data",), unless=("has_other_work",)),
        Row("slow_rank", 0.40, "inference", seen=("is_device_throttled", "is_in_data"), unless=("has_other_work",), missing=_BOTH),
    ),
    fix=Fix(
        do=(
            "`nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER -i UUID` on the named host. Thermal: fans, airflow, dust, a failed "
            "pump; move the job off this host meanwhile. Power: a power limit set lower than on its neighbours (`nvidia-smi -pl`), or a "
            "supply that lost a phase. Hardware slowdown: power brake or a fault: take the device out and have it looked at."
        ),
        changes="Nothing in the numbers: only the time a step takes.",
        does_not_fix="Other devices of the same host or rack, which the same heat or power will reach next.",
        expect="The clock returns to its limit, and steps become shorter by the time named in the evidence.",
        verify="No throttle reason is read any more, and `holter_collective_lag_seconds` of this rank is what the others show.",
        otherwise="If the clock is back and the rank is still late, there is another cause: read `holter explain slow_compute`.",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(DetectorEntry(SlowRank(), Stage.LATE), DetectorEntry(SlowStage(), Stage.LATE)),
    causes=(
        SLOW_COMPUTE, SLOW_INPUT, SLOW_DEVICE,
    ),
)  # fmt: skip
