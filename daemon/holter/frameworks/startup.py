"""How a run was started, so that two runs can be compared: environment variables that libraries read, and source files.

This is read once, when rank 0 attaches, within limits; what cannot be read is left out.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from holter.redaction import without_secrets

PREFIXES = (
    "NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "GLOO_", "OMP_", "MKL_", "KMP_", "ACCELERATE_", "FSDP_", "DS_", "DEEPSPEED_", "HF_", "TRANSFORMERS_",
    "TOKENIZERS_", "TRITON_", "UCX_", "FI_", "XLA_", "HSA_", "ROCR_", "MIOPEN_", "CUBLAS_", "PYTHONHASHSEED",
)  # fmt: skip
OF_ONE_START = ("TORCHELASTIC_", "TORCH_NCCL_RANKS", "ACCELERATE_TORCH_DEVICE_ID")
"""Prefixes of variables that differ at every start."""
MAX_VARIABLES = 100
MAX_VALUE = 200
MAX_FILES = 64
MAX_FILE_BYTES = 1 << 20
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "holter-runs", "wandb", "mlruns"})


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read, without secrets."""
    names = sorted(name for name in environ if name.startswith(PREFIXES) and not name.startswith(OF_ONE_START))
    shown = without_secrets([f"{name}={environ[name]}" for name in names[:MAX_VARIABLES]])
    return {name: value[:MAX_VALUE] for name, _, value in (entry.partition("=") for entry in shown)}


def code(script: str) -> dict[str, str]:
    """Return a digest of the script, and of the Python files beside it and in the folders there."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        path = Path(script).resolve()
        if path.suffix == ".py" and path.is_file():
            for one in [path, *_beside(path)][:MAX_FILES]:
                with contextlib.suppress(OSError):
                    if one.stat().st_size <= MAX_FILE_BYTES:
                        found[one.relative_to(path.parent).as_posix()] = _digest(one)
    return found


def _beside(script: Path) -> Iterator[Path]:
    """Yield the files in sorted order, so that the same ones are chosen each time."""
    folder = script.parent
    yield from sorted(one for one in folder.glob("*.py") if one != script)
    with os.scandir(folder) as inside:
        names = sorted(entry.name for entry in inside if entry.is_dir(follow_symlinks=False))
    for name in names[:MAX_FILES]:
        if not name.startswith(".") and name not in SKIPPED:
            yield from sorted((folder / name).glob("*.py"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
