"""Saves what `accelerator.save_state` writes, to be loaded by `accelerator.load_state` and `skip_first_batches`.

    state/  model.safetensors  optimizer.bin  scheduler.bin  random_states_<rank>.pkl …

In a held step all ranks call `save_state` itself, with the user's own hooks. In a rescue one rank calls it, alone, and
then writes the random states of every rank from their rewinds; around DeepSpeed each rank calls it for its own part.
The user's own checkpoints are not named, counted or deleted by either.

The random states are those that a loop needs which first loads and then makes its iterator (`random_states`).

A rank that saves for all is, for accelerate, the main process of a world of one, so that it writes everything and waits
for nobody:

    PartialState, AcceleratorState    distributed_type NO, one process, index 0
    torch.distributed                 unchanged; code that calls a collective all the same waits until the deadline of the save
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import RNG_STATE_NAME, DistributedType
from torch.distributed.tensor import DTensor

from holter.errors import PartlySavedError, SaveError
from holter.frameworks.loop import named_state
from holter.frameworks.saving import averages, random_states
from holter.rank.framework import Task
from holter.rank.search import innermost

if TYPE_CHECKING:
    from holter.rank.context import Context

REPLICATED = frozenset(
    kind for kind in DistributedType if kind is DistributedType.NO or kind.value.startswith("MULTI_")
)
"""Kinds of jobs in which every rank has the whole model, so that one rank can save for all."""

_ALONE = {"distributed_type": DistributedType.NO, "num_processes": 1, "process_index": 0, "local_process_index": 0}


@contextmanager
def alone() -> Iterator[None]:
    """Make accelerate, and what is built on it, believe that this is the only process.

    Only in a rescue: the process ends afterwards, and its main thread, blocked in a collective, reads none of this
    meanwhile.
    """
    kinds = PartialState, AcceleratorState
    shared: list[MutableMapping[str, Any]] = [kind._shared_state for kind in kinds]  # noqa: SLF001
    before = [dict(state) for state in shared]
    for state in shared:
        state.update(_ALONE)
    try:
        yield
    finally:
        for state, was in zip(shared, before, strict=True):
            state.update(was)


class AccelerateKeeper:
    """Saves with an Accelerator's own `save_state`."""

    framework = "accelerate"

    def __init__(self, accelerator: Any, optimizers: Sequence[torch.optim.Optimizer], context: "Context") -> None:
        self._accelerator = accelerator
        self._optimizers = optimizers
        self._context = context
        self._num_backwards = context.log.num_backwards
        """Number of backward passes completed in the step that is undone."""
        self._has_written_shared = False
        self.rescues_alone = True

    def save(self, task: Task) -> None:
        """Write `state/`; random states and buffers of this process have been rewound before."""
        accelerator = self._accelerator
        is_alone = task.is_rescue and self.rescues_alone
        if is_alone:
            if not task.writes_shared:
                return
            _check_replicated(accelerator)
        accelerator.project_configuration.automatic_checkpoint_naming = False
        if not task.is_snapshot:
            self._rewind_counters(is_held=not task.is_rescue)
        withheld = _withhold_positions(accelerator)
        with torch.no_grad():
            if is_alone:
                self._has_written_shared = True
                with alone():
                    accelerator.save_state(output_dir=str(task.state))
            else:
                self._has_written_shared = _is_writer(accelerator)
                accelerator.save_state(output_dir=str(task.state))
        self._write_random_states(task)
        if withheld:
            raise PartlySavedError(
                f"the position of stateful data loader {', '.join(map(str, withheld))} is not saved, it is past the step "
                "that was undone: skip the batches of the completed steps instead"
            )

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that `save_state` should have written here.

        They include optimizers and averages that the Accelerator never got, so that these are found missing.
        """
        if self._has_written_shared:
            held = [innermost(each) for each in (*self._accelerator._optimizers, *self._optimizers)]  # noqa: SLF001
            unique = list({id(optimizer): optimizer for optimizer in held}.values())
            yield from tensors_of(self._accelerator._models, unique)  # noqa: SLF001
            for average in averages.find(self._context, self._accelerator._models):  # noqa: SLF001
                yield from average.tensors()

    def _write_random_states(self, task: Task) -> None:
        """Overwrite the random states that `save_state` wrote: of this process, or in a rescue, where it wrote as rank 0, of all ranks."""
        is_alone = task.is_rescue and self.rescues_alone
        own = _path(task, 0 if is_alone else task.rank)
        written = torch.load(own, weights_only=False)
        ranks = range(task.world_size) if is_alone else (task.rank,)
        num_seeds = random_states.num_seeds_ahead(self._context, task.rewinds[task.rank])
        if is_alone:
            own.unlink()
        for rank in filter(task.rewinds.__contains__, ranks):
            states = task.rewinds[rank]
            kept = {"random_state": states.python_state, **random_states.as_loaded(states.torch_state, num_seeds)}
            if states.numpy is not None:
                kept["numpy_random_seed"] = states.numpy_state
            if rank == task.rank and (own_buffers := named_state.own_buffers(self._context.models.active())):
                kept["buffers"] = own_buffers
            if (key := random_states.device_key(states.device_type)) in written and states.device_words:
                kept[key] = states.device_states
            torch.save(written | kept, _path(task, rank))
        random_states.check_all_known(task, ranks)

    def _rewind_counters(self, *, is_held: bool) -> None:
        """Undo what the micro-steps of the undone step counted: in `accumulate`, and in a scheduler called at each of them."""
        accelerator = self._accelerator
        every, done = accelerator.gradient_accumulation_steps, self._num_backwards
        begun = accelerator.step % every or (every if done else 0)
        accelerator.step = max(0, accelerator.step - (done if is_held else begun))
        # The last micro-step of a step has not called the scheduler yet.
        calls = done - 1 if is_held else min(done, every - 1) if accelerator.sync_gradients else done
        for scheduler in accelerator._schedulers:  # noqa: SLF001
            if isinstance(scheduler, AcceleratedScheduler) and scheduler.gradient_state.adjust_scheduler:
                _uncount(scheduler.scheduler, calls)


def tensors_of(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers in the models' state_dicts, and every tensor in the optimizers' states."""
    for index, model in enumerate(models):
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                # Trained parameters keep requires_grad, which distinguishes them from buffers: those may be infinite.
                yield f"model {index}: {name}", value if value.requires_grad else value.detach()
    for index, optimizer in enumerate(optimizers):
        for number, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer {index}: {number}.{key}", value.detach()


