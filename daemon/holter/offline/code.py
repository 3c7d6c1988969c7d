"""Parses a script without importing it, for the lines that a cause points to and the parameters of its layers.

A hint is a line to look at, by inference: code shows what may happen, not what did happen.
"""

import ast
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from holter.offline.found import Code, Shapes

MAX_BYTES = 2**20


@dataclass(frozen=True)
class Hint:
    """A line of code, and why it is worth looking at."""

    kind: str
    file: str
    line: int
    text: str
    """Content of the line, shortened."""
    why: str


def looks_like_code(text: str) -> bool:
    """Whether a text is Python: it parses, and imports or defines something."""
    if len(text) > MAX_BYTES or not any(word in text for word in ("import ", "def ", "class ")):
        return False
    return _parsed(text) is not None


def _parsed(text: str) -> ast.Module | None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return tree if any(isinstance(node, kinds) for node in tree.body) else None


def hints(code: Code) -> list[Hint]:
    """Return the lines of a script that may be connected with faults of training."""
    tree = _parsed(code.text)
    try:
        return _hints(code, tree) if tree is not None else []
    except RecursionError:
        # The script has an expression so deep that no person has written it.
        return []


def _hints(code: Code, tree: ast.Module) -> list[Hint]:
    lines = code.text.splitlines()
    found: list[Hint] = []

    def note(kind: str, node: ast.AST, why: str) -> None:
        line = getattr(node, "lineno", 1)
        found.append(Hint(kind, code.file, line, lines[line - 1].strip()[:160] if line <= len(lines) else "", why))

    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {_called(call) for call in calls}
    for call in calls:
        _hint_of_call(call, _called(call), note)
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith)) and any(
            "no_grad" in ast.unparse(item.context_expr) for item in node.items
        ):
            note("no_grad", node, "no gradient is recorded inside")
        if isinstance(node, ast.AugAssign) and "loss" in ast.unparse(node.target) and isinstance(node.op, ast.Add):
            note("loss_term", node, "a term is added to the loss")
        if (
            isinstance(node, ast.Assign)
            and any("loss" in ast.unparse(target) for target in node.targets)
            and isinstance(node.value, ast.BinOp)
        ):
            note("loss_term", node, "the loss is made of terms")
    if any(name.endswith("DistributedSampler") for name in names) and not any(
        name.endswith("set_epoch") for name in names
    ):
        note(
            "set_epoch",
            next(call for call in calls if _called(call).endswith("DistributedSampler")),
            "set_epoch is never called: every epoch has the same order",
        )
    wraps = [
        call.lineno
        for call in calls
        if _called(call).rpartition(".")[2] in {"fully_shard", "FSDP", "FullyShardedDataParallel"}
    ]
    built = [
        call
        for call in calls
        if ".optim." in f".{_called(call)}"
        and _called(call).rpartition(".")[2][:1].isupper()
        and "lr_scheduler" not in _called(call)
    ]
    for call in built:
        if any(call.lineno < line for line in wraps):
            note(
                "optimizer_before_sharding",
                call,
                "the optimizer is built before the model is sharded: it may hold tensors that are the model's no more",
            )
    return sorted(found, key=lambda hint: hint.line)


def calls_with_constants(code: Code, names: Collection[str]) -> list[tuple[str, int, dict[str, str]]]:
    """Return (name, line, constant arguments) of every call of one of these names, in the order of the script."""
    tree = _parsed(code.text)
    found = []
    for node in ast.walk(tree) if tree is not None else ():
        name = _called(node).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in names:
            given = {word.arg: _constant(word.value) for word in node.keywords if word.arg}
            found.append((name, node.lineno, {key: value for key, value in given.items() if value}))
    return sorted(found, key=lambda one: one[1])


def _constant(node: ast.expr) -> str:
    """Return a constant number or list of numbers as text; empty for any other expression."""
    try:
        return str(ast.literal_eval(node))[:300]
    except (ValueError, TypeError, MemoryError, RecursionError):
        return ""


def _called(call: ast.Call) -> str:
    try:
        return ast.unparse(call.func)
    except (RecursionError, ValueError):
        return ""


