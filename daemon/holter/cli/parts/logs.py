"""Bounded log files in the run directory, for processes that nobody watches while they run."""

import contextlib
import logging
import logging.handlers
from pathlib import Path

LOG_BYTES = 1 << 20


def log_to(path: Path, *, is_by_hand: bool = False) -> None:
    """Log to a file, and also to the terminal if started by hand; a directory that cannot be written is ignored."""
    handlers: list[logging.Handler] = [logging.StreamHandler()] if is_by_hand else []
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # To open a pipe is to wait for who reads it.
        if not path.is_fifo():
            handlers.append(logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1))
    # A full disk must not make every log line a traceback on a closed stderr.
    logging.raiseExceptions = False
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    for handler in handlers:
        handler.setFormatter(formatter)
        logging.getLogger("holter").addHandler(handler)
    logging.getLogger("holter").setLevel(logging.INFO)
