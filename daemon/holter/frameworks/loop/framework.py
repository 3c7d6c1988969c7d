"""A loop that no framework runs, and the save functions that any script may use."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holter.rank.framework import Framework, Keeper, SaveFunction, absolute

if TYPE_CHECKING:
    from holter.rank.context import Context

_DCP = ("torch.distributed.checkpoint.state_dict_saver", "")


def _where(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> str:
    """Return the path given to `dcp.save(state_dict, checkpoint_id=…)`, or that of its writer."""
    where = kwargs.get("checkpoint_id")
    writer = kwargs.get("storage_writer", args[1] if len(args) > 1 else None)
    return absolute(where if where is not None else getattr(writer, "path", ""))


class Loop(Framework):
    """The script's own loop: plain, DDP, or sharded by DTensors."""

    name = "loop"
    checkpoint = "dcp"
    resume = "torch.distributed.checkpoint.load(state, checkpoint_id={path!r}); holter.restore({path!r}) once the data are where the run was"
    saves = (
        SaveFunction(*_DCP, "save", "torch.distributed.checkpoint", checkpoint="dcp", where=_where),
        SaveFunction(*_DCP, "async_save", "torch.distributed.checkpoint"),
        # Looked up at each call even by a script that imported `save` by name before it could be followed.
        SaveFunction(*_DCP, "_save_state_dict", checkpoint="dcp", where=_where),
        SaveFunction("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
        SaveFunction("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained"),
        SaveFunction("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "save_pretrained"),
        SaveFunction("peft.peft_model", "PeftModel", "save_pretrained"),
        SaveFunction("safetensors.torch", "", "save_file"),
        SaveFunction("safetensors.torch", "", "save_model"),
    )

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper:
        """Return a keeper that saves with torch.distributed.checkpoint."""
        from holter.frameworks.loop.keeper import DistributedKeeper  # noqa: PLC0415  not before a save

        return DistributedKeeper(context, optimizers)
