"""The vault of a run directory: checkpoints are written under a temporary name, checked, renamed last, and never overwritten.

    checkpoints/.30.partial      being written: not a checkpoint yet
    checkpoints/30               sealed: manifest.json lists every file of it
    checkpoints/30-2             sealed, of the same step, but with other bits
    checkpoints/30-incomplete    sealed, and its manifest says what is missing
    checkpoints/vault.json       runs that have sealed here: a run directory may have several lives
    checkpoints/watched.json     the script's own checkpoints, with a verdict for each (ScriptSaves)

Two good ones are kept; an older one is removed only after a newer one has its name. Every failure raises VaultError,
and existing checkpoints stay as they are.
"""

import contextlib
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from holter.clock import rfc3339, wall_ns
from holter.errors import VaultError
from holter.files import read_json, write_whole
from holter.halting.vault import manifest as manifests
from holter.halting.vault.manifest import (
    Circumstances,
    Manifest,
    Progress,
    RankPart,
    StoredFile,
    missing_from,
    ranks_with_random_state,
    unclaimed_files,
    why_whole,
)
from holter.records import Verdict

FOLDER = "checkpoints"
NUM_KEPT = 2
"""Number of checkpoints that are kept for each verdict."""
SEALED = re.compile(r"(\d+)(-\d+|-incomplete(-\d+)?)?")
"""Pattern of the names of sealed checkpoints: completed steps, and a suffix that distinguishes several of them."""
SCRIPT_SAVES = "watched.json"


class Sealed(NamedTuple):
    """A checkpoint with its final name."""

    path: Path
    manifest: Manifest

    @property
    def verdict(self) -> Verdict:
        """Verdict in the manifest."""
        return self.manifest.verdict

    @property
    def why(self) -> str:
        """Reason for the verdict."""
        return self.manifest.why

    @property
    def state(self) -> Path:
        """Path to give to the framework."""
        return self.path / manifests.STATE


class Ledger(msgspec.Struct, frozen=True):
    """Content of `vault.json`."""

    runs: list[str] = []


