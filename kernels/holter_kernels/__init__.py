"""Every statistic of a list of tensors, and a fingerprint of each, in one read of memory.

>>> import torch
>>> from holter_kernels import summarize
>>> table = summarize([torch.tensor([0.0, -2.0, 3.0, float("inf")])])
>>> int(table.zeros[0]), int(table.pos_infs[0]), float(table.min[0]), float(table.square_sum[0])
(1, 1, -2.0, 13.0)

`reference.py` defines the statistics, `keys.py` the fingerprint; the native code and the GPU kernels are claims about them.
"""

from holter_kernels.api import backend, fingerprint, merge, summarize
from holter_kernels.cpu import set_num_threads
from holter_kernels.devices import side_stream
from holter_kernels.passes import Pass, Reading
from holter_kernels.seen import SeenTensors, kinds, see
from holter_kernels.table import Table
from holter_kernels.tree import root, tree
from holter_kernels.warm import CompiledKernel, WarmUp, warm_up

__all__ = [
    "CompiledKernel",
    "Pass",
    "Reading",
    "SeenTensors",
    "Table",
    "WarmUp",
    "backend",
    "fingerprint",
    "kinds",
    "merge",
    "root",
    "see",
    "set_num_threads",
    "side_stream",
    "summarize",
    "tree",
    "warm_up",
]
