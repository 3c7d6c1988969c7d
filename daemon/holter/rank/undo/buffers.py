"""Buffers as they were before the step's first forward pass, which may move them: running means, counters, perhaps to NaN.

    forward k begins     copy what may have moved since the last copy
    forward k … k        moves them
    restore              puts the copies back, in place; where nothing was copied for this step, refuses unless nothing has moved

A small buffer is copied at every step: what native code writes, as batch normalisation does, torch does not count as a change. So are
running statistics of any size. Another large one, a mask or a table of positions, is copied once, and again only if torch counted a
change or another tensor stands in its place; if it then differs from its copy after all, `restore` refuses. So a step costs one
grouped copy of the small ones and the statistics.

DDP gives rank 0's buffers to all before each forward pass: what another rank's own came to is never used. A rank that saves for rank 0 before
that has happened takes over what rank 0 has published of them (`given`, 2 to 4 us a buffer; nothing of a device, for we would have to wait for it).

Copies lie on the buffers' own device; those of large ones take at most 256 MB in all, the smallest first, and once memory was short there
are none. Of a buffer without a copy (quantised weights, a replay memory) it is known whether torch counted a change: if it did, `restore` refuses.
All this under every setting of `action`, for an operator may ask for a halt.
"""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _NormBase

from holter.errors import RewindError
from holter.rank.context import Context
from holter.rank.models import Model, spans_world
from holter.rank.readings.fused_pass import fingerprint_of
from holter.rank.readings.samples import is_plain_moment, local

SMALL_BYTES = 1 << 14
"""Running statistics of 4096 channels."""
MAX_BYTES = 256 << 20
"""Of all copies of large ones."""


@dataclass
class _BufferCopy:
    module: "weakref.ref[torch.nn.Module]"
    name: str
    path: str
    """Its full name."""
    is_statistic: bool = False
    """Of a normalisation, whose native code moves it without torch's counting."""
    is_given: bool = False
    """Rank 0's is every rank's as soon as DDP is called."""
    copy: torch.Tensor | None = None
    is_fresh: bool = False
    """The copy is of this step."""
    seen: "weakref.ref[torch.Tensor] | None" = None
    """The tensor that stood there; None: none did. Another may have its place in memory later."""
    place: int = 0
    version: int = -1

    def now(self) -> torch.Tensor | None:
        """The buffer that stands there; None: none, or none with memory of its own."""
        found = self._standing()
        return local(found) if found is not None else None

    def see(self) -> tuple[torch.Tensor | None, bool]:
        """What stands there, and whether it has changed since it was last seen, as far as torch counts changes."""
        standing = self._standing()
        if standing is None:
            self.seen = None
            return None, True
        found = local(standing)
        is_same = self._is_as_seen(standing, found)
        if not is_same:
            self.seen, self.place, self.version = weakref.ref(standing), found.data_ptr(), found._version  # noqa: SLF001
        return found, not is_same

    def may_have_moved(self) -> bool:
        """Whether it may be another than was last seen; where changes are not counted, it may."""
        if self.seen is None or self.module() is None:
            return False
        standing = self._standing()
        if standing is None or not self.is_counted(local(standing)):
            return True
        return not self._is_as_seen(standing, local(standing))

    def is_counted(self, found: torch.Tensor) -> bool:
        """Whether torch's count is to be believed."""
        return not self.is_statistic and not _is_small(found)

    def has_moved_uncounted(self) -> bool:
        """Whether it differs from a copy of a step long ago although torch counted no change: nobody knows when it moved."""
        standing = self._standing()
        if standing is None or self.copy is None or self.is_fresh or not self._is_as_seen(standing, local(standing)):
            return False
        return self.has_moved()

    def has_moved(self) -> bool:
        """Whether it is not what was copied, or may not be."""
        found = self.now()
        if self.copy is None or found is None:
            return self.may_have_moved()
        return not _fits(self.copy, found) or fingerprint_of(self.copy) != fingerprint_of(found)

    @property
    def key(self) -> tuple[int, str]:
        """Which buffer of which module."""
        return id(self.module()), self.name

    def _is_as_seen(self, standing: torch.Tensor, found: torch.Tensor) -> bool:
        is_same = self.seen is not None and self.seen() is standing
        return is_same and (self.place, self.version) == (found.data_ptr(), found._version)  # noqa: SLF001

    def _standing(self) -> torch.Tensor | None:
        module = self.module()
        found = module._buffers.get(self.name) if module is not None else None  # noqa: SLF001
        return None if found is None or found.is_meta or found.layout is not torch.strided else found


