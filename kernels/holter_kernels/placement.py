"""Find out in one native call whether a list of tensors is laid out as the previous list was.

Gradients are new objects at every step, usually at other addresses, but always of the same sizes: a pass then only
needs their addresses.
"""

from collections.abc import Sequence

import numpy as np
import torch

from holter_kernels.seen import SeenTensors
from holter_kernels.sources import PLAIN_TYPES, Sources, look

try:
    from holter_kernels._native import look as _native_look
except ImportError:
    _native_look = None

_FUNCTIONS = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_SAME, _MOVED, _OTHERS, _NOT_PLAIN = range(4)
# DLPack does not distinguish a lazily negated view from its memory, nor a view of a freed storage from one at a low
# address.
_is_neg, _offset = torch.Tensor.is_neg, torch.Tensor.storage_offset


class Placement:
    """Remembers the layout of the last list, and compares the next one with it."""

    def __init__(self) -> None:
        self._layouts = np.zeros((0, 2), np.uint64)
        self._seen = b""
        """Layouts of the last list if it was a `SeenTensors`; otherwise empty."""
        self._is_valid = self._is_plain = False
        self.is_known = False
        """Whether the list that was asked about last was as the one before, but for addresses."""
        self._specs: list[object] = []
        self.sources = Sources()
        """The result of the last look tensor by tensor; its runs still hold."""
        self.bases = np.zeros(0, np.uint64)
        """Address of each tensor's first element."""
        self.generation = 0
        """Changes whenever the runs may have changed."""

    def is_as_before(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors have the sizes, dtypes and devices of the last ones, one by one; `bases` then holds their addresses."""
        if type(tensors) is SeenTensors and tensors.layouts == self._seen and self._is_valid:
            self.bases = np.frombuffer(tensors.addresses, np.uint64)
            self._is_plain = self.is_known = True
            return True
        found = self._compare(tensors)
        self._is_plain = found is not None
        self.is_known = self._is_valid and found in (_SAME, _MOVED)
        # Asked again about these very tensors, the answer is the same until somebody looks: the runs are still those of the list before.
        self._is_valid = self.is_known
        return self.is_known

    def look(self, tensors: Sequence[torch.Tensor]) -> Sources:
        """Return how these tensors are laid out.

        If `is_as_before` has just said so, this is the previous result; otherwise each tensor is examined, and what
        cannot be read in place is copied.
        """
        if self.is_known:
            return self.sources
        sources = look(tensors)
        if sources.signature != self.sources.signature or not self.generation:
            self.generation += 1
        self.bases = np.array(sources.bases, np.uint64)
        # A list with a tensor that lost its memory, or that could not be read, is examined again each time.
        self._is_valid = self._is_plain and not sources.kept and not sources.left_out
        kept, sources.kept = sources.kept, []
        self.sources = sources
        return sources if not kept else _with(sources, kept)

    def _compare(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Return the native code's answer (same, moved or others); None if it cannot tell."""
        if type(tensors) is SeenTensors:
            return self._compare_seen(tensors)
        if _native_look is None or _FUNCTIONS is None:
            return None
        as_list = tensors if type(tensors) is list else list(tensors)
        if self._seen:
            self._seen, self.bases = b"", self.bases.copy()
        if len(as_list) != len(self._layouts):
            self._layouts, self.bases = np.zeros((len(as_list), 2), np.uint64), np.zeros(len(as_list), np.uint64)
            self._is_valid = False
        found: int = _native_look(_FUNCTIONS, as_list, PLAIN_TYPES, self._layouts, self.bases)
        if found == _NOT_PLAIN:
            opened = _local_parts(as_list)
            if opened is None:
                return None
            as_list, specs = opened
            found = _native_look(_FUNCTIONS, as_list, PLAIN_TYPES, self._layouts, self.bases)
            self._is_valid &= specs == self._specs  # the same objects most often, which is quick
            self._specs = specs
        elif self._specs:
            self._is_valid, self._specs = False, []
        if found == _NOT_PLAIN or any(map(_is_neg, as_list)):
            return None
        # Memory at its old address is not lost: a view of a freed storage has an address as low as its offset within
        # the storage.
        is_where_it_was = found == _SAME and self._is_valid
        return None if not is_where_it_was and _has_lost_memory(as_list) else found

    def _compare_seen(self, tensors: SeenTensors) -> int:
        """Compare a `SeenTensors`, of which everything is known already."""
        self.bases = np.frombuffer(tensors.addresses, np.uint64)
        if tensors.layouts == self._seen:
            return _MOVED
        self._seen, self._specs, self._is_valid = tensors.layouts, [], False
        self._layouts = np.frombuffer(self._seen, np.uint64).reshape(-1, 2).copy()
        return _OTHERS


def _local_parts(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[object]] | None:
    """Return the local parts of any DTensors among these, with their placements.

    None if one is of another kind, or its part is still on its way.
    """
    parts, specs = [], []
    for tensor in tensors:
        part = tensor if type(tensor) in PLAIN_TYPES else getattr(tensor, "_local_tensor", None)
        if type(part) not in PLAIN_TYPES:
            return None
        parts.append(part)
        specs.append(None if part is tensor else tensor._spec)  # noqa: SLF001 - its placements and mesh in one
    return parts, specs


def _with(sources: Sources, kept: list[torch.Tensor]) -> Sources:
    """Return the same sources with the copies, which only the caller holds."""
    return Sources(
        sources.signature, sources.bases, sources.runs, sources.codes, kept, sources.left_out, sources.bits_only
    )


def _has_lost_memory(tensors: list[torch.Tensor]) -> bool:
    """Whether a view reaches beyond its storage, as views of FSDP's flat parameters do while they are sharded."""
    offsets = list(map(_offset, tensors))
    return any(offsets) and any(
        (offset + tensor.numel()) * tensor.element_size() > tensor.untyped_storage().nbytes()
        for offset, tensor in zip(offsets, tensors, strict=True)
        if offset
    )
