"""A checkpoint's tensors, read back: against its manifest, or, where there is none, looked at for values that are not finite."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from holter.errors import VaultError
from holter.frameworks.saving.reading import TORCH_SAVED, holds_tensors, tensors_in
from holter.halting.vault.manifest import Manifest, StoredTensor
from holter.halting.vault.verification import Problem
from holter.rank.readings.fused_pass import count_nonfinite, fingerprint_of

OnFile = Callable[[str, int], None]
"""Told a file's name and its bytes before it is read."""


def compare(directory: Path, manifest: Manifest, on_file: OnFile) -> Iterator[Problem]:
    """Tensors that are not those that were sealed."""
    by_file: dict[str, dict[str, StoredTensor]] = {}
    for tensor in manifest.tensors:
        by_file.setdefault(tensor.file, {})[tensor.name] = tensor
    for name, sealed in by_file.items():
        if (directory / name).is_file():
            on_file(name, (directory / name).stat().st_size)
            yield from _compare_file(directory, name, sealed)


def _compare_file(directory: Path, name: str, sealed: dict[str, StoredTensor]) -> Iterator[Problem]:
    waiting = dict(sealed)
    try:
        for tensor_name, tensor in tensors_in(directory / name):
            before = waiting.pop(tensor_name, None)
            if before is not None and fingerprint_of(tensor) != before.fingerprint:
                shape = "x".join(map(str, before.shape)) or "scalar"
                text = f"{tensor_name} ({before.dtype}, {shape}) in {name} is not the tensor that was sealed"
                yield Problem("changed_tensor", text, name, tensor_name)
    except (VaultError, ValueError) as error:
        yield Problem("unreadable_file", f"{name} could be read when it was sealed, and now: {error}", name)
        return
    for tensor_name in waiting:
        yield Problem("missing_tensor", f"{tensor_name} is no longer in {name}", name, tensor_name)


@dataclass
class Surveyed:
    """What can be said of a checkpoint that nobody sealed."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0
    num_tensors: int = 0


def survey(path: Path, on_file: OnFile) -> Surveyed:
    """Whether every tensor can be read, and how many values are not finite. Raises OSError."""
    found = Surveyed()
    root = path if path.is_dir() else path.parent
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    for file in files:
        name, size = str(file.relative_to(root)), file.stat().st_size
        found.num_files += 1
        found.num_bytes += size
        on_file(name, size)
        if holds_tensors(name) or not path.is_dir():
            _survey_file(file, name, found)
    return found


def _survey_file(file: Path, name: str, found: Surveyed) -> None:
    try:
        for tensor_name, tensor in tensors_in(file):
            found.num_tensors += 1
            if bad := count_nonfinite(tensor):
                text = f"{tensor_name} in {name}: {bad} of {tensor.numel()} values are NaN or infinite"
                found.problems.append(Problem("nonfinite_tensor", text, name, tensor_name))
    except (VaultError, ValueError) as error:
        if _is_meant_to_hold_tensors(file):
            found.problems.append(Problem("unreadable_file", str(error), name))
        else:
            found.notes.append(f"{error}: whether it holds tensors is not known")


def _is_meant_to_hold_tensors(file: Path) -> bool:
    """By its format; a name such as `.bin` may be anything's."""
    with file.open("rb") as opened:
        return file.suffix not in TORCH_SAVED or opened.read(2) == b"PK"
