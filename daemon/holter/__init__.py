"""A Holter monitor for distributed training: what went wrong, on which rank, in which tensor, since which step."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["HolterCallback", "__version__", "restore", "watch"]


def watch(*args: Any, **kwargs: Any) -> Any:
    """Attach to this process: `watch(accelerator)` gives it back, `watch(model, optimizer)` gives a Watch. Twice is once."""
    from holter.frameworks import watch  # noqa: PLC0415  imports torch

    return watch.watch(*args, **kwargs)


def restore(directory: Any, model: Any = None) -> int:
    """Set this rank's random states as they were when the step began before which a run was halted; returns the completed steps.

    `directory` is a checkpoint that holter kept (`<run>/checkpoints/30`, or its `state`), loaded already by the framework's own function;
    `model` gets back the buffers that each rank has of its own. To be called last, with the data at the next step's batch: whatever
    draws random numbers afterwards, an iterator of a DataLoader too, draws those of the halted run. Only where the halted step was the first
    of its epoch has the run itself made that iterator afterwards: then before it.

        state = {"model": …, "optim": …}
        torch.distributed.checkpoint.load(state, checkpoint_id=directory / "state")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        completed = holter.restore(directory, model)
    """
    from holter.frameworks.saving import random_states  # noqa: PLC0415  imports torch

    return random_states.restore(directory, model)


def __getattr__(name: str) -> Any:
    if name == "HolterCallback":
        from holter.frameworks.hf_trainer.callback import HolterCallback  # noqa: PLC0415  imports transformers

        return HolterCallback
    raise AttributeError(f"module 'holter' has no attribute {name!r}")
