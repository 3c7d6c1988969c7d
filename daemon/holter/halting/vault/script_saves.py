"""The script's own checkpoints, and what is thought of each: `checkpoints/watched.json`."""

from pathlib import Path

import msgspec

from holter.halting.vault.store import FOLDER
from holter.records import Verdict

NAME = "watched.json"


class ScriptSave(msgspec.Struct, frozen=True, kw_only=True):
    """A finished save of the script's, or its framework's."""

    step: int
    """Completed optimizer steps in it, those before a resume included."""
    path: str
    framework: str
    saved_at: str
    seconds: float
    verdict: Verdict
    why: str
    incident: str = ""
    """Where the fault in it is explained."""
    ranks: list[int] = []
    """Those that said so."""


class ScriptSaves(msgspec.Struct, frozen=True):
    """All that are remembered, oldest first."""

    saves: list[ScriptSave] = []


def path_in(run_dir: Path) -> Path:
    """Where they are written down."""
    return run_dir / FOLDER / NAME


def read(run_dir: Path) -> list[ScriptSave]:
    """What is written down; a file that cannot be read says nothing."""
    try:
        return msgspec.json.decode(path_in(run_dir).read_bytes(), type=ScriptSaves).saves
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return []
