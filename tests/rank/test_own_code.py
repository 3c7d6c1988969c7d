"""The script's own lines are told from a library's; what another process raised is read from its text."""

import sys
import types
from pathlib import Path

import pytest
import torch

from holter.rank import own_code

SCRIPT = """
import torch

def total(x):
    return torch.cat([x, torch.zeros(3)])

def main():
    try:
        total(torch.zeros(2, 2))
    except RuntimeError as error:
        raise ValueError("bad batch") from error
"""


@pytest.fixture
def script(tmp_path: Path) -> types.ModuleType:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    module = types.ModuleType("train")
    exec(compile(SCRIPT, str(path), "exec"), module.__dict__)  # noqa: S102
    return module


def test_the_innermost_line_of_the_script_comes_first(script: types.ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        script.total(torch.zeros(2, 2))
    own = own_code.own_frames(raised.value)
    assert own[0] == f"{tmp_path}/train.py:5 in total: return torch.cat([x, torch.zeros(3)])"


def test_of_a_chain_the_last_exception_is_told_and_what_it_came_from(script: types.ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad batch") as raised:
        script.main()
    assert own_code.own_frames(raised.value)[0].startswith(f"{tmp_path}/train.py:11 in main: raise ValueError")
    assert own_code.text_of(raised.value).startswith("ValueError: bad batch (from RuntimeError: ")


def test_a_worker_that_was_killed_is_told_with_its_signal() -> None:
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    text = "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly (from RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.)"
    assert text == own_code.text_of(error)


def test_what_a_loaders_worker_raised_is_read_from_its_text(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("import x\ndef get(i):\n    return table[i]\n")
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "{torch.__file__}", line 9, in fetch\n    data = self.dataset[i]\n'
        f'  File "{tmp_path}/data.py", line 3, in get\n    return table[i]\n'
        "KeyError: 'sample-17'\n"
    )
    error = RuntimeError(text)
    assert own_code.own_frames(error)[0] == f"{tmp_path}/data.py:3 in get: return table[i]"
    assert own_code.text_of(error) == "KeyError: 'sample-17' (Caught KeyError in DataLoader worker process 0)"


@pytest.mark.parametrize(
    "filename", [torch.__file__, "<frozen runpy>", own_code.__file__, types.__file__, sys.modules["json"].__file__]
)
def test_libraries_python_and_holter_are_not_the_scripts_own(filename: str) -> None:
    assert not own_code.is_own(filename)
