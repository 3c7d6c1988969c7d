"""How ranks find the coordinator: rank 0 publishes its address, run and token in the job's own store, and the others read them there.

The store is torch's, made by `init_process_group`. Rank 0 writes to it; on other ranks, a thread looks there until the message is found or the
patience is over. Nobody waits for that thread.
"""

import atexit
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from holter.rank.context import Context
from holter.threads import without_signals

KEY = "holter/bootstrap/1"
PATIENCE_S = 120.0
INTERVAL_S = 0.1


class Rendezvous:
    """Publishes or finds one message, once a process group exists."""

    def __init__(self, context: Context, *, message: bytes | None, found: Callable[[bytes], None]) -> None:
        self._context = context
        self._message = message
        self._found = found
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        """Publish or look for the message when a process group is made, or at once if there is one."""
        if not dist.is_available():
            return
        self._context.patches.replace("init_process_group", self._around_init, c10d, dist)
        atexit.register(self.stop)
        if dist.is_initialized():
            self._context.guard.wrap(self._exchange, "any")()

    def stop(self) -> None:
        """End the thread before the interpreter ends: a thread that is in native code at that moment would abort the process."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _around_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        exchange = self._context.guard.wrap(self._exchange, "any")

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            exchange()
            return result

        return init_process_group

    def _exchange(self) -> None:
        store = c10d._get_default_store()  # noqa: SLF001
        if self._message is not None:
            store.set(KEY, self._message)
        elif self._thread is None:
            self._thread = threading.Thread(target=self._look, args=(store,), name="holter-rendezvous", daemon=True)
            with without_signals():
                self._thread.start()

    def _look(self, store: Any) -> None:
        for _ in range(int(PATIENCE_S / INTERVAL_S)):
            try:
                if store.check([KEY]):
                    self._found(bytes(store.get(KEY)))
                    return
            except Exception:  # noqa: BLE001  the store went away with the job
                return
            if self._stop.wait(INTERVAL_S):
                return
