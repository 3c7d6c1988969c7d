"""Finds, before a long run, what will not work on this machine, with these settings or this script, and says what to do about it.

machine   the interpreter, torch, py-spy, limits, shared memory, disk, ports
settings  variables of NCCL, gloo and launchers that contradict each other; accelerate's and DeepSpeed's configs; the launcher's own options
script    the training script, by its syntax tree alone
"""

from holter.offline.preflight.record import PreflightCheck

__all__ = ["PreflightCheck"]
