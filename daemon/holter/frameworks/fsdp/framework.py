"""What only FSDP knows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holter.frameworks.loop.framework import Loop
from holter.rank.framework import Framework, Keeper

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.monitor import Monitor


class Fsdp(Framework):
    """A loop whose model is sharded."""

    name = "fsdp"
    checkpoint, resume = Loop.checkpoint, Loop.resume

    def attach(self, monitor: "Monitor") -> None:
        """A snapshot asks for shards in the middle of a forward pass, which must not wait for a second of imports."""
        if monitor.context.undo.snapshots is not None:
            from holter.frameworks.fsdp import shards  # noqa: F401, PLC0415  imports torch

    def keeper(self, context: "Context", optimizers: Sequence[Any]) -> Keeper | None:
        """Saves flat shards (FSDP1); DTensors are left to the loop's keeper."""
        from holter.frameworks.fsdp.keeper import FlatKeeper  # noqa: PLC0415  not before a save

        keeper = FlatKeeper(context, optimizers)
        return keeper if keeper.is_flat() else None

    def sharded(self, root: Any) -> Mapping[tuple[int, str], Any]:
        """The shards behind FSDP2's modules."""
        from holter.frameworks.fsdp import shards  # noqa: PLC0415  imports torch

        return shards.sharded(root)
