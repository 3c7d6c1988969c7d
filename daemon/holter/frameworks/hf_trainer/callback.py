"""A callback for the Hugging Face Trainer: `Trainer(..., callbacks=[holter.HolterCallback()])`."""

from typing import Any

from transformers import TrainerCallback

from holter.frameworks import attach


class HolterCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches holter when training begins, and passes the Trainer's log on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Attach; the model has been wrapped by now."""
        attachment = attach.attach("hf_trainer")
        if attachment is not None and kwargs.get("model") is not None:
            attachment.monitor.add_model(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Pass on what the Trainer shows, which may hide a NaN."""
        if logs:
            attach.log(logs)
