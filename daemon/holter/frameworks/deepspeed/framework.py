"""What only DeepSpeed knows."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holter.frameworks.accelerate.framework import Accelerate
from holter.rank.framework import Framework, Keeper, SaveFunction, absolute

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.monitor import Monitor

_ENGINE = ("deepspeed.runtime.engine", "DeepSpeedEngine")


def _where(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> str:
    """`save_checkpoint(save_dir, tag)`; without a tag it counts."""
    engine, *rest = args
    save_dir = kwargs["save_dir"] if "save_dir" in kwargs else rest.pop(0)
    tag = kwargs.get("tag", rest[0] if rest else None)
    return absolute(os.path.join(save_dir, str(tag or f"global_step{engine.global_steps}")))  # noqa: PTH118 - may be an address


class DeepSpeed(Framework):
    """An engine, the script's own or one inside an Accelerator."""

    name = checkpoint = "deepspeed"
    resume = "engine.load_checkpoint({path!r})"
    module, owner = _ENGINE
    saves = (
        SaveFunction(*_ENGINE, "save_checkpoint", checkpoint="deepspeed", where=_where),
        SaveFunction(*_ENGINE, "save_16bit_model"),
    )

    def attach(self, monitor: "Monitor") -> None:
        """ZeRO's step is around the optimizer's."""
        from holter.frameworks.deepspeed.zero import ZeroProbe  # noqa: PLC0415  imports torch

        monitor.before_backward.append(monitor.context.guard.wrap(ZeroProbe(monitor.context, monitor.steps).look))

    def count_steps(self, optimizer: Any) -> int | None:
        """Skipped ones included."""
        return next((int(engine.global_steps) for engine in self.owners([optimizer])), None)

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper | None:
        """By `save_checkpoint`, or what an Accelerator around the engine makes of it."""
        for engine in self.owners(optimizers):
            from holter.frameworks.deepspeed.keeper import DeepSpeedKeeper  # noqa: PLC0415  imports torch

            return DeepSpeedKeeper(engine, Accelerate().keeper(context, optimizers))
        return None