@dataclass(frozen=True)
class PastBuffer:
    """One buffer as an earlier step found it."""

    entry: _BufferCopy
    copy: torch.Tensor | None
    """None: it rested, or is too large to copy."""
    version: int


class MovingBuffers:
    """Copies of the buffers, as one step's first forward pass found them."""

    def __init__(self, context: Context, max_bytes: int = MAX_BYTES) -> None:
        self._context = context
        self._entries: list[_BufferCopy] = []
        self._state: list[int] = []
        self._has_copied = False
        self._max_bytes = max_bytes
        """0: memory was short once."""
        context.models.on_forget.append(self._forget)

    def begin(self) -> None:
        """Another step begins: the copies are of an earlier one."""
        self._has_copied = False

    def keep(self) -> bool:
        """A step's first forward pass begins, or may begin next; False: nothing can be copied at this moment."""
        if not is_plain_moment():
            return False
        self._has_copied = True
        state = self._context.models.outline(())
        if state != self._state:
            self._state, self._entries = state, list(self._find())
        try:
            self._copy()
        except BaseException:
            # Most likely memory is short: the training needs it more than we do.
            self._max_bytes = 0
            for entry in self._entries:
                entry.copy = None
            raise
        return True

    def _copy(self) -> None:
        fresh: list[tuple[_BufferCopy, torch.Tensor]] = []
        targets, sources = [], []
        for entry in self._entries:
            found, has_changed = entry.see()
            if entry.copy is not None and (found is None or not _fits(entry.copy, found)):
                entry.copy, has_changed = None, True
            entry.is_fresh = found is not None and (has_changed or not entry.is_counted(found))
            if found is None or not entry.is_fresh:
                continue
            if entry.copy is None:
                fresh.append((entry, found))
            else:
                targets.append(entry.copy)
                sources.append(found)
        if not targets and not fresh:
            return
        with torch.no_grad():
            if targets:
                torch._foreach_copy_(targets, sources)
            if fresh:
                self._copy_first(fresh)

    def _copy_first(self, fresh: "list[tuple[_BufferCopy, torch.Tensor]]") -> None:
        large = [entry.copy for entry in self._entries if entry.copy is not None and not _is_small(entry.copy)]
        room_bytes = self._max_bytes - sum(copy.nbytes for copy in large)
        for entry, found in sorted(fresh, key=lambda each: each[1].nbytes):
            if not _is_small(found):
                room_bytes -= found.nbytes
                if room_bytes < 0:
                    return
            entry.copy = found.clone()

    def found(self) -> "Iterator[tuple[weakref.ref[torch.nn.Module], str, torch.Tensor, bool]]":
        """What the forward pass finds, by module and name; True: the buffer itself, which may move. If the moment was not plain, nothing."""
        for entry in self._entries if self._has_copied else ():
            tensor = entry.copy if entry.copy is not None else entry.now()
            if tensor is not None:
                yield entry.module, entry.name, tensor, entry.copy is None

    def given(self) -> dict[str, bytes]:
        """What this rank, if it is the first, gives to all of those that may move; large ones that no normalisation moves rest."""
        return {
            key: bytes(found.detach().reshape(-1).view(torch.uint8).numpy())
            for key, found in self._giving()
            if found.device.type == "cpu"
        }

    def take_over(self, given: Mapping[str, bytes]) -> bool:
        """Let the buffers that the first rank gives to all be these; False: of one its value is not among them, and none is changed."""
        found = list(self._giving())
        if any(len(given.get(key, b"")) != tensor.nbytes for key, tensor in found):
            return False
        with torch.no_grad():
            for key, tensor in found:
                tensor.copy_(torch.frombuffer(bytearray(given[key]), dtype=tensor.dtype).view(tensor.shape))
        return True

    def _giving(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, entry in enumerate(self._entries):
            found = entry.now() if entry.is_given else None
            if found is not None and found.numel() and not entry.is_counted(found):
                yield f"{number}:{entry.path}", found

    def restore(self) -> None:
        """Put back what the forward pass found; buffers that it replaced get the values of those that stood there.

        Raises RewindError, with nothing put back, if one that has no copy, or an old one, may have changed.
        """
        if not self._has_copied:
            self._check_resting()
            return
        for entry in self._entries:
            if entry.copy is None and entry.may_have_moved():
                why = f"copies take at most {self._max_bytes >> 20} MB" if self._max_bytes else "memory was short"
                raise RewindError(f"the buffer {entry.path} has changed since the step began and was not copied: {why}")
            if entry.has_moved_uncounted():
                raise RewindError(f"the buffer {entry.path} has changed, and torch did not count when")
        with torch.no_grad():
            for entry in self._entries:
                found = entry.now()
                if found is None or entry.copy is None:
                    continue
                if _fits(entry.copy, found):
                    found.copy_(entry.copy)
                elif (module := entry.module()) is not None:
                    module._buffers[entry.name] = entry.copy.clone()  # noqa: SLF001

    def past(self, spare: "list[PastBuffer]") -> "list[PastBuffer]":
        """What the step's first forward pass finds, copied once more: the next step's copies take the place of this one's. `spare`: memory to use again."""
        room = {each.entry.key: each.copy for each in spare if each.copy is not None}
        kept, targets, sources = [], [], []
        for entry in self._entries if self._has_copied else ():
            if entry.copy is None or not entry.is_fresh:
                kept.append(PastBuffer(entry, None, entry.version))
                continue
            copy = room.get(entry.key)
            if copy is None or not _fits(copy, entry.copy):
                copy = torch.empty_like(entry.copy)
            targets.append(copy)
            sources.append(entry.copy)
            kept.append(PastBuffer(entry, copy, entry.version))
        if targets:
            torch._foreach_copy_(targets, sources)
        return kept

    def put_past(self, past: "list[PastBuffer]") -> None:
        """Put back what an earlier step's first forward pass found. Raises RewindError, with nothing put back, if one that was not copied then has changed."""
        looked_at = {each.entry.key for each in past}
        for entry in self._find():
            if entry.key not in looked_at:
                raise RewindError(f"it is not known what the buffer {entry.path} was when the step began")
        for each in past:
            standing = each.entry.now()
            if each.copy is None and standing is not None and standing._version != each.version:  # noqa: SLF001
                raise RewindError(f"the buffer {each.entry.path} has changed since the step began and was not copied")
        for each in past:
            found = each.entry.now()
            if each.copy is None or found is None:
                continue
            if _fits(each.copy, found):
                found.copy_(each.copy)
            elif (module := each.entry.module()) is not None:
                module._buffers[each.entry.name] = each.copy.clone()  # noqa: SLF001

    def check_whole(self) -> None:
        """Raises RewindError if there is a buffer that was not looked at."""
        looked_at = {entry.key for entry in self._entries}
        for entry in self._find():
            if entry.key not in looked_at:
                raise RewindError(f"it is not known what the buffer {entry.path} was when the step began")

    def _check_resting(self) -> None:
        """Nothing was copied for this step. What is still as it was copied for an earlier one needs no putting back."""
        self.check_whole()
        for entry in self._entries:
            if entry.has_moved():
                raise RewindError(f"it is not known what the buffer {entry.path} was when the step began, and it moves")

    def _find(self) -> Iterator[_BufferCopy]:
        seen: set[tuple[int, str]] = set()
        for model in self._context.models.all():
            for path, part in model.root.named_modules() if model.root is not None else ():
                for name, buffer in part._buffers.items():  # noqa: SLF001
                    if buffer is not None and (id(part), name) not in seen:
                        seen.add((id(part), name))
                        is_statistic = isinstance(part, _NormBase) or name.startswith("running_")
                        full = f"{path}.{name}".lstrip(".")
                        yield _BufferCopy(weakref.ref(part), name, full, is_statistic, _is_given(model, full))

    def _forget(self) -> None:
        """The script let go of a model: its memory is not ours to hold."""
        self._entries, self._state, self._has_copied = [], [], False


def _is_given(model: Model, path: str) -> bool:
    ddp = model.ddp
    # One whose constructor failed has neither.
    if not getattr(ddp, "broadcast_buffers", False) or not spans_world(getattr(ddp, "process_group", None)):
        return False
    return path.removeprefix("module.") not in getattr(ddp, "parameters_to_ignore", ())


def _is_small(tensor: torch.Tensor) -> bool:
    return bool(tensor.nbytes <= SMALL_BYTES)


def _fits(copy: torch.Tensor, found: torch.Tensor) -> bool:
    return (copy.shape, copy.dtype, copy.device) == (found.shape, found.dtype, found.device)
