"""What savers tell each other while they write one checkpoint, through files beside it: no collective, so that blocked ranks can too.

    parts/exchange/plan-2       what rank 2 could write
    parts/exchange/orders-0     who writes what, from the first saver
    parts/exchange/written-2    where rank 2 wrote it
    parts/exchange/failure-2    or why it did not
    parts/exchange/end-0        what is missing of the whole, once its metadata is written

Pickles, as torch.distributed.checkpoint itself sends its plans, read from this directory alone, which is made for one save.
"""

import contextlib
import pickle
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holter import clock
from holter.errors import SaveError

FOLDER = "parts/exchange"
"""Below a folder that is gone once the checkpoint is sealed."""
POLL_S = 0.01


class Exchange:
    """One saver's end."""

    def __init__(self, directory: Path, rank: int, until_s: float) -> None:
        self.folder = directory / FOLDER
        self._rank = rank
        self._until_s = until_s
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, kind: str, content: Any) -> None:
        """Tell the others; they see all of it or nothing."""
        part = self.folder / f".{kind}-{self._rank}"
        part.write_bytes(pickle.dumps(content))
        part.rename(self.folder / f"{kind}-{self._rank}")

    def fail(self, error: Exception) -> None:
        """Tell the others not to wait for this rank, if the disk still takes a file."""
        with contextlib.suppress(OSError):
            self.put("failure", f"{type(error).__name__}: {error}")

    def get(self, kind: str, rank: int, patience_s: float) -> Any:
        """What this rank says; SaveError if it says nothing in time, or that it failed."""
        found, whys = self.gather(kind, [rank], patience_s)
        if rank not in found:
            raise SaveError(f"rank {rank} {whys[rank]}")
        return found[rank]

    def gather(self, kind: str, ranks: Iterable[int], patience_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        """What these ranks say, and why some do not."""
        found: dict[int, Any] = {}
        whys: dict[int, str] = {}
        began_s = clock.monotonic_s()
        until_s = min(began_s + patience_s, self._until_s)
        awaited = set(ranks)
        while awaited:
            for rank in sorted(awaited):
                if (path := self.folder / f"{kind}-{rank}").exists():
                    found[rank] = pickle.loads(path.read_bytes())  # noqa: S301  written by a saver of this very halt
                elif (path := self.folder / f"failure-{rank}").exists():
                    whys[rank] = f"failed: {pickle.loads(path.read_bytes())}"  # noqa: S301  as above
            awaited -= {*found, *whys}
            if awaited and clock.monotonic_s() > until_s:
                whys |= dict.fromkeys(awaited, f"gave no {kind} within {clock.monotonic_s() - began_s:.0f} s")
                break
            if awaited:
                threading.Event().wait(POLL_S)
        return found, whys
