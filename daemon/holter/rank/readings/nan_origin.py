"""Where a NaN came from: a batch that was not finite, or the first module that made one out of finite inputs.

This is asked when the optimizer is given a gradient that is not finite: the weights are then still those of the forward pass, and the batch of
the step is still held. The batch of every step is signed. On a healthy step of comparison its statistics are taken (range, mean, whether constant,
whether finite), and tensors that are never finite, such as a mask of -inf, are learnt.

If the batch was finite, it is run through the model once more, under hooks. Nothing is left behind: no gradient is recorded, random states are
put back, and buffers and what modules keep in plain attributes are restored. The wrapper is not called, and a collective that the
model calls itself ends the replay: one rank alone would wait for its peers for ever.

The replay also runs on a device, once the rank stands still: before a step that is not applied, or after the device has left a step out, with the
call that was kept for that. The device is waited for then, as it has nothing else to do. A step that was applied is not replayed on a device: the
weights are no longer those of the call.
"""

import contextlib
import io
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holter.rank import accelerator
from holter.rank.context import Context
from holter.rank.hooks.data import FetchedBatch
from holter.rank.publish.step_log import OpenStep
from holter.rank.readings import batches
from holter.rank.readings.batches import Inputs, leaves, tensors_of
from holter.rank.readings.loss_lines import LossTrace, lines_in
from holter.rank.undo.side_stream import wait_until
from holter.records import Origin
from holter_kernels.devices import recorded

PATIENCE_S = 10.0
"""Seconds that a replay waits for the device to finish earlier work."""
COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_dtensor"})
PLAIN = (list, dict, set)
TORCHS_OWN = frozenset(name for name in vars(torch.nn.Module()) if name.startswith("_"))
"""Attributes in which torch keeps a module's parts and hooks; a forward pass writes to the others only."""
NEAR_LIMIT = 0.01
"""A -Inf beside values above this share of the dtype's largest number is an overflow, not a mask."""
MAX_REPLAYS = 3
"""Number of replays in a run: a NaN has one origin, and a run that goes on with it need not be replayed at every step."""
MAX_CALLS = 32
"""Number of calls of a step that are signed: a model may be called once for each element of a sequence."""
MAX_LEAVES = 8
"""Number of tensors of a batch whose statistics are reported."""
MAX_LINES = 6


