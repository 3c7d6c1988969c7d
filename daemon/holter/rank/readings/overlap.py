"""Samples that are evaluated and trained on: fingerprints of rows of batches, in two small tables that remember the newest.

Training is what a backward pass follows: the batch of its loader, or, where a script makes its batches itself, what the model was given.
Evaluation is a loader that no backward pass follows while a model is called in evaluation mode, or that call itself if no loader fed it.

    a loader's first batches   held back: it may yet be trained on
    its pass ends, or some backward passes went by without it   evaluated, if a model was called in evaluation mode meanwhile

A script that makes its own batches may look at what it trains on with good reason (a batch's accuracy, a rollout): there a sample counts when
it was evaluated at two moments or more, and not within a few steps of being trained on.

Of a batch a few rows are signed, of its largest tensor that is no mask. Padding at both ends is left out, so that a text is the same in a
longer batch. Rows that are constant say nothing. Only host memory is read.
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
"""65,536 samples."""
TRAINED_ROWS, EVALUATED_ROWS = 8, 64
"""Rows of a batch that are signed."""
MIN_ROW_BYTES = 8
MAX_CALLS = 64
"""Evaluation calls of one step that are looked at."""
MAX_PENDING = 64
PATIENCE = 4
"""A loader that is trained on is known as such after three backward passes (`hooks.data.TOGETHER`)."""
MIN_TOLD = 3
MAX_LOADERS = 62
BY_CALL = 63
"""In place of a loader's number: the model was called with tensors that no loader gave."""
SIDE_INPUTS = re.compile(r"mask|pos|segment|token_type|len|index|idx|weight|label|target")
WHOLE_SAMPLE = 64


@dataclass
class _Pending:
    """Batches of a loader of which it is not known yet what they are for."""

    epoch: int
    prints: list[bytes] = field(default_factory=list)
    is_evaluated: bool = False
    num_backward: int = 0


@dataclass
class _Side:
    """What was seen of training, or of evaluation."""

    table: bytearray = field(default_factory=lambda: bytearray(TABLE_BYTES))
    round: tuple[int, int] = (-1, -1)
    num_in_round: int = 0
    num_pairs: int = 0
    """Samples that were compared within one pass over the data, in which none should come twice."""
    num_repeats: int = 0


@dataclass
class _Source:
    """One loader that is evaluated, or the calls."""

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
        """A bit for each loader that is trained on."""
        self._calls = (-1, 0)
        self._is_distinctive: bool | None = None

    def fetched(self, loader: int, epoch: int, leaves: list[Leaf], dataset: str) -> None:
        """A loader that is not known to be trained on gave a batch."""
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
        """This loader is trained on; what was evaluated of it was so on purpose."""
        if loader <= MAX_LOADERS:
            self._training |= 1 << loader
            self._pending.pop(loader, None)

    def ended(self, loader: int) -> None:
        """A pass over this loader is over."""
        self._settle(loader)

    def train(self, leaves: list[Leaf], loader: int, epoch: int) -> None:
        """A backward pass begins; these are the tensors that it is about."""
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
        """A model is called in evaluation mode."""
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
        """It was not trained on: if a model was evaluated meanwhile, it is a loader of the evaluation."""
        pending = self._pending.pop(loader, None)
        if pending is not None and pending.is_evaluated:
            met = [self._evaluate(loader, prints, pending.epoch) for prints in pending.prints]
            for source in set(b"".join(met)):
                self._tell(source)

    def _evaluate(self, source: int, prints: bytes, round_: int) -> bytes:
        """The sources of samples that were met."""
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
        # Another of each few rows at every step: a batch that comes again is looked at elsewhere.
        first = self._context.log.step % every
        trims = not chosen.is_floating_point() and chosen.dim() > 1
        return _samples.sign(chosen.data_ptr(), rows, row_bytes, row_bytes, chosen.element_size(), trims, first, every)


def main_tensor(leaves: list[Leaf]) -> torch.Tensor | None:
    """The largest tensor of a batch that lies densely in host memory and holds a row a sample."""
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
    """Whether rows are of numbers that are not whole: two of those are the same by no chance."""
    if not tensor.is_floating_point() or tensor[0].numel() < 4:  # noqa: PLR2004
        return False
    few = tensor.reshape(-1)[:WHOLE_SAMPLE].double()
    return float(((few % 1) != 0).double().mean()) > 0.5  # noqa: PLR2004
