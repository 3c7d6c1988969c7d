"""Passes over data loaders, put together from what the ranks reported at their beginnings and ends; and who must be fed differently.

A loader is identified by its number in a process. If one of its passes was trained on, it is a loader of the training.
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
        """The last report about it."""
        return self.end or self.begin


def passes(window: Window) -> list[LoaderPass]:
    """Return the passes in the order in which they began; an end without a known beginning counts as both."""
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
    """Return the passes over loaders that feed the training."""
    known = list(known)
    feeding = {(one.rank, one.latest.loader) for one in known if one.latest.is_training}
    return [one for one in known if (one.rank, one.begin.loader) in feeding]


def is_replicated_everywhere(window: Window) -> bool:
    """Whether everything trained is replicated over all ranks, so that each must be fed its own data.

    If one trained tensor is not, the ranks may share a model, and then they read the same batches on purpose.
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
