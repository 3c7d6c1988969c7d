"""Reads settings beside a run: YAML, JSON, environment listings, versions; flat, with their lines. No YAML library is needed for `key: value`."""

import re
from collections.abc import Mapping
from typing import Any

from holter.offline.found import Config

_ENTRY = re.compile(r"^(\s*)(?:-\s+)?([A-Za-z_][\w.\-/]*)\s*:\s*(.*?)\s*(?:\s#.*)?$")
_ENVIRONMENT = re.compile(r"^(?:export\s+)?([A-Z_][A-Z0-9_]*)=(.*)$")
_VERSION = re.compile(r"^([A-Za-z][\w.\-]*)==(\S+)$")
_OPTION = re.compile(r"^\s*--?([A-Za-z][\w-]*)(?:[ =](\S+))?\s*\\?$")
MAX_LINES = 20_000
MAX_DEPTH = 8
MAX_LISTED = 300
"""Number of characters of a list's text from which on no further entries are added."""
_MODEL_KEYS = frozenset(
    {"vocab_size", "hidden_size", "num_hidden_layers", "n_layer", "n_embd", "d_model", "num_layers"}
)


def from_json(file: str, content: Mapping[str, Any]) -> Config | None:
    """Return the settings of a JSON object; None if it has none."""
    values = _flat(content, "", 0)
    if not values:
        return None
    kind = "settings"
    if "zero_optimization.stage" in values or "train_micro_batch_size_per_gpu" in values:
        kind = "deepspeed"
    elif _MODEL_KEYS & set(content):
        kind = "model"
    return Config(file, values, kind=kind)


def _flat(content: Mapping[str, Any], prefix: str, depth: int) -> dict[str, str]:
    made: dict[str, str] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < MAX_DEPTH:
            made |= _flat(value, f"{name}.", depth + 1)
        elif isinstance(value, (str, int, float, bool, list)) or value is None:
            made[name] = str(value)[:300]
    return made


def from_text(file: str, text: str) -> Config | None:
    """Return the settings of a text that consists mostly of settings; None if it is something else."""
    lines = [
        line for line in text.splitlines()[:MAX_LINES] if line.strip() and not line.lstrip().startswith(("#", "---"))
    ]
    for pattern, kind in ((_VERSION, "versions"), (_ENVIRONMENT, "environment"), (_OPTION, "settings")):
        found = [match for line in lines if (match := pattern.match(line.strip() if kind != "settings" else line))]
        if found and len(found) >= 0.7 * len(lines):
            prefix = "version." if kind == "versions" else ""
            return Config(
                file,
                {f"{prefix}{match.group(1)}": (match.group(2) or "true").strip("'\"") for match in found},
                kind=kind,
            )
    return _yaml(file, text, len(lines))


def _yaml(file: str, text: str, num_lines: int) -> Config | None:
    values: dict[str, str] = {}
    places: dict[str, int] = {}
    above: list[tuple[int, str]] = []
    num = 0
    for number, line in enumerate(text.splitlines()[:MAX_LINES], start=1):
        match = _ENTRY.match(line)
        if not match or line.lstrip().startswith("#"):
            if line.lstrip().startswith("- "):
                num += 1
                _listed(line, above, values)
            continue
        num += 1
        indent = len(match.group(1))
        above = [one for one in above if one[0] < indent]
        name = ".".join([*(one[1] for one in above), match.group(2)])
        if match.group(3):
            values[name] = match.group(3).strip("'\"")
            places[name] = number
        else:
            above.append((indent, match.group(2)))
    is_settings = values and num >= 0.7 * num_lines
    if not is_settings:
        return None
    kind = "accelerate" if "distributed_type" in values or "compute_environment" in values else "settings"
    return Config(file, values, places, kind)


def _listed(line: str, above: list[tuple[int, str]], values: dict[str, str]) -> None:
    """Add an entry of a list whose name is on a line above: `milestones:` and `- 30` become `[30]`."""
    name = ".".join(one[1] for one in above)
    entry = line.lstrip()[2:].partition(" #")[0].strip()
    if name and entry and len(values.get(name, "")) < MAX_LISTED:
        known = values.get(name, "[]")[1:-1]
        values[name] = f"[{known}, {entry}]" if known else f"[{entry}]"
