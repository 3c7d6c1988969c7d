"""Saves what the Hugging Face Trainer writes as `checkpoint-N`, for `trainer.train(resume_from_checkpoint=…)`.

    state/  model.safetensors  optimizer.pt  scheduler.pt  rng_state(_<rank>).pth  trainer_state.json  training_args.bin …

It uses the pieces of the Trainer's own `_save_checkpoint`, without rotation, best model or hub. When the Trainer
resumes, it sets random states after the first batch was fetched, or before an epoch's iterator is made:

    within an epoch     skip batches   fetch   set random states   forward …       so they are kept as the first forward found them
    at its beginning    set random states   iter   fetch   forward …               so they are kept as the step before left them
"""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer import TRAINER_STATE_NAME

from holter.errors import SaveError
from holter.frameworks.accelerate.keeper import REPLICATED, alone, tensors_of
from holter.frameworks.hf_trainer.framework import exporting
from holter.frameworks.saving import averages, random_states
from holter.rank.framework import Task
from holter.rank.search import innermost

if TYPE_CHECKING:
    from holter.rank.context import Context
    from holter.rank.undo.rewind import Rewound


class TrainerKeeper:
    """Saves with a Trainer's own functions."""

    framework = "hf_trainer"
    rescues_alone = True

    def __init__(self, trainer: Any, context: "Context") -> None:
        self._trainer = trainer
        self._context = context
        self._num_backwards = context.log.num_backwards
        """Number of backward passes completed in the step that is undone."""
        self._has_written_shared = False

    def save(self, task: Task) -> None:
        """Write `state/`; random states and buffers of this process have been rewound before."""
        if task.is_rescue and not task.writes_shared:
            return
        task.state.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            if task.is_rescue:
                self._check_replicated()
                with alone():
                    self._save(task)
            else:
                self._save(task)

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the Trainer should have written here.

        They include averages of a callback, which the Trainer does not know, so that these are found missing.
        """
        if self._has_written_shared:
            yield from tensors_of([self._trainer.model], [innermost(self._trainer.optimizer)])
            for average in averages.find(self._context, [self._trainer.model]):
                yield from average.tensors()

    def _check_replicated(self) -> None:
        kind = self._trainer.accelerator.distributed_type
        if kind not in REPLICATED or getattr(self._trainer, "is_distributed_loading_by_transformers", False):
            raise SaveError(f"the Trainer saves {kind.value} state by collectives, and ranks are blocked")

    def _save(self, task: Task) -> None:
        """Save as `_save_checkpoint` does; a rescuer counts for as many ranks as there are."""
        trainer, folder = self._trainer, str(task.state)
        self._has_written_shared = trainer.args.should_save
        self._uncount(
            0 if task.is_snapshot else self._num_backwards, num_ranks=task.world_size if task.is_rescue else 1
        )
        trainer.store_flos()
        trainer.save_model(folder, _internal_call=True)
        trainer._save_optimizer_and_scheduler(folder)  # noqa: SLF001
        trainer._save_scaler(folder)  # noqa: SLF001
        if self._has_written_shared:
            _export(trainer)
            trainer.state.save_to_json(str(task.state / TRAINER_STATE_NAME))
        self._save_random_states(task)

    def _uncount(self, num_backwards: int, *, num_ranks: int) -> None:
        """Undo what the Trainer counted for batches whose step is undone."""
        trainer, state = self._trainer, self._trainer.state
        tokens = state.num_input_tokens_seen
        for inputs in _batches(trainer)[:num_backwards]:
            trainer.current_flos -= float(trainer.floating_point_ops(inputs))
            trainer._track_num_input_tokens(inputs)  # noqa: SLF001
        state.num_input_tokens_seen = tokens - (state.num_input_tokens_seen - tokens) * num_ranks
        trainer.current_flos *= num_ranks

    def _save_random_states(self, task: Task) -> None:
        """Write the Trainer's own file with the states that it needs when it resumes; in a rescue, one for every rank."""
        trainer, folder = self._trainer, task.state
        trainer._save_rng_state(str(folder))  # noqa: SLF001
        index = trainer.args.process_index
        path = folder / ("rng_state.pth" if trainer.args.world_size <= 1 else f"rng_state_{index}.pth")
        own = torch.load(path, weights_only=False)
        path.unlink()
        ranks = range(task.world_size) if task.is_rescue else (task.rank,)
        for rank in ranks:
            if rank in task.rewinds:
                name = "rng_state.pth" if task.world_size <= 1 else f"rng_state_{rank}.pth"
                torch.save(own | self._random_states(task.rewinds[rank], own), folder / name)
        random_states.check_all_known(task, ranks)

    def _random_states(self, rewound: "Rewound", own: Mapping[str, Any]) -> dict[str, Any]:
        states = rewound if self._is_at_epoch() else rewound.at_forward
        kept: dict[str, Any] = {"python": states.python_state, "cpu": states.torch_state}
        if states.numpy is not None:
            kept["numpy"] = states.numpy_state
        kind = states.device_type
        if kind in own and states.device_words:
            is_all = isinstance(own[kind], list)
            kept[kind] = (
                states.device_states if is_all else states.device_states[torch.accelerator.current_device_index()]
            )
        return kept

    def _is_at_epoch(self) -> bool:
        """Whether the resumed Trainer begins with an epoch's iterator: at its first batch, or because it does not skip any."""
        state = self._trainer.state
        return bool(self._trainer.args.ignore_data_skip or not state.global_step or float(state.epoch).is_integer())


def _batches(trainer: Any) -> Sequence[Any]:
    """Return the micro-batches that the Trainer fetched for the current step, taken from its own stack frame."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_name == "_run_epoch" and frame.f_locals.get("self") is trainer:
            return frame.f_locals.get("batch_samples") or ()
        frame = frame.f_back
    return ()


def _export(trainer: Any) -> None:
    """Store the states of callbacks in the Trainer's state."""
    stored = trainer.state.stateful_callbacks
    for part in exporting(trainer):
        name = type(part).__name__
        if isinstance(stored.get(name), list):
            stored[name].append(part.state())
        else:
            stored[name] = part.state()
