"""The ranks' devices: is a clock held down, and why; and what dcgm-exporter tells of the same devices, found by their UUID.

holter's own readings come from the sidecars alone. A machine without devices has none of them, and these panels are empty there.
"""

from holter.exporters.dashboards.card import CRITICAL, FINE, WARNING, Card, Panel, Query
from holter.exporters.dashboards.panels import lines, states
from holter.exporters.dashboards.promql import END, RANK, by_rank, each, highest, highest_by_rank, lowest, series

REASONS = {"power": WARNING, "thermal": CRITICAL, "hardware": CRITICAL}
"""Why a clock is held down, the gravest last."""


def panels() -> list[Panel]:
    """For the dashboard of ranks."""
    throttled = each("rank, reason", series("device_throttled", of=RANK) + END)
    names = {"0": ("free", FINE)} | {str(level): (reason, REASONS[reason]) for level, reason in enumerate(REASONS, 1)}
    return [
        lines(
            Card(10, "Device: clock", "Share of the most that it can be. A device that computes and is below its peers holds all of them up.", "percentunit", 12),
            Query(lowest(_clock(), _clock(END)), "rank {{rank}}"),
        ),
        states(
            Card(11, "Device: clock held down", "Why the clock is held down: power cap, heat, or the hardware itself. Idleness is none of them.", "none", 12),
            Query(highest(_held_down(), f"sum by (rank) ({throttled})"), "rank {{rank}}"),
            names,
        ),
        lines(
            Card(12, "Device: temperature", "As its driver tells the sidecar.", "celsius", 12),
            Query(highest_by_rank("device_temperature_celsius"), "rank {{rank}}"),
        ),
        lines(
            Card(13, "Device: power", "As its driver tells the sidecar.", "watt", 12),
            Query(highest_by_rank("device_power_watts"), "rank {{rank}}"),
        ),
        lines(
            Card(14, "Device: utilisation", "From dcgm-exporter, if Prometheus scrapes it: the device of each rank, found by its UUID.", "percent", 12),
            Query(lowest(_dcgm("GPU_UTIL"), _dcgm("GPU_UTIL", END)), "rank {{rank}}"),
        ),
        lines(
            Card(15, "Device: memory used", "From dcgm-exporter, likewise.", "mbytes", 12),
            Query(highest(_dcgm("FB_USED"), _dcgm("FB_USED", END)), "rank {{rank}}"),
        ),
    ]  # fmt: skip


def _clock(at: str = "") -> str:
    return f"{by_rank('device_clock_hertz', at=at)} / {by_rank('device_clock_limit_hertz', at=at)}"


def _held_down() -> str:
    """0, or the number of the gravest reason."""
    told = (f"{series('device_throttled', _is(reason), of=RANK)} * {level}" for level, reason in enumerate(REASONS, 1))
    return each("rank", " or ".join(told))


def _is(reason: str) -> str:
    return f'reason="{reason}"'


def _dcgm(field: str, at: str = "") -> str:
    """Of each rank's device. The ranks are the many: some may share a device, and dcgm-exporter may tell of its parts."""
    device = each("rank, gpu_uuid", series("rank_info", 'gpu_uuid!=""', of=RANK) + at)
    ranks = f'label_replace({device}, "UUID", "$1", "gpu_uuid", "(.+)")'
    return each("rank", f"{ranks} * on (UUID) group_left () {each('UUID', f'DCGM_FI_DEV_{field}{at}')}")
