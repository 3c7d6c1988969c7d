"""Keeps buffers as they were before the step's first forward pass, which may change them: running means, counters, perhaps to NaN.

    forward k begins     copy what may have changed since the last copy
    forward k … k        changes them
    restore              puts the copies back, in place; if nothing was copied for this step, refuses unless nothing has changed

A small buffer is copied at every step, because torch does not count what native code writes, as batch normalisation does, as a change. So are
running statistics of any size. Any other large buffer, such as a mask or a table of positions, is copied once, and again only if torch counted
a change or another tensor is in its place; if it differs from its copy although torch counted no change, `restore` refuses. So a step costs one
grouped copy of the small buffers and the statistics.

DDP gives rank 0's buffers to all ranks before each forward pass: the values on other ranks are never used. A rank that saves for rank 0 before
that has happened takes over what rank 0 has published of them (`given`, 2 to 4 us for each buffer; none on a device, for which we would have to wait).

Copies lie on the buffers' own device; those of large ones take at most 256 MB in all, the smallest first, and after memory was short once there
are none. Of a buffer without a copy (quantised weights, a replay memory) we only know whether torch counted a change: if it did, `restore` refuses.
All this is done under every setting of `action`, because an operator may ask for a halt.
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
"""Size up to which a buffer is small: running statistics of 4096 channels."""
MAX_BYTES = 256 << 20
"""Size of all copies of large buffers together, at most."""


@dataclass
class _BufferCopy:
    module: "weakref.ref[torch.nn.Module]"
    name: str
    path: str
    """Full name of the buffer."""
    is_statistic: bool = False
    """Whether it belongs to a normalisation, whose native code changes it without torch counting that."""
    is_given: bool = False
    """Whether DDP overwrites it with rank 0's value on every rank as soon as the model is called."""
    copy: torch.Tensor | None = None
    is_fresh: bool = False
    """Whether the copy was made for this step."""
    seen: "weakref.ref[torch.Tensor] | None" = None
    """The tensor that was the buffer when last seen; None if there was none. Another tensor may reuse its memory address later."""
    place: int = 0
    version: int = -1

    def now(self) -> torch.Tensor | None:
        """Return the present buffer; None if there is none, or none with memory of its own."""
        found = self._standing()
        return local(found) if found is not None else None

    def see(self) -> tuple[torch.Tensor | None, bool]:
        """Return the present buffer (None if there is none), and whether it has changed since it was last seen, as far as torch counts changes."""
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
        """Whether the buffer may have changed since it was last seen; True if its changes are not counted."""
        if self.seen is None or self.module() is None:
            return False
        standing = self._standing()
        if standing is None or not self.is_counted(local(standing)):
            return True
        return not self._is_as_seen(standing, local(standing))

    def is_counted(self, found: torch.Tensor) -> bool:
        """Whether torch's count of changes is reliable for this buffer: not for small ones and statistics."""
        return not self.is_statistic and not _is_small(found)

    def has_moved_uncounted(self) -> bool:
        """Whether the buffer differs from the copy of an earlier step although torch counted no change, so that nobody knows when it changed."""
        standing = self._standing()
        if standing is None or self.copy is None or self.is_fresh or not self._is_as_seen(standing, local(standing)):
            return False
        return self.has_moved()

    def has_moved(self) -> bool:
        """Whether the buffer differs from its copy, or may have changed if there is none."""
        found = self.now()
        if self.copy is None or found is None:
            return self.may_have_moved()
        return not _fits(self.copy, found) or fingerprint_of(self.copy) != fingerprint_of(found)

    @property
    def key(self) -> tuple[int, str]:
        """(id of the module, name of the buffer in it)."""
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
    """One buffer as it was when an earlier step began."""

    entry: _BufferCopy
    copy: torch.Tensor | None
    """None if it had not changed, or is too large to copy."""
    version: int


class MovingBuffers:
    """Copies of the buffers as they were before one step's first forward pass."""

    def __init__(self, context: Context, max_bytes: int = MAX_BYTES) -> None:
        self._context = context
        self._entries: list[_BufferCopy] = []
        self._state: list[int] = []
        self._has_copied = False
        self._max_bytes = max_bytes
        """Limit for copies of large buffers; 0 after memory was short once."""
        context.models.on_forget.append(self._forget)

    def begin(self) -> None:
        """Note that another step begins, so that the copies are those of an earlier one."""
        self._has_copied = False

    def keep(self) -> bool:
        """Copy the buffers, because a step's first forward pass begins or may begin next; return False if nothing can be copied at this moment."""
        if not is_plain_moment():
            return False
        self._has_copied = True
        state = self._context.models.outline(())
        if state != self._state:
            self._state, self._entries = state, list(self._find())
        try:
            self._copy()
        except BaseException:
            # Most likely memory is short, and the training needs it more than we do.
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
        """Yield (module, name, tensor, whether it is the buffer itself, which may still change) of the buffers as the forward pass finds them.

        Yield nothing if they could not be copied at that moment.
        """
        for entry in self._entries if self._has_copied else ():
            tensor = entry.copy if entry.copy is not None else entry.now()
            if tensor is not None:
                yield entry.module, entry.name, tensor, entry.copy is None

    def given(self) -> dict[str, bytes]:
        """Return the bytes, by key, of the buffers that rank 0 gives to all; without large ones that no normalisation changes, and none on a device."""
        return {
            key: bytes(found.detach().reshape(-1).view(torch.uint8).numpy())
            for key, found in self._giving()
            if found.device.type == "cpu"
        }

    def take_over(self, given: Mapping[str, bytes]) -> bool:
        """Overwrite the buffers that rank 0 gives to all with these bytes; return False, with none changed, if one is missing."""
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
        """Put the buffers back as the forward pass found them; a buffer that was replaced by another tensor gets the old values.

        Raises RewindError, with nothing put back, if one that has no copy, or only one of an earlier step, may have changed.
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
        """Return second copies of the buffers as this step's first forward pass finds them, because the next step overwrites the first copies.

        `spare` holds copies whose memory may be used again.
        """
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
        """Put the buffers back as an earlier step's first forward pass found them.

        Raises RewindError, with nothing put back, if one that was not copied then has changed.
        """
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
        """Raise RewindError if there is a buffer of which nothing is known."""
        looked_at = {entry.key for entry in self._entries}
        for entry in self._find():
            if entry.key not in looked_at:
                raise RewindError(f"it is not known what the buffer {entry.path} was when the step began")

    def _check_resting(self) -> None:
        """Raise RewindError if a buffer may have changed in a step for which nothing was copied; the others need not be put back."""
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
        """Drop all copies, because the script has let go of a model and its memory must be freed."""
        self._entries, self._state, self._has_copied = [], [], False


def _is_given(model: Model, path: str) -> bool:
    ddp = model.ddp
    # A DDP object whose constructor failed has neither attribute.
    if not getattr(ddp, "broadcast_buffers", False) or not spans_world(getattr(ddp, "process_group", None)):
        return False
    return path.removeprefix("module.") not in getattr(ddp, "parameters_to_ignore", ())


def _is_small(tensor: torch.Tensor) -> bool:
    return bool(tensor.nbytes <= SMALL_BYTES)


def _fits(copy: torch.Tensor, found: torch.Tensor) -> bool:
    return (copy.shape, copy.dtype, copy.device) == (found.shape, found.dtype, found.device)
