"""What a checkpoint holds, as written down when it was sealed: every file by its digest, every tensor by its fingerprint.

    parts/<rank>.json   what one rank wrote and read back (Part)  ──┐
    state/ ranks/       the files themselves, digested              ├─▶  manifest.json (Manifest)
    the coordinator     step, cause, verdict                      ──┘

Two proofs, because they answer different questions: a digest says that a file is the one that was sealed; a fingerprint says that a tensor in
it is the one that was in memory, and names the tensor when it is not. A manifest carries its own digest: one that was changed is none.

Whether a save is whole is judged here too (`missing_from`): what the ranks say they wrote, against the files that are there. Replicas stand
for each other: the first saver's part is enough. A shard stands for itself: each one that is missing is named.
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
"""What the framework wrote; what each rank says of it; how the step began on each rank."""
CHUNK_BYTES = 4 << 20

Progress = Callable[[int, int], None]
"""Told how many bytes are done, of how many."""
_RANDOM_STATE = re.compile(r"(?:random_states_|rng_state_|ranks/)(\d+)\.(?:pkl|pth|pt|msgpack)$")
_LONE_RANDOM_STATE = re.compile(r"/rng_state\.pth$")


class StoredFile(msgspec.Struct, frozen=True):
    """A file as it was sealed."""

    bytes: int
    sha256: str


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, or a stored piece of one, as it was read back from its file."""

    name: str
    file: str
    """Relative to the checkpoint's directory."""
    shape: tuple[int, ...]
    dtype: str
    fingerprint: str
    """64 bits in hexadecimal: numbers of JSON end at 53."""
    rank: int = 0
    """Who read it back."""

    @property
    def content(self) -> tuple[str, tuple[int, ...], str]:
        """What makes two tensors the same, bit for bit, whatever they are called."""
        return self.dtype, self.shape, self.fingerprint


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote, and that it holds what the rank held."""

    rank: int
    framework: str
    is_sharded: bool = False
    """Other ranks' parts cannot stand for this one."""
    has_index: bool = False
    """The framework's own index of the whole was written, which is done only when no piece of any tensor is missing."""
    files: dict[str, int] = {}
    """Those that it wrote -> bytes."""
    tensors: list[StoredTensor] = []
    unread: dict[str, str] = {}
    """Files whose tensors could not be read safely -> why; their digest covers them."""
    num_live: int = 0
    """Tensors that had to be found again."""
    with_nan: list[str] = []
    """Tensors that had to be found again and hold NaN, or Inf where none may be: however they came there, this state is not good."""
    oversized: dict[str, float] = {}
    """Finite ones of a size that no model that trains has -> their largest magnitude."""
    implausible: dict[str, str] = {}
    """Tensors of the state that are not as their own history has them -> a sentence."""
    unlooked: list[str] = []
    """Tensors of the state that no reading had come to before: what they were like is not known."""
    replica_roots: dict[str, str] = {}
    """Set of ranks that must hold the same, this one among them -> root of what it holds of that."""
    missing: list[StoredTensor] = []
    """Those that are not in its own files; replicas may find them in another's."""
    num_own: int = 0
    """Tensors that no other rank is known to hold: parts of a model that is split by hand, experts that a wrapper was told to ignore."""
    own_missing: list[StoredTensor] = []
    """Those of them that are not in its own files; another rank's may have them."""
    notes: list[str] = []
    """What differs from a run that goes on although the checkpoint is whole: a sentence each."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`: public; fields are added, never changed."""

    schema: int = 1
    run_id: str
    step: int
    """Completed optimizer steps in it, those of the run that it goes on from included."""
    framework: str
    world_size: int
    mesh: dict[str, list[list[int]]] = {}
    """Name of an axis or group -> the ranks of each, as far as known."""
    verdict: Verdict
    why: str
    cause: str = ""
    """Why the run was halted."""
    savers: list[int] = []
    lost: list[int] = []
    """Ranks that could not save."""
    random_states: list[int] = []
    """Ranks whose random state is in it."""
    files: dict[str, StoredFile]
    tensors: list[StoredTensor]
    unread: dict[str, str] = {}
    sealed_at: str
    digest: str = ""
    """SHA-256 of all the rest."""


def signed(manifest: Manifest) -> Manifest:
    """The manifest with its digest."""
    return msgspec.structs.replace(manifest, digest=digest_of(msgspec.json.encode(manifest)))


def digest_of(content: bytes) -> str:
    """The digest of all fields, whether this version knows them or not: so a renamed field is noticed, and a newer version's field is no damage."""
    rest = msgspec.json.decode(content) | {"digest": ""}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()


