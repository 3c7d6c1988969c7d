"""What one pass said of some entries of the census, and the table that is made of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from holter.rank.readings.marks import Kinds, marks
from holter.rank.readings.selection import Selection
from holter.records import PackedTable
from holter_kernels import root


@dataclass(frozen=True)
class Rows:
    """Fingerprints and statistics of entries, by place in the census."""

    places: np.ndarray
    fingerprints: np.ndarray
    sums: np.ndarray
    square_sums: np.ndarray
    marks: np.ndarray

    @staticmethod
    def of(table: Any, places: np.ndarray, kinds: Kinds) -> "Rows":
        """From a pass over the tensors at these places."""
        return Rows(places, table.fingerprint, table.sum, table.square_sum, marks(table, kinds))

    @staticmethod
    def joined(parts: Sequence["Rows"], wanted: np.ndarray) -> "Rows":
        """Several passes in one, only what is wanted of each."""
        kept = [(part, np.isin(part.places, wanted)) for part in parts]
        return Rows(
            *(
                np.concatenate([getattr(part, column)[mask] for part, mask in kept])
                for column in ("places", "fingerprints", "sums", "square_sums", "marks")
            )
        )

    def numbers(self, tensor_class: str) -> dict[str, float]:
        """Sum and norm over all tensors: how far apart ranks are shows in their differences."""
        total, square = float(self.sums.sum()), float(self.square_sums.sum())
        return {f"sum.{tensor_class}": total, f"norm.{tensor_class}": math.sqrt(square) if square >= 0 else math.nan}

    def packed(
        self,
        tensor_class: str,
        chosen: Selection,
        *,
        over: Literal["parameters", "buffers"] = "parameters",
        keys: Sequence[str] = (),
    ) -> PackedTable:
        """The table over all entries; its root goes over the chosen ones."""
        fingerprints = np.zeros(chosen.size, dtype="<u8")
        fingerprints[self.places] = self.fingerprints
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(self.square_sums)
        return PackedTable(
            tensor_class=tensor_class,
            root=int(root(fingerprints[chosen.places])),
            fingerprints=fingerprints.tobytes(),
            norms=self._spread(norms, chosen.size, "<f4"),
            sums=self._spread(self.sums, chosen.size, "<f8"),
            marks=self._spread(self.marks, chosen.size, "u1"),
            over=over,
            keys=list(keys),
        )

    def _spread(self, values: np.ndarray, size: int, dtype: str) -> bytes:
        out = np.zeros(size, dtype=dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            out[self.places] = values
        return out.tobytes()
