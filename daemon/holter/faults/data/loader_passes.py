"""Passes over data loaders, put together from what the ranks said at their beginnings and ends; and who must be fed differently.

A loader is known by its number in a process. One pass that was trained on makes it a loader of the training.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holter.faults.shared.structure import distinct_censuses
from holter.faults.window import Window
from holter.records import Census, Feed


@dataclass(frozen=True)
class LoaderPass:
    """One pass of one rank over one loader."""

    rank: int
    begin_step: int
    begin: Feed
    end: Feed | None = None
    end_step: int | None = None

    @property
    def latest(self) -> Feed:
        """What was said of it last."""
        return self.end or self.begin


def passes(window: Window) -> list[LoaderPass]:
    """In order of beginning. An end whose beginning was forgotten counts as both."""
    found: dict[tuple[int, int, int], LoaderPass] = {}
    for note, feed in window.notes_of(Feed):
        key = (note.rank, feed.loader, feed.epoch)
        if not feed.is_end:
            found[key] = LoaderPass(note.rank, note.step, feed)
        elif key in found:
            found[key] = replace(found[key], end=feed, end_step=note.step)
        else:
            found[key] = LoaderPass(note.rank, note.step, feed, feed, note.step)
    return list(found.values())


def trained(known: Iterable[LoaderPass]) -> list[LoaderPass]:
    """The passes over loaders that feed the training."""
    known = list(known)
    feeding = {(one.rank, one.latest.loader) for one in known if one.latest.is_training}
    return [one for one in known if (one.rank, one.begin.loader) in feeding]


def is_replicated_everywhere(window: Window) -> bool:
    """Whether all that is trained is replicated over all ranks, so that each must be fed with data of its own.

    One trained tensor that is not, and the ranks may share a model: then they read the same batches on purpose.
    """
    known = distinct_censuses(window, None)
    return window.world_size > 1 and bool(known) and all(_is_replicated(census, window.world_size) for census in known)


def _is_replicated(census: Census, world_size: int) -> bool:
    trained_tensors = [entry for entry in census.entries if entry.optimizer >= 0 and entry.requires_grad]
    return (
        bool(trained_tensors)
        and all(entry.is_replicated for entry in trained_tensors)
        and all(one.num_replicas in (0, world_size) for one in census.components if one.is_trained)
    )
