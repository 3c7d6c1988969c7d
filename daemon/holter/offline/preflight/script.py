"""Checks a training script by its syntax tree: nothing is imported or run.

It finds collectives that only some ranks reach, epochs that all have the same order, an accelerator or a wrapper that was
forgotten, parameters that are frozen or made after they were wrapped, checkpoints that rotate away. Sound code that looks
like these is not reported: both sides of a condition that call the same collectives, the known pair of barriers around a
download, a collective with its own group, another model that is frozen.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from holter.offline.preflight.order import out_of_order
from holter.offline.preflight.record import PreflightCheck, failed, warned
from holter.offline.preflight.syntax import OPTIMIZERS, all_calls, last, root_of

COLLECTIVES = frozenset(
    {"barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "broadcast",
     "broadcast_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather_object", "scatter_object_list",
     "wait_for_everyone", "gather_for_metrics", "pad_across_processes", "save_state", "load_state", "save_checkpoint", "consolidate_state_dict", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "full_tensor", "summon_full_params", "synchronize_between_processes"}
)  # fmt: skip
QUALIFIED = frozenset({"gather", "reduce", "scatter"})
"""Names that are collectives only as methods of `dist`, `distributed` or an accelerator."""
_RANK_WORDS = frozenset(
    {"rank", "local_rank", "global_rank", "world_rank", "dp_rank", "process_index", "local_process_index", "is_main_process", "is_local_main_process",
     "is_main", "is_master", "master_process", "is_rank0", "is_rank_zero", "is_global_zero", "is_world_process_zero", "is_local_process_zero", "main_process",
     "get_rank", "get_local_rank", "node_rank", "is_chief"}
)  # fmt: skip
_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "SLURM_PROCID", "GROUP_RANK"})
_MAIN_WORDS = frozenset(
    word for word in _RANK_WORDS if word.startswith("is_") or word in {"master_process", "main_process"}
)
_WRAPPERS = frozenset(
    {
        "DistributedDataParallel",
        "DDP",
        "FullyShardedDataParallel",
        "FSDP",
        "fully_shard",
        "parallelize_module",
        "DeepSpeedEngine",
    }
)
_ON_MAIN = frozenset({"on_main_process", "on_local_main_process", "on_last_process", "rank_zero_only"})
_KEEPS = frozenset({"save_total_limit", "total_limit", "keep_last_n", "max_to_keep"})


def look(text: str, file: str) -> list[PreflightCheck]:
    """Return all results in the order of their lines; a file that is not Python gives one failed check."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 0) or 0
        return [
            failed(
                "script",
                f"{file} is not Python that this interpreter can parse: {error}",
                "Mend it, or name another file.",
                file=file,
                line=line,
            )
        ]
    script = _Script(_with_names_resolved(tree), file)
    found = [
        *script.collectives(),
        *script.epochs(),
        *script.unprepared(),
        *script.unwrapped(),
        *script.late(),
        *script.rotated(),
        *out_of_order(script.tree, file),
    ]
    return sorted(found, key=lambda one: one.line)


@dataclass(frozen=True)
class _Call:
    """A collective under a condition on the rank."""

    name: str
    line: int
    side: str
    """`main` or `others`; empty if the condition is neither."""


