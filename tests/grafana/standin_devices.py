"""What two devices would tell of themselves, where there are none: made up here, and read, exported, scraped and asked for as real ones.

    a Device, as holter's own reader makes it ─▶ holter's own exporter ─▶ holter_device_*
    the same readings in dcgm-exporter's words ─▶ DCGM_FI_DEV_*
    rank N of the run is taken for one that computes on device N: Prometheus writes that into holter_rank_info as it scrapes

The second device grows hot, and its clock is held down for it.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from holter.exporters.prometheus import expose, families
from holter.exporters.snapshot import RankSnapshot
from holter.records import Device

NUM_DEVICES = 2
HOT_C, HOTTER_C_PER_S = 86, 0.6


@dataclass(frozen=True)
class Standin:
    """The devices of one run."""

    address: str
    run_id: str

    def relabelling(self) -> list[dict[str, Any]]:
        """For what is scraped of holter."""
        told = {"source_labels": ["__name__", "run_id", "rank"], "regex": f"holter_rank_info;{self.run_id};(.+)"}
        return [told | {"target_label": "gpu_uuid", "replacement": "GPU-$1"}]


@contextlib.contextmanager
def devices(run_id: str) -> Iterator[Standin]:
    """Served until the end of the block."""
    began_s = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page(run_id, time.monotonic() - began_s)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Standin(f"127.0.0.1:{server.server_address[1]}", run_id)
    server.shutdown()
    server.server_close()


def page(run_id: str, age_s: float) -> bytes:
    """Both exporters' lines at this age."""
    devices = [_device(number, age_s) for number in range(NUM_DEVICES)]
    ranks = [RankSnapshot(rank, "host", device=device, gpu_uuid=device.uuid) for rank, device in enumerate(devices)]
    told = [family for family in families(run_id, "", ranks) if family.name.startswith("holter_device_")]
    return expose(told, "")[0] + "".join(_dcgm(device, number) for number, device in enumerate(devices)).encode()


def _device(number: int, age_s: float) -> Device:
    temperature_c = 62 if number == 0 else min(91, int(64 + HOTTER_C_PER_S * age_s))
    is_hot = temperature_c >= HOT_C
    return Device(
        uuid=f"GPU-{number}",
        throttled_by=["thermal"] if is_hot else [],
        clock_mhz=1215.0 if is_hot else 1980.0,
        clock_limit_mhz=1980.0,
        temperature_c=float(temperature_c),
        power_w=430.0 if is_hot else 640.0,
        memory_used_bytes=61 << 30,
        memory_total_bytes=80 << 30,
        counters={
            "ecc_corrected": 3 * number,
            "ecc_uncorrected": number,
            "nvlink_replays": 2 * number,
            "pcie_replays": 1,
        },
        states=["row_remap_pending"] * number,
    )


def _dcgm(device: Device, number: int) -> str:
    labels = f'{{gpu="{number}",UUID="{device.uuid}",device="nvidia{number}",modelName="made up",Hostname="host"}}'
    busy = 99 if device.throttled_by else 94
    return f"DCGM_FI_DEV_GPU_UTIL{labels} {busy}\nDCGM_FI_DEV_FB_USED{labels} {61_000 + number}\n"