def _uncount(scheduler: Any, calls: int) -> None:
    """Undo counted calls that did not step, because OneCycleLR ends by that count; nothing to do if there were none."""
    counted, stepped = getattr(scheduler, "_step_count", None), getattr(scheduler, "last_epoch", None)
    if isinstance(counted, int) and isinstance(stepped, int):
        scheduler._step_count = counted - max(0, min(calls, counted - 1 - stepped))  # noqa: SLF001


def _withhold_positions(accelerator: Any) -> list[int]:
    """Make `save_state` leave out the positions of stateful loaders; return the loaders' numbers, from 0.

    A missing position is noticed, and better than a wrong one.
    """
    found = []
    for number, loader in enumerate(accelerator._dataloaders):  # noqa: SLF001
        if getattr(loader, "use_stateful_dataloader", False):
            loader.use_stateful_dataloader = False
            found.append(number)
    return found


def _path(task: Task, rank: int) -> Path:
    return task.state / f"{RNG_STATE_NAME}_{rank}.pkl"


def _is_writer(accelerator: Any) -> bool:
    state = PartialState()
    is_on_each_node = accelerator.project_configuration.save_on_each_node
    return bool(state.is_local_main_process if is_on_each_node else state.is_main_process)


def _check_replicated(accelerator: Any) -> None:
    if accelerator.distributed_type not in REPLICATED:
        raise SaveError(
            f"accelerate saves {accelerator.distributed_type.value} state by collectives, and ranks are blocked"
        )
    for model in accelerator._models:  # noqa: SLF001
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                raise SaveError(f"{name} is sharded: no rank has all of it, and accelerate gathers it by a collective")
