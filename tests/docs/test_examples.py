"""Every example runs as its docstring says, on two CPU ranks under holter, and nothing is found in it."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
ZERO = {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu"}
NEEDS = {"train_lightning.py": ("lightning",), "train_grpo.py": ("trl", "peft"), "train_ray.py": ("ray",)}
JOBS = [
    pytest.param("train_loop.py", {}),
    pytest.param("train_accelerate.py", {}, marks=pytest.mark.release),
    pytest.param("train_trainer.py", {}, marks=pytest.mark.release),
    pytest.param("train_deepspeed.py", ZERO, marks=pytest.mark.release),
    pytest.param("train_fsdp.py", {}, marks=pytest.mark.release),
    pytest.param("train_titan.py", {}, marks=pytest.mark.release),
    pytest.param("train_ray.py", {"HOLTER": "1"}, marks=pytest.mark.release),
    pytest.param("train_lightning.py", {}, marks=pytest.mark.release),
    pytest.param("train_grpo.py", {"HF_HUB_OFFLINE": "1"}, marks=pytest.mark.release),
]


def command(script: str) -> str:
    """What the docstring tells to type, on one line."""
    lines = re.search(r"\n\n    (.+?)\n\n", (EXAMPLES / script).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert lines is not None
    return lines[1].replace("\\\n", " ")


def test_every_training_script_is_run_here() -> None:
    assert {job.values[0] for job in JOBS} | {"train_gpt.py"} == {path.name for path in EXAMPLES.glob("train_*.py")}


@pytest.mark.job
@pytest.mark.parametrize(("script", "env"), JOBS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_example_trains_under_holter(script: str, env: dict[str, str], jobs: Any) -> None:
    if missing := [name for name in NEEDS.get(script, ()) if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}; `make test-all` installs them")
    told = command(script)
    assert told.endswith(f"deploy/examples/{script}")
    by_itself = "python" if told.startswith("HOLTER=1 python ") else "accelerate"
    ended = jobs.run(
        EXAMPLES / script,
        *("--steps", 20),
        by="torchrun" if "torchrun" in told else by_itself,
        attached="-m holter" in told,
        env=env,
    )
    assert ended.code == 0, ended.stderr[-3000:]
    run = json.loads((ended.run_dir / "run.json").read_text())
    assert (2, [0, 1]) == (run["world_size"], run["ranks"])
    assert [] == ended.alarms
