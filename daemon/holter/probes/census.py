"""Who is there: names, shapes, dtypes, frozenness, buffers, and which optimizer holds what, by identity."""

from collections.abc import Iterator

import torch

from holter.probes.models import Models
from holter.records import Census, TensorEntry

ENTRIES_PER_PART = 500
"""About 40 KB a part: small beside the page's ring."""


def take(models: Models, optimizers: list[torch.optim.Optimizer], ready_order: list[int]) -> Iterator[Census]:
    """The census of all watched models, in parts; `ready_order` holds parameter ids in the order their gradients came."""
    holder = {
        id(parameter): index
        for index, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    watched = list(models)
    tensors = [(name, p, False) for model in watched for name, p in model.parameters]
    place = {id(p): index for index, (_, p, _) in enumerate(tensors)}
    tensors += [(name, b, True) for model in watched for name, b in model.buffers]
    entries = [
        TensorEntry(
            name=name,
            shape=tuple(t.shape),
            dtype=str(t.dtype).removeprefix("torch."),
            requires_grad=t.requires_grad,
            is_buffer=is_buffer,
            optimizer=holder.get(id(t), -1),
        )
        for name, t, is_buffer in tensors
    ]
    parts = max(1, -(-len(entries) // ENTRIES_PER_PART))
    for part in range(parts):
        yield Census(
            model=0,
            wrapper=watched[0].wrapper if watched else "",
            is_replicated=any(model.is_replicated for model in watched),
            optimizers=[type(optimizer).__name__ for optimizer in optimizers],
            backward_order=[place[i] for i in ready_order if i in place] if part == 0 else [],
            part=part,
            parts=parts,
            entries=entries[part * ENTRIES_PER_PART : (part + 1) * ENTRIES_PER_PART],
        )
