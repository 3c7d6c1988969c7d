"""Tests marked `device` (or `device("npu")`, one of another maker) run in a process that has the device; the rest of the session never sees it.

A server that has torch and the device loaded forks a child for each test, so a test begins on a fresh device and costs no import. The test's
arguments (parameters, `tmp_path`: what can be pickled) go to the child, its failure comes back as text. `tests/conftest.py` takes this in.
"""

import base64
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from fake_cuda.environment import environment

DEADLINE_S = 240


class Server:
    """The process that forks."""

    def __init__(self, wanted: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fake_cuda.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environ(wanted),
        )
        self.refusal = self._read() or None
        """Why there is no device."""

    def run(self, order: dict[str, object]) -> str:
        """What went wrong, as text; nothing if nothing did."""
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(pickle.dumps(order)).decode() + "\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """Ends with its input."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return pickle.loads(base64.b64decode(line)) if line else "the device's server died"  # noqa: S301


class Servers(dict[str, Server]):
    """By the kind of device that their children have; each is started when it is first asked for."""

    def __missing__(self, wanted: str) -> Server:
        self[wanted] = Server(wanted)
        return self[wanted]


def _environ(wanted: str) -> dict[str, str]:
    """What tests import here they import there."""
    path = os.pathsep.join(filter(None, sys.path))
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return {**os.environ, **environment(wanted), **more}


@pytest.fixture(scope="session")
def device_servers() -> Iterator[Servers]:
    """One a session, or a worker, and kind; skips, with the reason, where the device cannot be built."""
    servers = Servers()
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="session")
def device_environment(device_servers: Servers) -> dict[str, str]:
    """Variables for jobs on the device: `jobs.run(script, env=device_environment)`."""
    return _job_environment(device_servers, "1")


@pytest.fixture(scope="session")
def npu_environment(device_servers: Servers) -> dict[str, str]:
    """The same, for the device of another maker."""
    return _job_environment(device_servers, "npu")


@pytest.fixture(scope="session")
def bare_environment(device_servers: Servers) -> dict[str, str]:
    """The same, for one that shows no streams and has no float64."""
    return _job_environment(device_servers, "bare")


def _job_environment(servers: Servers, wanted: str) -> dict[str, str]:
    if servers[wanted].refusal:
        pytest.skip(f"no device: {servers[wanted].refusal}")
    return environment(wanted)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marked tests get the server."""
    for item in items:
        if item.get_closest_marker("device") and isinstance(item, pytest.Function):
            item.fixturenames.insert(0, "device_servers")


def places_of(test: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, int]:
    """Where the test's own `parametrize` marks hold these values, by each mark's first name; pytest's own indices count all combinations."""
    found = {}
    for mark in (mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"):
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        for place, each in enumerate(mark.args[1]):
            values = each.values if isinstance(each, ParameterSet) else each if len(names) > 1 else [each]
            if all(given[name] is value for name, value in zip(names, values, strict=True)):
                found[names[0]] = place
                break
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A marked test is run by the server's child."""
    marker = pyfuncitem.get_closest_marker("device")
    if marker is None:
        return None
    server: Server = pyfuncitem.funcargs["device_servers"]["".join(marker.args) or "1"]
    if server.refusal:
        pytest.skip(f"no device: {server.refusal}")
    # A parameter may be what cannot be pickled, a function say: the child finds it where the parent did.
    callspec = getattr(pyfuncitem, "callspec", None)
    given = dict(callspec.params) if callspec is not None else {}
    indices = places_of(pyfuncitem.function, given)
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name not in given}
    order = {"path": str(pyfuncitem.path), "name": pyfuncitem.function.__qualname__}
    failure = server.run({**order, "arguments": arguments, "indices": indices, "deadline_s": DEADLINE_S})
    if failure.startswith("skipped: "):
        pytest.skip(failure.removeprefix("skipped: "))
    if failure:
        pytest.fail(failure, pytrace=False)
    return True
