"""The manifest of a sealed checkpoint: a digest of every file and a fingerprint of every tensor.

    parts/<rank>.json   what one rank wrote and read back (RankPart)  ──┐
    state/ ranks/       the files themselves, digested                   ├─▶  manifest.json (Manifest)
    the coordinator     step, cause, verdict                           ──┘

Two proofs are needed, because they answer different questions: a digest shows that a file is the one that was sealed; a
fingerprint shows that a tensor in it is the one that was in memory, and names the tensor if it is not. A manifest
carries its own digest: one that was changed is invalid.

This file also decides whether a save is complete (`missing_from`): it compares what the ranks say they wrote with the
files that are there. Replicas can stand for each other: the first saver's part is enough. A shard stands only for
itself: each missing one is named.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holter.errors import VaultError
from holter.files import UNREADABLE, read_json, read_plain
from holter.records import Verdict

NAME = "manifest.json"
STATE, PARTS, RANKS = "state", "parts", "ranks"
"""Folders of a checkpoint: what the framework wrote, what each rank reports of it, and how the step began on each
rank."""
CHUNK_BYTES = 4 << 20

Progress = Callable[[int, int], None]
"""Called with the number of bytes done and the total number of bytes."""
_RANDOM_STATE = re.compile(r"(?:random_states_|rng_state_|ranks/)(\d+)\.(?:pkl|pth|pt|msgpack)$")
_LONE_RANDOM_STATE = re.compile(r"/rng_state\.pth$")


class StoredFile(msgspec.Struct, frozen=True):
    """Size and digest of a file at the time of sealing."""

    bytes: int
    sha256: str


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, or a stored piece of one, as it was read back from its file."""

    name: str
    file: str
    """Path relative to the checkpoint's directory."""
    shape: tuple[int, ...]
    dtype: str
    fingerprint: str
    """64 bits in hexadecimal, because JSON numbers are exact only up to 53 bits."""
    rank: int = 0
    """Rank that read it back."""

    @property
    def content(self) -> tuple[str, tuple[int, ...], str]:
        """Key that is equal for tensors with the same bits, whatever their names."""
        return self.dtype, self.shape, self.fingerprint


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote, with the proof that it holds what the rank had in memory."""

    rank: int
    framework: str
    is_sharded: bool = False
    """Whether the rank's part is its own shard, so that no other rank's part can stand for it."""
    has_index: bool = False
    """Whether the framework's own index of the whole was written, which it does only if no piece of any tensor is
    missing."""
    files: dict[str, int] = {}
    """Size in bytes of each file that the rank wrote."""
    tensors: list[StoredTensor] = []
    unread: dict[str, str] = {}
    """Files whose tensors could not be read safely, with the reason; only their digest covers them."""
    num_live: int = 0
    """Number of tensors in memory that the files had to contain."""
    with_nan: list[str] = []
    """Tensors that had to be found and hold NaN, or Inf where none may be; whatever the reason, this state is not
    good."""
    oversized: dict[str, float] = {}
    """Finite tensors of a size that no training model has, with their largest magnitude."""
    implausible: dict[str, str] = {}
    """Tensors of the state that do not fit their own history, with a sentence that says how."""
    unlooked: list[str] = []
    """Tensors of the state that no comparison had read before, so that nothing is known of their earlier values."""
    replica_roots: dict[str, str] = {}
    """For each set of ranks that must be equal and include this one: root fingerprint of what this rank holds of it."""
    missing: list[StoredTensor] = []
    """Tensors in memory that are not in the rank's own files; replicas may have them in another rank's files."""
    num_own: int = 0
    """Number of tensors that no other rank is known to hold: parts of a model that is split by hand, or experts that a
    wrapper was told to ignore."""
    own_missing: list[StoredTensor] = []
    """Those of these tensors that are not in the rank's own files; another rank's files may contain them."""
    notes: list[str] = []
    """Differences from an uninterrupted run although the checkpoint is complete, a sentence each."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `manifest.json`. It is public: fields are added, never changed."""

    schema: int = 1
    run_id: str
    step: int
    """Completed optimizer steps in it, including those of the run that it was resumed from."""
    framework: str
    world_size: int
    mesh: dict[str, list[list[int]]] = {}
    """For each axis or group by name, the sets of ranks that belong together, as far as known."""
    verdict: Verdict
    why: str
    cause: str = ""
    """Why the run was halted."""
    savers: list[int] = []
    lost: list[int] = []
    """Ranks that could not save."""
    random_states: list[int] = []
    """Ranks whose random state is included."""
    files: dict[str, StoredFile]
    tensors: list[StoredTensor]
    unread: dict[str, str] = {}
    sealed_at: str
    digest: str = ""
    """SHA-256 of all other fields."""


