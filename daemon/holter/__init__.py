"""A Holter monitor for distributed training: what went wrong, on which rank, in which tensor, since which step."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["HolterCallback", "__version__", "watch"]


def watch(*args: Any, **kwargs: Any) -> Any:
    """Attach to this process: `watch(accelerator)` gives it back, `watch(model, optimizer)` gives a Watch. Twice is once."""
    from holter.integrations import watching  # noqa: PLC0415  imports torch

    return watching.watch(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name == "HolterCallback":
        from holter.integrations.hf_trainer import HolterCallback  # noqa: PLC0415  imports transformers

        return HolterCallback
    raise AttributeError(f"module 'holter' has no attribute {name!r}")
