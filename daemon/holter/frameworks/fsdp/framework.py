"""What holter knows of FSDP in particular."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holter.frameworks.loop.framework import Loop
from holter.rank.framework import Framework, Keeper

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.monitor import Monitor


PARTS = "fsdp_parts"
"""Name of the format, in a manifest, of parts that ranks wrote separately."""
ASSEMBLED = "assembled"
"""Folder that `holter checkpoint assemble` writes, beside `state`, which stays as it was sealed."""
RESUME_PARTS = "`holter checkpoint assemble {path!r}`, then dcp.load from the folder that it names"


class Fsdp(Framework):
    """A loop whose model is sharded."""

    name = "fsdp"
    checkpoint, resume = Loop.checkpoint, Loop.resume

    def attach(self, monitor: "Monitor") -> None:
        """Import FSDP now if snapshots are kept.

        A snapshot asks for shards in the middle of a forward pass, which must not wait a second for imports.
        """
        if monitor.context.undo.snapshots is not None:
            import torch.distributed.fsdp  # noqa: F401, PLC0415

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper | None:
        """Return a keeper for flat shards (FSDP1); None for DTensors, which the loop's keeper saves."""
        from holter.frameworks.fsdp.keeper import FlatKeeper  # noqa: PLC0415  not before a save

        keeper = FlatKeeper(context, optimizers)
        return keeper if keeper.is_flat() else None

    def sharded(self, root: Any) -> Mapping[tuple[int, str], Any]:
        """Return FSDP2's sharded parameters by (id of the module, name), wherever the modules are in their forward or backward pass."""
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415  takes a second

        found = {}
        for module in root.modules():
            if not isinstance(module, FSDPModule):
                continue
            state: Any = module._get_fsdp_state()  # noqa: SLF001
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
            for held in (held for group in groups if group is not None for held in group.fsdp_params):
                info = held._module_info  # noqa: SLF001
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                for owner, name in ((info.module, info.param_name), *shared):
                    found[id(owner), name] = held.sharded_param
        return found
