"""What a checkpoint holds, as written down when it was sealed: every file by its digest, every tensor by its fingerprint.

    parts/<rank>.json   what one rank wrote and read back (Part)  ──┐
    state/ ranks/       the files themselves, digested              ├─▶  manifest.json (Manifest)
    the coordinator     step, cause, verdict                      ──┘

Two proofs, because they answer different questions: a digest says that a file is the one that was sealed; a fingerprint says that a tensor in
it is the one that was in memory, and names the tensor when it is not. A manifest carries its own digest: one that was changed is none.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holter.errors import VaultError
from holter.records import Verdict

NAME = "manifest.json"
STATE, PARTS, RANKS = "state", "parts", "ranks"
"""What the framework wrote; what each rank says of it; how the step began on each rank."""
CHUNK_BYTES = 4 << 20

Progress = Callable[[int, int], None]
"""Told how many bytes are done, of how many."""


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
    missing: list[StoredTensor] = []
    """Those that are not in its own files; replicas may find them in another's."""
    notes: list[str] = []
    """What is not as it would be in a run that goes on, and takes nothing from its being whole: a sentence each."""


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
    """With the digest that belongs to it."""
    return msgspec.structs.replace(manifest, digest=digest_of(msgspec.json.encode(manifest)))


def digest_of(content: bytes) -> str:
    """Of all that stands there, known to this version or not: a name that was changed is no field left out, nor is a newer one's a change."""
    rest = msgspec.json.decode(content) | {"digest": ""}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()


def encode(record: msgspec.Struct) -> bytes:
    """For a file that people open."""
    return _laid_out(msgspec.json.encode(record))


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint's directory. Raises VaultError with the sentence."""
    path = directory / NAME
    try:
        content = path.read_bytes()
        found, digest = msgspec.json.decode(content, type=Manifest), digest_of(content)
    except FileNotFoundError:
        raise VaultError(f"{directory} has no {NAME}") from None
    except OSError as error:
        raise VaultError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise VaultError(f"{path} is damaged: {error}") from None
    # White space says nothing, and is not as it was written: something has touched it.
    if found.digest != digest or content != _laid_out(content):
        raise VaultError(f"{path} is damaged: it was changed after the checkpoint was sealed")
    return found


def read_part(path: Path) -> RankPart:
    """What one rank says. Raises VaultError with the sentence."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RankPart)
    except OSError as error:
        raise VaultError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise VaultError(f"{path} is damaged: {error}") from None


def listed(directory: Path) -> dict[str, int]:
    """Every file of a checkpoint that a manifest must name -> bytes. Links are not followed: what they point to is elsewhere."""
    found = {}
    for part in (STATE, RANKS):
        for folder, _, names in os.walk(directory / part):
            for name in names:
                path = Path(folder) / name
                found[str(path.relative_to(directory))] = path.lstat().st_size
    return dict(sorted(found.items()))


def sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None, *, is_synced: bool = False) -> str:
    """Of a file's content; with `is_synced` the content is on the disk as well when this returns. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if is_synced:
            os.fsync(file.fileno())
        for chunk in _chunks(file.fileno()):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def _chunks(descriptor: int) -> Iterator[bytes]:
    while chunk := os.read(descriptor, CHUNK_BYTES):
        yield chunk


def _laid_out(content: bytes) -> bytes:
    return msgspec.json.format(content, indent=1) + b"\n"
