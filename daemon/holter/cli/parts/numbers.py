"""Bounded numbers on the command line: anything unusable is refused in one sentence."""

import argparse
import math

MAX_SECONDS = 10.0**9
MAX_RANKS = 2**24


def seconds(text: str) -> float:
    """Parse a number of seconds; zero or more, and not infinite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds between 0 and {MAX_SECONDS:g}")
    return value


def port(text: str) -> int:
    """Parse a port; 0 means a free one."""
    return _whole(text, 2**16 - 1, "no port between 0 and 65535")


def count(text: str) -> int:
    """Parse a number of ranks."""
    return _whole(text, MAX_RANKS, f"no whole number between 0 and {MAX_RANKS}")


def _whole(text: str, most: int, otherwise: str) -> int:
    # Python itself refuses a number of thousands of digits with a ValueError.
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is {otherwise}")
    return value
