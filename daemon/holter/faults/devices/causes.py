"""Devices and hosts: their faults, their memory, their links, their clocks."""

from holter.faults.devices.device_clocks import DeviceClocks
from holter.faults.devices.device_errors import DeviceErrors
from holter.faults.devices.device_links import DeviceLinks
from holter.faults.devices.device_memory import DeviceMemory
from holter.faults.family import CauseEntry, Consequence, DetectorEntry, Family, Row, Stage
from holter.records import Fix

_NO_MEANING = "what this Xid means: the vendor's catalogue of Xids, and whether the named device reports others"
_NOT_SAID = "which device the rank uses: it did not say, so that the device of its local rank is named"
_NOT_OURS = ("is_own_error", "is_out_of_memory", "is_suspended")
"""Facts of ends and stops that no device causes: the script's own error, memory that ran out, a signal that stops a process."""
_OTHERS = ("script_error", "out_of_memory", "host_unreachable", "slow_input")

DEVICE_FAULT = CauseEntry(
    cause="device_fault",
    happened="A device failed: its driver reported a fault (Xid), or it is gone from the bus.",
    mechanism=(
        "The device, its own processor or the bus stopped working. Calls of the rank that uses it hang in the driver or fail with an error that names "
        "whatever line came next; its peers wait in their collectives. The script and its data have nothing to do with it."
    ),
    would_refute="The driver says that the device is well: no such Xid, and it answers.",
    refuting_fact="is_device_well",
    is_refuted_by=True,
    rows=(
        Row("device_errors", 0.95, "observation", seen=("is_device_failed",), unless=("is_device_assumed",)),
        Row("device_errors", 0.80, "documented", seen=("is_device_failed",)),
        Row("device_errors", 0.50, "inference", missing=_NO_MEANING),
    ),
    fix=Fix(
        do=(
            "Drain the named host (`scontrol update NodeName=HOST State=DRAIN Reason=xid`, `kubectl cordon HOST`) and go on without it from the last good checkpoint. "
            "Then reset the device (`nvidia-smi --gpu-reset -i UUID`; one that is gone from the bus needs the host's power cycled) and run the vendor's test (`dcgmi diag -r 3`) "
            "before the host comes back. Keep `nvidia-bug-report.sh` of the moment for the vendor."
        ),
        changes="Which hosts the job runs on.",
        does_not_fix="The device: it will fail again if it comes back untested.",
        expect="The resumed run passes this step on other hosts.",
        verify="`nvidia-smi` lists the device, and `dmesg -T | grep -i xid` on its host stays silent through a test under load.",
        otherwise=(
            "If the same Xid comes on several hosts, it is the driver or its firmware, not the devices: look at versions. If it follows the host's slot after "
            "the card was swapped, it is the board, the riser or the power supply."
        ),
    ),
)  # fmt: skip

DEVICE_MEMORY_ERROR = CauseEntry(
    cause="device_memory_error",
    happened="A device's memory has errors that could not be corrected, or bad rows that were not set aside.",
    mechanism=(
        "Two bits or more of a word flipped, and the error-correcting code can only say so. What lay there is lost: the driver ends the program that reads it, or, where the error "
        "is not contained, every program on the device. The row is replaced at the next reset of the device; until then it can be met again."
    ),
    would_refute="The device's own counters show errors that were corrected, and none else.",
    refuting_fact="is_corrected",
    is_refuted_by=True,
    rows=(
        Row("device_memory", 0.95, "observation", seen=("is_memory_bad",), unless=("is_device_assumed", "is_old")),
        Row("device_memory", 0.90, "observation", seen=("is_memory_bad",), unless=("is_device_assumed",)),
        Row("device_memory", 0.80, "documented"),
    ),
    fix=Fix(
        do=(
            "If errors came during the run: drain the named host, and go on without it from the newest checkpoint that `holter checkpoint list RUN` calls healthy. If a row or page "
            "only waits to be set aside: reset the device when the job has ended (`nvidia-smi --gpu-reset -i UUID`). If remapping failed, or errors come back after a reset, have the device replaced."
        ),
        changes="Which hosts the job runs on.",
        does_not_fix="What was computed from a value that was lost: the checkpoint's verdict and the losses since say whether any was.",
        expect="No further errors after the reset; rows are remapped and none is pending.",
        verify="`nvidia-smi -q -d ECC,ROW_REMAPPER -i UUID`: no uncorrectable errors since the reset, remapping not pending, no failure.",
        otherwise="If errors appear on several devices of one host, suspect its power supply or its cooling; `dcgmi diag -r 3` tests memory under load.",
    ),
)  # fmt: skip

