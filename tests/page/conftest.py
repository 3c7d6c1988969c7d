"""Pages for tests, closed afterwards."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from holter.page import PageReader, PageWriter


@pytest.fixture
def make_page() -> Iterator[Callable[..., tuple[PageWriter, PageReader]]]:
    """Make a page and open it; settings are those of `PageWriter.create`."""
    with ExitStack() as stack:

        def make(**settings: int) -> tuple[PageWriter, PageReader]:
            identity = {"rank": 1, "world_size": 4, "pid": 4242, "started_ticks": 777, "ring_bytes": 4096}
            writer = stack.enter_context(closing(PageWriter.create(**{**identity, **settings})))
            return writer, stack.enter_context(closing(PageReader.open(writer.fd)))

        yield make


@pytest.fixture
def start_python() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Run a script in a process of its own, which sees the same packages and does not outlive the test."""
    with ExitStack() as stack:

        def start(script: str) -> subprocess.Popen[str]:
            child = subprocess.Popen(
                [sys.executable, "-c", script],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            return child

        yield start
