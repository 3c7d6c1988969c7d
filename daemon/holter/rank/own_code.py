"""Which lines of a traceback or a stack are the script's own, and not those of a library, of Python or of holter.

    torch/nn/functional.py:3462 in cross_entropy      where it was raised
    /home/me/losses.py:12 in total                    the script's own line: where somebody has to look
    /home/me/train.py:41 in main

A script that is installed as a package lies beside the libraries: then the frames of the package that was run are its own. An exception of a
loader's worker or a pool's process arrives as the text of a traceback, from which its frames are read.
"""

import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary
from types import FrameType

import holter

MAX_FRAMES = 8
MAX_LINE = 160
MAX_TEXT = 2000
_LIBRARIES = tuple(
    {f"{Path(path).resolve()}/" for path in sysconfig.get_paths().values()}
    | {f"{Path(holter.__file__).resolve().parent}/"}
)
_PACKAGES = ("/site-packages/", "/dist-packages/")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)


def frames_of(raised: BaseException | FrameType) -> list[FrameSummary]:
    """Return the frames of an exception, or of a running frame and its callers; the innermost is last."""
    if isinstance(raised, BaseException):
        return list(traceback.extract_tb(raised.__traceback__))
    return list(traceback.StackSummary.extract(traceback.walk_stack(raised), limit=200, lookup_lines=False))[::-1]


def own_frames(raised: BaseException | FrameType) -> list[str]:
    """Return the script's own frames as text, the innermost first, each with its line of code.

    Of a chain of exceptions, these are the frames of the first exception that has any, after those that another process wrote.
    """
    if isinstance(raised, FrameType):
        return [shown(frame) for frame in _own(frames_of(raised)[::-1])[:MAX_FRAMES]]
    chain = list(_chain(raised))
    elsewhere = [frame for one in chain for frame in _own(_frames_in(str(one))[::-1])]
    here = next((found for one in chain if (found := _own(frames_of(one)[::-1]))), [])
    return [shown(frame) for frame in (*elsewhere, *here)[:MAX_FRAMES]]


def _own(frames: list[FrameSummary]) -> list[FrameSummary]:
    return [frame for frame in frames if is_own(frame.filename)] or [
        frame for frame in frames if _is_of_main_package(frame.filename)
    ]


def _frames_in(text: str) -> list[FrameSummary]:
    """Return the frames of a traceback that another process wrote as text."""
    found = _FRAME.finditer(text) if _TRACEBACK in text else ()
    return [FrameSummary(one["file"], int(one["line"]), one["name"], lookup_line=False) for one in found]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, and those that it was raised from."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def is_own(filename: str) -> bool:
    """Whether a file belongs neither to a library, nor to Python, nor to holter."""
    if filename.startswith("<") or any(folder in filename for folder in _PACKAGES):
        return False
    return not str(Path(filename).absolute()).startswith(_LIBRARIES)


def _is_of_main_package(filename: str) -> bool:
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is None or not spec.parent or not file:
        return False
    root = Path(file).absolute().parents[spec.parent.count(".")]
    return root in Path(filename).absolute().parents


def place_of(frame: FrameSummary) -> str:
    """Return a frame's place as text: `/home/me/train.py:41 in main`."""
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def shown(frame: FrameSummary) -> str:
    """Return a frame's place and its line of code, if that can be read."""
    code = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{place_of(frame)}: {code[:MAX_LINE]}" if code else place_of(frame)


def text_of(error: BaseException) -> str:
    """Return an exception's type and message, and what it was raised from; for one of another process, that process's own message."""
    name, said = type(error).__name__, str(error)
    head, found, rest = said.partition(_TRACEBACK)
    words = [line for line in rest.splitlines() if line and not line.startswith((" ", '"""'))]
    if not found or not words:
        cause = error.__cause__
        came_from = f" (from {type(cause).__name__}: {str(cause).strip()})" if cause is not None else ""
        return f"{name}: {said}{came_from}"[:MAX_TEXT]
    where = head.strip().splitlines()[0].rstrip(".") if head.strip() else name
    return f"{words[-1]} ({where})"[:MAX_TEXT]