LINK_ERRORS = CauseEntry(
    cause="link_errors",
    happened="Errors of a device's links grow: NVLink or PCIe send again what arrived damaged.",
    mechanism=(
        "A connector, a cable, a bridge or a riser is bad or dirty. What arrives damaged is sent again, which costs time at every transfer; when that is not enough the link is trained "
        "anew or goes down, and the collective that uses it fails or hangs."
    ),
    would_refute="The counters stand still while the job communicates.",
    refuting_fact="is_link_quiet",
    is_refuted_by=True,
    passes_after_steps=50,
    rows=(
        Row("device_links", 0.95, "observation", seen=("is_link_failing",), unless=("is_device_assumed",)),
        Row("device_links", 0.80, "documented"),
    ),
    fix=Fix(
        do=(
            "Move this rank to another host at the next restart, at once if a link is down or the job hangs. On the host: `nvidia-smi nvlink -e -i UUID` (which link), "
            "`nvidia-smi topo -m`, `lspci -vvv -s ADDRESS | grep -i -E 'LnkSta|AER'`; reseat the card or its bridge, and look at switch and cables."
        ),
        changes="Which hosts the job runs on.",
        does_not_fix="The other end of the link, which may be the bad one.",
        expect="The counters stand still under load.",
        verify="`dcgmi diag -r 2 -p pcie` passes, and the counters named in the evidence do not move over an hour of training.",
        otherwise="If the counters of two devices grow together, it is what lies between them: bridge, switch or cable.",
    ),
)  # fmt: skip

DEVICE_THROTTLED = CauseEntry(
    cause="device_throttled",
    happened="A device's clock is held down by heat, by power or by the hardware.",
    mechanism=(
        "The driver lowers the clock so that the device does not overheat or draw more than it may. The same kernels take longer there, and every step of "
        "the job lasts as long as on this device."
    ),
    would_refute="The device's own readings show that nothing holds its clock down.",
    refuting_fact="is_clock_free",
    is_refuted_by=True,
    passes_after_steps=25,
    rows=(
        Row("device_clocks", 0.95, "observation", seen=("is_held_down", "is_held_by_heat"), unless=("is_device_assumed",)),
        Row("device_clocks", 0.88, "observation", seen=("is_held_down",), unless=("is_device_assumed",)),
        Row("device_clocks", 0.60, "inference", missing=_NOT_SAID),
    ),
    fix=Fix(
        do=(
            "`nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER -i UUID` on the named host, beside a device that runs freely. Heat: fans, airflow, dust, a failed pump, hot air "
            "from the neighbour. Power: a limit that is lower than on the others (`nvidia-smi -pl`), or a supply that lost a phase. Move the rank to another host meanwhile."
        ),
        changes="Nothing in the numbers: only the time a step takes.",
        does_not_fix="Other devices of the same host or rack, which the same heat or power will reach next.",
        expect="The clock returns to what the others' is, and steps become shorter.",
        verify="`holter_device_throttled` is 0 for this rank, and `holter_device_clock_hertz` is what the others show.",
        otherwise="If nothing is hot and no limit is lower, the device itself may be failing: the vendor's test under load (`dcgmi diag -r 3`).",
    ),
)  # fmt: skip

FAMILY = Family(
    detectors=(
        DetectorEntry(DeviceErrors(), Stage.FED, incident_per="event"),
        DetectorEntry(DeviceMemory(), Stage.FED, incident_per="event"),
        DetectorEntry(DeviceLinks(), Stage.FED, incident_per="event"),
        DetectorEntry(DeviceClocks(), Stage.FED, incident_per="event"),
    ),
    causes=(DEVICE_FAULT, DEVICE_MEMORY_ERROR, LINK_ERRORS, DEVICE_THROTTLED),
    brings_about=(
        # A rank whose device fails hangs, dies or is slow; one whose memory fails also computes nonsense.
        Consequence("device_errors", ("dead_rank", "stalled_rank", "slow_rank", "device_links", "device_clocks"), unless_leader_has=("is_unclear",), unless_follower_is=_OTHERS, unless_follower_has=_NOT_OURS, on_a_shared_rank=True),
        Consequence("device_memory", ("dead_rank", "stalled_rank", "slow_rank", "device_errors"), unless_leader_has=("is_old",), unless_follower_is=_OTHERS, unless_follower_has=_NOT_OURS, on_a_shared_rank=True),
        Consequence("device_memory", ("replica_divergence", "shard_history"), unless_leader_has=("is_old",), on_a_shared_rank=True, whenever=True),
        Consequence("device_memory", ("nonfinite_values",), unless_leader_has=("is_old",), unless_follower_is=("nonfinite_input",), on_a_shared_rank=True, whenever=True),
        # Errors that were only counted cost time; one that the driver reports stops a transfer.
        Consequence("device_links", ("dead_rank", "stalled_rank"), unless_leader_has=("is_only_counted",), unless_follower_is=_OTHERS, unless_follower_has=_NOT_OURS, on_a_shared_rank=True),
        Consequence("device_links", ("slow_rank",), unless_follower_is=("slow_input",), on_a_shared_rank=True, whenever=True),
        Consequence("device_clocks", ("slow_rank",), unless_follower_is=("slow_input",), on_a_shared_rank=True, whenever=True),
    ),
)  # fmt: skip
