"""Where the script made a loss that is not finite, and by which operation.

This is asked when a backward pass begins on such a loss: its graph still holds the inputs of the operations, so that a log of zero or a division
by zero is seen there. The line is found by reading the script:

    out = model(x)                  which function called the model was noted then
    loss = total(out, y)            the last line that gave the loss its value: this one,
    loss = loss / 4                 not one that only divides or adds to it, unless the graph shows no reason: what was added may carry no gradient
    loss.backward()                 or `return total(out, y)` in a function that does not call backward itself

and if `total` is the script's own function, the line in it where the operation stands, or its return.
"""

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from holter.rank.own_code import is_own
from holter.records import Origin

MAX_NODES = 64
MAX_UP = 60
MAX_DEPTH = 2
MAX_LINE = 160
MEAN_OF_NOTHING, ALL_IGNORED = (
    "mean of nothing: it was given no values",
    "cross entropy in which every label is ignored",
)
OF_A_WRAPPER = frozenset({"_DDPSinkBackward"})
"""Custom autograd functions that return their inputs unchanged."""
Place = tuple[CodeType, int]
"""A function, and a line in it."""
WORDS = {
    "Log": "log", "Log2": "log2", "Log10": "log10", "Log1p": "log1p", "Div": "/", "Sqrt": "sqrt", "Rsqrt": "rsqrt", "Exp": "exp", "Pow": "**",
    "Mean": "mean", "NllLoss": "cross_entropy", "NllLoss2d": "cross_entropy", "BinaryCrossEntropy": "binary_cross_entropy", "Mul": "*", "Std": "std", "Var": "var",
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "MseLoss": "mse_loss", "KlDiv": "kl_div", "LinalgVectorNorm": "norm", "Acos": "acos", "Asin": "asin", "Atanh": "atanh",
}  # fmt: skip
"""How each operation of the graph is written in a script."""


@dataclass
class LossTrace:
    """What is known about a loss that is not finite."""

    operation: str = ""
    """What went wrong, such as `log of 3 of 8 values that are zero or negative`; empty if the graph does not tell."""
    is_of_nothing: bool | None = None
    """Whether the operation is an average over no values; None if a part of the graph cannot be read."""
    are_outputs_finite: bool | None = None
    """Whether the outputs of the step's models were finite when the backward pass began; None if nobody could look."""
    lines: list[str] = field(default_factory=list)
    """Lines of the script, the likeliest first: `/home/me/train.py:41 in main: loss = total(out, y)`."""
    origin: Origin | None = None
    """The module that made the first number that is not finite, as the loss's graph shows it; None if it does not."""


@functools.lru_cache(maxsize=4096)
def _is_own(filename: str) -> bool:
    return is_own(filename)


