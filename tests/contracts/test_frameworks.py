"""A framework is a folder: nobody else asks which one it is, and each says all that is asked of it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holter.frameworks.all import ALL

HOLTER = Path(__file__).resolve().parents[2] / "daemon" / "holter"

ANY_FRAMEWORK = [
    "rank",
    "halting",
    "coordinator",
    "sidecar",
    "transport",
    "page",
    "flight",
    "exporters",
    "status_page",
    "cli",
]
"""What works with any framework. `faults`, `diagnosis` and `offline` explain what frameworks do and print, so they name them."""

NAMED = re.compile(r"accelerate|deepspeed|transformers|trainer|fsdp|fullysharded|flatparameter|\bds_", re.IGNORECASE)

EXCEPTIONS = {
    # How a tensor lies on the ranks is asked of the tensor, thousands of times a step; a framework is no help there.
    "ds_id": "ZeRO-3 marks a parameter with it",
    "ds_tensor": "ZeRO-3 keeps a partition there",
    "ds_shape": "ZeRO-3 keeps the shape of the whole there",
    "FlatParameter": "FSDP1's parameters are of this class",
    # Wrappers of a model are told by the names of their classes, which are facts of a census too.
    "FullyShardedDataParallel": "its gradients are reduced by the end of backward, and its parameters are flat",
    "DeepSpeedEngine": "likewise; the script's model is its `module`",
    "FSDPModule": "what fully_shard makes of a module: it says over which axes it reduces",
    "_fsdp_param_groups": "likewise",
    # A loader is described without running the script's code: whose code may be run is a list of packages.
    "accelerate": "its loaders and samplers answer without side effects",
    "accelerate.": "its loader holds the one that is iterated",
    "transformers": "its samplers answer without side effects",
}


def words(path: Path) -> Iterator[str]:
    """Strings that code compares with or looks up: one word each, unlike sentences and documentation."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value.strip():
            yield node.value


def test_no_framework_is_named_outside_of_its_folder():
    found = {
        f"{path.relative_to(HOLTER)}: {word}"
        for part in ANY_FRAMEWORK
        for path in (HOLTER / part).rglob("*.py")
        for word in words(path)
        if NAMED.search(word) and word not in EXCEPTIONS
    }
    assert set() == found


def test_every_exception_is_needed():
    used = {word for path in (HOLTER / "rank").rglob("*.py") for word in words(path)}
    assert set() == set(EXCEPTIONS) - used


def test_the_rule_sees_a_name(tmp_path):
    (tmp_path / "bad.py").write_text('"""About the Trainer."""\nis_it = kind == "Trainer"\n')
    assert ["Trainer"] == [word for word in words(tmp_path / "bad.py") if NAMED.search(word)]


@pytest.mark.parametrize("framework", ALL, ids=lambda framework: framework.name)
def test_a_framework_is_called_as_its_folder_and_says_how_to_resume(framework):
    assert (HOLTER / "frameworks" / framework.name / "framework.py").is_file()
    assert framework.checkpoint
    assert "{path!r}" in framework.resume


def test_every_folder_is_in_the_list_once():
    folders = {path.parent.name for path in (HOLTER / "frameworks").glob("*/framework.py")}
    assert sorted(folders) == sorted(framework.name for framework in ALL)


def test_the_list_costs_no_import_of_torch_or_of_a_framework():
    code = (
        "import sys, holter.frameworks.all; "
        "sys.exit(bool({'torch', 'accelerate', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
