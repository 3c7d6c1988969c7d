"""Attaching: with the settings that can be used, once, wholly or not at all."""

import builtins
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from holter.config import Settings
from holter.frameworks import attach
from holter.frameworks.place import RankPlace
from holter.halting import halt_record
from made_up import HALT

HALF_ATTACHED = """
    import os, signal, sys, threading
    import torch
    from holter.frameworks import attach as loop

    def functions():
        return torch.save, torch.autograd.backward, sys.excepthook, os._exit

    def fail(*_):
        raise RuntimeError("no store")

    before = functions()
    loop._meet = fail
    assert loop.attach() is None
    assert before == functions()
    # The agent has heard that nobody is there.
    threading.Event().wait(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(2.0)
    print("SIGTERM was kept")
"""


@pytest.fixture
def bare(monkeypatch: Any) -> None:
    """A process that has not tried yet."""
    monkeypatch.setattr(attach, "_attachment", None)
    monkeypatch.setattr(attach, "_has_failed", False)


def test_a_wrong_setting_does_not_make_an_observer_halt(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("HOLTER_ACTION", "observe")
    monkeypatch.setenv("HOLTER_OVERHEAD_BUDGET", "1%")
    assert "observe" == attach._settings().action
    said = capsys.readouterr().err
    assert "HOLTER_OVERHEAD_BUDGET must be a number, got '1%'" in said
    assert "the action is observe" in said


@pytest.mark.parametrize(("owner", "name"), [(sys, "ps1"), (builtins, "get_ipython")])
def test_a_session_in_which_a_person_sits_is_not_halted(monkeypatch: Any, capsys: Any, owner: Any, name: str) -> None:
    assert "halt" == attach._settings().action
    monkeypatch.setattr(owner, name, ">>> ", raising=False)
    assert "notify" == attach._settings().action
    assert 1 == capsys.readouterr().err.count("interactive session")


def test_a_session_that_asks_for_less_is_told_nothing(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setenv("HOLTER_ACTION", "observe")
    assert "observe" == attach._settings().action
    assert "" == capsys.readouterr().err


@pytest.mark.usefixtures("bare")
def test_what_could_not_be_put_on_is_not_tried_again_in_mid_training(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("HOLTER_RING_BYTES", str(1 << 60))
    monkeypatch.setenv("HOLTER_RUN_DIR", str(tmp_path))
    assert attach.attach() is None
    halt_record.write(tmp_path, HALT)
    attach.log({"kl": 0.1})
    assert 1 == capsys.readouterr().err.count("trains unobserved")


@pytest.mark.slow
def test_what_was_put_on_in_part_is_taken_off(tmp_path: Path) -> None:
    environ = os.environ | {"HOLTER_RUN_DIR": str(tmp_path / "run"), "HOLTER_LINGER_S": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HALF_ATTACHED)],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "unobserved: RuntimeError: no store" in ended.stderr
    assert (-signal.SIGTERM, "") == (ended.returncode, ended.stdout), ended.stderr


def test_a_directory_that_was_deleted_is_no_reason_to_fail(tmp_path: Path, monkeypatch: Any) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "/runs/7" == attach._short("/runs/7")


@pytest.mark.parametrize(
    ("listen_host", "is_one_host", "expected"),
    [("", True, "127.0.0.1"), ("", False, "0.0.0.0"), ("10.0.0.7", False, "10.0.0.7"), ("::1", True, "::1")],  # noqa: S104
)
def test_nobody_listens_wider_than_needed(listen_host: str, is_one_host: bool, expected: str) -> None:  # noqa: FBT001
    here = RankPlace(rank=1, world_size=2, local_rank=1, is_one_host=is_one_host, address="node-0")
    assert expected == attach._listen_host(Settings(listen_host=listen_host), here)


@pytest.mark.parametrize(
    ("listen_host", "expected"),
    [
        ("", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),  # noqa: S104
        ("::", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3"),
        ("fd00::1", "[fd00::1]"),
    ],
)
def test_ranks_find_a_coordinator_that_listens_on_one_interface_there(listen_host: str, expected: str) -> None:
    here = RankPlace(rank=0, world_size=2, local_rank=0, address="127.0.0.1", is_one_host=True)
    assert expected == attach._reached_at(Settings(listen_host=listen_host), here)
