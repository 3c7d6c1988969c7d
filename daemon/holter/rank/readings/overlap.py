"""Samples that are both evaluated and trained on, found by fingerprints of rows of batches, in two small tables that keep the newest.

A batch counts as training if a backward pass follows it: the loader's batch or, where a script makes its batches itself, the model's input.
It counts as evaluation if its loader is followed by no backward pass while a model is called in evaluation mode. Without a loader, the input of
that call counts.

    a loader's first batches                                     held back: the loader may yet be trained on
    its pass ends, or some backward passes went by without it    evaluated, if a model was called in evaluation mode meanwhile

A script that makes its own batches may have good reason to evaluate what it trains on (a batch's accuracy, a rollout): there a sample counts only
if it was evaluated at two moments or more, and not within a few steps of being trained on.

A few rows of each batch are signed, taken from its largest tensor that is not a mask or the like. Padding at both ends is left out, so that a
text is the same in a longer batch. Constant rows say nothing and are skipped. Only host memory is read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from holter.rank.context import Context
from holter.rank.readings.batches import Leaf
from holter.records import Overlap

try:
    from holter.rank import _samples
except ImportError:  # built without a C compiler
    _samples = None  # type: ignore[assignment]

TABLE_BYTES = 1 << 20
"""Size of each table: 65,536 samples."""
TRAINED_ROWS, EVALUATED_ROWS = 8, 64
"""Number of rows that are signed of a batch of training, and of one of evaluation."""
MIN_ROW_BYTES = 8
MAX_CALLS = 64
"""Number of evaluation calls that are looked at in one step."""
MAX_PENDING = 64
PATIENCE = 4
"""Backward passes without a batch of a loader after which it is settled; one that is trained on is known after three (`hooks.data.TOGETHER`)."""
MIN_TOLD = 3
MAX_LOADERS = 62
BY_CALL = 63
"""Stands in place of a loader's number if the model was called with tensors that no loader gave."""
SIDE_INPUTS = re.compile(r"mask|pos|segment|token_type|len|index|idx|weight|label|target")
WHOLE_SAMPLE = 64


@dataclass
class _Pending:
    """Batches of a loader that are not yet known to be trained on or evaluated."""

    epoch: int
    prints: list[bytes] = field(default_factory=list)
    is_evaluated: bool = False
    num_backward: int = 0


@dataclass
class _Side:
    """The samples that were trained on, or those that were evaluated."""

    table: bytearray = field(default_factory=lambda: bytearray(TABLE_BYTES))
    round: tuple[int, int] = (-1, -1)
    num_in_round: int = 0
    num_pairs: int = 0
    """Number of pairs of samples compared within one pass over the data, in which none should come twice."""
    num_repeats: int = 0


@dataclass
class _Source:
    """One loader that is evaluated, or all evaluation calls without a loader."""

    num_evaluated: int = 0
    num_met: int = 0
    num_told: int = 0
    dataset: str = ""


