"""Where a finished save lies, from the call that made it: one function for each library's way to say so. Each may raise; the caller is guarded."""

import os
from collections.abc import Mapping
from typing import Any

import torch

MAX_DEPTH = 4


def by_accelerate(_args: tuple[Any, ...], _kwargs: Mapping[str, Any], result: Any) -> str:
    """`Accelerator.save_state` returns it."""
    return absolute(result)


def by_trainer(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> str:
    """`Trainer._save_checkpoint(model, trial)` names it by its step."""
    trainer = args[0]
    trial = kwargs.get("trial", args[2] if len(args) > 2 else None)  # noqa: PLR2004 - the signature's
    return absolute(os.path.join(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}"))  # noqa: SLF001, PTH118 - may be an address


def by_deepspeed(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> str:
    """`DeepSpeedEngine.save_checkpoint(save_dir, tag)`; without a tag it counts."""
    engine, *rest = args
    save_dir = kwargs["save_dir"] if "save_dir" in kwargs else rest.pop(0)
    tag = kwargs.get("tag", rest[0] if rest else None)
    return absolute(os.path.join(save_dir, str(tag or f"global_step{engine.global_steps}")))  # noqa: PTH118 - may be an address


def by_distributed(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> str:
    """`dcp.save(state_dict, checkpoint_id=…)`, or the writer that it was given."""
    where = kwargs.get("checkpoint_id")
    writer = kwargs.get("storage_writer", args[1] if len(args) > 1 else None)
    return absolute(where if where is not None else getattr(writer, "path", ""))


def by_torch(args: tuple[Any, ...], kwargs: Mapping[str, Any], num_parameters: int) -> str:
    """`torch.save(obj, f)` of at least half as many numbers as are trained; of anything less there is nothing to say."""
    saved = args[0] if args else kwargs.get("obj")
    target = args[1] if len(args) > 1 else kwargs.get("f")
    if _num_numbers(saved) * 2 < max(1, num_parameters):
        return ""
    return absolute(target if isinstance(target, (str, os.PathLike)) else getattr(target, "name", ""))


def absolute(where: Any) -> str:
    """A path from the root, an address as it is; empty for what is neither."""
    if not isinstance(where, (str, os.PathLike)) or not (text := os.fspath(where)) or not isinstance(text, str):
        return ""
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - links stay as the user wrote them


def _num_numbers(thing: Any, depth: int = 0) -> int:
    """Floating-point elements in a state dict, or in what holds some."""
    if isinstance(thing, torch.Tensor):
        return thing.numel() if thing.is_floating_point() else 0
    if isinstance(thing, torch.nn.Module):
        return sum(parameter.numel() for parameter in thing.parameters())
    if depth >= MAX_DEPTH:
        return 0
    parts = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple)) else ()
    return sum(_num_numbers(part, depth + 1) for part in parts)
