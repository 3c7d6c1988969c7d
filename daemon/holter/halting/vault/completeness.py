"""Whether a save is whole: what the ranks say they wrote, against the files that are there. Pure.

Replicas stand for each other: the first saver's part is enough. A shard stands for itself: each one that is missing is named.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from holter.halting.vault.manifest import STATE, RankPart, StoredFile
from holter.records import Verdict

_RANDOM_STATE = re.compile(r"(?:random_states_|rng_state_|ranks/)(\d+)\.(?:pkl|pth|pt|msgpack)$")
_LONE_RANDOM_STATE = re.compile(r"/rng_state\.pth$")


@dataclass(frozen=True)
class Circumstances:
    """What the coordinator knows of a halt when its checkpoint is sealed."""

    run_id: str
    step: int
    """Completed optimizer steps, those before a resume included."""
    world_size: int
    savers: tuple[int, ...]
    """Ranks that were to save; the first for all, as far as ranks are replicas."""
    lost: tuple[int, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict)
    """Rank -> why it did not save what it should have."""
    cause: str = ""
    verdict: Verdict = "healthy"
    """Of the numbers, as far as the detectors can tell; `verdicts.of_halt` says it."""
    why: str = ""
    mesh: Mapping[str, list[list[int]]] = field(default_factory=dict)


def lacking(about: Circumstances, parts: Mapping[int, RankPart], files: Mapping[str, StoredFile]) -> list[str]:
    """What the checkpoint does not have, a sentence each; none: it is whole."""
    nothing = [] if any(map(_is_state, files)) else ["nothing was written"]
    return [*nothing, *_missing_parts(about, parts), *_unproven(about, parts), *_missing_files(about, parts, files)]


def unclaimed(parts: Mapping[int, RankPart], files: Iterable[str]) -> list[str]:
    """Files that no rank says it wrote."""
    claimed = {name for part in parts.values() for name in part.files}
    return [name for name in files if _is_state(name) and name not in claimed]


def random_states(files: Iterable[str]) -> list[int]:
    """Ranks whose random state is there, by the frameworks' own names and ours."""
    ranks = {int(found[1]) for name in files if (found := _RANDOM_STATE.search(name))}
    return sorted(ranks | {0 for name in files if _LONE_RANDOM_STATE.search(name)})


def why(about: Circumstances, parts: Mapping[int, RankPart], known_states: list[int]) -> str:
    """Of a whole one, with what its ranks note. Where no file is known to be a random state nothing is said: a framework may keep it among other things."""
    without = [rank for rank in range(about.world_size) if rank not in known_states] if known_states else []
    lack = f"without the random state of rank {', '.join(map(str, without))}" if without else ""
    notes = [note for part in parts.values() for note in part.notes]
    return "; ".join(filter(None, (about.why, lack, *notes)))


def _is_state(name: str) -> bool:
    return name.startswith(f"{STATE}/")


def _needed(about: Circumstances, parts: Mapping[int, RankPart]) -> tuple[int, ...]:
    return about.savers if _is_sharded(parts) or not parts else about.savers[:1]


def _is_sharded(parts: Mapping[int, RankPart]) -> bool:
    return any(part.is_sharded for part in parts.values())


def _missing_parts(about: Circumstances, parts: Mapping[int, RankPart]) -> Iterator[str]:
    for rank in _needed(about, parts):
        if rank not in parts:
            yield f"rank {rank} saved nothing that it could prove{_because(about, rank)}"
    for rank in sorted(about.failures.keys() & parts.keys()):
        yield f"rank {rank}: {about.failures[rank]}"
    # Where shards are replicated too, another rank has written a lost one's.
    if _is_sharded(parts) and not any(part.has_index for part in parts.values()):
        yield from (f"the shard of rank {rank} is missing{_because(about, rank)}" for rank in about.lost)


def _unproven(about: Circumstances, parts: Mapping[int, RankPart]) -> Iterator[str]:
    stored = {tensor.content for part in parts.values() for tensor in part.tensors}
    for rank in sorted(set(_needed(about, parts)) & parts.keys()):
        missing = [tensor.name for tensor in parts[rank].missing if tensor.content not in stored]
        if missing:
            named = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")  # noqa: PLR2004 - a sentence's worth
            yield f"of rank {rank}'s {parts[rank].num_live} tensors {len(missing)} are in no file ({named})"


def _missing_files(
    about: Circumstances, parts: Mapping[int, RankPart], files: Mapping[str, StoredFile]
) -> Iterator[str]:
    for rank, part in parts.items():
        for name, size in part.files.items():
            if name not in files:
                yield f"{name}, which rank {rank} wrote, is not there"
            elif files[name].bytes != size:
                yield f"{name} has {files[name].bytes} bytes, rank {rank} wrote {size}"
    if not parts.keys() >= set(about.savers):
        # Whoever wrote it did not come to its end.
        yield from (f"{name} was read back by no rank" for name in unclaimed(parts, files))


def _because(about: Circumstances, rank: int) -> str:
    reason = about.failures.get(rank)
    return f" ({reason})" if reason else ""
