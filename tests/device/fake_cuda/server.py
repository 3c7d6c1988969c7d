"""Forks a child with the device for each test that it is told of; see `pytest_plugin.py`.

Nothing here starts a thread or touches the device's memory, so that children have both to themselves.
"""

import ast
import base64
import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from _pytest.assertion.rewrite import rewrite_asserts
from _pytest.mark.structures import ParameterSet
from _pytest.outcomes import Skipped


def import_test(path: Path) -> ModuleType:
    """The file as a module, its assertions rewritten as pytest does it."""
    source = path.read_bytes()
    tree = ast.parse(source, str(path))
    rewrite_asserts(tree, source, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    return module


def parameters(test: Any, indices: dict[str, int]) -> dict[str, Any]:
    """What the test's own `parametrize` marks hold at these places."""
    found = {}
    for mark in (mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"):
        names, values = mark.args[0], list(mark.args[1])
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        value = values[indices[names[0]]]
        if isinstance(value, ParameterSet):
            found |= dict(zip(names, value.values, strict=True))
        else:
            found |= dict(zip(names, value if len(names) > 1 else [value], strict=True))
    return found


def run_test(order: dict[str, Any]) -> str:
    """What went wrong, as text."""
    found: Any = None
    try:
        if defect := os.environ.get("TESTS_DEFECT"):
            importlib.import_module("tests.device.defects").put_back(defect)
        found = import_test(Path(order["path"]))
        for part in order["name"].split("."):
            found = getattr(found, part)
            found = found() if isinstance(found, type) else found
        found(**order["arguments"], **parameters(found, order["indices"]))
        drain()
    except Skipped as skipped:
        return f"skipped: {skipped}"
    except BaseException:  # noqa: BLE001 - whatever a test raises is its failure
        return traceback.format_exc()
    return ""


def drain() -> None:
    """A test whose operations failed on the device has failed."""
    import fake_cuda  # noqa: PLC0415

    fake_cuda.set_gate(is_open=True)
    fake_cuda.set_delay(0)
    fake_cuda.drain()


def in_a_child(order: dict[str, Any]) -> str:
    """The same, in a child whose death is a failure too."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as failure:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            faulthandler.enable(said)
            faulthandler.dump_traceback_later(order["deadline_s"], exit=True, file=said)
            failure.write(run_test(order))
            failure.flush()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        _kill_group(pid)
        failure.seek(0)
        said.seek(0)
        text = failure.read()
        if os.WIFSIGNALED(status):
            text = f"died of signal {os.WTERMSIG(status)}"
        elif os.WEXITSTATUS(status):
            text = f"ended with {os.WEXITSTATUS(status)}, after {order['deadline_s']} s at most"
        if text and not text.startswith("skipped"):
            text += f"\n{said.read()[-20_000:]}"
        return text


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def answer(to: TextIO, text: str) -> None:
    """One line."""
    to.write(base64.b64encode(pickle.dumps(text)).decode() + "\n")
    to.flush()


def main() -> None:
    """Until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    import fake_cuda  # noqa: PLC0415

    try:
        fake_cuda.install()
        import numpy as np  # noqa: F401, PLC0415
        import torch  # noqa: PLC0415

        import holter_kernels.triton_kernels  # noqa: F401, PLC0415 - Triton and its interpreter, once for all children

        # Shapes of results come from meta kernels, some of which torch has in Python and imports late.
        torch.ones(3, device="meta").add(1)
    except fake_cuda.Unavailable as error:
        answer(out, str(error))
    else:
        answer(out, "")
    for line in sys.stdin:
        answer(out, in_a_child(pickle.loads(base64.b64decode(line))))  # noqa: S301


if __name__ == "__main__":
    main()
