"""How a script that knows nothing of the device gets it: by its environment. Imports no torch."""

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent
VARIABLE = "TESTS_DEVICE"


def kind() -> str:
    """Which device this process is to have: "cuda", or one of another maker ("npu", "bare": torch_npu.py)."""
    wanted = os.environ.get(VARIABLE, "1")
    return "cuda" if wanted == "1" else wanted


def environment(wanted: str = "1", **more: str) -> dict[str, str]:
    """Variables for a process, or for `torchrun`: `import torch` finds the entry point in this folder and calls `autoload`."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {VARIABLE: wanted, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "ACCELERATE_USE_CPU": "false", **more}


def autoload() -> None:
    """Called by torch at the end of its import, in every process that has this folder on its path."""
    if os.environ.get(VARIABLE):
        from fake_cuda.setup import install  # noqa: PLC0415

        install()
