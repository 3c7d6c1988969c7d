"""Saves and evaluations of libraries, shown as such from beginning to end: a rank that writes a checkpoint for minutes does not hang.

`torch.save` and a model's call show themselves (`calls.py`). What lies around them in a library (weights as safetensors, shards, metrics,
uploads) is the library's own function. Nothing is imported for this: a library is followed once the script has imported it.

The outermost of them that ends well is a finished checkpoint, if it is one that a run can go on from: that is told, with its place.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holter import clock
from holter.rank.context import Context, in_phase
from holter.rank.hooks import save_paths
from holter.rank.hooks.patches import LateImports
from holter.records import Kept, Phase

Whereabouts = Callable[[tuple[Any, ...], Mapping[str, Any], Any], str]
"""Arguments and result of a call -> where it saved; empty: nowhere that we know."""


@dataclass(frozen=True)
class Stretch:
    """One function that is a save, or an evaluation, as a whole."""

    module: str
    owner: str
    """Class in that module; empty: the module itself."""
    name: str
    phase: Phase = Phase.CHECKPOINT
    also: str = ""
    """Another module that knows the same function."""
    framework: str = ""
    """Whose checkpoint it makes; empty: none that a run goes on from, or one that is not finished when the call returns."""
    where: Whereabouts | None = None


STRETCHES = (
    Stretch(
        "torch.distributed.checkpoint.state_dict_saver",
        "",
        "save",
        also="torch.distributed.checkpoint",
        framework="dcp",
        where=save_paths.by_distributed,
    ),
    Stretch("torch.distributed.checkpoint.state_dict_saver", "", "async_save", also="torch.distributed.checkpoint"),
    # Of a script that took `save` by name before we could follow it, this is still looked up.
    Stretch(
        "torch.distributed.checkpoint.state_dict_saver",
        "",
        "_save_state_dict",
        framework="dcp",
        where=save_paths.by_distributed,
    ),
    Stretch(
        "accelerate.accelerator", "Accelerator", "save_state", framework="accelerate", where=save_paths.by_accelerate
    ),
    Stretch("accelerate.accelerator", "Accelerator", "save_model"),
    Stretch("transformers.trainer", "Trainer", "_save_checkpoint", framework="hf_trainer", where=save_paths.by_trainer),
    Stretch("transformers.trainer", "Trainer", "save_model"),
    Stretch("transformers.trainer", "Trainer", "evaluate", Phase.EVALUATION),
    Stretch("transformers.trainer", "Trainer", "predict", Phase.EVALUATION),
    Stretch("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    Stretch("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained"),
    Stretch("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "save_pretrained"),
    Stretch("peft.peft_model", "PeftModel", "save_pretrained"),
    Stretch(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine",
        "save_checkpoint",
        framework="deepspeed",
        where=save_paths.by_deepspeed,
    ),
    Stretch("deepspeed.runtime.engine", "DeepSpeedEngine", "save_16bit_model"),
    Stretch("safetensors.torch", "", "save_file"),
    Stretch("safetensors.torch", "", "save_model"),
)


class SaveProbe:
    """Follows the libraries that the script has imported."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._awaited = LateImports(STRETCHES)
        self._around_us = threading.local()
        """How many saves this thread is in."""
        self._say = context.guard.wrap(self._tell)

    def install(self) -> None:
        """Follow what is there already."""
        self._context.guard.wrap(self.look, "any")()
        # Above the phase that `calls.py` shows: only here it is known whether a library is around it.
        self._context.patches.replace("save", self._around_torch_save, torch, torch.serialization)

    def look(self) -> None:
        """Follow what has come since the last look."""
        for stretch, owners in self._awaited.come():
            make = functools.partial(self._around, stretch)
            self._context.patches.replace(stretch.name, make, *owners)

    def _around(self, stretch: Stretch, original: Callable[..., Any]) -> Callable[..., Any]:
        shown = in_phase(self._context, stretch.phase, original)
        return self._told(shown, stretch.framework, stretch.where) if stretch.phase is Phase.CHECKPOINT else shown

    def _around_torch_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def where(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> str:
            return save_paths.by_torch(args, kwargs, sum(_size(model.inner) for model in self._context.models))

        return self._told(original, "torch", where)

    def _told(self, call: Callable[..., Any], framework: str, where: Whereabouts | None) -> Callable[..., Any]:
        """The same function; the outermost that ends without an exception is told."""

        @functools.wraps(getattr(call, "__wrapped__", call))
        def within(*args: Any, **kwargs: Any) -> Any:
            began_s, depth = clock.monotonic_s(), getattr(self._around_us, "depth", 0)
            self._around_us.depth = depth + 1
            try:
                result = call(*args, **kwargs)
            finally:
                self._around_us.depth = depth
            if where is not None and depth == 0:
                self._say(framework, functools.partial(where, args, kwargs, result), began_s)
            return result

        return within

    def _tell(self, framework: str, where: Callable[[], str], began_s: float) -> None:
        path = where()
        if path:
            seconds = round(clock.monotonic_s() - began_s, 3)
            self._context.writer.say(self._context.log.step, Kept(path=path, framework=framework, seconds=seconds))


def _size(module: torch.nn.Module | None) -> int:
    return sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0
