"""What tests of halts share: a job that is halted, resumed, and held against one that never met the fault."""

import json
from pathlib import Path
from typing import Any

HALT = {"HOLTER_ACTION": "halt"}
"""What a user has who sets nothing."""


def results(out: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank wrote at its end."""
    return [json.loads(out.with_name(f"{out.name}-{rank}.json").read_text()) for rank in range(ranks)]


def halt_json(run_dir: Path) -> dict[str, Any]:
    """halt.json."""
    return json.loads((run_dir / "halt.json").read_text())


def same_bits(reference: list[dict[str, Any]], resumed: list[dict[str, Any]], first: str) -> None:
    """Losses from the resumed step on, and all else that was written at the end."""
    for healthy, again in zip(reference, resumed, strict=True):
        assert first == next(iter(again["losses"])), "it goes on where it was halted"
        assert list(again["losses"]) == list(healthy["losses"])[-len(again["losses"]) :]
        assert {name: healthy["losses"][name] for name in again["losses"]} == again["losses"]
        assert {name: value for name, value in healthy.items() if name != "losses"} == {
            name: value for name, value in again.items() if name != "losses"
        }
