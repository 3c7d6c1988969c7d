"""A fault is named in its family and nowhere else: whoever adds a detector or a cause edits no engine."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from holter.faults import CAUSES, DETECTORS

HOLTER = Path(__file__).resolve().parents[2] / "daemon" / "holter"
ENGINES = ["diagnosis", "halting", "coordinator", "exporters", "sidecar"]
SERIES = {"learning_rate", "device_throttled"}
"""Also names of a series that every rank reports, and of a metric of its device, which are meant wherever an engine says them."""


def literals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_names_a_fault(engine: str) -> None:
    names = {*DETECTORS, *CAUSES} - SERIES
    files = sorted((HOLTER / engine).rglob("*.py"))
    assert files
    assert [] == [
        f"{path.relative_to(HOLTER)}: {name}" for path in files for name in sorted(names.intersection(literals(path)))
    ]


def test_the_literals_of_a_file_are_seen(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text('HALTS = {"rank_dead"}\n')
    assert ["rank_dead"] == list(literals(tmp_path / "bad.py"))
