"""`python -m holter [options] train.py …`: run a script as Python would, with holter on.

The script gets its own `__main__`, argv and path; holter attaches when the script imports torch, not before, so that what the
script sets up for torch still counts.
"""

import argparse
import functools
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType

import holter
from holter import config
from holter.cli.parts import options as command_line
from holter.errors import ConfigError

WRONG_USE = 2


def main(argv: Sequence[str]) -> None:
    """Split holter's options from the script, check both, and become the script."""
    own, rest = _split(list(argv))
    try:
        options = _parse(own)
        settings = command_line.given(options)
        if options.config:
            os.environ["HOLTER_CONFIG"] = options.config
        config.load(options=settings)
        path = _script(rest)
    except ConfigError as error:
        sys.stderr.write(f"holter: {error}\n")
        raise SystemExit(WRONG_USE) from None
    for name, value in settings.items():
        os.environ[config.PREFIX + name.upper()] = str(value)
    _expect_torch()
    _become(path, rest)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the words: holter's options end at the first word that is neither an option nor an option's value."""
    index = 0
    while index < len(argv) and argv[index].startswith("-"):
        if argv[index] == "--":
            return argv[:index], argv[index + 1 :]
        is_flag = argv[index] in ("-h", "--help", "--version") or "=" in argv[index]
        index += 1 if is_flag else 2
    return argv[:index], argv[index:]


def _parse(own: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m holter", usage="%(prog)s [options] train.py …", description=__doc__, exit_on_error=False
    )
    parser.add_argument("--version", action="version", version=f"holter {holter.__version__}")
    command_line.add(parser)
    try:
        options, unknown = parser.parse_known_args(own)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if unknown:
        raise ConfigError(f"there is no option {unknown[0]}; see `python -m holter --help`")
    return options


def _script(rest: list[str]) -> Path:
    if not rest:
        raise ConfigError("name a script: python -m holter [options] train.py …; see --help")
    path = Path(rest[0])
    if not path.is_file():
        raise ConfigError(f"there is no script {rest[0]}")
    return path


def _expect_torch() -> None:
    """Arrange to attach at the script's `import torch`; attach now if torch is imported already or will not call holter."""
    os.environ["HOLTER"] = "1"
    from holter.frameworks import autoload  # noqa: PLC0415

    autoload.expect()
    is_registered = any(point.name == "holter" for point in metadata.entry_points(group="torch.backends"))
    if not is_registered or "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        autoload.autoload()


def _become(path: Path, argv: list[str]) -> None:
    module = types.ModuleType("__main__")
    # Absolute, as Python itself sets it: the script may change its directory.
    name = str(path.absolute())
    module.__file__ = name
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = argv
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    sys.excepthook = functools.partial(_show, sys.excepthook, name)
    code = compile(path.read_bytes(), name, "exec")
    exec(code, module.__dict__)  # noqa: S102  what the user asked to run


def _show(
    show: Callable[..., None], script: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show a traceback that begins at the script, as it would without holter."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename != script:
        own = own.tb_next
    # What is shown is the exception's own traceback, whatever is passed beside it.
    show(kind, error.with_traceback(own or trace), own or trace)


if __name__ == "__main__":
    main(sys.argv[1:])
