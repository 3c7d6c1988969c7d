"""What a Trainer counts of a run, for snapshots: a halt may undo several steps.

Taken at the beginning of a step's first forward pass: the Trainer counts this micro-step afterwards.
"""

import sys
import weakref
from typing import Any

from holter.rank.undo.state_parts import Copies, Source, StatePart, put_image, source_of


def source(trainer: Any) -> Source:
    """Its counters, each time as they are then."""
    return source_of(_take, trainer)


def _take(trainer: Any) -> StatePart:
    counted = vars(trainer.state)
    state = {
        "state": {name: value for name, value in counted.items() if name != "log_history"},
        # Entries are only ever added.
        "num_logged": len(trainer.state.log_history),
        "exported": [each.state() for each in _exporting(trainer)],
        "flos": trainer.current_flos,
    }
    return StatePart(weakref.ref(trainer), state, _put, is_moving=True, apart=(trainer,))


def _put(trainer: Any, image: Any, copies: Copies) -> None:
    vars(trainer.state).update(put_image(None, image["state"], copies))
    del trainer.state.log_history[image["num_logged"] :]
    for each, kept in zip(_exporting(trainer), image["exported"], strict=True):
        exported = put_image(None, kept, copies)
        vars(each).update(exported["args"] | exported["attributes"])
    trainer.current_flos = image["flos"]


def _exporting(trainer: Any) -> list[Any]:
    kind = sys.modules["transformers.trainer_callback"].ExportableState
    return [each for each in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(each, kind)]