class BatchBlameProbe:
    """Signs the batch of every step, and searches it for the origin of a NaN when there is one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_replays = 0
        self._healthy_steps = context.inputs.healthy_steps
        self._signature = 0
        """Signature of the inputs that no backward pass has claimed yet."""
        self._num_calls = 0
        self._num_samples = [0, 0]
        """Number of samples in this step, counted by the models' inputs and by the loaders."""
        self._leaves: list[batches.Leaf] = []
        """Tensors of the last batch that a loader gave."""
        self._was: dict[str, str] = {}
        """For the path of an input, the path in the loader's batch of the tensor that it was."""

    def see_call(self) -> None:
        """Sign the inputs of a model that is called in training, and count their samples."""
        self._num_calls += 1
        if self._num_calls > MAX_CALLS:
            return
        inputs, num_samples = self._context.inputs, 0
        tensors = []
        for _, tensor in tensors_of(inputs.last):
            tensors.append(tensor)
            if not num_samples and tensor.dim():
                num_samples = tensor.shape[0]
        if inputs.stage is None or inputs.stage[1]:
            # A later stage of a pipeline is given another stage's output, not a batch, and these are all alike once they are NaN.
            self._signature = batches.fold(self._signature, batches.sign(tensors))
        self._num_samples[0] += num_samples

    def begin_backward(self, fetched: list[FetchedBatch]) -> None:
        """Add what came since the last backward pass to this step; `fetched` are the batches that its loaders gave."""
        for batch in fetched:
            self._signature = batches.fold(self._signature, batch.signature)
            self._num_samples[1] += batch.num_samples
        if fetched:
            self._leaves = fetched[-1].leaves
            self._keep_until_told(self._leaves)
        self._claim()

    def _keep_until_told(self, leaves: list[batches.Leaf]) -> None:
        """Keep the batch's last few tensors for a device that may report a NaN some steps later."""
        kept = self._context.log.now.suspects.fetched
        kept += [(path, t, t._version) for path, t in leaves if t.is_cpu and t.is_floating_point()]  # noqa: SLF001
        del kept[:-MAX_LEAVES]

    def investigate(self, *, is_applied: bool = False) -> None:
        """Look for the fault of a step that is not finite, first in its batch, and if that is sound, in the modules."""
        context = self._context
        context.log.now.suspects.is_questioned = True
        inputs = context.inputs.suspect or context.inputs.last
        bad = batches.read(tensors_of(inputs))
        if all(entry.name in self._healthy_steps for entry in bad):
            # Labels are in the loader's batch, but not among the model's inputs.
            seen = {_place(tensor) for _, tensor in tensors_of(inputs)}
            bad += batches.read([leaf for leaf in self._leaves if _place(leaf[1]) not in seen])
        senders = {path: context.inputs.received.get(tensor.data_ptr(), -1) for path, tensor in tensors_of(inputs)}
        for entry in bad:
            known = {"healthy_steps": self._healthy_steps[entry.name], "received_from": senders.get(entry.name, -1)}
            context.log.now.suspects.add(msgspec.structs.replace(entry, **known))
        is_sound = all(entry.name in self._healthy_steps for entry in bad)
        if is_sound and self._num_replays < MAX_REPLAYS:
            self._replay(inputs, context.log.now, is_applied=is_applied)

    def investigate_left_out(self, step: OpenStep) -> None:
        """Look for the fault of a step that the device left out some steps ago: the weights are still those of its call.

        A step that the device reported in time was investigated then.
        """
        if step.suspects.is_questioned:
            return
        is_sound = all(entry.name in self._healthy_steps for entry in step.suspects.inputs)
        if step.suspects.call is not None and is_sound and self._num_replays < MAX_REPLAYS:
            self._replay(step.suspects.call, step)

    @property
    def num_last_samples(self) -> int:
        """Number of samples that the model was given in its last training call; 0 if it is not known."""
        return next((t.shape[0] for _, t in tensors_of(self._context.inputs.last) if t.dim()), 0)

    def observe(self, *, is_check: bool) -> None:
        """Claim the batch of a step that is about to be applied, and take its statistics at a healthy step of comparison."""
        self._claim()
        traced, step = self._context.inputs.trace, self._context.log.step
        if traced is not None and not self._context.log.now.suspects.is_questioned:
            self._context.writer.say(step, _unquestioned(traced))
        if is_check and not self._context.log.now.suspects.tensors:
            self._survey()
        self._leaves, self._num_calls, self._num_samples = [], 0, [0, 0]

    def _survey(self) -> None:
        """Take the statistics of a healthy step's batch."""
        inputs, numbers = tensors_of(self._context.inputs.last), self._context.log.now.numbers
        told = self._told(inputs)[:MAX_LEAVES]
        found, is_odd = {}, False
        for entry in batches.survey(told):
            found[entry.path] = entry
            numbers.update(entry.numbers())
            is_odd |= bool(entry.nans or entry.infs)
        called, fetched = self._num_samples
        if called or fetched:
            # Loaders may be a batch ahead, so the calls are counted, unless a model is called twice for one loss: it sees its samples twice.
            is_one_call_each = self._num_calls == self._context.log.now.passes.num_done
            numbers["batch.num_samples"] = float(called if called and (is_one_call_each or not fetched) else fetched)
        if not is_odd and not self._leaves and len(inputs) <= len(told):
            return
        # The loader's tensors are often the inputs themselves: no memory is read twice.
        paths = {_place(tensor): path for path, tensor in told}
        others = batches.survey([(path, t) for path, t in inputs if _place(t) not in paths])
        for entry in others[: MAX_LEAVES - len(told)]:
            numbers.update(entry.numbers())
        if not any(entry.nans or entry.infs for entry in (*found.values(), *others)):
            return
        odd = [entry.path for entry in others if entry.nans or entry.infs]
        for path, tensor in inputs:
            same = found.get(paths.get(_place(tensor), ""))
            if path in odd or (same is not None and (same.nans or same.infs)):
                self._learn_odd(path)
        for path in {path for path, entry in found.items() if entry.nans or entry.infs} - {path for path, _ in inputs}:
            self._learn_odd(path)

    def _told(self, inputs: list[batches.Leaf]) -> list[batches.Leaf]:
        """Return the loader's batch, with a tensor replaced by the model's input that the script made of it, for that is what is trained on.

        An input is taken for a tensor of the batch if it was that tensor at an earlier step, or is the only one of its shape and dtype.
        """
        if not self._leaves:
            return inputs
        fetched = {_place(tensor): path for path, tensor in self._leaves}
        instead = {}
        for path, tensor in inputs:
            if (same := fetched.get(_place(tensor))) is not None:
                self._was[path] = same
            elif tensor.is_cpu and (was := self._was.get(path) or self._alike(tensor, inputs)):
                instead[was] = tensor
        return [(path, instead.get(path, tensor)) for path, tensor in self._leaves]

    def _alike(self, tensor: torch.Tensor, inputs: list[batches.Leaf]) -> str:
        """Return the path of the one tensor of the loader's batch that this input may have been made of; empty if there is none, or several."""
        fed = {_place(each) for _, each in inputs}
        found = [
            path
            for path, leaf in self._leaves
            if leaf.is_floating_point() and (leaf.shape, leaf.dtype) == (tensor.shape, tensor.dtype)
            if _place(leaf) not in fed
        ]
        return found[0] if len(found) == 1 else ""

    def _learn_odd(self, path: str) -> None:
        """Learn that a tensor of the batch is not finite by nature, since the step is finite; wait if a device still owes an answer on that."""
        now = self._context.log.now
        if now.num_owed:
            now.suspects.odd.add(path)
        else:
            self._healthy_steps[path] += 1

    def _claim(self) -> None:
        if self._signature:
            now = self._context.log.now
            now.batch, self._signature = batches.fold(now.batch, self._signature), 0

    def _replay(self, inputs: Inputs | None, step: OpenStep, *, is_applied: bool = False) -> None:
        self._num_replays += 1
        context = self._context
        module = inputs.model() if inputs is not None else None
        model = next((model for model in context.models if model.inner is module), None)
        with context.guard.paused():
            is_later = step is not context.log.now
            moment = AskedWhen(is_applied=is_applied, num_passes=step.passes.num_done, is_later=is_later)
            found = find(inputs, model.prefix if model else "", moment)
        traced = context.inputs.trace or LossTrace()
        if traced.origin is not None and not found.module_class:
            reason = f"{traced.origin.reason}; {'the replay' if found.replayed else 'not replayed'}: {found.reason}"
            found = msgspec.structs.replace(traced.origin, reason=reason)
        lines = traced.lines
        if found.is_loss_alone and module is not None:
            word = traced.operation.partition(" ")[0]
            lines = [*lines_in(type(module).forward, word), *lines]
        context.writer.say(
            step.step,
            msgspec.structs.replace(
                found,
                operation=traced.operation,
                are_outputs_finite=traced.are_outputs_finite,
                lines=list(dict.fromkeys(lines))[:MAX_LINES],
                num_models=max(1, context.inputs.num_models),
            ),
        )


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    is_here = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.data_ptr() if is_here else id(tensor), tensor.shape, tensor.dtype


