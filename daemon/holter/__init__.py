"""A Holter monitor for distributed training: what went wrong, on which rank, in which tensor, since which step."""

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from holter.frameworks.attach import Watch


class AcceleratorLike(Protocol):
    """Interface of accelerate's `Accelerator` that holter uses; accelerate itself is not imported here."""

    def prepare(self, *args: Any) -> Any:
        """Wrap models, optimizers and loaders."""

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Run a backward pass."""


class ModuleLike(Protocol):
    """Interface of torch's `Module` that holter uses."""

    training: bool

    def parameters(self, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002  as torch has it
        """Return the parameters of this module and of all modules in it."""


AnyAccelerator = TypeVar("AnyAccelerator", bound=AcceleratorLike)

__version__ = "0.1.0"
__all__ = ["HolterCallback", "__version__", "restore", "watch"]


@overload
def watch(first: AnyAccelerator) -> AnyAccelerator: ...
@overload
def watch(first: ModuleLike, optimizer: object = None) -> "Watch": ...
def watch(first: Any, optimizer: Any = None) -> Any:
    """Attach to this process: `watch(accelerator)` returns it, `watch(model, optimizer)` returns a Watch.

    A second call attaches nothing more.
    """
    from holter.frameworks import attach  # noqa: PLC0415  imports torch

    return attach.watch(first, optimizer)


def restore(directory: Any, model: Any = None) -> int:
    """Restore this rank's random states to the beginning of the step that a halt did not apply; return the completed steps.

    `directory` is a checkpoint that holter kept (`<run>/checkpoints/30`, or its `state`), loaded already by the framework's own function;
    `model` gets back the buffers that each rank has of its own. Call this last, when the next batch is that of the next step: whatever draws
    random numbers afterwards, such as a new iterator of a DataLoader, draws those of the halted run. If the halted step was the first of its
    epoch, the halted run made that iterator within the step: then call this before the iterator is made.

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