def encode(record: msgspec.Struct) -> bytes:
    """For a file that people open."""
    return _laid_out(msgspec.json.encode(record))


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint's directory. Raises VaultError with the sentence."""
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
    # White space says nothing, and is not as it was written: something has touched it.
    if found.digest != digest or content != _laid_out(content):
        raise VaultError(f"{path} is damaged: it was changed after the checkpoint was sealed")
    return found


def read_part(path: Path) -> RankPart:
    """What one rank says. Raises VaultError with the sentence."""
    try:
        return msgspec.json.decode(read_plain(path), type=RankPart)
    except OSError as error:
        raise VaultError(f"{path} cannot be read: {error.strerror}") from None
    except UNREADABLE as error:
        raise VaultError(f"{path} is damaged: {error}") from None


def replicas_path(directory: Path, rank: int) -> Path:
    """Where a rank writes the tables behind its roots: set of ranks -> tensor -> fingerprint."""
    return directory / PARTS / f"{rank}.replicas"


def parted_replicas(directory: Path, parts: Mapping[int, RankPart]) -> str:
    """Which replicas are not equal, a sentence with the first tensors; empty: none that are known.

    Tables are read only where roots differ, of two ranks.
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
    """Every file of a checkpoint that a manifest must name -> bytes. Links are not followed: what they point to is elsewhere."""
    found = {}
    for part in (STATE, RANKS):
        for folder, _, names in os.walk(directory / part):
            for name in names:
                path = Path(folder) / name
                found[str(path.relative_to(directory))] = path.lstat().st_size
    return dict(sorted(found.items()))


def counted(progress: Progress, total: int) -> Callable[[int], None]:
    """Tells `progress` of all bytes so far whenever it is told of some more."""
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return on_bytes


def sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None, *, is_synced: bool = False) -> str:
    """Digest of a file's content; with `is_synced` the content is on the disk as well when this returns. Raises OSError."""
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
    uncompared: str = ""
    """Until when replicas were last found equal, if that is not this state; empty: they were in this one."""


def missing_from(about: Circumstances, parts: Mapping[int, RankPart], files: Mapping[str, StoredFile]) -> list[str]:
    """What the checkpoint does not have, a sentence each; none: it is whole."""
    nothing = [] if any(map(_is_state, files)) else ["nothing was written"]
    return [
        *nothing,
        *_missing_parts(about, parts),
        *_unproven(about, parts),
        *_missing_own(about, parts),
        *_missing_files(about, parts, files),
    ]


def not_looked_at(about: Circumstances, parts: Mapping[int, RankPart]) -> str:
    """What nobody looked at: a sentence; empty: nothing.

    Tensors that nobody held against what is in memory, or that no reading had come to before, and replicas of which one alone saved.
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
    """Whether one replica alone saved, of a state in which nobody had compared it with the others."""
    told: dict[str, list[int]] = {}
    for rank, part in parts.items():
        for ranks in part.replica_roots:
            told.setdefault(ranks, []).append(rank)
    alone = next((ranks[0] for ranks in told.values() if len(ranks) == 1), None)
    return f"{about.uncompared}, and rank {alone} alone saved" if about.uncompared and alone is not None else ""


def _is_trained(tensor: StoredTensor) -> bool:
    return not _RANDOM_STATE.search(tensor.file) and not _LONE_RANDOM_STATE.search(tensor.file)


def unclaimed_files(parts: Mapping[int, RankPart], files: Iterable[str]) -> list[str]:
    """Files that no rank says it wrote."""
    claimed = {name for part in parts.values() for name in part.files}
    return [name for name in files if _is_state(name) and name not in claimed]


def ranks_with_random_state(files: Iterable[str]) -> list[int]:
    """Ranks whose random state is there, by the frameworks' own names and ours."""
    ranks = {int(found[1]) for name in files if (found := _RANDOM_STATE.search(name))}
    return sorted(ranks | {0 for name in files if _LONE_RANDOM_STATE.search(name)})


def why_whole(about: Circumstances, parts: Mapping[int, RankPart], known_states: list[int]) -> str:
    """The sentence about a whole checkpoint, with what its ranks note. Where no file is known to hold random states nothing is said of them: a framework may keep them elsewhere."""
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
            yield f"of rank {rank}'s {parts[rank].num_live} tensors {len(missing)} are in no file ({_some(missing)})"


def _missing_own(about: Circumstances, parts: Mapping[int, RankPart]) -> Iterator[str]:
    """What a rank alone held, and nobody saved; of a rank that is lost only that there may have been such."""
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
        # Whoever wrote it did not come to its end.
        yield from (f"{name} was read back by no rank" for name in unclaimed_files(parts, files))


def _because(about: Circumstances, rank: int) -> str:
    reason = about.failures.get(rank)
    return f" ({reason})" if reason else ""