class AskedWhen(NamedTuple):
    """When a step is investigated, which matters on a device: it reports a NaN later."""

    is_applied: bool = False
    """Whether the step was applied to the weights, or may have been."""
    num_passes: int = 1
    """Number of backward passes of the step."""
    is_later: bool = False
    """Whether other steps have been computed since."""


AT_ONCE = AskedWhen()


def _unquestioned(traced: LossTrace) -> Origin:
    """Describe a loss that is not finite although its gradients are, so that the batch was not replayed."""
    return Origin(
        module="",
        module_class="",
        is_input_finite=False,
        input_absmax=0.0,
        replayed=False,
        reason="the gradients were finite, so it was not replayed",
        operation=traced.operation,
        is_of_nothing=traced.is_of_nothing,
        lines=traced.lines,
        are_outputs_finite=traced.are_outputs_finite,
    )


def find(inputs: Inputs | None, prefix: str, moment: AskedWhen = AT_ONCE) -> Origin:
    """Replay the captured call, and return the first module that made a NaN, or the reason why that is not known."""
    module = inputs.model() if inputs is not None else None
    if inputs is None or module is None:
        return _unknown("the inputs of the step were not seen")
    obstacle = _obstacle(inputs, module, moment)
    if obstacle:
        return _unknown(obstacle)
    search = _OriginSearch(module, prefix)
    try:
        counts = _replay(module, inputs, search)
    except _FoundError:
        return search.origins[0]
    except _CollectiveError as collective:
        return _unknown(f"the model communicates ({collective}): one rank cannot replay it alone")
    except Exception as error:  # noqa: BLE001  the script's module may not bear a second call
        return _unknown(f"the replay raised {type(error).__name__}: {error}")
    return next(iter(search.origins), _nowhere(counts, moment))