def signed(manifest: Manifest) -> Manifest:
    """Return the manifest with its digest filled in."""
    return msgspec.structs.replace(manifest, digest=digest_of(msgspec.json.encode(manifest)))


def digest_of(content: bytes) -> str:
    """Return the digest of all fields, including those that this version does not know.

    So a renamed field is noticed, and a field of a newer version is no damage.
    """
    rest = msgspec.json.decode(content) | {"digest": ""}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record for a file that people read: as indented JSON."""
    return _laid_out(msgspec.json.encode(record))


def read(directory: Path) -> Manifest:
    """Read the manifest from a checkpoint's directory. Raises VaultError with a sentence for the user."""
    path = directory / NAME
    try:
        content = read_plain(path)
        found, digest = msgspec.json.decode(content, type=Manifest), digest_of(content)
    except FileNotFoundError:
        raise VaultError(f"{directory} has no {NAME}") from None
    except OSError as error:
        raise VaultError(f"{path} cannot be read: {error.strerror}") from None
    except UNREADABLE as error:
        raise VaultError(f"{path} is damaged: {error}") from None
    # Different white space is harmless, but shows that something has changed the file.
    if found.digest != digest or content != _laid_out(content):
        raise VaultError(f"{path} is damaged: it was changed after the checkpoint was sealed")
    return found


def read_part(path: Path) -> RankPart:
    """Read the report of one rank. Raises VaultError with a sentence for the user."""
    try:
        return msgspec.json.decode(read_plain(path), type=RankPart)
    except OSError as error:
        raise VaultError(f"{path} cannot be read: {error.strerror}") from None
    except UNREADABLE as error:
        raise VaultError(f"{path} is damaged: {error}") from None


def replicas_path(directory: Path, rank: int) -> Path:
    """Return the path to which a rank writes the tables behind its roots: set of ranks -> tensor -> fingerprint."""
    return directory / PARTS / f"{rank}.replicas"


def parted_replicas(directory: Path, parts: Mapping[int, RankPart]) -> str:
    """Describe replicas that differ in a sentence with the first tensors; empty if none are known to.

    Tables are read only if roots differ, and only from two ranks.
    """
    by_root: dict[str, dict[str, list[int]]] = {}
    for rank, part in parts.items():
        for ranks, root in part.replica_roots.items():
            by_root.setdefault(ranks, {}).setdefault(root, []).append(rank)
    for ranks, roots in by_root.items():
        if len(roots) > 1:
            most, *others = sorted(roots.values(), key=lambda alike: (-len(alike), alike))
            one, other = (_table(directory, alike[0], ranks) for alike in (most, others[0]))
            differ = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
            apart = ", ".join(str(rank) for alike in others for rank in alike)
            named = _some(differ) or "their tables cannot be read"
            return f"rank {apart} holds other values than rank {', '.join(map(str, most[:8]))}, of which it is a replica: {named}"
    return ""


def _table(directory: Path, rank: int, ranks: str) -> dict[str, str]:
    tables = read_json(replicas_path(directory, rank), dict[str, dict[str, str]])
    return tables.get(ranks, {}) if tables is not None else {}


def listed(directory: Path) -> dict[str, int]:
    """Return the size in bytes of every file that a manifest must name. Links are not followed, because they point elsewhere."""
    found = {}
    for part in (STATE, RANKS):
        for folder, _, names in os.walk(directory / part):
            for name in names:
                path = Path(folder) / name
                found[str(path.relative_to(directory))] = path.lstat().st_size
    return dict(sorted(found.items()))


