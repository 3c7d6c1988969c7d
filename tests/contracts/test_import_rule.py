"""The import rule of the design, enforced: who may import whom, and who may not import what."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOLTER = ROOT / "daemon" / "holter"
KERNELS = ROOT / "kernels" / "holter_kernels"

LAYERS = [
    {"__main__", "testing"},
    {"cli"},
    {"frameworks"},
    {"config"},
    {"sidecar", "agent", "coordinator", "offline"},
    {"rank", "exporters", "status_page", "halting"},
    {"transport", "page"},
    {"diagnosis"},
    {"faults"},
    {"flight"},
    {"patience"},
    {"records", "errors", "clock", "threads", "files", "redaction"},
]
"""Top may import below; those of one layer may not import each other. `holter/__init__.py` is the public face: it imports the
frameworks when it is asked for them, and anyone may ask it for the version."""

SHARED_TABLES = {"rank": ("holter.halting.rank_protocol", "holter.halting.orders")}
"""The rank's side of a halt follows the rank's own table."""

IMPURE = {"torch", "asyncio", "socket", "os", "time", "threading", "logging"}
PURE = [
    "records",
    "patience.py",
    "flight",
    "faults",
    "diagnosis",
    "halting/plan.py",
    "halting/protocol.py",
    "halting/rank_protocol.py",
    "halting/verdicts.py",
]
TORCH_FREE = [
    "status_page",
    "offline",
    "sidecar",
    "agent",
    "coordinator",
    "transport",
    "exporters",
    "page",
    "config.py",
    "__init__.py",
    "cli",
]
FRAMEWORKS = {"accelerate", "deepspeed", "transformers"}


def files(where: str) -> list[Path]:
    path = HOLTER / where
    return [path] if path.is_file() else sorted(path.rglob("*.py")) if path.is_dir() else []


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside its functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(module: str) -> str:
    """`holter.rank.hooks.step` belongs to `rank`; `holter` itself to `__init__`."""
    words = module.split(".")
    known = set().union(*LAYERS)
    return words[1] if len(words) > 1 and words[1] in known else "__init__"


def layer(name: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if name in names)


def violations(root: Path) -> list[str]:
    """Imports that go upwards or sideways."""
    found = []
    for path in sorted(root.rglob("*.py")):
        own = path.relative_to(root).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for module in imports(path):
            if module.split(".")[0] != "holter" or part(module) == own:
                continue
            other = part(module)
            if module == "holter.halting" or module.startswith(SHARED_TABLES.get(own, ())):
                continue
            if other != "__init__" and layer(other) <= layer(own):
                found.append(f"{path.relative_to(root)} imports {module}")
    return found


def test_the_architecture_page_shows_the_same_layers():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = page.split("## Import rule")[1].split("```")[1].split("\n")[1:-1]
    assert LAYERS == [set(line.split(" | ")) for line in drawn]


def test_nothing_imports_upwards_or_sideways():
    assert violations(HOLTER) == []


def test_the_rule_sees_an_import_that_breaks_it(tmp_path):
    (tmp_path / "sidecar").mkdir()
    (tmp_path / "sidecar" / "bad.py").write_text("def f():\n    from holter.coordinator import roster\n")
    (tmp_path / "records.py").write_text("import holter.faults.window\n")
    assert len(violations(tmp_path)) >= 2


@pytest.mark.parametrize("where", PURE)
def test_judges_are_pure(where):
    assert files(where)
    for path in files(where):
        assert not {module.split(".")[0] for module in imports(path)} & IMPURE, path


@pytest.mark.parametrize("where", TORCH_FREE)
def test_the_daemons_import_no_torch(where):
    assert files(where)
    for path in files(where):
        assert "torch" not in {module.split(".")[0] for module in imports(path)}, path


def test_families_of_faults_do_not_import_each_other():
    families = {path.parent.name for path in (HOLTER / "faults").glob("*/__init__.py")} - {"shared"}
    for path in files("faults"):
        own = path.relative_to(HOLTER / "faults").parts[0]
        others = {module.split(".")[2] for module in imports(path) if module.startswith("holter.faults.")}
        assert own not in families | {"shared"} or not others & (families - {own}), path


def test_only_the_rank_imports_the_kernels():
    for path in HOLTER.rglob("*.py"):
        if path.relative_to(HOLTER).parts[0] != "rank":
            assert "holter_kernels" not in {module.split(".")[0] for module in imports(path)}, path


def test_kernels_import_no_holter():
    for path in KERNELS.rglob("*.py"):
        assert "holter" not in {module.split(".")[0] for module in imports(path)}, path


def test_only_frameworks_import_frameworks():
    for path in HOLTER.rglob("*.py"):
        if path.relative_to(HOLTER).parts[0] != "frameworks":
            assert not {module.split(".")[0] for module in imports(path)} & FRAMEWORKS, path


def test_a_sidecar_starts_without_the_detectors():
    """It must be up before a rank that dies young is gone."""
    code = (
        "import holter.sidecar.service, sys; sys.exit(any(name.startswith('holter.diagnosis') for name in sys.modules))"
    )
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


def test_only_the_clock_reads_the_clock():
    for path in HOLTER.rglob("*.py"):
        if path.name != "clock.py":
            assert not {"time", "datetime"} & {module.split(".")[0] for module in imports(path)}, path


def test_only_config_and_attaching_read_the_environment():
    # launch.py hands it on to the job; preflight.py looks for what contradicts itself in it, and hands it on.
    allowed = {"config.py", "__main__.py", "attach.py", "place.py", "autoload.py", "launch.py", "preflight.py"}
    for path in HOLTER.rglob("*.py"):
        if path.name not in allowed:
            assert "os.environ" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("where", ["rank", "halting", "frameworks", "page"])
def test_threads_in_the_rank_take_no_signals(where):
    for path in files(where):
        text = path.read_text(encoding="utf-8")
        num_started = sum(text.count(f"threading.{kind}(") for kind in ("Thread", "Timer"))
        assert num_started <= text.count("with without_signals():"), path


@pytest.mark.parametrize(
    "module",
    [
        "holter",
        "holter.sidecar.service",
        "holter.coordinator.service",
        "holter.cli.sidecar",
        "holter.cli",
        "holter.testing",
    ],
)
def test_no_torch_is_loaded_in_fact(module):
    check = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_one_module_of_each_package_knows_the_types_of_devices():
    """Whoever asks `torch.cuda` by its name forgets all others; the doctor's checks are of CUDA."""
    known = {HOLTER / "rank" / "accelerator.py", KERNELS / "devices.py"}
    for package in (HOLTER / "rank", HOLTER / "frameworks", KERNELS):
        for path in {*package.rglob("*.py")} - known - {*(HOLTER / "rank" / "doctor").rglob("*.py")}:
            code = ast.unparse(_without_docstrings(ast.parse(path.read_text())))
            assert not re.search(r"torch\.(cuda|xpu|mps|npu|hpu)\b|['\"](cuda|xpu|mps|npu|hpu)['\"]", code), path


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [
                line for line in node.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ] or [ast.Pass()]
    return tree
