"""Finds what a script does in the wrong order: an optimizer built too early, gradients clipped while scaled, a model left in evaluation mode."""

import ast
from collections.abc import Iterator

from holter.offline.preflight.record import PreflightCheck, failed, warned
from holter.offline.preflight.syntax import OPTIMIZERS, all_calls, last, root_of

SHARDS = frozenset({"fully_shard", "FullyShardedDataParallel", "FSDP", "parallelize_module"})
REPLACES = {
    "get_peft_model": "adds adapters", "resize_token_embeddings": "makes new embeddings", "to_empty": "makes new parameters",
    "prepare_model_for_kbit_training": "changes parameters",
}  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def out_of_order(tree: ast.Module, file: str) -> Iterator[PreflightCheck]:
    """Yield one failed or warned check for each thing in the wrong order; scope by scope, because lines of different functions have no order."""
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))]:
        calls = sorted(_own_calls(scope), key=lambda call: (call.lineno, call.col_offset))
        yield from _stale_optimizers(calls, file, _held_parameters(scope))
    yield from _scaled_clipping(tree, file)
    yield from _left_in_evaluation(tree, file)


def _own_calls(scope: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of a scope outside of functions inside it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, ast.Call):
            yield node
        waiting += ast.iter_child_nodes(node)


def _held_parameters(scope: ast.AST) -> dict[str, set[str]]:
    """Return variable -> names of the models whose parameters it holds: `params = [p for p in model.parameters()]`."""
    return {
        target.id: roots
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and last(node.value) not in OPTIMIZERS and (roots := _asked_for_parameters(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }  # fmt: skip


def _stale_optimizers(calls: list[ast.Call], file: str, held: dict[str, set[str]]) -> Iterator[PreflightCheck]:
    built = [(call, root) for call in calls if last(call.func) in OPTIMIZERS for root in sorted(_models_of(call, held))]
    for call, root in built:
        later = next(
            ((other, what) for other in calls if other.lineno > call.lineno and (what := _new_parameters(other, root))),
            None,
        )
        is_built_again = later and any(
            one.lineno >= later[0].lineno and name == root for one, name in built if one is not call
        )
        if later and not is_built_again:
            yield failed(
                "optimizer before sharding",
                f"line {call.lineno}: the optimizer is given the parameters of `{root}`, and line {later[0].lineno} {later[1]}: it steps tensors that are the model's no more",
                "Build the optimizer after that line.", file=file, line=call.lineno,
            )  # fmt: skip


def _models_of(call: ast.Call, held: dict[str, set[str]] | None = None) -> set[str]:
    """Return the names of the models whose parameters an optimizer is given."""
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "params")]
    found: set[str] = set()
    for argument in given:
        found |= _asked_for_parameters(argument)
        found |= (held or {}).get(argument.id, set()) if isinstance(argument, ast.Name) else set()
    return found


def _asked_for_parameters(expression: ast.expr) -> set[str]:
    return {
        root
        for inner in ast.walk(expression)
        if isinstance(inner, ast.Call)
        and last(inner.func) in {"parameters", "named_parameters"}
        and (root := root_of(inner.func))
    }


def _new_parameters(call: ast.Call, root: str) -> str:
    """Return in words how a call shards or replaces the parameters of a model; empty if it does neither."""
    name = last(call.func)
    is_about = any(root_of(argument) == root for argument in call.args[:1]) or (
        isinstance(call.func, ast.Attribute) and root_of(call.func) == root
    )
    if not is_about:
        return ""
    if name in SHARDS:
        return f"({name}) shards it"
    if name == "load_state_dict" and any(
        keyword.arg == "assign" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    ):
        return "(load_state_dict with assign=True) puts other tensors in their place"
    return f"({name}) {REPLACES[name]}" if name in REPLACES else ""


def _scaled_clipping(tree: ast.Module, file: str) -> Iterator[PreflightCheck]:
    """Find clipping of scaled gradients.

    A loss scaler multiplies gradients by thousands, so a limit is meaningless before they are unscaled.
    """
    calls = list(all_calls(tree))
    names = {last(call.func) for call in calls}
    clips = [call for call in calls if last(call.func) in {"clip_grad_norm_", "clip_grad_value_"}]
    has_scaler = "GradScaler" in names and "scale" in names
    is_by_hand = any(root_of(call.func) in {"torch", "nn", "utils", "clip_grad_norm_", "clip_grad_value_"} for call in clips)  # fmt: skip
    if has_scaler and clips and is_by_hand and "unscale_" not in names:
        yield failed(
            "scaled clipping",
            f"line {clips[0].lineno}: gradients are clipped while they are still multiplied by the loss scale: every step is cut to next to nothing",
            "Call `scaler.unscale_(optimizer)` before clipping.", file=file, line=clips[0].lineno,
        )  # fmt: skip


def _left_in_evaluation(tree: ast.Module, file: str) -> Iterator[PreflightCheck]:
    """Find `model.eval()` in a script that trains that model and never calls its `train()`."""
    calls = list(all_calls(tree))
    names = {last(call.func) for call in calls}
    trained = {root for call in calls if last(call.func) in OPTIMIZERS for root in _models_of(call)}
    if "backward" not in names or any("Trainer" in name for name in names):
        return
    for call in calls:
        root = root_of(call.func) if isinstance(call.func, ast.Attribute) else ""
        if last(call.func) != "eval" or call.args or root not in trained:
            continue
        is_back = any(last(other.func) == "train" and root_of(other.func) == root for other in calls)
        steps = [other.lineno for other in calls if last(other.func) == "backward"]
        # After the last step, `eval()` is for the final evaluation, unless a loop comes back to the training.
        if not is_back and (min(steps) > call.lineno or _shares_loop(tree, call, steps)):
            yield warned(
                "evaluation mode", f"line {call.lineno}: `{root}.eval()`, and `{root}.train()` is never called: dropout and normalisation stay as in evaluation while it trains",
                "Call `train()` before the training goes on.", file=file, line=call.lineno,
            )  # fmt: skip


def _shares_loop(tree: ast.Module, call: ast.Call, lines: list[int]) -> bool:
    return any(
        loop.lineno <= call.lineno <= (loop.end_lineno or 0) and any(loop.lineno <= line <= (loop.end_lineno or 0) for line in lines)
        for loop in ast.walk(tree)
        if isinstance(loop, ast.For | ast.While)
    )  # fmt: skip
