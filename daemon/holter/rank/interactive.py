"""Whether a person sits before this interpreter: then an exception, or a SystemExit, is not the end of the process."""

import builtins
import sys


def is_interactive() -> bool:
    """A prompt is there or will be (`python -i`), or a notebook's cell runs."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect) or hasattr(builtins, "get_ipython")
