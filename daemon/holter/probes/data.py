"""The data phase: time spent in a DataLoader's `next`."""

from torch.utils.data.dataloader import _BaseDataLoaderIter

from holter.probes.context import Context, in_phase
from holter.records import Phase


class DataProbe:
    """Follows every DataLoader of the process."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def install(self) -> None:
        """Call through ours whenever a batch is fetched."""
        self._context.patches.replace(
            "__next__", lambda original: in_phase(self._context, Phase.DATA, original), _BaseDataLoaderIter
        )