def _replay(module: torch.nn.Module, inputs: Inputs, search: "_OriginSearch") -> str:
    """Replay the call under hooks. Return an attribute that the call changed, such as a counter, with which the replay may differ; empty if none."""
    is_cast, dtype = inputs.autocast
    with (
        _left_as_it_was(module) as moved,
        _hooked(module, search),
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(io.StringIO()),
        torch.no_grad(),
        torch.autocast(inputs.device.type, dtype=dtype, enabled=is_cast),
        _NoCollectives(),
    ):
        torch.random.set_rng_state(inputs.random_state)
        if inputs.device_state is not None:
            accelerator.generator_of(inputs.device).set_state(inputs.device_state)
        module(*inputs.args, **inputs.kwargs)
        return moved()


def _obstacle(inputs: Inputs, module: torch.nn.Module, moment: AskedWhen) -> str:
    if not inputs.leaves:
        return "no tensor was seen among the inputs: it is not known where they are, nor whether they have changed"
    held = chain(module.parameters(), module.buffers(), (t for _, t, _ in inputs.leaves))
    there = {t.device for t in held if not t.is_cpu}
    if there and (obstacle := _obstacle_of_device(there, moment)):
        return obstacle
    if any(t._version != version for _, t, version in inputs.leaves):  # noqa: SLF001
        return "an input was changed in place since: the replay would not see what the model saw"
    if any(hasattr(p, "ds_tensor") for p in module.parameters()):
        return "ZeRO-3 gathers the model's parameters: one rank cannot replay it alone"
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return "a part of the model is compiled by TorchScript and takes no hooks"
    return ""


def _obstacle_of_device(there: set[torch.device], moment: AskedWhen) -> str:
    if any(device.type == "meta" for device in there):
        return "a part of the model is on a device without values"
    if moment.is_applied:
        return "the model is on a device, which had applied the step before it told of it: its weights are not those of the call"
    if moment.num_passes > 1:
        return "the model is on a device, which told of the step as a whole: which of its micro-batches made the NaN is not known"
    is_idle = not accelerator.is_capturing() and all(wait_until(recorded(device).query, PATIENCE_S) for device in there)
    return "" if is_idle else "the model is on a device that does not come to the end of what was queued"


class _FoundError(Exception):
    """The first non-finite output was seen; the rest of the forward pass is not needed."""


class _CollectiveError(Exception):
    """The model calls a collective."""


class _NoCollectives(TorchDispatchMode):  # type: ignore[misc]
    """Lets every operation pass except collectives, which raise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise _CollectiveError(func.name())
        return func(*args, **(kwargs or {}))


def _nowhere(counts: str, moment: AskedWhen) -> Origin:
    """Describe a replay in which every module's output was finite."""
    if moment.is_later:
        return _unknown(
            "every module's output was finite some steps later, when the device had told of it: a module may have changed since"
        )
    if counts:
        return _unknown(f"{counts} is changed by each call: the replay did not do what the step did")
    reason = "replayed with the same batch and random state: every module's output is finite"
    return Origin(module="", module_class="", is_input_finite=True, input_absmax=0.0, replayed=True, reason=reason)


def _unknown(reason: str) -> Origin:
    return Origin(module="", module_class="", is_input_finite=False, input_absmax=0.0, replayed=False, reason=reason)


