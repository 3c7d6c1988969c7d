"""Every rank saves its state now and then; one rank's third save never ends: its storage hangs."""

import io
import os
import tempfile
import threading
from pathlib import Path

import torch
from common import DistributedDataParallel, Net, batch, finish, options, start, work
from torch.nn.functional import cross_entropy


class HangingStorage(io.BytesIO):
    """Takes no byte and gives no error."""

    def write(self, _: object) -> int:
        """Never returns."""
        threading.Event().wait()
        return 0


# `write`: Python code that writes never returns. `open`: a file that cannot be opened (a pipe that nobody reads from).
arguments = options("write", "open", steps=60)
rank = start()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with tempfile.TemporaryDirectory() as folder:
    os.mkfifo(Path(folder) / "pipe")
    for step in range(arguments.steps):
        x, y = batch(rank, step)
        work()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 10 == 9:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if step == 29 and rank == arguments.culprit and not arguments.healthy:
                torch.save(state, HangingStorage() if arguments.how == "write" else Path(folder) / "pipe")
            torch.save(state, Path(folder) / "last.pt")
    finish()
