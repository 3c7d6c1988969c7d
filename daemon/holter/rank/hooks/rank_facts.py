"""Reports facts about the rank once: the process groups that it is in, and the accelerator that it computes on.

Gloo's recorder does not say who belongs to which group, so a rank that never joins its group's collectives would not be missed. The three
lowest ranks of a group report it; more would say the same. A group of all ranks is known without a report.

The sidecar reads the accelerator's sensors; the rank never asks a driver.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from holter.rank import accelerator
from holter.rank.context import Context
from holter.rank.mesh import GROUPS
from holter.records import Group, Groups, OnDevice

NUM_TELLERS = 3
MAX_MEMBERS = 4096
"""Number of ranks in one record; a larger group is not reported."""


class GroupProbe:
    """Looks for new process groups after one was made, and at every backward pass for those that were made in another way."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: tuple[int, int] | None = None
        self._told: set[str] = set()

    def install(self) -> None:
        """Patch the function that makes groups; all ways to make one but splitting lead through it."""
        if dist.is_available():
            self._context.patches.replace("_new_group_with_tag", self._around, dist.distributed_c10d)

    def look(self) -> None:
        """Report the groups that are new; communicates with nobody, and costs nothing while there are none."""
        if not GROUPS:
            return
        world = dist.distributed_c10d._world  # noqa: SLF001  nothing public lists the groups; the guard counts it if this is gone
        seen = len(world.pg_names), world.group_count
        if seen == self._seen:
            return
        self._seen = seen
        for part in _parts(self._new(world)):
            self._context.writer.say(self._context.log.step, Groups(groups=part))

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        look = self._context.guard.wrap(self.look, "any")

        @functools.wraps(original)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            look()
            return made

        return new_group

    def _new(self, world: Any) -> Iterator[Group]:
        rank, everyone = dist.get_rank(), dist.get_world_size()
        living = dict(world.pg_names)
        self._told &= set(living.values())
        for group, name in living.items():
            members = tuple(sorted(world.pg_group_ranks.get(group, ())))
            is_told = name in self._told or rank not in members[:NUM_TELLERS]
            self._told.add(name)
            if not is_told and len(members) < everyone and len(members) <= MAX_MEMBERS:
                yield Group(str(name), str(getattr(group, "group_desc", "")), members)


def _parts(groups: Iterator[Group]) -> Iterator[list[Group]]:
    """Split the groups into lists whose groups have at most MAX_MEMBERS ranks together."""
    part: list[Group] = []
    for group in groups:
        if part and sum(len(one.ranks) for one in part) + len(group.ranks) > MAX_MEMBERS:
            yield part
            part = []
        part.append(group)
    if part:
        yield part


class DeviceProbe:
    """Looks for the rank's device when a backward pass begins, until the script has begun to use one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_done = False

    def look(self) -> None:
        """Report the device once the script uses one; this initializes no device, and waits for none."""
        if self._is_done or accelerator.module() is None:
            return
        self._is_done = True
        if uuid := accelerator.uuid():
            self._context.writer.say(self._context.log.step, OnDevice(uuid=uuid))
