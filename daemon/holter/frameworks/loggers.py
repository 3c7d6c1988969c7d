"""Reads what the script logs through its framework or tracker, by name, when it is logged.

Nothing is imported for this: a library is followed once the script has imported it, which is checked when a backward
pass begins and the interpreter has more modules than before. If one log function calls another, like the Trainer's that
writes to TensorBoard, only the outermost counts.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from holter.frameworks.tracker_marks import LIBRARIES, TrackerMarks
from holter.rank.framework import LateImports, LogFunction
from holter.rank.monitor import Monitor

Read = Callable[..., Any]
"""Returns the values that a call logs, by name; anything but a mapping is ignored."""


def _first(_self: Any, values: Any = None, *_: Any, **kwargs: Any) -> Any:
    return kwargs.get("data", kwargs.get("metrics", values))


def _scalar(_self: Any, tag: Any = "", scalar_value: Any = None, *_: Any, **__: Any) -> Mapping[str, Any]:
    return {str(tag): scalar_value}


def _scalars(_self: Any, main_tag: Any = "", tag_scalar_dict: Any = None, *_: Any, **__: Any) -> Mapping[str, Any]:
    return {f"{main_tag}/{tag}": value for tag, value in (tag_scalar_dict or {}).items()}


def _metric(key: Any = "", value: Any = None, *_: Any, **__: Any) -> Mapping[str, Any]:
    return {str(key): value}


def _metrics(metrics: Any = None, *_: Any, **__: Any) -> Any:
    return metrics


def _client_metric(_self: Any, _run_id: Any = "", key: Any = "", value: Any = None, *_: Any, **__: Any) -> Any:
    return {str(key): value}


def _batch(_self: Any, _run_id: Any = "", metrics: Any = (), *_: Any, **__: Any) -> Mapping[str, Any]:
    # Not from a generator, which can be read only once.
    return {str(one.key): one.value for one in metrics} if isinstance(metrics, (list, tuple)) else {}


_TORCH_BOARD = ("torch.utils.tensorboard.writer", "SummaryWriter")
_BOARD_X = ("tensorboardX.writer", "SummaryWriter")
_MLFLOW = ("mlflow.tracking.fluent", "")
_MLFLOW_CLIENT = ("mlflow.tracking.client", "MlflowClient")
TRACKERS = (
    LogFunction(*_TORCH_BOARD, "add_scalar", read=_scalar),
    LogFunction(*_TORCH_BOARD, "add_scalars", read=_scalars),
    LogFunction(*_BOARD_X, "add_scalar", read=_scalar),
    LogFunction(*_BOARD_X, "add_scalars", read=_scalars),
    LogFunction("wandb.sdk.wandb_run", "Run", "log", read=_first),
    LogFunction("trackio.run", "Run", "log", read=_first),
    LogFunction(*_MLFLOW, "log_metric", "mlflow", read=_metric),
    LogFunction(*_MLFLOW, "log_metrics", "mlflow", read=_metrics),
    LogFunction(*_MLFLOW_CLIENT, "log_metric", read=_client_metric),
    LogFunction(*_MLFLOW_CLIENT, "log_batch", read=_batch),
)
"""Log functions of trackers that any script may use; frameworks list their own."""


class Loggers:
    """Follows the log functions of libraries that the script has imported."""

    def __init__(self, monitor: Monitor, marks: TrackerMarks | None = None) -> None:
        """Prepare to follow; `marks` tells the trackers of incidents, and is None on all ranks but one."""
        self._monitor, self._marks = monitor, marks
        self._awaited = LateImports(
            [*TRACKERS, *(each for framework in monitor.context.frameworks.known for each in framework.logs)]
        )
        self._depth = 0
        self._has_wandb = False

    def install(self) -> None:
        """Look for new libraries at every backward pass."""
        self._monitor.before_backward.append(self._monitor.context.guard.wrap(self.look))

    def look(self) -> None:
        """Follow what was imported since the last look."""
        for logger, owners in self._awaited.come():
            self._follow(logger.module.partition(".")[0], logger.name, logger.read, *owners)
        self._follow_wandb()

    def _follow_wandb(self) -> None:
        """Follow `wandb.log`, a bound method that was taken from the started run before its class could be followed."""
        wandb = sys.modules.get("wandb")
        bound: Any = getattr(wandb, "log", None)
        if wandb is not None and not self._has_wandb and hasattr(bound, "__func__"):
            self._has_wandb = True
            if bound.__func__ is not getattr(type(bound.__self__), "log", None):
                self._follow("", "log", functools.partial(_first, None), wandb)
                if self._marks is not None:
                    self._marks.seen("wandb", bound.__self__)

    def _follow(self, library: str, name: str, read: Read, *owners: Any) -> None:
        self._monitor.context.patches.replace(name, functools.partial(self._around, library, read), *owners)

    def _around(self, library: str, read: Read, original: Callable[..., Any]) -> Callable[..., Any]:
        guard, marks = self._monitor.context.guard, self._marks
        tell = guard.wrap(self._tell)
        seen = guard.wrap(marks.seen) if marks is not None and library in LIBRARIES else None

        @functools.wraps(original)
        def log(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                tell(read, *args, **kwargs)
            if seen is not None:
                seen(library, None if library == "mlflow" else args[0] if args else None)
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return log

    def _tell(self, read: Read, *args: Any, **kwargs: Any) -> None:
        values = read(*args, **kwargs)
        if isinstance(values, Mapping):
            self._monitor.logs.log(values)