class _OriginSearch:
    """Judges modules as they return; children return before their parents, so the first origin that is found is the innermost.

    A module that makes a NaN or a +Inf out of finite inputs is an origin. A -Inf alone may be a mask, and is one if all else is zero; otherwise
    the first is suspected.
    """

    def __init__(self, module: torch.nn.Module, prefix: str) -> None:
        self._root = module
        self._names = {id(child): prefix + name for name, child in module.named_modules()}
        self._suspects: list[torch.nn.Module] = []
        self.origins: list[Origin] = []

    def judge(self, child: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Judge a module that returns, as its forward hook; raise `_FoundError` when the rest of the pass is not needed."""
        made = _Values.of(t for _, t in leaves(output, ""))
        if made.is_finite:
            return
        taken = _Values.of(t for _, t in leaves((args, kwargs), ""))
        if taken.nans or taken.pos_infs or (taken.neg_infs and not made.nans):
            return
        if taken.neg_infs and self.origins:
            raise _FoundError
        is_mild = not made.nans and not made.pos_infs and made.absmax < NEAR_LIMIT * made.dtype_max
        if is_mild and made.absmax == 0.0:
            return
        if not is_mild and any(part is suspect for suspect in self._suspects for part in child.modules()):
            raise _FoundError
        self._suspects.append(child)
        found = self._origin(child, taken, made)
        self.origins.append(msgspec.structs.replace(found, is_loss_alone=child is self._root and _is_scalar(output)))
        if not is_mild:
            # Earlier suspects made only a mild -Inf; this module is the origin.
            del self.origins[:-1]
            raise _FoundError

    def _origin(self, child: torch.nn.Module, taken: "_Values", made: "_Values") -> Origin:
        own = _Values.of(child.parameters(recurse=False))
        return Origin(
            module=self._names.get(id(child), ""),
            module_class=type(child).__name__,
            is_input_finite=taken.is_finite,
            input_absmax=taken.absmax,
            replayed=True,
            reason="first module whose output is not finite while its inputs are"
            + ("" if taken.is_finite else ", but for a mask of -inf")
            + ("" if own.is_finite else "; its own weights are not finite"),
            dtype=made.dtype,
            dtype_max=made.dtype_max,
            output_nans=made.nans,
            output_infs=made.pos_infs + made.neg_infs,
            output_absmax=made.absmax,
            weight_absmax=own.absmax,
        )


def _is_scalar(output: Any) -> bool:
    """Whether the only outputs of a model that are not finite are single numbers, such as its loss."""
    odd = [t for _, t in leaves(output, "") if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    return all(t.numel() == 1 for t in odd)


@dataclass
class _Values:
    """Counts of what is not finite in some tensors together; integers are always finite."""

    nans: int = 0
    pos_infs: int = 0
    neg_infs: int = 0
    absmax: float = 0.0
    """Largest finite magnitude."""
    dtype: str = ""
    """Dtype of the first tensor that is not finite; empty if all are finite."""
    dtype_max: float = 0.0
    """Largest number of that dtype."""

    @property
    def is_finite(self) -> bool:
        return not (self.nans or self.pos_infs or self.neg_infs)

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> "_Values":
        """Count over all these tensors."""
        found = cls()
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                found._add(tensor.detach())
        return found

    def _add(self, tensor: torch.Tensor) -> None:
        finite = torch.isfinite(tensor)
        if bool(finite.all()):
            self.absmax = max(self.absmax, float(tensor.abs().max()))
            return
        if not self.dtype:
            self.dtype, self.dtype_max = str(tensor.dtype).removeprefix("torch."), torch.finfo(tensor.dtype).max
        self.nans += int(torch.isnan(tensor).sum())
        self.pos_infs += int(torch.isposinf(tensor).sum())
        self.neg_infs += int(torch.isneginf(tensor).sum())
        if bool(finite.any()):
            self.absmax = max(self.absmax, float(tensor[finite].abs().max()))


@contextlib.contextmanager
def _hooked(module: torch.nn.Module, search: _OriginSearch) -> Iterator[None]:
    handles = []
    try:
        for child in module.modules():
            handles.append(child.register_forward_hook(search.judge, with_kwargs=True))  # noqa: PERF401  some are on when one fails
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _left_as_it_was(module: torch.nn.Module) -> Iterator[Callable[[], str]]:
    """Restore random states, buffers and plain attributes at the end; yields a function that names a number among them that has changed."""
    now = torch.random.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    there = [generator.get_state() for generator in accelerator.generators()]
    parts = list(module.modules())
    buffers = [(part, dict(part._buffers)) for part in parts]  # noqa: SLF001
    attributes = [(part, {k: v for k, v in part.__dict__.items() if k not in TORCHS_OWN}) for part in parts]
    contents = [(v, v.copy()) for _, kept in attributes for v in kept.values() if type(v) in PLAIN]

    def moved() -> str:
        for part, kept in attributes:
            for name, value in kept.items():
                if type(value) in (int, float, bool) and part.__dict__.get(name) != value:
                    return f"{type(part).__name__}.{name}"
        return ""

    try:
        for part, kept in buffers:
            part._buffers.update({name: b.detach().clone() for name, b in kept.items() if b is not None})  # noqa: SLF001
        yield moved
    finally:
        for part, kept in buffers:
            part._buffers.update(kept)  # noqa: SLF001
        for part, kept in attributes:
            part.__dict__.update(kept)
            for name in [k for k in part.__dict__ if k not in TORCHS_OWN and k not in kept]:
                del part.__dict__[name]
        for container, before in contents:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        torch.random.set_rng_state(now[0])
        accelerator.set_generators(there)
        random.setstate(now[1])
        np.random.set_state(now[2])  # noqa: NPY002
