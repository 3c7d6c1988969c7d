"""CONTRIBUTING's examples, followed word for word in a copy of the tree: the detector judges, the framework answers, the transport carries."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LEARNING = "daemon/holter/faults/learning"
FRAMEWORKS = "daemon/holter/frameworks"
TRANSPORT = "daemon/holter/transport"
TINYTRAIN = """
class Engine:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.global_step = model, optimizer, 7
"""


def example(path: str) -> str:
    """The code that CONTRIBUTING shows for a file."""
    return shown_after(f"`{path}`")


def shown_after(words: str) -> str:
    """The code below the line that begins so."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(words)}[^\n]*\n```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, words
    return found[1]


class Tree:
    """A copy of the parts that a contributor touches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for part in ("daemon/holter", "grafana", "tests/device/fake_cuda"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for name in (
            "pyproject.toml",
            "tests/conftest.py",
            "tests/processes.py",
            "tests/made_up.py",
            "tests/faults/test_all.py",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)

    def add(self, path: str, text: str | None = None) -> None:
        """A new file."""
        (self._folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / path).write_text(example(path) if text is None else text, encoding="utf-8")

    def edit(self, path: str, *changes: tuple[str, str]) -> None:
        """Replace what is found first."""
        text = (self._folder / path).read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        (self._folder / path).write_text(text, encoding="utf-8")

    def python(self, *words: str) -> str:
        """Run in it; its holter comes first."""
        path = os.pathsep.join(str(self._folder / part) for part in ("daemon", "."))
        environ = os.environ | {"PYTHONPATH": path}
        command = [sys.executable, *words]
        ran = subprocess.run(command, cwd=self._folder, env=environ, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_detector_is_added(tree: Tree) -> None:
    imported, _, line = shown_after("In the same file the import").partition("\n\n")
    tree.add(f"{LEARNING}/zero_learning_rate.py")
    tree.add("tests/faults/learning/test_zero_learning_rate.py")
    tree.edit(
        f"{LEARNING}/causes.py",
        ("FAMILY = ", example(f"{LEARNING}/causes.py") + "\nFAMILY = "),
        ("STALE_OPTIMIZER_PARAMETERS,", "STALE_OPTIMIZER_PARAMETERS, SCHEDULE_RAN_OUT,"),
        ("\n\nfrom ", f"\n\n{imported}\nfrom "),
        ("    detectors=(\n", f"    detectors=(\n{line}"),
    )

    assert "passed" in tree.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/faults")
    assert "schedule_ran_out" in tree.python("-m", "holter.cli", "explain", "zero_learning_rate")
    tree.python("-m", "holter.cli", "alerts", "--write", "grafana")
    assert "schedule_ran_out" in tree.python("-c", "print(open('grafana/alerts/causes.yml').read())")


def test_a_framework_is_added(tree: Tree) -> None:
    imported, _, line = example(f"{FRAMEWORKS}/all.py").partition("\n\n")
    tree.add(f"{FRAMEWORKS}/tinytrain/__init__.py", '"""tinytrain."""\n')
    tree.add(f"{FRAMEWORKS}/tinytrain/framework.py")
    tree.add(f"{FRAMEWORKS}/tinytrain/keeper.py")
    (former,) = (one for one in (ROOT / FRAMEWORKS / "all.py").read_text().splitlines() if one.startswith("ALL: "))
    tree.edit(f"{FRAMEWORKS}/all.py", ("\n\nfrom ", f"\n\n{imported}\nfrom "), (former, line))
    tree.add("tinytrain.py", TINYTRAIN)
    tree.add("ask.py", ASK)
    assert "7 tinytrain ['model: weight', 'model: bias']\n" == tree.python("ask.py")


def test_a_transport_is_added(tree: Tree) -> None:
    imported, _, line = example(f"{TRANSPORT}/choice.py").partition("\n\n")
    tree.add(f"{TRANSPORT}/local/__init__.py", '"""Both ends in one process."""\n')
    tree.add(f"{TRANSPORT}/local/ends.py")
    first = '    "": Transport('
    tree.edit(f"{TRANSPORT}/choice.py", ("\n\nfrom ", f"\n\n{imported}\nfrom "), (first, f"{line.rstrip()}\n{first}"))
    tree.add("talk.py", TALK)
    assert "['connect', 'hear', 'urgent', 'hear_table', 'goodbye', 'disconnect'] 1 True\n" == tree.python("talk.py")


ASK = """
import tinytrain
import torch

from holter.frameworks.all import ALL

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
engine = tinytrain.Engine(model, optimizer)
(tiny,) = (one for one in ALL if one.name == "tinytrain")
keeper = tiny.keeper(None, [optimizer])
print(tiny.count_steps(optimizer), keeper.framework, [name for name, _ in keeper.live()])
"""

TALK = """
import asyncio

from holter.transport import wire
from holter.transport.choice import transport_of
from holter.transport.uplink import RankUplink

said = []


class Receiver:
    run_id, run_dir = "r", "/runs/r"

    def refusal(self, hello):
        return "too many" if hello.rank else None

    def connect(self, hello, now_ns):
        said.append("connect")
        return 1

    def __getattr__(self, name):
        return lambda *_, **__: said.append(name) or name == "hear"


def hello(rank):
    return wire.Hello(run_id="r", rank=rank, world_size=1, host="h", rank_pid=1, sidecar_pid=2, metrics_address="")


async def talk():
    transport = transport_of("local://")
    listener = transport.listener(Receiver(), "token", lambda: said.append("urgent"), lambda _: asyncio.sleep(0))
    uplinks = [RankUplink("local://", "token", hello(rank), lambda _: None) for rank in (0, 1)]
    for uplink in uplinks:
        uplink.start()
    uplinks[0].beat(wire.Heartbeat(1, 2, 0, 5))
    await listener.fetch([("gradients", 3, 0)], 1.0)
    is_closed = await uplinks[0].close(1.0)
    print(said, listener.refused, is_closed)


asyncio.run(talk())
"""
