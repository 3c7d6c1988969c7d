"""Facts, in both directions: what a cause, a consequence or the engine reads is stated by a detector, and what is stated is read."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from holter.faults import BRINGS_ABOUT, CAUSES, DETECTORS
from holter.faults.family import EngineFacts

HOLTER = Path(__file__).resolve().parents[2] / "daemon" / "holter"
ENGINES = ["diagnosis", "halting", "coordinator", "exporters", "offline/dumps.py", "cli", "status_page"]
NEWS = {
    "batch_lengths": {"ranks_running_out"},
    "buffer_divergence": {"buffers_agreed_at_first", "has_majority"},
    "collective_mismatch": {"is_hanging"},
    "compute_dtype": {"do_regions_differ", "has_majority"},
    "dead_rank": {"is_done", "is_everyone_gone", "is_on_several_ranks"},
    "declared_frozen": {"was_unfrozen_later"},
    "dtype_drift": {"is_narrower", "is_on_all_ranks"},
    "frozen_divergence": {"has_majority", "is_implausible_on_all"},
    "gradient_balance": {"is_single"},
    "gradient_explosion": {"has_modules"},
    "gradient_vanishing": {"is_zero_elsewhere"},
    "nonfinite_loss": {"has_finite_gradient", "is_on_all_ranks"},
    "nonfinite_values": {"missing_ranks"},
    "replica_divergence": {"has_implausible_side", "has_majority", "own_history_broke_on_all"},
    "reward_spread": {"is_from_start"},
    "skipped_steps": {"has_collapsed_scale", "has_nonfinite_input", "has_passed_step"},
    "stalled_rank": {"is_cpu_moving", "is_deadlock"},
    "structure_mismatch": {"has_majority"},
    "uncleared_gradients": {"does_norm_grow", "has_one_optimizer"},
    "variance_of_nothing": {"where"},
}
"""Read by no name: when one of these changes, the finding is news (`correlate`), and its diagnosis is written again with the evidence
of now. A fact that is neither read nor news is to be deleted."""


@functools.cache
def stated(detector: str) -> set[str]:
    """Keys of the facts that the detector's file puts together."""
    path = HOLTER.parent / (type(DETECTORS[detector].detector).__module__.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {key for place in _places(tree) for key in _keys(place, functions)}


def _places(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if (
            (isinstance(node, ast.keyword) and node.arg == "facts")
            or (
                isinstance(node, ast.Assign)
                and any(isinstance(to, ast.Name) and to.id == "facts" for to in node.targets)
            )
            or (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id == "facts"
                and node.value
            )
        ):
            yield node.value


def _keys(place: ast.AST, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Of the dictionaries written there, and in the functions of the file that are called there for more of them."""
    for node in ast.walk(place):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    merged = [
        value
        for node in ast.walk(place)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if key is None
    ]
    called = [
        node
        for node in (place, *merged, *_sides(place))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    for call in called:
        if isinstance(call.func, ast.Name) and call.func.id in functions:
            yield from _keys(functions[call.func.id], {})


def _sides(place: ast.AST) -> list[ast.AST]:
    """Of `a | b`."""
    return [place.left, place.right] if isinstance(place, ast.BinOp) else []


def read_in_rows(detector: str) -> set[str]:
    rows = [row for entry in CAUSES.values() for row in entry.rows if row.detector == detector]
    return {name for row in rows for name in (*row.seen, *row.absent, *row.unknown, *row.unless)}


def read_elsewhere(detector: str) -> set[str]:
    refuting = {entry.refuting_fact for entry in CAUSES.values() if any(row.detector == detector for row in entry.rows)}
    leading = {name for line in BRINGS_ABOUT if line.leader == detector for name in line.unless_leader_has}
    following = {name for line in BRINGS_ABOUT if detector in line.after for name in line.unless_follower_has}
    return refuting | leading | following | set(EngineFacts.__annotations__)


@pytest.mark.parametrize("detector", DETECTORS)
def test_what_is_read_is_stated_and_what_is_stated_is_read(detector: str) -> None:
    told, news = stated(detector), NEWS.get(detector, set())
    assert set() == read_in_rows(detector) - told, "no detector says so"
    assert news == told - read_in_rows(detector) - read_elsewhere(detector), "nobody asks"


def test_what_would_refute_a_cause_is_stated_by_a_detector_that_sees_it() -> None:
    for entry in CAUSES.values():
        assert any(entry.refuting_fact in stated(row.detector) for row in entry.rows), entry.cause


def test_a_consequence_asks_for_facts_that_its_detectors_state() -> None:
    for line in BRINGS_ABOUT:
        assert set(line.unless_leader_has) <= stated(line.leader)
        for name in line.unless_follower_has:
            assert any(name in stated(follower) for follower in line.after), line


def test_each_fact_of_the_engine_is_stated_by_some_detector() -> None:
    assert set(EngineFacts.__annotations__) <= set().union(*map(stated, DETECTORS))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_reads_no_other_fact_by_its_name(engine: str) -> None:
    """`finding.facts` stays closed: `engine_facts` is asked, whose names and types mypy checks."""
    files = [HOLTER / engine] if engine.endswith(".py") else sorted((HOLTER / engine).rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asked = (
                node.args[0]
                if isinstance(node, ast.Call) and node.args
                else node.slice
                if isinstance(node, ast.Subscript)
                else None
            )
            of = (
                node.func.value
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                else getattr(node, "value", None)
            )
            is_facts = isinstance(of, ast.Attribute) and of.attr == "facts"
            assert not (is_facts and isinstance(asked, ast.Constant)), f"{path}: {ast.unparse(node)}"
