"""Where a statistic is taken: on the rank's own gradients, on reduced ones, or on a shard of those."""

from collections.abc import Sequence

from holter.rank.models import REDUCING_WRAPPERS, Model
from holter.records import View


def view(models: Sequence[Model]) -> View:
    """How the gradients of these models reach their optimizers."""
    for model in models:
        if model.wrapper in REDUCING_WRAPPERS or any(hasattr(p, "placements") for _, p in model.parameters):
            return "sharded"
    return "replicated" if any(model.is_replicated for model in models) else "local"
