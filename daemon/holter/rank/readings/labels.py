"""Which classes the loss is given: counts of the labels that a classifying loss keeps for its own backward pass, one per sample.

The labels are taken from the loss's graph, not from the batch: there they are known to be labels, whatever the script calls them. Labels of
tokens or pixels are uneven by nature, so they are not counted, and only the number of classes is reported. Labels are read at every step of the
first few dozen, then rarely, and only in host memory.

    cross_entropy, nll_loss                   whole numbers, and how many classes there are
    binary_cross_entropy (with logits)        zeros and ones, one column
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from holter.rank.context import Context
from holter.records import Labels

try:
    from holter.rank import _samples
except ImportError:  # built without a C compiler
    _samples = None  # type: ignore[assignment]

EVERY_STEP_UNTIL = 64
THEN_EVERY = 16
TOLD_AT = (12, 24, 36, 48, 64)
"""Steps at which the counts are reported; after the last, at every power of two."""
MAX_CLASSES = 1024
MAX_TOLD = 64
"""Number of classes that are reported, the commonest first."""
MAX_NODES = 24
ROWS = 2
"""Number of dimensions of scores with one row per sample or token."""
CLASSES = "NllLossBackward"
BINARY = ("BinaryCrossEntropyWithLogitsBackward", "BinaryCrossEntropyBackward")


class LabelProbe:
    """Counts the classes that the loss is given, at backward passes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counts = bytearray(8 * MAX_CLASSES)
        self._num_classes, self._is_weighted = 0, False
        self._first_step = self._last_step = -1
        self._is_over = False
        """Whether counting has ended: there are too many classes, or the loss is not a classifying one."""
        self._num_misses = 0

    def look(self, loss: torch.Tensor, num_samples: Callable[[], int]) -> None:
        """Count the labels of a loss whose backward pass begins; `num_samples` gives the size of its batch."""
        step = self._context.log.step
        if step != self._last_step and self._first_step >= 0 and _is_told_at(step):
            self._tell(step)
        if self._is_over or _samples is None or (step >= EVERY_STEP_UNTIL and step % THEN_EVERY):
            return
        self._last_step = step
        node = next(_classifying(loss.grad_fn), None)
        labels = node._saved_target if node is not None else None  # noqa: SLF001
        if labels is None or not self._count(node, labels.detach(), num_samples()):
            self._num_misses += 1
            self._is_over = self._first_step < 0 and self._num_misses >= TOLD_AT[0]
            if self._is_over and labels is not None:
                self._tell_classes(step, node)
        elif self._first_step < 0:
            self._first_step = step

    def _count(self, node: Any, labels: torch.Tensor, num_samples: int) -> bool:
        """Count the labels; return False if they are not one per sample, not in host memory, or cannot be counted."""
        if not labels.is_cpu or labels.numel() != num_samples or num_samples == 0:
            return False
        if labels.is_floating_point():
            whole = labels.to(torch.int64)
            if not torch.equal(whole.to(labels.dtype), labels):
                return False
            labels, self._num_classes = whole, 2
        else:
            scores = node._saved_self  # noqa: SLF001
            self._num_classes = scores.shape[-1] if scores is not None and scores.dim() else 0
        self._is_weighted |= getattr(node, "_saved_weight", None) is not None
        labels = labels.contiguous()
        num_large = _samples.count(labels.data_ptr(), labels.numel(), labels.element_size(), self._counts)
        self._is_over = num_large > 0
        return not self._is_over

    def _tell_classes(self, step: int, node: Any) -> None:
        """Report only how many classes there are, for labels of tokens or pixels."""
        scores = node._saved_self if node.name().startswith(CLASSES) else None  # noqa: SLF001
        if scores is not None and scores.dim():
            # For pixels, the classes are the second dimension.
            num = scores.shape[-1 if scores.dim() <= ROWS else 1]
            is_weighted = getattr(node, "_saved_weight", None) is not None
            self._context.writer.say(step, Labels(counts={}, num_classes=num, is_weighted=is_weighted, first_step=step))

    def _tell(self, step: int) -> None:
        counts = np.frombuffer(self._counts, np.int64)
        order = np.argsort(-counts, kind="stable")[:MAX_TOLD]
        told = {int(label): int(counts[label]) for label in order if counts[label]}
        if told and not self._is_over:
            self._context.writer.say(
                step,
                Labels(
                    counts=told,
                    num_classes=self._num_classes,
                    is_weighted=self._is_weighted,
                    first_step=self._first_step,
                ),
            )
        self._counts, self._first_step = bytearray(8 * MAX_CLASSES), step


def _is_told_at(step: int) -> bool:
    return step in TOLD_AT or (step > TOLD_AT[-1] and step & (step - 1) == 0)


def _classifying(node: Any) -> Iterator[Any]:
    """Yield the nodes of the loss's graph that hold labels, the nearest to the loss first."""
    nodes, num = [node], 0
    while nodes and num < MAX_NODES:
        node = nodes.pop(0)
        if node is None:
            continue
        num += 1
        name = node.name()
        if name.startswith(CLASSES) or name.startswith(BINARY):
            yield node
        nodes += [function for function, _ in node.next_functions]
