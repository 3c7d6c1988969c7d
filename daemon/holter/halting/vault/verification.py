"""Compare a sealed checkpoint with its manifest, without torch: exactly the listed files, each with the sealed content.

To say which tensors changed in a file, a reader of its format is needed: `holter.frameworks.saving.reading`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holter.errors import VaultError
from holter.files import read_plain
from holter.halting.vault import manifest as manifests
from holter.halting.vault.manifest import Manifest, Progress
from holter.halting.vault.store import SEALED, Vault

ProblemKind = Literal[
    "no_manifest",
    "damaged_manifest",
    "unsealed",
    "other_run",
    "other_step",
    "missing_file",
    "extra_file",
    "truncated_file",
    "changed_file",
    "unreadable_file",
    "changed_tensor",
    "missing_tensor",
    "nonfinite_tensor",
    "names_code",
]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint."""

    kind: ProblemKind
    text: str
    file: str = ""
    tensor: str = ""


@dataclass
class CheckpointExamination:
    """The result of examining a checkpoint."""

    directory: Path
    manifest: Manifest | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked."""
    num_files: int = 0
    num_bytes: int = 0

    @property
    def is_good(self) -> bool:
        """Whether the checkpoint is complete, unchanged since it was sealed, and was healthy then.

        Without a manifest: whether nothing wrong was found.
        """
        return not self.problems and (self.manifest is None or self.manifest.verdict == "healthy")


def home(path: Path) -> Path | None:
    """Return the directory of the sealed checkpoint that a path to it, or to its state, means; None if it is not one of holter's."""
    path = path.resolve()
    for candidate in (path, path.parent) if path.name == manifests.STATE else (path,):
        is_named = candidate.parent.name == "checkpoints" and bool(SEALED.fullmatch(candidate.name))
        is_partial = candidate.name.startswith(".") and candidate.name.endswith(".partial")
        has_state = (candidate / manifests.STATE).is_dir()
        if (candidate / manifests.NAME).is_file() or (has_state and (is_named or is_partial)):
            return candidate
    return None


def examine(directory: Path, progress: Progress) -> CheckpointExamination:
    """Check everything that digests can prove. Raises OSError if the disk cannot be read."""
    found = CheckpointExamination(directory)
    sizes = manifests.listed(directory)
    found.num_files, found.num_bytes = len(sizes), sum(sizes.values())
    if directory.name.startswith("."):
        text = f"{directory.name} was never sealed: the halt that wrote it did not come to its end"
        found.problems.append(Problem("unsealed", text))
        return found
    try:
        found.manifest = manifests.read(directory)
    except VaultError as error:
        is_there = (directory / manifests.NAME).exists()
        found.problems.append(Problem("damaged_manifest" if is_there else "no_manifest", str(error)))
        return found
    found.problems += _belonging(directory, found)
    found.problems += _files(directory, found.manifest, sizes, progress)
    return found


def _belonging(directory: Path, found: CheckpointExamination) -> Iterator[Problem]:
    assert found.manifest is not None
    manifest, named = found.manifest, SEALED.fullmatch(directory.name)
    if named is None:
        found.notes.append(f"{directory.name} is no name of a step: it cannot be compared with the manifest's")
    elif int(named[1]) != manifest.step:
        yield Problem("other_step", f"the manifest is of step {manifest.step}, the directory is named {directory.name}")
    run_dir = directory.parent.parent
    runs = {*Vault(run_dir).runs(), *_run_id(run_dir)}
    if not runs:
        found.notes.append("there is no run directory around it: whose it is cannot be checked")
    elif manifest.run_id not in runs:
        yield Problem(
            "other_run", f"the manifest is of run {manifest.run_id}, the directory of {', '.join(sorted(runs))}"
        )


def _run_id(run_dir: Path) -> list[str]:
    try:
        content = json.loads(read_plain(run_dir / "run.json"))
        return [str(content["run_id"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _files(directory: Path, manifest: Manifest, sizes: dict[str, int], progress: Progress) -> Iterator[Problem]:
    on_bytes = manifests.counted(progress, sum(sizes.values()))
    for name in sorted(manifest.files.keys() | sizes.keys()):
        sealed, size = manifest.files.get(name), sizes.get(name)
        if sealed is None:
            yield Problem("extra_file", f"{name} was not there when the checkpoint was sealed", name)
        elif size is None:
            yield Problem("missing_file", f"{name} is missing", name)
        elif size < sealed.bytes:
            yield Problem("truncated_file", f"{name} is cut off: {size} of {sealed.bytes} bytes", name)
        elif manifests.sha256(directory / name, on_bytes) != sealed.sha256:
            yield Problem("changed_file", f"the content of {name} is not what was sealed", name)
