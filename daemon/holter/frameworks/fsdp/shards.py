"""The shards behind FSDP2's modules, wherever those are in their forward or backward pass."""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def sharded(root: torch.nn.Module) -> dict[tuple[int, str], torch.nn.Parameter]:
    """FSDP2's own parameters, which its optimizer steps, by the modules that show them or the gathered ones."""
    found = {}
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()  # noqa: SLF001
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
        for held in (held for group in groups if group is not None for held in group.fsdp_params):
            info = held._module_info  # noqa: SLF001
            for owner, name in (
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names, strict=True),
            ):
                found[id(owner), name] = held.sharded_param
    return found
