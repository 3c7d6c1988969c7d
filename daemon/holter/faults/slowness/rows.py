"""Ranks that the others wait for."""

from holter.faults.row import Row

_WORK = "ranks whose work can be compared: the late one has larger batches, more micro-steps or another part of the model, so that its time may be its due"
_BOTH = "a step without the wait for data: batches come late on this rank and its device is held down as well"

ROWS: tuple[Row, ...] = (
    # slow_rank: is the time lost in the data loader, on a device that is held down, or in between?
    Row("slow_input", "slow_rank", 0.93, "observation", seen=("is_in_data",), unless=("has_other_work",)),
    Row("slow_device", "slow_rank", 0.92, "observation", seen=("is_device_throttled",), absent=("is_in_data",), unless=("has_other_work",)),
    Row("slow_device", "slow_rank", 0.40, "inference", seen=("is_device_throttled", "is_in_data"), unless=("has_other_work",), missing=_BOTH),
    Row("slow_compute", "slow_rank", 0.93, "observation", absent=("is_in_data", "is_device_throttled"), unless=("has_other_work",)),
    Row("slow_compute", "slow_rank", 0.90, "observation", absent=("is_in_data",), unknown=("is_device_throttled",), unless=("has_other_work",)),
    Row("slow_input", "slow_rank", 0.40, "inference", seen=("has_other_work", "is_in_data"), missing=_WORK),
    Row("slow_compute", "slow_rank", 0.35, "inference", missing=_WORK),
)  # fmt: skip
