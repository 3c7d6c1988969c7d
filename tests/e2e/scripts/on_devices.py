"""Two ranks that train on the CPU while a stand-in driver tells of a device for each; at a step rank 1's device does what the argument says."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT, STEPS, AT = sys.argv[1], int(sys.argv[2]), 30
STEP_S, LATE_S = 0.03, 0.06


def device(*lines: str) -> None:
    """The stand-in reads this file at every call."""
    with Path(os.environ["HOLTER_TESTING_NVML"]).open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def spoil(step: int) -> None:
    """What happens to rank 1 and its device."""
    if FAULT == "heat":
        time.sleep(LATE_S)
    if step != AT:
        return
    match FAULT:
        case "killed":
            device("1 xid 79", "1 error 15")
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        case "hung":
            device("1 xid 119")
            time.sleep(600)
        case "memory":
            device("1 xid 94", "1 ecc_uncorrected 2", "1 remap_pending 1")
        case "link":
            device("1 nvlink_recoveries 5", "1 nvlink_replays 400", "1 pcie_replays 3")
        case "script":
            # A kernel that reads where it must not is the script's own error, whatever the driver calls it.
            device("1 xid 31", "1 xid 43")
            raise IndexError("batch 30 is out of range")
        case "well":
            device(
                "1 ecc_corrected 4000",
                "1 nvlink_replays 1",
                "0 reasons 0x4",
                "1 reasons 0x4",
                "0 clock 1700",
                "1 clock 1650",
            )


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for step in range(STEPS):
    time.sleep(STEP_S)
    if dist.get_rank() == 1:
        spoil(step)
    optimizer.zero_grad()
    loss = model(torch.randn(16, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