class Vault:
    """The checkpoints of one run directory. Every method may be as slow as the disk."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER

    def begin(self, step: int, stamp: int = 0) -> Path:
        """Return a fresh directory to save into, and remove what an unfinished halt left. Raises VaultError.

        `stamp` makes the directory's name unique: a slow disk must not remove what ranks write in the meantime.
        """
        partial = self.partial(step, stamp)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in list(self.folder.glob(".*.partial")):
                if left != partial or not stamp:
                    _remove(left)
            for left in list(self.folder.glob(".*.gone")):
                shutil.rmtree(left, ignore_errors=True)
            for part in (manifests.STATE, manifests.PARTS, manifests.RANKS):
                (partial / part).mkdir(parents=True, exist_ok=bool(stamp))
        except OSError as error:
            raise VaultError(f"nothing can be saved below {self.folder}: {_reason(error)}") from error
        return partial

    def partial(self, step: int, stamp: int = 0) -> Path:
        """Return the directory in which a state of `step` completed steps is written until it is sealed."""
        return self.folder / (f".{step}.{stamp}.partial" if stamp else f".{step}.partial")

    def seal(self, partial: Path, about: Circumstances, progress: Progress = lambda _done, _of: None) -> Sealed:
        """Check what was written, write its manifest, and give it its final name.

        Raises VaultError; then no name has changed.
        """
        try:
            sealed = self._seal(partial, about, progress)
        except OSError as error:
            raise VaultError(
                f"the checkpoint of step {about.step} could not be sealed: {_reason(error)}; what was written of it is in {partial}, unverified"
            ) from error
        # The new checkpoint has its name: failing to remove an old one does it no harm.
        with contextlib.suppress(OSError):
            self.prune()
        return sealed

    def discard(self, partial: Path) -> None:
        """Remove what was written, because it is not whole and cannot be sealed; a failure to remove it is ignored."""
        with contextlib.suppress(OSError):
            _remove(partial)

    def all(self) -> list[Sealed]:
        """Return every checkpoint with a readable manifest, oldest first."""
        return [Sealed(path, found) for path, found in self._named() if found is not None]

    def damaged(self) -> list[Path]:
        """Return the sealed checkpoints whose manifest cannot be read."""
        return [path for path, found in self._named() if found is None]

    def last_good(self) -> Sealed | None:
        """Return the newest healthy checkpoint whose files are all there; None if there is none."""
        return next((one for one in reversed(self.all()) if _is_good(one)), None)

    def prune(self) -> None:
        """Remove all but the newest two checkpoints of each verdict.

        A healthy one with missing files does not count and is not removed. Raises OSError.
        """
        by_verdict: dict[Verdict, list[Sealed]] = {}
        for one in reversed(self.all()):
            if one.verdict != "healthy" or _is_good(one):
                by_verdict.setdefault(one.verdict, []).append(one)
        for alike in by_verdict.values():
            for one in alike[NUM_KEPT:]:
                _remove(one.path)

    def runs(self) -> list[str]:
        """Return the ids of the runs that have sealed checkpoints here; empty if not known."""
        ledger = read_json(self.folder / "vault.json", Ledger)
        return [] if ledger is None else ledger.runs

    def _named(self) -> list[tuple[Path, Manifest | None]]:
        found: list[tuple[tuple[str, int], Path, Manifest | None]] = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if SEALED.fullmatch(path.name) and path.is_dir():
                    manifest = _manifest(path)
                    found.append(((manifest.sealed_at if manifest else "", _written_ns(path)), path, manifest))
        return [(path, manifest) for _, path, manifest in sorted(found, key=lambda one: (one[0], one[1].name))]

    def _seal(self, partial: Path, about: Circumstances, progress: Progress) -> Sealed:
        files = _digested(partial, progress)
        parts, damaged = _parts(partial)
        lacks = [*missing_from(about, parts, files), *damaged]
        is_whole, known_states = not lacks, ranks_with_random_state(files)
        about = _looked_at(about, parts, manifests.parted_replicas(partial, parts))
        manifest = manifests.signed(
            Manifest(
                run_id=about.run_id,
                step=about.step,
                framework=next((part.framework for part in parts.values()), ""),
                world_size=about.world_size,
                mesh=dict(about.mesh),
                verdict=about.verdict if is_whole else "incomplete",
                why=why_whole(about, parts, known_states) if is_whole else "; ".join(lacks),
                cause=about.cause,
                savers=list(about.savers),
                lost=list(about.lost),
                random_states=known_states,
                files=files,
                tensors=[tensor for part in parts.values() for tensor in part.tensors],
                unread={name: reason for part in parts.values() for name, reason in part.unread.items()}
                | dict.fromkeys(unclaimed_files(parts, files), "no rank read it back"),
                sealed_at=rfc3339(wall_ns()),
            )
        )
        if (same := self._same(manifest)) is not None:
            _remove(partial)
            return same
        write_whole(partial / manifests.NAME, manifests.encode(manifest))
        for folder, _, _ in os.walk(partial, topdown=False):
            _sync(Path(folder))
        write_whole(self.folder / "vault.json", manifests.encode(Ledger(sorted({*self.runs(), about.run_id}))))
        path = self._free(str(about.step) + ("" if is_whole else "-incomplete"))
        partial.rename(path)
        # The name is given. If a crash undoes that, a partial directory is left, which claims nothing; the parts are in
        # the manifest.
        with contextlib.suppress(OSError):
            _sync(self.folder)
        shutil.rmtree(path / manifests.PARTS, ignore_errors=True)
        return Sealed(path, manifest)

    def _same(self, manifest: Manifest) -> Sealed | None:
        """Return a sealed checkpoint of this step with the same files, bit for bit, and the same verdict; None if there is none."""
        for one in self.all():
            is_alike = (one.manifest.step, one.verdict, one.manifest.files) == (
                manifest.step,
                manifest.verdict,
                manifest.files,
            )
            if is_alike and _digested(one.path, lambda _done, _of: None) == manifest.files:
                return one
        return None

    def _free(self, name: str) -> Path:
        number, path = 1, self.folder / name
        # Anything of that name blocks it, even a link that leads nowhere.
        while os.path.lexists(path):
            number += 1
            path = self.folder / f"{name}-{number}"
        return path


def _digested(directory: Path, progress: Progress) -> dict[str, StoredFile]:
    """Return size and digest of every file, after making sure that it is on the disk."""
    sizes = manifests.listed(directory)
    on_bytes = manifests.counted(progress, sum(sizes.values()))
    return {
        name: StoredFile(size, manifests.sha256(directory / name, on_bytes, is_synced=True))
        for name, size in sizes.items()
    }


def _parts(partial: Path) -> tuple[dict[int, RankPart], list[str]]:
    found, damaged = {}, []
    for path in sorted((partial / manifests.PARTS).glob("*.json")):
        try:
            part = manifests.read_part(path)
        except VaultError as error:
            damaged.append(str(error))
        else:
            found[part.rank] = part
    return dict(sorted(found.items())), damaged


def _looked_at(about: Circumstances, parts: dict[int, RankPart], parted: str) -> Circumstances:
    """Adjust the verdict by what the ranks themselves found in the numbers, whatever the detectors had found."""
    bad = [name for part in parts.values() for name in part.with_nan]
    if about.verdict == "poisoned":
        return about
    if bad:
        named = f"{bad[0]}{', …' if bad[1:] else ''}"
        return replace(about, verdict="poisoned", why=f"{len(bad)} tensors hold NaN or Inf ({named})")
    odd = [text for text in (_odd(parts), parted) if text]
    if odd:
        known = [about.why] if about.verdict == "suspect" else []
        return replace(about, verdict="suspect", why="; ".join([*known, *odd]))
    unseen = manifests.not_looked_at(about, parts)
    if unseen and about.verdict == "healthy":
        return replace(about, verdict="unknown", why=unseen)
    return about


def _odd(parts: dict[int, RankPart]) -> str:
    """Describe values that no training produces, with the first tensor; empty if there are none.

    Weights are named before the state that an optimizer derived from its gradients.
    """
    large = {
        (rank, name): f"holds values of up to {size:.3g}"
        for rank, part in parts.items()
        for name, size in sorted(part.oversized.items(), key=lambda one: -one[1])
    }
    odd = {(rank, name): text for rank, part in parts.items() for name, text in part.implausible.items()} or large
    if not odd:
        return ""
    rank, name = min(odd, key=lambda key: key[1].startswith("optim"))
    more = f", and {len(odd) - 1} more tensors are like it" if len(odd) > 1 else ""
    return f"{name} of rank {rank} {odd[rank, name]}{more}"


def _is_good(one: Sealed) -> bool:
    """Whether a checkpoint is healthy by its manifest and every file is there in full size.

    `holter checkpoint verify` checks more closely.
    """
    if one.verdict == "healthy":
        with contextlib.suppress(OSError):
            return manifests.listed(one.path) == {name: file.bytes for name, file in one.manifest.files.items()}
    return False


def _manifest(path: Path) -> Manifest | None:
    try:
        return manifests.read(path)
    except VaultError:
        return None


def _written_ns(path: Path) -> int:
    try:
        return (path / manifests.NAME).stat().st_mtime_ns
    except OSError:
        return 0


def _remove(path: Path) -> None:
    """Remove a directory, renaming it first so that nobody finds half of it.

    What cannot be deleted remains under the other name. Raises OSError if the renaming fails.
    """
    gone = path.with_name(f".{path.name.lstrip('.')}.{wall_ns()}.gone")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


class ScriptSave(msgspec.Struct, frozen=True, kw_only=True):
    """A finished save by the script or its framework."""

    step: int
    """Completed optimizer steps in it, including those before a resume."""
    path: str
    framework: str
    saved_at: str
    seconds: float
    verdict: Verdict
    why: str
    incident: str = ""
    """Id of the incident that explains the fault in it; empty if there is none."""
    ranks: list[int] = []
    """Ranks that reported the save."""


class ScriptSaves(msgspec.Struct, frozen=True):
    """Content of `watched.json`: all saves that are remembered, oldest first."""

    saves: list[ScriptSave] = []


def script_saves_path(run_dir: Path) -> Path:
    """Return the path at which the script's saves are recorded."""
    return run_dir / FOLDER / SCRIPT_SAVES


def read_script_saves(run_dir: Path) -> list[ScriptSave]:
    """Return the recorded saves of the script; empty if the file cannot be read."""
    found = read_json(script_saves_path(run_dir), ScriptSaves)
    return found.saves if found is not None else []