def counted(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function that is called with the bytes just done and tells `progress` the sum so far."""
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return on_bytes


def sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None, *, is_synced: bool = False) -> str:
    """Return the digest of a file's content.

    With `is_synced`, the content is also safely on the disk when this returns. Raises OSError.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if is_synced:
            os.fsync(file.fileno())
        while chunk := os.read(file.fileno(), CHUNK_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def _laid_out(content: bytes) -> bytes:
    return msgspec.json.format(content, indent=1) + b"\n"


@dataclass(frozen=True)
class Circumstances:
    """What the coordinator knows of a halt when its checkpoint is sealed."""

    run_id: str
    step: int
    """Completed optimizer steps, including those before a resume."""
    world_size: int
    savers: tuple[int, ...]
    """Ranks that were to save; where ranks are replicas, the first one saves for all."""
    lost: tuple[int, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict)
    """Rank -> why it did not save what it should have."""
    cause: str = ""
    verdict: Verdict = "healthy"
    """Verdict on the numbers by the detectors, from `verdicts.of_halt`."""
    why: str = ""
    mesh: Mapping[str, list[list[int]]] = field(default_factory=dict)
    uncompared: str = ""
    """Until when replicas were last found equal, in words, if that is before this state; empty if they were equal in
    it."""


def missing_from(about: Circumstances, parts: Mapping[int, RankPart], files: Mapping[str, StoredFile]) -> list[str]:
    """Return what the checkpoint lacks, a sentence each; empty if it is complete."""
    nothing = [] if any(map(_is_state, files)) else ["nothing was written"]
    return [
        *nothing,
        *_missing_parts(about, parts),
        *_unproven(about, parts),
        *_missing_own(about, parts),
        *_missing_files(about, parts, files),
    ]


def not_looked_at(about: Circumstances, parts: Mapping[int, RankPart]) -> str:
    """Describe in a sentence what nobody examined; empty if everything was.

    Such are tensors that nobody compared with memory or had read before, and replicas of which only one saved.
    """
    needed = [parts[rank] for rank in _needed(about, parts) if rank in parts]
    blind = [part.rank for part in needed if not part.num_live and any(map(_is_trained, part.tensors))]
    if blind:
        return f"what rank {', '.join(map(str, blind))} saved was not looked at, tensor by tensor"
    if unlooked := [(part.rank, name) for part in needed for name in part.unlooked]:
        rank, name = unlooked[0]
        more = f" and {len(unlooked) - 1} more" if unlooked[1:] else ""
        return f"{name} of rank {rank}{more} had not been read before it was saved: what it was like is not known"
    return _lone_replica(about, parts)


def _lone_replica(about: Circumstances, parts: Mapping[int, RankPart]) -> str:
    """Say so if only one replica saved a state in which the replicas had not been compared; else empty."""
    told: dict[str, list[int]] = {}
    for rank, part in parts.items():
        for ranks in part.replica_roots:
            told.setdefault(ranks, []).append(rank)
    alone = next((ranks[0] for ranks in told.values() if len(ranks) == 1), None)
    return f"{about.uncompared}, and rank {alone} alone saved" if about.uncompared and alone is not None else ""


def _is_trained(tensor: StoredTensor) -> bool:
    return not _RANDOM_STATE.search(tensor.file) and not _LONE_RANDOM_STATE.search(tensor.file)


def unclaimed_files(parts: Mapping[int, RankPart], files: Iterable[str]) -> list[str]:
    """Return the files that no rank says it wrote."""
    claimed = {name for part in parts.values() for name in part.files}
    return [name for name in files if _is_state(name) and name not in claimed]


def ranks_with_random_state(files: Iterable[str]) -> list[int]:
    """Return the ranks whose random state is stored, recognised by the frameworks' file names and holter's own."""
    ranks = {int(found[1]) for name in files if (found := _RANDOM_STATE.search(name))}
    return sorted(ranks | {0 for name in files if _LONE_RANDOM_STATE.search(name)})


def why_whole(about: Circumstances, parts: Mapping[int, RankPart], known_states: list[int]) -> str:
    """Return the sentence about a complete checkpoint, with its ranks' notes.

    Missing random states are mentioned only if a file is known to hold some: a framework may keep them elsewhere.
    """
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
    # If shards are replicated too, another rank has written the shard of a lost one.
    if _is_sharded(parts) and not any(part.has_index for part in parts.values()):
        yield from (f"the shard of rank {rank} is missing{_because(about, rank)}" for rank in about.lost)


def _unproven(about: Circumstances, parts: Mapping[int, RankPart]) -> Iterator[str]:
    stored = {tensor.content for part in parts.values() for tensor in part.tensors}
    for rank in sorted(set(_needed(about, parts)) & parts.keys()):
        missing = [tensor.name for tensor in parts[rank].missing if tensor.content not in stored]
        if missing:
            yield f"of rank {rank}'s {parts[rank].num_live} tensors {len(missing)} are in no file ({_some(missing)})"


def _missing_own(about: Circumstances, parts: Mapping[int, RankPart]) -> Iterator[str]:
    """Yield what only one rank held and nobody saved; of lost ranks it is only known that they may have held such tensors."""
    stored = {tensor.content for part in parts.values() for tensor in part.tensors}
    for rank, part in sorted(parts.items()):
        missing = [tensor.name for tensor in part.own_missing if tensor.content not in stored]
        if missing:
            yield f"{len(missing)} tensors that only rank {rank} held are in no file ({_some(missing)})"
    owners = [rank for rank, part in parts.items() if part.num_own]
    silent = [rank for rank in range(about.world_size) if rank not in parts]
    if silent and owners and (len(owners) == 1 or any(part.is_sharded for part in parts.values())):
        lost = ", ".join(map(str, silent))
        yield f"rank {owners[0]} holds tensors that no other rank is known to hold, and what rank {lost} held of that kind is lost"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")  # noqa: PLR2004 - a sentence's worth


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
        # The rank that wrote them did not finish.
        yield from (f"{name} was read back by no rank" for name in unclaimed_files(parts, files))


def _because(about: Circumstances, rank: int) -> str:
    reason = about.failures.get(rank)
    return f" ({reason})" if reason else ""
