"""Memory that grows without bound, or has run out."""

from holter.faults.family import CauseEntry, Consequence, DetectorEntry, Family, Row, Stage
from holter.faults.memory.memory_growth import MemoryGrowth
from holter.records import Fix

OUT_OF_MEMORY = CauseEntry(
    cause="out_of_memory",
    happened="An allocation failed, or the kernel ended the process for want of memory.",
    mechanism=(
        "Memory grows with batch, sequence length, activations that are kept for the backward pass, and optimizer state; one long batch, a leak or fragmentation is "
        "enough. Where the allocation itself fails, an exception says so. A process that the kernel ends says nothing; nor does a loader's worker, which often is the first to go."
    ),
    would_refute="Another rank ended before the named one, and neither by SIGTERM nor over a lost connection.",
    refuting_fact="has_earlier_death",
    is_refuted_by=True,
    is_death=True,
    rows=(
        Row("dead_rank", 0.95, "observation", seen=("is_out_of_memory",)),
        Row("dead_rank", 0.75, "documented", seen=("is_worker_killed",), unless=("is_out_of_memory",)),
    ),
    fix=Fix(
        do=(
            "On a device: halve the micro-batch and double the accumulation, turn on activation checkpointing, or bound the sequence length. On a host: fewer loader workers, smaller "
            "prefetch, more shared memory (`df -h /dev/shm`), a higher limit of the container (`cat /sys/fs/cgroup/memory.max`). If memory had grown step by step, mend that first."
        ),
        changes="Memory of a step; speed a little.",
        does_not_fix="A leak: it only takes longer.",
        expect="The peak stays a tenth below the capacity.",
        verify="`torch.cuda.max_memory_allocated()` on a device, `grep VmHWM /proc/PID/status` on a host, over 100 steps.",
        otherwise="If it grows from step to step, something keeps what a step made: look for lists that are appended to, and log `loss.item()`, not `loss`.",
    ),
)  # fmt: skip

_CHANGES = "What lives beyond a step."
_DOES_NOT_FIX = "What was taken already: it is given back when the run is started again."
_OTHERWISE = (
    "If nothing of the script grows, look at its loader's workers (`ps --ppid PID -o pid,rss,cmd`), at hooks that are registered at every step, and at "
    "libraries' caches by shape."
)

HOST_MEMORY_LEAK = CauseEntry(
    cause="host_memory_leak",
    happened="A rank's memory on its host grows from step to step without bound.",
    mechanism=(
        "Something keeps what a step made: a list that outputs or losses are appended to, a loss that is summed with its graph, a cache by shape or by sample, hooks that are "
        "registered again and again, a loader whose workers copy what they touch. When the host or the container has nothing left, the kernel ends the process without a word."
    ),
    would_refute="The growth stops by itself.",
    refuting_fact="has_settled",
    is_refuted_by=True,
    passes_after_steps=50,
    rows=(
        Row("memory_growth", 0.93, "observation", seen=("is_host", "is_owner_known")),
        Row("memory_growth", 0.85, "observation", seen=("is_host",)),
        Row("memory_growth", 0.10, "inference", missing="whose memory grows: the host's or a device's"),
    ),
    fix=Fix(
        do="Look at the container that is named, or at what is kept beyond a step: append `loss.item()`, not `loss`; detach outputs that are stored; bound caches; clear lists when a report is written.",
        expect="Memory is flat after the first steps.",
        verify="`grep VmRSS /proc/PID/status` at steps 100 and 1000 says the same.",
        changes=_CHANGES,
        does_not_fix=_DOES_NOT_FIX,
        otherwise=_OTHERWISE,
    ),
)  # fmt: skip

DEVICE_MEMORY_LEAK = CauseEntry(
    cause="device_memory_leak",
    happened="A rank's memory on its device grows from step to step without bound.",
    mechanism="Something keeps what a step made: losses summed with their graphs, lists of outputs, hooks, caches by shape. When the device has nothing left, an allocation fails.",
    would_refute="The growth stops by itself.",
    refuting_fact="has_settled",
    is_refuted_by=True,
    passes_after_steps=50,
    rows=(
        Row("memory_growth", 0.93, "observation", seen=("is_device", "is_owner_known")),
        Row("memory_growth", 0.85, "observation", seen=("is_device",)),
    ),
    fix=Fix(
        do="Find what is kept: sum `loss.item()` instead of `loss`, detach what is stored, clear lists at the end of a step.",
        expect="Memory is flat after the first steps.",
        verify="`torch.cuda.memory_allocated()` at steps 100 and 1000 is the same; `torch.cuda.memory._record_memory_history()` shows who allocated what stayed.",
        changes=_CHANGES,
        does_not_fix=_DOES_NOT_FIX,
        otherwise=_OTHERWISE,
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(DetectorEntry(MemoryGrowth(), Stage.CURVE),),
    causes=(OUT_OF_MEMORY, HOST_MEMORY_LEAK, DEVICE_MEMORY_LEAK),
    brings_about=(
        # When memory has run out, the process ends, or a worker of its loader; before that it may be slow.
        Consequence("memory_growth", ("dead_rank",), unless_follower_is=("script_error",), on_a_shared_rank=True),
        Consequence("memory_growth", ("slow_rank",), on_a_shared_rank=True),
    ),
)
