"""Gradient norms by module over time, from the vitals of the first rank that spoke at each step."""

import math
from collections.abc import Mapping

from holter.faults.window import Window
from holter.records import Vitals

Norms = Mapping[str, float]
"""Module -> gradient norm."""


def gradient_norms(window: Window) -> dict[int, Norms]:
    """Step -> norms, ascending; only modules that are trained with a learning rate above zero."""
    found: dict[int, Norms] = {}
    for note, vitals in window.notes_of(Vitals):
        norms = {
            module.module: module.gradient_norm
            for module in vitals.modules
            if module.learning_rate > 0 and math.isfinite(module.gradient_norm)
        }
        found.setdefault(note.step, norms)
    return dict(sorted(found.items()))