def nearest_own(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the script's own code within `MAX_UP` frames; None if there is none."""
    for _ in range(MAX_UP):
        if frame is None or _is_own(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return frame if frame is not None and _is_own(frame.f_code.co_filename) else None


def caller() -> Place | None:
    """Return the innermost of the script's own functions that is running, and its current line; None if there is none."""
    frame = nearest_own(sys._getframe(1))  # noqa: SLF001
    return (frame.f_code, frame.f_lineno) if frame is not None else None


def trace(loss: torch.Tensor, called: Place | None) -> LossTrace:
    """Explain a loss that is not finite, at the start of its backward pass; `called` is where the script called its model."""
    name, operation, is_of_nothing = _culprit(loss.grad_fn)
    word = WORDS.get(name, name.lower())
    frame = nearest_own(sys._getframe(1))  # noqa: SLF001
    lines = list(dict.fromkeys(_lines(frame, called, word)))
    return LossTrace(operation, is_of_nothing, lines=lines)


def lines_in(function: Callable[..., Any], word: str = "") -> Iterator[str]:
    """Yield the line of one of the script's functions that has the operation `word` in it, and the line that makes what it returns."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None and _is_own(code.co_filename) and (scope := _scope(code)) is not None:
        yield from _inside(code, scope, word, {}, 1)


def _lines(frame: FrameType | None, called: Place | None, word: str) -> Iterator[str]:
    if frame is not None and (called is None or frame.f_code is called[0]):
        scope = _scope(frame.f_code)
        names = {**frame.f_globals, **frame.f_locals}
        if scope is not None:
            made = _of_backward(scope, frame.f_lineno)
            yield from _made(frame.f_code, scope, made, frame.f_lineno, word, names, 0)
    elif called is not None and (scope := _scope(called[0])) is not None:
        names = _globals(called[0].co_filename)
        returned = _returned(scope, called[1])
        if returned is not None:
            yield from _made(called[0], scope, returned.value, returned.lineno, word, names, 0)


def _made(  # noqa: PLR0913, PLR0917 - where, what, and by which names it goes
    code: CodeType, scope: ast.AST, value: ast.expr | None, before: int, word: str, names: dict[str, Any], depth: int
) -> Iterator[str]:
    """Yield the lines, above line `before`, that gave `value` what it is."""
    line = before
    if isinstance(value, ast.Name):
        if not word and (added := _added(scope, value.id, before)) is not None:
            yield _shown(code, added.lineno)
        assigned = _assigned(scope, value.id, before)
        if assigned is None:
            return
        line, value = assigned.lineno, assigned.value
    for call in ast.walk(value) if value is not None else ():
        function = _resolved(call.func, names) if isinstance(call, ast.Call) and depth < MAX_DEPTH else None
        inner = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
        if inner is not None and _is_own(inner.co_filename) and (within := _scope(inner)) is not None:
            yield from _inside(inner, within, word, _globals(inner.co_filename), depth + 1)
    yield _shown(code, line)


def _inside(code: CodeType, scope: ast.AST, word: str, names: dict[str, Any], depth: int) -> Iterator[str]:
    """Yield the first line of a function with the operation in it, then the lines that make what it returns."""
    first, last = code.co_firstlineno, max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
    if word:
        source = linecache.getlines(code.co_filename)
        found = [
            number for number in range(first + 1, last + 1) if number <= len(source) and word in source[number - 1]
        ]
        yield from (_shown(code, number) for number in found[:1])
    returned = _returned(scope, first)
    if returned is not None:
        yield from _made(code, scope, returned.value, returned.lineno, word, names, depth)


def _shown(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()[:MAX_LINE]
    return f"{code.co_filename}:{line} in {code.co_name}: {text}"


@functools.lru_cache(maxsize=16)
def _tree(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _scope(code: CodeType) -> ast.AST | None:
    """Return the syntax tree of the function or module that has this code; None if it is not found."""
    tree = _tree(code.co_filename)
    if tree is None or code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _of_backward(scope: ast.AST, line: int) -> ast.expr | None:
    """Return the loss of the backward call on this line: `loss.backward()`, `scaler.scale(loss).backward()`, `accelerator.backward(loss)`."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("backward", "manual_backward"):
            continue
        subject: ast.expr = node.args[0] if node.args else node.func.value
        while (
            isinstance(subject, ast.Call)
            and isinstance(subject.func, ast.Attribute)
            and subject.func.attr == "scale"
            and subject.args
        ):
            subject = subject.args[0]
        return subject
    return None


def _assigned(scope: ast.AST, name: str, before: int) -> ast.Assign | ast.AnnAssign | None:
    """Return the last assignment above line `before` that gave a name a value not made from its old one."""
    found: ast.Assign | ast.AnnAssign | None = None
    for node in ast.walk(scope):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        is_it = any(isinstance(part, ast.Name) and part.id == name for target in targets for part in ast.walk(target))
        if not is_it or not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or node.lineno >= before:
            continue
        if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.value)):
            continue
        if found is None or node.lineno > found.lineno:
            found = node
    return found


def _added(scope: ast.AST, name: str, before: int) -> ast.stmt | None:
    """Return the last statement above line `before` that updates a name, as by adding to it, with the result of a call."""
    found: ast.stmt | None = None
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign | ast.AugAssign) or node.lineno >= before:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        is_it = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        is_own = isinstance(node, ast.AugAssign) or any(
            isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.value)
        )
        is_computed = any(isinstance(part, ast.Call) for part in ast.walk(node.value))
        if is_it and is_own and is_computed and (found is None or node.lineno > found.lineno):
            found = node
    return found


def _returned(scope: ast.AST, after: int) -> ast.Return | None:
    """Return the first `return` at or after a line, reduced to its first value: `loss` of `return (loss, out) if both else loss`."""
    found = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Return) and node.lineno >= after and node.value is not None
    ]
    if not found:
        return None
    first = min(found, key=lambda node: node.lineno)
    value = first.value
    while isinstance(value, ast.Tuple | ast.IfExp | ast.Dict):
        parts = (
            value.elts
            if isinstance(value, ast.Tuple)
            else value.values
            if isinstance(value, ast.Dict)
            else [value.body]
        )
        if not parts:
            return None
        value = parts[0]
    return ast.copy_location(ast.Return(value=value), first)


