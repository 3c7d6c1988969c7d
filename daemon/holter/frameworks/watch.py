"""`holter.watch`: the explicit way on. Attaching twice is once; what is passed is watched in addition."""

from collections.abc import Mapping
from typing import Any

from holter.frameworks import attach


class Watch:
    """What `holter.watch(model, optimizer)` gives back."""

    def log(self, **values: Any) -> None:
        """Tell what only the script knows, each a number or a tensor, or a module for ema.

        kl, entropy, vocabulary, rewards and advantages ([groups, samples]), ratio, ema, loss_terms={...}, codebook_usage ([codes] counts);
        other names are kept as plain series.
        """
        log(values)


def watch(first: Any, optimizer: Any = None) -> Any:
    """`watch(accelerator)` gives the accelerator back; `watch(model, optimizer)` gives a Watch."""
    is_accelerator = hasattr(first, "prepare") and hasattr(first, "backward")
    attachment = attach.attach("accelerate" if is_accelerator else "loop")
    models = list(getattr(first, "_models", ())) if is_accelerator else [first]
    if attachment is not None:
        for model in models:
            attachment.monitor.add_model(model)
    del optimizer  # Known by itself when it first steps.
    return first if is_accelerator else Watch()


def log(values: Mapping[str, Any]) -> None:
    """Tell these numbers, tensors or modules, beside the step they belong to; never raises."""
    attachment = attach.attach()
    if attachment is not None:
        attachment.monitor.logs.log(values)
