"""Other names for what one checkpoint holds: scripts load with the keys that they are used to.

    dcp.load({"model": …, "optim": …, "scheduler": …})              what is written
    dcp.load({"model": …, "optimizer": …, "lr_scheduler": …})       the same bytes
    dcp.load({"app": AppState(…)})                                  the same bytes
    get_state_dict(…, options=StateDictOptions(flatten_optimizer_state_dict=True))

An entry of the metadata is a name and a place in a file, so a second name costs a hundred bytes and no copy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

OTHERS = {
    "model": ("app.model",),
    "optim": ("optimizer", "app.optim", "app.optimizer"),
    "scheduler": ("lr_scheduler", "app.scheduler", "app.lr_scheduler"),
    "step": ("app.step",),
}
"""Top-level keys, and what they are called elsewhere."""

Path = tuple[Any, ...]
"""Where a value stands in the nested state: keys, and numbers for the elements of a list."""


def add(metadata: Metadata, written: Iterable[WriteResult], groups: Sequence[Mapping[str, Any]]) -> list[WriteResult]:
    """Put every entry's other names into the metadata; returns where they lie. `groups` name their parameters."""
    more = []
    for result in written:
        key = result.index.fqn
        for path in _other_paths(metadata.planner_data[key], groups):
            other = ".".join(map(str, path))
            metadata.state_dict_metadata[other] = metadata.state_dict_metadata[key]
            metadata.planner_data[other] = path
            index = MetadataIndex(other, result.index.offset, result.index.index)
            more.append(WriteResult(index=index, size_in_bytes=0, storage_data=result.storage_data))
    return more


def _other_paths(path: Path, groups: Sequence[Mapping[str, Any]]) -> Iterator[Path]:
    flattened = list(_flattened(path, groups))
    yield from flattened
    for each in (path, *flattened):
        for other in OTHERS.get(each[0], ()):
            yield (*other.split("."), *each[1:])


def _flattened(path: Path, groups: Sequence[Mapping[str, Any]]) -> Iterator[Path]:
    """`optim.param_groups.0.lr` is every parameter's own `optim.param_groups.<fqn>.lr` in the flattened form."""
    if path[:2] == ("optim", "param_groups") and path[-1] != "params":
        for name in groups[path[2]]["params"]:
            yield "optim", ".".join(("param_groups", name, *map(str, path[3:])))
