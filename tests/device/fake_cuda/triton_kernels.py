"""Triton's kernels on the device: any `@triton.jit` function runs in Triton's interpreter, later, on the stream that it was launched on.

Tensors are given by the addresses that streams see. An address that a kernel finds in memory (in a table of pointers, say) is one of the
device; every load, store and atomic operation of the interpreter translates those.
"""

import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

INTERPRETER = "triton.runtime.interpreter"


class Translated:
    """Triton's interpreter of memory, whose pointers may be the device's."""

    def __init__(self, interpreter: ModuleType, device: ModuleType) -> None:
        self._interpreter, self._device = interpreter, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def load(self, pointers: np.ndarray, *rest: Any) -> Any:
        return self._interpreter.load(self._seen(pointers), *rest)

    def store(self, pointers: np.ndarray, *rest: Any) -> Any:
        return self._interpreter.store(self._seen(pointers), *rest)

    def atomic_cas(self, pointers: np.ndarray, *rest: Any) -> Any:
        return self._interpreter.atomic_cas(self._seen(pointers), *rest)

    def atomic_rmw(self, operation: Any, pointers: np.ndarray, *rest: Any) -> Any:
        return self._interpreter.atomic_rmw(operation, self._seen(pointers), *rest)

    def _seen(self, pointers: np.ndarray) -> np.ndarray:
        for first, size, shift in self._device.arenas():
            inside = (pointers >= first) & (pointers < first + size)
            if inside.any():
                pointers = np.where(inside, pointers + np.uint64(shift % 2**64), pointers)
        return pointers


def install(interpreter: ModuleType, device: ModuleType) -> None:
    """Launches whose arguments lie on the device go to its stream."""
    interpreter._interpreter = Translated(interpreter._interpreter, device)
    # The interpreter patches the language while a kernel runs: one at a time.
    turn = threading.RLock()

    class OnStream(interpreter.GridExecutor):
        def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
            return args, kwargs

        def _restore_args_dev(self, *_: Any) -> None:
            """Nothing was copied."""

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if warmup:
            return
        index = next((a.device.index for a in (*args, *kwargs.values()) if _is_on_device(a)), None)
        if index is None:
            with turn:
                original(function, *args, grid=grid, warmup=warmup, **kwargs)
            return
        args = [_seen_by_streams(device, argument) for argument in args]
        kwargs = {name: _seen_by_streams(device, value) for name, value in kwargs.items()}
        if callable(grid):
            grid = grid(dict(zip(function.arg_names, args, strict=False)) | kwargs)

        def later() -> None:
            with turn:
                OnStream(function.rewrite(), function.arg_names, grid, function.pre_run_hooks)(*args, **kwargs)

        with torch.cuda.device(index):
            device.enqueue(f"triton {function.__name__}", later)

    original = interpreter.InterpretedFunction.run
    interpreter.InterpretedFunction.run = run
    interpreter.InterpretedFunction.reads_devices = True


def _is_on_device(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.is_cuda


def _seen_by_streams(device: ModuleType, argument: Any) -> Any:
    return device.seen_by_streams(argument) if _is_on_device(argument) else argument


class Finder(importlib.abc.MetaPathFinder):
    """Finds Triton's interpreter as Python does, and completes it once it is loaded: nobody pays for Triton who does not use it."""

    def __init__(self, complete: Callable[[ModuleType], None]) -> None:
        self._complete = complete

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        if name != INTERPRETER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_complete(module: ModuleType) -> None:
            execute(module)
            self._complete(module)

        spec.loader.exec_module = execute_and_complete
        return spec


def install_when_imported(device: ModuleType) -> None:
    """Now, or as soon as somebody imports Triton."""
    if INTERPRETER in sys.modules:
        install(sys.modules[INTERPRETER], device)
    else:
        sys.meta_path.insert(0, Finder(lambda module: install(module, device)))