class OverlapProbe:
    """Notes which samples are evaluated and which are trained on."""

    def __init__(self, context: Context, is_same_dataset: Callable[[int], bool] = lambda _: False) -> None:
        self._context = context
        self._is_same_dataset = is_same_dataset
        self._trained, self._evaluated = _Side(), _Side()
        self._num_trained = 0
        self._sources: dict[int, _Source] = {}
        self._pending: dict[int, _Pending] = {}
        self._training = 0
        """One bit for each loader that is trained on."""
        self._calls = (-1, 0)
        self._is_distinctive: bool | None = None

    def fetched(self, loader: int, epoch: int, leaves: list[Leaf], dataset: str) -> None:
        """Sign and hold back a batch of a loader that is not known to be trained on."""
        if loader > MAX_LOADERS or _samples is None:
            return
        pending = self._pending.get(loader)
        if pending is None or pending.epoch != epoch:
            self._settle(loader)
            pending = self._pending[loader] = _Pending(epoch)
            self._sources.setdefault(loader, _Source()).dataset = dataset
        pending.num_backward = 0
        if len(pending.prints) < MAX_PENDING:
            pending.prints.append(self._sign(leaves, EVALUATED_ROWS))

    def trains(self, loader: int) -> None:
        """Note that this loader is trained on; an evaluation of its samples was on purpose."""
        if loader <= MAX_LOADERS:
            self._training |= 1 << loader
            self._pending.pop(loader, None)

    def ended(self, loader: int) -> None:
        """Settle a loader whose pass over the data has ended."""
        self._settle(loader)

    def train(self, leaves: list[Leaf], loader: int, epoch: int) -> None:
        """Sign the tensors on which a backward pass is about to train; `loader` is negative if no loader gave them."""
        for number, pending in list(self._pending.items()):
            pending.num_backward += 1
            if pending.num_backward >= PATIENCE:
                self._settle(number)
        prints = self._sign(leaves, TRAINED_ROWS)
        if prints:
            step = self._context.log.step
            round_ = (loader, epoch) if loader >= 0 else (-1, step)
            num_new, met = self._visit(self._trained, self._evaluated, prints, round_, BY_CALL)
            self._num_trained += num_new
            for source in set(met):
                self._tell(source)

    def evaluation_call(self, leaves: Callable[[], list[Leaf]]) -> None:
        """Note that a model is called in evaluation mode; if no loader fed it, its input is what is evaluated."""
        if self._pending:
            for pending in self._pending.values():
                pending.is_evaluated = True
            return
        step = self._context.log.step
        num = self._calls[1] + 1 if self._calls[0] == step else 1
        self._calls = (step, num)
        if num <= MAX_CALLS and _samples is not None:
            for source in set(self._evaluate(BY_CALL, self._sign(leaves(), EVALUATED_ROWS), step)):
                self._tell(source)

    def _settle(self, loader: int) -> None:
        """Count the held-back batches of a loader that was not trained on as evaluated, if a model was evaluated meanwhile."""
        pending = self._pending.pop(loader, None)
        if pending is not None and pending.is_evaluated:
            met = [self._evaluate(loader, prints, pending.epoch) for prints in pending.prints]
            for source in set(b"".join(met)):
                self._tell(source)

    def _evaluate(self, source: int, prints: bytes, round_: int) -> bytes:
        """Enter evaluated samples, and return the source of each that is also trained on, one byte each."""
        known = self._sources.setdefault(source, _Source())
        num_new, met = self._visit(self._evaluated, self._trained, prints, (source, round_), source)
        known.num_evaluated += num_new
        return met

    def _visit(
        self, own: _Side, other: _Side, prints: bytes, round_: tuple[int, int], loader: int
    ) -> tuple[int, bytes]:
        if not prints:
            return 0, b""
        if own.round != round_:
            own.round, own.num_in_round = round_, 0
        num_known, num_new, num_repeated, met = _samples.visit(
            prints,
            own.table,
            other.table,
            own is self._evaluated,
            self._context.log.step,
            (round_[1] * 64 + round_[0]) & 0xFFFF,
            loader,
            self._training,
        )
        own.num_pairs += num_known * own.num_in_round + num_known * (num_known - 1) // 2
        own.num_in_round += num_known
        own.num_repeats += num_repeated
        for source in met:
            self._sources.setdefault(source, _Source()).num_met += 1
        return num_new, met

    def _tell(self, source: int) -> None:
        known = self._sources[source]
        if known.num_met < max(MIN_TOLD, 2 * known.num_told):
            return
        known.num_told = known.num_met
        others = [one for number, one in self._sources.items() if number != source]
        overlap = Overlap(
            loader=-1 if source == BY_CALL else source,
            dataset=known.dataset,
            num_evaluated=known.num_evaluated,
            num_met=known.num_met,
            num_trained=self._num_trained,
            num_pairs=self._trained.num_pairs + self._evaluated.num_pairs,
            num_repeats=self._trained.num_repeats + self._evaluated.num_repeats,
            is_distinctive=bool(self._is_distinctive),
            is_same_dataset=source != BY_CALL and self._is_same_dataset(source),
            num_clean=sum(one.num_evaluated for one in others if not one.num_met),
        )
        self._context.writer.say(self._context.log.step, overlap)

    def _sign(self, leaves: list[Leaf], most: int) -> bytes:
        chosen = main_tensor(leaves)
        if chosen is None or _samples is None:
            return b""
        if self._is_distinctive is None:
            self._is_distinctive = _is_distinctive(chosen)
        rows, row_bytes = chosen.shape[0], chosen.nbytes // chosen.shape[0]
        every = -(-rows // most)
        # Each step begins at another row, so that different rows are signed when a batch comes again.
        first = self._context.log.step % every
        trims = not chosen.is_floating_point() and chosen.dim() > 1
        return _samples.sign(chosen.data_ptr(), rows, row_bytes, row_bytes, chosen.element_size(), trims, first, every)


def main_tensor(leaves: list[Leaf]) -> torch.Tensor | None:
    """Return the largest contiguous tensor of a batch in host memory that has one row per sample and is not a mask or the like."""
    best, most = None, 0
    for path, tensor in leaves:
        if (
            tensor.dim() > 0
            and tensor.nbytes > most
            and tensor.is_cpu
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and tensor.nbytes >= MIN_ROW_BYTES * tensor.shape[0]
            and not SIDE_INPUTS.search(path.lower())
        ):
            best, most = tensor, tensor.nbytes
    return best


def _is_distinctive(tensor: torch.Tensor) -> bool:
    """Whether most numbers are not whole: two rows of such numbers are not equal by chance."""
    if not tensor.is_floating_point() or tensor[0].numel() < 4:  # noqa: PLR2004
        return False
    few = tensor.reshape(-1)[:WHOLE_SAMPLE].double()
    return float(((few % 1) != 0).double().mean()) > 0.5  # noqa: PLR2004
