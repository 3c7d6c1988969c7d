"""Combine the fingerprints of many tensors into one root, with levels in between to find a difference in a few look-ups.

    level 0: one fingerprint for each tensor                   f0 f1 … f31 | f32 … f63 | …
    level 1: one node for 32 fingerprints, in order            g0          | g1        | …
    …        until one node is left: the root

    node = mix64(number of children + sum over k of mix64(child_k ^ (position_k + 1) * phi)),  position within the level

Two replicas whose roots are equal hold equal lists; if the roots differ, compare the 32 children of each differing
node.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from holter_kernels.keys import mix64


def tree(fingerprints: Iterable[int], fanout: int = 32) -> list[np.ndarray]:
    """Return all levels: first the fingerprints, last the root alone."""
    if fanout < 2:  # noqa: PLR2004
        raise ValueError(f"fanout must be at least 2, got {fanout}")
    is_array = isinstance(fingerprints, np.ndarray)
    level = np.asarray(fingerprints if is_array else list(fingerprints), np.uint64).reshape(-1)
    levels = [level]
    while level.size != 1 or len(levels) == 1:
        level = _parents(level, fanout)
        levels.append(level)
    return levels


def root(fingerprints: Iterable[int], fanout: int = 32) -> int:
    """Return only the root; it depends on the order and the number of the fingerprints."""
    return int(tree(fingerprints, fanout)[-1][0])


def _parents(children: np.ndarray, fanout: int) -> np.ndarray:
    num_parents = max(1, -(-children.size // fanout))
    mixed = np.zeros(num_parents * fanout, np.uint64)
    mixed[: children.size] = mix64(children ^ _positions(children.size))
    sums = mixed.reshape(num_parents, fanout).sum(axis=1)
    sums += np.uint64(fanout)
    sums[-1:] -= np.uint64(num_parents * fanout - children.size)  # what the last parent lacks; a slice wraps silently
    return mix64(sums)


@lru_cache(maxsize=64)
def _positions(count: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