def _resolved(expression: ast.expr, names: dict[str, Any]) -> Any:
    """Return the function that an expression names, without running any code, not even a property; None if it names none."""
    if isinstance(expression, ast.Name):
        found = names.get(expression.id)
    elif isinstance(expression, ast.Attribute) and (owner := _resolved_owner(expression.value, names)) is not None:
        found = inspect.getattr_static(owner, expression.attr, None)
        if found is None and isinstance(owner, torch.nn.Module):
            found = owner._modules.get(expression.attr)  # noqa: SLF001
    else:
        return None
    if isinstance(found, torch.nn.Module):
        return type(found).forward
    found = getattr(found, "__func__", found)
    return found if inspect.isfunction(found) else None


def _resolved_owner(expression: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    if isinstance(expression, ast.Attribute) and (owner := _resolved_owner(expression.value, names)) is not None:
        found = inspect.getattr_static(owner, expression.attr, None)
        return owner._modules.get(expression.attr) if found is None and isinstance(owner, torch.nn.Module) else found  # noqa: SLF001
    return None


def _globals(filename: str) -> dict[str, Any]:
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == filename:
            return dict(vars(module))
    return {}


def _culprit(node: Any) -> tuple[str, str, bool | None]:
    """Return the first operation with inputs outside its domain, what is wrong with them, and whether any operation averages nothing.

    Both strings are empty if the graph shows no such operation; the last value is None if a part of the graph cannot be read.
    """
    nodes, last, is_of_nothing = [node] if node is not None else [], ("", ""), False
    is_opaque = False
    seen: set[Any] = set()
    while nodes and len(seen) < MAX_NODES:
        node = nodes.pop(0)
        if node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        name = kind.partition("Backward")[0]
        is_opaque |= isinstance(node, torch.autograd.function.BackwardCFunction) and kind not in OF_A_WRAPPER
        # The deepest such operation was computed first; those after it only pass its result on.
        if said := _domain(name, node):
            last = (name, said)
            is_of_nothing |= said in (MEAN_OF_NOTHING, ALL_IGNORED)
        nodes += [function for function, _ in node.next_functions if function is not None]
    return *last, is_of_nothing or (None if is_opaque else False)


def _domain(name: str, node: Any) -> str:  # noqa: PLR0911 - a line for each kind of operation
    """Say what is outside the operation's domain; empty if the graph shows nothing."""
    given, other, result = (_saved(node, part) for part in ("self", "other", "result"))
    if name in ("Log", "Log2", "Log10") and given is not None:
        return _counted(given <= 0, f"{name.lower()} of", "that are zero or negative")
    if name == "Log1p" and given is not None:
        return _counted(given <= -1, "log1p of", "that are -1 or less")
    if name == "Div" and other is not None:
        return _counted(other == 0, "division by", "that are zero")
    if name in ("Sqrt", "Rsqrt", "Exp", "Softmax", "LogSoftmax", "Acos", "Asin", "Atanh") and result is not None:
        return _counted(~torch.isfinite(result), f"{WORDS[name]} with", "that are not finite, in its result")
    if name == "Mean" and _size(node) == 0:
        return MEAN_OF_NOTHING
    if name.startswith("NllLoss") and (weight := _saved(node, "total_weight")) is not None:
        return ALL_IGNORED if float(weight.sum()) == 0 else ""
    if (
        name in ("MseLoss", "BinaryCrossEntropy", "KlDiv", "SmoothL1Loss", "L1Loss")
        and (target := _saved(node, "target")) is not None
    ):
        return (
            MEAN_OF_NOTHING
            if target.numel() == 0
            else _counted(
                ~torch.isfinite(target), f"{WORDS.get(name, name)} against", "that are not finite, in its target"
            )
        )
    if name == "Mul" and other is not None:
        return (
            _counted(~torch.isfinite(other), "product with", "that are not finite")
            if given is not None and bool(torch.isfinite(given).all())
            else ""
        )
    return ""


def _saved(node: Any, part: str) -> torch.Tensor | None:
    """Return a tensor that the graph keeps for the backward pass; None if it was freed, is on a device, or was packed by a hook.

    Unpacking would compute, and may communicate. A plain number is returned as a tensor.
    """
    try:
        if getattr(getattr(node, f"_raw_saved_{part}", None), "unpack_hook", None) is not None:
            return None
        value = getattr(node, f"_saved_{part}", None)
    except RuntimeError:
        return None
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    return value.detach() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else None


def _size(node: Any) -> int | None:
    found = getattr(node, "_saved_self_sym_numel", None)
    if isinstance(found, int):
        return found
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return int(torch.Size(sizes).numel()) if sizes is not None else None


def _counted(bad: torch.Tensor, before: str, after: str) -> str:
    count = int(bad.sum())
    return f"{before} {count} of {bad.numel()} values {after}" if count else ""
