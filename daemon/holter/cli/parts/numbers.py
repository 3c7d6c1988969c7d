"""Numbers on the command line, each with its bounds: what no number is, and what none can be used with, is refused in one sentence."""

import argparse
import math

MAX_SECONDS = 10.0**9
MAX_RANKS = 2**24


def seconds(text: str) -> float:
    """Zero or more, and not for ever."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds between 0 and {MAX_SECONDS:g}")
    return value


def port(text: str) -> int:
    """0 means a free one."""
    return _whole(text, 2**16 - 1, "no port between 0 and 65535")


def count(text: str) -> int:
    """Of ranks."""
    return _whole(text, MAX_RANKS, f"no whole number between 0 and {MAX_RANKS}")


def _whole(text: str, most: int, otherwise: str) -> int:
    # A number of thousands of digits is refused by Python itself, with a ValueError.
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is {otherwise}")
    return value
