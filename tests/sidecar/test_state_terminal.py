"""One row of a real terminal, taken and given back."""

import contextlib
import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator

import pytest

from holter.sidecar.state import StatusLine


class Terminal:
    """A pseudo terminal, seen from its outer end."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.outer, self.inner = pty.openpty()
        self.resize(rows, columns)
        os.set_blocking(self.outer, False)

    @property
    def device(self) -> str:
        return os.ttyname(self.inner)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def shown(self) -> str:
        chunks = []
        with contextlib.suppress(BlockingIOError):
            while True:
                chunks.append(os.read(self.outer, 65536))
        return b"".join(chunks).decode()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    os.close(made.inner)
    os.close(made.outer)


def test_the_last_row_is_reserved_written_and_given_back(terminal):
    line = StatusLine(terminal.device)
    line.show("step 3")
    shown = terminal.shown()
    assert "\x1b[1;23r" in shown
    assert "\x1b[24;1H" in shown
    assert "step 3" in shown
    assert shown.count("\x1b7") == shown.count("\x1b8"), "the cursor goes back to where the script left it"
    line.close()
    assert "\x1b[r" in terminal.shown()


def test_the_row_is_reserved_once(terminal):
    line = StatusLine(terminal.device)
    line.show("one")
    terminal.shown()
    line.show("two")
    assert "r\x1b8" not in terminal.shown()
    line.close()


def test_a_resized_terminal_is_reserved_anew(terminal):
    line = StatusLine(terminal.device)
    line.show("one")
    terminal.shown()
    terminal.resize(40, 100)
    line.show("two")
    assert "\x1b[1;39r" in terminal.shown()
    line.close()


def test_a_long_line_is_cut_to_the_width(terminal):
    line = StatusLine(terminal.device)
    line.show("x" * 500)
    assert 79 == terminal.shown().count("x")
    line.close()


def test_a_terminal_too_small_is_left_alone(terminal):
    terminal.resize(2, 10)
    line = StatusLine(terminal.device)
    line.show("step")
    line.close()
    assert "" == terminal.shown()


def test_what_is_said_stands_above_the_line(terminal):
    line = StatusLine(terminal.device)
    line.say("holter: one\ntwo")
    assert "\r\x1b[Kholter: one\r\ntwo\r\n" == terminal.shown().replace("\r\r", "\r")
    line.close()


def test_a_terminal_that_is_never_read_does_not_block(terminal):
    line = StatusLine(terminal.device)
    for number in range(20_000):
        line.show(f"step {number}")
    assert terminal.shown()
    line.close()


def test_closing_twice_is_closing(terminal):
    line = StatusLine(terminal.device)
    line.show("x")
    line.close()
    line.close()
    line.show("y")
    assert "y" not in terminal.shown()


def test_a_file_is_no_terminal(tmp_path):
    path = tmp_path / "log"
    path.touch()
    line = StatusLine(str(path))
    line.show("step 3")
    line.close()
    assert "" == path.read_text()


def test_a_file_is_told_nothing(tmp_path):
    path = tmp_path / "log"
    path.touch()
    line = StatusLine(str(path))
    line.say("holter: something")
    line.close()
    assert "" == path.read_text()


def test_a_device_that_is_not_there_is_nothing(tmp_path):
    line = StatusLine(str(tmp_path / "none"))
    line.show("x")
    line.say("y")
    line.close()
    assert [] == list(tmp_path.iterdir()), "it is not made"
