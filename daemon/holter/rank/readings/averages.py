"""An averaged copy of the weights against the live ones, on a sample of elements."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holter.rank.context import Context
from holter.rank.readings.batches import sign

MAX_TENSORS = 16
MAX_ELEMENTS = 1024
"""Of each."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor of the copy, and the live one."""
WRAPPERS = ("module.", "_orig_mod.", "model.", "ema_model.", "averaged_model.")
"""What copies put before the names of their parameters."""


def named_tensors(average: Any) -> dict[str, torch.Tensor]:
    """The tensors of a module, of a state dict, or of an object that keeps them in a list, under numbers then."""
    if isinstance(average, torch.nn.Module):
        return dict(average.named_parameters())
    if isinstance(average, Mapping):
        return {str(name): value for name, value in average.items() if isinstance(value, torch.Tensor)}
    shadow = getattr(average, "shadow_params", None)
    if isinstance(shadow, Sequence) and all(isinstance(value, torch.Tensor) for value in shadow):
        return {str(number): value for number, value in enumerate(shadow)}
    return {}


class AverageReader:
    """Remembers what the copy was when it was last logged."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last = 0

    def read(self, average: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
        """How far the copy is from the live weights, and whether it moved."""
        pairs = self._pairs(average)
        # Evenly over the model: its first tensors are embeddings, which move in their own way.
        pairs = [pair for pair in pairs[:: -(-len(pairs) // MAX_TENSORS) or 1] if _is_comparable(*pair)]
        if not pairs:
            return
        copies = torch.cat([_sample(copy.detach()).double() for copy, _ in pairs])
        live = torch.cat([_sample(live.detach()).double() for _, live in pairs])
        apart, size = float((copies - live).norm()), float(live.norm())
        yield "ema.distance", apart / size if size else float(apart > 0)
        now = sign([copies])
        if self._last:
            yield "ema.moved", float(now != self._last)
        self._last = now

    def _pairs(self, average: dict[str, torch.Tensor]) -> list[Pair]:
        for model in self._context.models:
            live = {name.removeprefix(model.prefix): parameter for name, parameter in model.parameters}
            if all(name.isdigit() for name in average):
                trained = [parameter for parameter in live.values() if parameter.requires_grad]
                found = list(zip(average.values(), trained, strict=False)) if len(trained) == len(average) else []
            else:
                found = [(copy, live[bare]) for name, copy in average.items() if (bare := _bare(name, live)) in live]
            # The copy may be among the models itself.
            if found and found[0][0].data_ptr() != found[0][1].data_ptr():
                return found
        return []


def _bare(name: str, live: Mapping[str, Any]) -> str:
    """The name without what a wrapper put before it."""
    while name not in live:
        shorter = next((name.removeprefix(wrapper) for wrapper in WRAPPERS if name.startswith(wrapper)), None)
        if shorter is None:
            break
        name = shorter
    return name


def _is_comparable(copy: torch.Tensor, live: torch.Tensor) -> bool:
    is_here = copy.device.type == live.device.type == "cpu" and copy.layout is live.layout is torch.strided
    return is_here and copy.shape == live.shape and copy.is_floating_point() and copy.data_ptr() != live.data_ptr()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements spread over the whole; where flattening would copy it, its first ones."""
    if tensor.numel() <= MAX_ELEMENTS:
        return tensor.reshape(-1)
    if tensor.is_contiguous():
        return tensor.view(-1)[:: -(-tensor.numel() // MAX_ELEMENTS) | 1]
    return tensor[tuple(0 for _ in range(tensor.dim() - 1))][:MAX_ELEMENTS]
