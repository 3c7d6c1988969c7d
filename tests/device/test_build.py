"""Where the device cannot be built, that is said once, and marked tests are skipped with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cuda import build

TEST = Path(__file__).with_name("test_streams.py")


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch) -> Path:
    compiler = tmp_path / "c++"
    compiler.write_text(
        f"#!/bin/sh\necho built >> {tmp_path}/calls\necho 'device.cpp:1: error: not here' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TESTS_DEVICE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_refusal_is_remembered(refusing: Path) -> None:
    for _ in range(2):
        with pytest.raises(build.Unavailable, match=r"refuses the device: device.cpp:1: error: not here"):
            build.library()
    assert "built\n" == (refusing / "calls").read_text()


def test_without_a_compiler_the_reason_is_that(refusing: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", str(refusing / "missing"))
    with pytest.raises(build.Unavailable, match="no C\\+\\+ compiler"):
        build.library()


def test_another_state_of_the_sources_is_another_build(refusing: Path, monkeypatch) -> None:
    before = build.folder()
    (refusing / "csrc").mkdir()
    (refusing / "csrc" / "device.cpp").write_text("changed")
    monkeypatch.setattr(build, "SOURCES", refusing / "csrc")
    assert before != build.folder()


@pytest.mark.slow
def test_marked_tests_are_skipped_with_the_reason(refusing: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={refusing}/pytest", TEST]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(os.environ), cwd=TEST.parents[2]
    )
    assert "error: not here" in run.stdout, run.stdout + run.stderr
    assert "failed" not in run.stdout
    assert "passed" not in run.stdout
    assert 0 == run.returncode