@dataclass
class _Script:
    tree: ast.Module
    file: str
    calling: dict[str, str] = field(default_factory=dict)
    """Functions of the script that call a collective -> that collective."""

    def __post_init__(self) -> None:
        functions = {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for _ in range(3):
            for name, node in functions.items():
                inside = next(self._collectives_in(node.body), None)
                if inside and name not in self.calling and name not in COLLECTIVES:
                    self.calling[name] = inside[0]

    def collectives(self) -> Iterator[PreflightCheck]:
        """Find calls that all ranks must make, under a condition on the rank."""
        for scope in self._scopes():
            calls = list(self._guarded(scope))
            sides = {(call.name, call.side) for call in calls}
            for call in calls:
                other = {"main": "others", "others": "main"}.get(call.side)
                # This is the known pair of barriers: the others wait before the download, the first rank after it.
                if other is not None and (call.name, other) in sides:
                    continue
                yield failed(
                    "barrier under a rank condition",
                    f"line {call.line}: {call.name} is reached by some ranks only: the others never enter it, and those that did wait for ever",
                    "Move the call out of the condition, so that every rank makes it.",
                    file=self.file, line=call.line,
                )  # fmt: skip

    def _scopes(self) -> Iterator[list[ast.stmt]]:
        yield self.tree.body
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if any(last(decorator) in _ON_MAIN for decorator in node.decorator_list):
                    yield [
                        ast.If(
                            test=ast.Name(id="is_main_process", ctx=ast.Load()),
                            body=node.body,
                            orelse=[],
                            lineno=node.lineno,
                            col_offset=0,
                        )
                    ]
                yield node.body

    def _guarded(self, body: list[ast.stmt]) -> Iterator[_Call]:
        """Yield the collectives under a condition on the rank in one scope, without functions inside it, which are scopes of their own."""
        for place, node in enumerate(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if isinstance(node, ast.ClassDef):
                    yield from self._guarded(node.body)
                continue
            if isinstance(node, ast.If) and (side := _side(node.test)) is not None:
                yield from self._one_sided(node, side)
                if _leaves(node.body) and not node.orelse:
                    rest = {"main": "others", "others": "main"}.get(side, side)
                    yield from (_Call(name, line, rest) for name, line in self._collectives_in(body[place + 1 :]))
                    return
                continue
            if isinstance(node, ast.Match) and _is_rank(node.subject):
                yield from self._cases(node)
                continue
            if (isinstance(node, ast.For) and _is_rank(node.iter)) or (
                isinstance(node, ast.While) and _is_rank(node.test)
            ):
                yield from (_Call(name, line, "") for name, line in self._collectives_in(node.body))
                continue
            yield from self._expressions(node)
            for inner in ("body", "orelse", "finalbody"):
                yield from self._guarded(getattr(node, inner, None) or [])
            for handler in getattr(node, "handlers", []):
                yield from self._guarded(handler.body)

    def _cases(self, node: ast.Match) -> Iterator[_Call]:
        """Yield the collectives of all cases of a `match` on the rank, unless every case calls the same ones."""
        made = [list(self._collectives_in(case.body)) for case in node.cases]
        names = [sorted(name for name, _ in calls) for calls in made]
        if any(one != names[0] for one in names):
            yield from (_Call(name, line, "") for calls in made for name, line in calls)

    def _one_sided(self, node: ast.If, side: str) -> Iterator[_Call]:
        mine, theirs = list(self._collectives_in(node.body)), list(self._collectives_in(node.orelse))
        opposite = {"main": "others", "others": "main"}.get(side, side)
        for calls, others, whose in ((mine, theirs, side), (theirs, mine, opposite)):
            names = [name for name, _ in others]
            for name, line in calls:
                if name in names:
                    names.remove(name)
                else:
                    yield _Call(name, line, whose)

    def _expressions(self, node: ast.stmt) -> Iterator[_Call]:
        """Yield collectives under a condition within an expression: `rank == 0 and dist.barrier()`; `dist.barrier() if rank == 0 else None`."""
        if not isinstance(node, ast.Expr | ast.Assign | ast.Return):
            return
        for inner in ast.walk(node):
            if isinstance(inner, ast.BoolOp) and (side := _side(inner.values[0])) is not None:
                yield from (
                    _Call(name, line, side)
                    for name, line in self._calls(ast.Tuple(elts=inner.values[1:], ctx=ast.Load()))
                )
            elif isinstance(inner, ast.IfExp) and (side := _side(inner.test)) is not None:
                mine, theirs = list(self._calls(inner.body)), [name for name, _ in self._calls(inner.orelse)]
                yield from (_Call(name, line, side) for name, line in mine if name not in theirs)

    def _collectives_in(self, body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from self._calls(node)

    def _calls(self, node: ast.AST) -> Iterator[tuple[str, int]]:
        """Yield (collective, line) of collectives of all ranks; one with its own group is left out, because it may be meant for some ranks."""
        for call in ast.walk(node):
            if not isinstance(call, ast.Call):
                continue
            name = last(call.func)
            owner = last(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            is_collective = name in COLLECTIVES or (
                name in QUALIFIED and owner in {"dist", "distributed", "accelerator", "fabric"}
            )
            if is_collective and not any(keyword.arg in {"group", "process_group"} for keyword in call.keywords):
                yield name, call.lineno
            elif name in self.calling and isinstance(call.func, ast.Name):
                yield self.calling[name], call.lineno

    def epochs(self) -> Iterator[PreflightCheck]:
        """Find a DistributedSampler that shuffles in a script with several epochs that never calls set_epoch."""
        samplers = [
            call
            for call in all_calls(self.tree)
            if last(call.func) == "DistributedSampler" and _value(call, "shuffle") is not False
        ]
        has_epochs = any(isinstance(node, ast.For | ast.While) and _counts_epochs(node) for node in ast.walk(self.tree))
        if samplers and has_epochs and not any(last(call.func) == "set_epoch" for call in all_calls(self.tree)):
            line = samplers[0].lineno
            yield failed(
                "set_epoch", f"line {line}: a DistributedSampler shuffles, and set_epoch is never called: every epoch has the same order",
                "Call `sampler.set_epoch(epoch)` at the start of each epoch.", file=self.file, line=line,
            )  # fmt: skip

    def unprepared(self) -> Iterator[PreflightCheck]:
        """Find an Accelerator that was not given a model, an optimizer or a loader of the training loop."""
        calls = list(all_calls(self.tree))
        makers = [call for call in calls if last(call.func) == "Accelerator"]
        if not makers:
            return
        prepares = [
            call for call in calls if last(call.func).startswith("prepare") and isinstance(call.func, ast.Attribute)
        ]
        given = {root_of(argument) for call in prepares for argument in call.args}
        if not prepares:
            line = makers[0].lineno
            yield failed(
                "prepare",
                f"line {line}: an Accelerator is made, and prepare is never called: nothing is distributed",
                "Call `accelerator.prepare(model, optimizer, loader)`.",
                file=self.file,
                line=line,
            )
            return
        if any(isinstance(argument, ast.Starred) for call in prepares for argument in call.args):
            return
        for name, line, what in self._left_out(given):
            yield failed(
                "prepare",
                f"line {line}: the {what} `{name}` is used in the training loop, and prepare was not given it",
                f"Pass `{name}` to `accelerator.prepare`.",
                file=self.file,
                line=line,
            )
        for call in calls:
            if (
                last(call.func) == "backward"
                and isinstance(call.func, ast.Attribute)
                and "loss" in root_of(call.func.value)
            ):
                yield warned(
                    "prepare",
                    f"line {call.lineno}: `{ast.unparse(call.func)}()` goes past the accelerator: loss scaling and accumulation are left out",
                    "Call `accelerator.backward(loss)`.",
                    file=self.file,
                    line=call.lineno,
                )

    def _left_out(self, given: set[str]) -> Iterator[tuple[str, int, str]]:
        made = {
            target: (call, node.lineno)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and isinstance(call := node.value, ast.Call)
            for target in map(root_of, node.targets)
        }
        for loop in (node for node in ast.walk(self.tree) if isinstance(node, ast.For)):
            inside = [last(call.func) for call in all_calls(loop)]
            loader = _loader(loop.iter)
            if (
                "backward" in inside
                and loader in made
                and "DataLoader" in last(made[loader][0].func)
                and loader not in given
            ):
                yield loader, loop.lineno, "loader"
        for name, (call, line) in made.items():
            is_stepped = any(
                last(one.func) == "step" and isinstance(one.func, ast.Attribute) and root_of(one.func.value) == name
                for one in all_calls(self.tree)
            )
            if last(call.func) in OPTIMIZERS and is_stepped and name not in given:
                yield name, line, "optimizer"

    def unwrapped(self) -> Iterator[PreflightCheck]:
        """Find a process group and an optimizer that steps, without anything that makes gradients agree."""
        names = {last(call.func) for call in all_calls(self.tree)}
        groups = [call for call in all_calls(self.tree) if last(call.func) == "init_process_group"]
        wraps = (
            bool(names & _WRAPPERS)
            or bool(names & {"Accelerator", "initialize", "Trainer", "SFTTrainer", "Fabric", "replicate"})
            or any("Trainer" in name for name in names)
        )
        if (
            groups
            and "backward" in names
            and "step" in names
            and not wraps
            and not names & {"all_reduce", "reduce", "average_gradients", "sync_gradients"}
        ):
            yield failed(
                "wrapper", f"line {groups[0].lineno}: a process group is made, and no model is wrapped nor a gradient reduced: each rank trains alone",
                "Wrap the model in DistributedDataParallel, or reduce the gradients.", file=self.file, line=groups[0].lineno,
            )  # fmt: skip

    def late(self) -> Iterator[PreflightCheck]:
        """Find parameters that are frozen, unfrozen or added after they were wrapped: the wrapper has made its buckets."""
        wrapped = self._wrapped()
        for root, line, what in _touched(self.tree):
            if root in wrapped and line > wrapped[root]:
                yield failed(
                    "frozen after wrapping", f"line {line}: {what} of `{root}` after line {wrapped[root]} wrapped it: the wrapper does not know of it, and ranks part or wait",
                    "Freeze, unfreeze and build everything before wrapping; wrap anew after a change.", file=self.file, line=line,
                )  # fmt: skip

    def _wrapped(self) -> dict[str, int]:
        """Return variable -> line at which it was passed to, or returned by, a wrapper or an accelerator."""
        wrapped: dict[str, int] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and last(node.func) in _WRAPPERS:
                held = node.args[:1]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in {"prepare", "prepare_model"}
            ):
                held = node.args
            elif (
                isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and last(node.value.func) in _WRAPPERS
            ):
                held = node.targets
            else:
                continue
            for one in held:
                wrapped.setdefault(root_of(one), node.lineno)
        return wrapped

    def rotated(self) -> Iterator[PreflightCheck]:
        """Find a rotation that keeps only one checkpoint, which is deleted by the next one even if that is poisoned."""
        for call in all_calls(self.tree):
            for keyword in call.keywords:
                if keyword.arg in _KEEPS and isinstance(keyword.value, ast.Constant) and keyword.value.value == 1:
                    yield warned(
                        "rotation",
                        f"line {keyword.value.lineno}: {keyword.arg}=1 keeps one checkpoint: if it is poisoned, there is no other",
                        "Keep three.",
                        file=self.file,
                        line=keyword.value.lineno,
                    )

    def saves_plain_weights(self) -> int:
        """Return the line of `torch.save(model.state_dict(), ...)`; 0 if there is none."""
        for call in all_calls(self.tree):
            if (
                last(call.func) in {"save", "save_file"}
                and call.args
                and "state_dict" in ast.unparse(call.args[0])
                and "get_state_dict" not in ast.unparse(call.args[0])
            ):
                return call.lineno
        return 0


def _with_names_resolved(tree: ast.Module) -> ast.Module:
    """Replace names that stand for a condition on the rank by that condition: `main = rank == 0` and later `if main:`."""
    meant: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            if (
                isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp)
                and _is_rank(value)
                and name.lower() not in _RANK_WORDS
            ):
                meant[name] = value

    class _Names(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return (
                ast.copy_location(meant[node.id], node) if isinstance(node.ctx, ast.Load) and node.id in meant else node
            )

    return _Names().visit(tree) if meant else tree


def plain_save_line(text: str) -> int:
    """Return the line that saves a module's own state dict; 0 if there is none."""
    try:
        return _Script(ast.parse(text), "").saves_plain_weights()
    except (SyntaxError, ValueError, RecursionError):
        return 0


def _value(call: ast.Call, name: str) -> object:
    return next(
        (
            keyword.value.value
            for keyword in call.keywords
            if keyword.arg == name and isinstance(keyword.value, ast.Constant)
        ),
        None,
    )


def _is_rank(node: ast.AST) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute) and last(inner).lower() in _RANK_WORDS:
            return True
        if isinstance(inner, ast.Constant) and inner.value in _RANK_VARIABLES:
            return True
    return False


def _side(test: ast.AST) -> str | None:
    """Return which ranks fulfil a condition: `main`, `others`, or empty for other sets; None if it is no condition on the rank."""
    if not _is_rank(test):
        return None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return {"main": "others", "others": "main"}.get(_side(test.operand) or "", "")
    if isinstance(test, ast.BoolOp):
        return next((side for value in test.values if (side := _side(value))), "")
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _side_of_comparison(test.ops[0], test.comparators[0])
    return "main" if last(test) in _MAIN_WORDS else "others" if last(test) in _RANK_WORDS else ""


def _side_of_comparison(operator: ast.cmpop, other: ast.expr) -> str:
    try:
        value = ast.literal_eval(other)
    except (ValueError, TypeError, SyntaxError):
        return ""
    has_zero = 0 in value if isinstance(value, list | tuple | set) else value in {0, "0"}
    if isinstance(operator, ast.Eq | ast.In | ast.LtE | ast.Is):
        # rank == -1 means that the job is not distributed.
        return "main" if has_zero else "others" if value != -1 else ""
    if isinstance(operator, ast.NotEq | ast.NotIn | ast.Gt | ast.IsNot):
        return "others" if has_zero else ""
    return ""


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def _counts_epochs(loop: ast.For | ast.While) -> bool:
    if isinstance(loop, ast.While):
        return "epoch" in ast.unparse(loop.test).lower()
    if "epoch" not in ast.unparse(loop.target).lower() and "epoch" not in ast.unparse(loop.iter).lower():
        return False
    ends = loop.iter.args if isinstance(loop.iter, ast.Call) and last(loop.iter.func) in {"range", "trange"} else []
    return not (len(ends) == 1 and isinstance(ends[0], ast.Constant) and ends[0].value == 1)


def _loader(node: ast.expr) -> str:
    """Return what a loop iterates over, inside of enumerate, tqdm and the like."""
    while (
        isinstance(node, ast.Call) and node.args and last(node.func) in {"enumerate", "tqdm", "iter", "islice", "cycle"}
    ):
        node = node.args[0]
    return root_of(node)


def _touched(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Yield (variable, line, what happens) of all parameters and modules that are frozen, unfrozen or added."""
    owners = _owners(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _assigned(target, node, owners)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"requires_grad_", "add_module", "register_parameter"}
        ):
            root = root_of(node.func.value)
            yield owners.get(root, root), node.lineno, f"{node.func.attr} is called on a part"


def _assigned(target: ast.expr, node: ast.Assign, owners: dict[str, str]) -> Iterator[tuple[str, int, str]]:
    if not isinstance(target, ast.Attribute):
        return
    root = root_of(target)
    if target.attr == "requires_grad":
        yield owners.get(root, root), node.lineno, "requires_grad is set on a part"
    elif isinstance(node.value, ast.Call) and _is_module(node.value):
        yield root_of(target.value), node.lineno, f"`{ast.unparse(target)}` is made a part"


def _owners(tree: ast.AST) -> dict[str, str]:
    """Return loop variable over parameters or modules -> variable that holds these."""
    owners: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.For) or not any(
            word in ast.unparse(node.iter) for word in ("parameters(", "modules(", "children(")
        ):
            continue
        is_counted = isinstance(node.iter, ast.Call) and last(node.iter.func) == "enumerate" and node.iter.args
        iterated = node.iter.args[0] if is_counted and isinstance(node.iter, ast.Call) else node.iter
        owners |= {target.id: root_of(iterated) for target in ast.walk(node.target) if isinstance(target, ast.Name)}
    return owners


def _is_module(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute)
        and root_of(call.func) in {"nn", "torch"}
        and call.func.attr[:1].isupper()
        and call.func.attr not in _WRAPPERS
    )