def _hint_of_call(call: ast.Call, name: str, note: "object") -> None:
    assert callable(note)
    last = name.rpartition(".")[2]
    if last in {"var", "std", "var_mean", "std_mean"}:
        note("variance", call, "a variance: with one sample or none it is NaN, unless unbiased=False (correction=0)")
    elif last == "detach":
        note("detach", call, "the graph ends here")
    elif last == "clip_grad_norm_":
        note("clip", call, "gradients are clipped here")
    elif "lr_scheduler" in name or last in {
        "StepLR",
        "MultiStepLR",
        "CosineAnnealingWarmRestarts",
        "LambdaLR",
        "OneCycleLR",
        "ExponentialLR",
        "CyclicLR",
        "CosineAnnealingLR",
        "MultiplicativeLR",
    }:
        note("schedule", call, "the learning rate's schedule")
    elif last in {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Lion", "NAdam", "RAdam"}:
        note("optimizer", call, "the optimizer and its rate")


Sizes = Mapping[str, float]


def shapes(code: Code, settings: Mapping[str, str]) -> Shapes | None:
    """Return the parameters of the layers that a model's `__init__` makes; None if there are fewer than two.

    Sizes must follow from constants, defaults and settings.
    """
    tree = _parsed(code.text)
    try:
        return _shapes(code, tree, settings) if tree is not None else None
    except (RecursionError, OverflowError, ValueError):
        # The script has sizes that no model has.
        return None


def _shapes(code: Code, tree: ast.Module, settings: Mapping[str, str]) -> Shapes | None:
    known = _constants(tree, settings)
    entries: list[tuple[str, tuple[int, ...], str]] = []
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    held = {_called(call) for one in classes.values() for call in ast.walk(one) if isinstance(call, ast.Call)} & set(
        classes
    )
    for name, node in classes.items():
        if name not in held:
            entries += _layers(node, known, classes, "", 0)
    tied = _tied(tree)
    entries = [entry for entry in entries if not tied or not entry[0].endswith(tuple(tied))]
    return Shapes(code.file, tuple(entries[:5000]), "inference") if len(entries) > 1 else None


def _tied(tree: ast.Module) -> set[str]:
    """Return the names on the left sides of assignments such as `self.head.weight = self.wte.weight`.

    These are the same tensors as those on the right sides, and so are counted once.
    """
    pairs = [(node.targets[0], node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]  # fmt: skip
    return {
        f"{target.value.attr}.weight"
        for target, value in pairs
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Attribute)
        and isinstance(value, ast.Attribute)
        and target.attr == value.attr == "weight"
    }


def _constants(tree: ast.Module, settings: Mapping[str, str]) -> dict[str, float]:
    known: dict[str, float] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            pairs = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
            more = [
                (arg, value)
                for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                if value is not None
            ]
            for arg, default in (*pairs, *more):
                _remember(known, arg.arg, default)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            _remember(known, node.targets[0].id, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            _remember(known, node.target.id, node.value)
        elif isinstance(node, ast.keyword) and node.arg:
            _remember(known, node.arg, node.value)
    for name, text in settings.items():
        try:
            known[name.rpartition(".")[2]] = float(text)
        except ValueError:
            continue
    return known


def _remember(known: dict[str, float], name: str, value: ast.expr) -> None:
    number = _size(value, known)
    if number is not None and name not in known:
        known[name] = number


def _size(node: ast.expr, known: Sizes) -> float | None:  # noqa: PLR0911 - one line a kind of expression
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return known.get(name)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _size(left, known), _size(right, known)
            if a is None or b is None:
                return None
            if isinstance(op, ast.Mult):
                return a * b
            if isinstance(op, (ast.Add, ast.Sub)):
                return a + b if isinstance(op, ast.Add) else a - b
            return a // b if isinstance(op, (ast.FloorDiv, ast.Div)) and b else None
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            return _size(inner, known)
    return None


HAS_PARAMETERS = frozenset({"Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "LSTM", "GRU", "RNN", "MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"})  # fmt: skip
"""Classes of layers whose sizes must be known before shares of the parameters are judged."""


def _layers(
    node: ast.ClassDef, known: Sizes, classes: Mapping[str, ast.ClassDef], prefix: str, depth: int
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield the layers that are assigned to `self` in `__init__`, as often as a list repeats them."""
    for method in node.body:
        if not (isinstance(method, ast.FunctionDef) and method.name == "__init__"):
            continue
        for statement in ast.walk(method):
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
                name = f"{prefix}{statement.targets[0].attr}"
                for call, times in _calls(statement.value, known, 1):
                    yield from _layer(call, name, times, known, classes, depth)


def _calls(node: ast.expr, known: Sizes, times: int) -> Iterator[tuple[ast.Call, int]]:
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        many = (
            _size(node.generators[0].iter.args[-1], known)
            if isinstance(node.generators[0].iter, ast.Call) and node.generators[0].iter.args
            else None
        )
        yield from _calls(node.elt, known, times * int(many or 1))
    elif isinstance(node, (ast.List, ast.Tuple)):
        for one in node.elts:
            yield from _calls(one, known, times)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from _calls(value, known, times)
    elif isinstance(node, ast.Call):
        last = _called(node).rpartition(".")[2]
        if last in {"ModuleList", "Sequential", "ModuleDict", "dict"}:
            for inner in (*node.args, *(keyword.value for keyword in node.keywords)):
                yield from _calls(inner, known, times)
        else:
            yield node, times


def _given(call: ast.Call, made: ast.ClassDef, known: Sizes) -> Sizes:
    """Return the sizes known inside a class of the script that is made with these arguments."""
    init = next((one for one in made.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    names = [argument.arg for argument in init.args.args[1:]] if init else []
    given = [*zip(names, call.args, strict=False), *((one.arg, one.value) for one in call.keywords if one.arg)]
    return {**known, **{name: size for name, value in given if (size := _size(value, known)) is not None}}


def _layer(  # noqa: PLR0913, PLR0917
    call: ast.Call, name: str, times: int, known: Sizes, classes: Mapping[str, ast.ClassDef], depth: int
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    kind = _called(call).rpartition(".")[2]
    if kind in classes and depth < 4:  # noqa: PLR2004 - deeper is a loop
        given = _given(call, classes[kind], known)
        for number in range(min(times, 512)):
            yield from _layers(
                classes[kind], given, classes, f"{name}.{number}." if times > 1 else f"{name}.", depth + 1
            )
        return
    sizes = [_size(argument, known) for argument in call.args]
    by_name = {keyword.arg: _size(keyword.value, known) for keyword in call.keywords if keyword.arg}
    a = (
        sizes[0]
        if sizes
        else next(
            (
                by_name[key]
                for key in (
                    "num_embeddings",
                    "in_features",
                    "in_channels",
                    "input_size",
                    "embed_dim",
                    "d_model",
                    "normalized_shape",
                )
                if by_name.get(key)
            ),
            None,
        )
    )
    b = (
        sizes[1]
        if len(sizes) > 1
        else next(
            (
                by_name[key]
                for key in ("embedding_dim", "out_features", "out_channels", "hidden_size", "dim_feedforward")
                if by_name.get(key)
            ),
            None,
        )
    )
    num = _count(kind, a, b, sizes, by_name)
    if kind == "from_pretrained" or (num is None and kind in HAS_PARAMETERS):
        raise ValueError(f"{name} has parameters that nobody can count here")
    if num is not None and num > 0:
        for number in range(min(times, 512)):
            own = f"{name}.{number}.weight" if times > 1 else f"{name}.weight"
            is_matrix = kind in {"Embedding", "Linear"} and a is not None and b is not None
            yield own, (int(a), int(b)) if is_matrix and a and b else (int(num),), kind


def _count(  # noqa: PLR0911
    kind: str, a: float | None, b: float | None, sizes: list[float | None], by_name: Mapping[str, float | None]
) -> float | None:
    if a is None:
        return None
    if kind in {"Embedding", "Linear", "EmbeddingBag"}:
        return a * b if b is not None else None
    if kind in {"LSTM", "GRU", "RNN"} and b is not None:
        gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
        layers = by_name.get("num_layers") or (sizes[2] if len(sizes) > 2 else 1) or 1  # noqa: PLR2004 - its place
        return gates * (a * b + b * b + 2 * b) + max(0, layers - 1) * gates * (2 * b * b + 2 * b)
    if kind.startswith("Conv") and b is not None and kind[4:5].isdigit():
        kernel = by_name.get("kernel_size") or (sizes[2] if len(sizes) > 2 else None)  # noqa: PLR2004 - its place
        return a * b * math.pow(kernel, int(kind[4])) if kernel else None
    if kind == "MultiheadAttention":
        return 4 * a * a
    if kind in {"TransformerEncoderLayer", "TransformerDecoderLayer"}:
        forward = by_name.get("dim_feedforward") or (sizes[2] if len(sizes) > 2 and sizes[2] else 2048)  # noqa: PLR2004 - its place
        return (4 if "Encoder" in kind else 8) * a * a + 2 * a * (forward or 2048)
    if kind in {"LayerNorm", "RMSNorm", "BatchNorm1d", "BatchNorm2d", "GroupNorm"}:
        return 2 * a
    return None
