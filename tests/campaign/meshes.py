"""The second grammar: faults of sharded jobs. A seed gives a case, always the same one; the draws of the first grammar do not depend on it.

    python -m tests.campaign.meshes --seed 7 --number 12              run and score the first twelve cases of seed 7, each with its twin
    python -m tests.campaign.meshes --seed 7 --healthy 12             healthy runs alone
    python -m tests.campaign.meshes --seed 7 --number 12 --list       what would be run

What is drawn: a kind of fault first, then a framework that can have it, its ranks, whose fault it is, when it begins, how much, in which tensor or
module, and how the job is built (optimizer, layers, micro-batches, precision, checkpoints). The scripts are those of the corpus (`mesh_runs.py`, `zero_runs.py`,
`composed_runs.py`), with the arguments that were drawn. A case whose result is on disk is not run again.
"""

import argparse
import json
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.campaign.grammar import LATE_BY, WITHIN, Expected
from tests.campaign.runner import HANGING_S, SETTLED_S
from tests.campaign.score import Result, brief, counts, judge, misses, table

from conftest import Nursery

SCRIPTS = Path(__file__).resolve().parents[1] / "corpus" / "scripts"
STEPS = 60
EVERY_STEP = {"HOLTER_OVERHEAD_BUDGET": "1", "HOLTER_OVERHEAD_FLOOR_S": "1"}
"""Weights are read before and after each."""
SHARDED, HYBRID = ("fsdp2", "checkpointing"), ("hsdp",)
TENSOR, COMPOSED_MESH = ("tp", "sequence", "loss_parallel"), ("tp_fsdp2", "sequence_fsdp2")
STAGES, FIRST_KIND, ZERO = ("pipeline", "pipeline_1f1b"), ("fsdp1", "hybrid1"), ("zero1", "zero2", "zero3")
FOUR_RANKS = frozenset({"hsdp", *COMPOSED_MESH, "hybrid1", "expert_mesh", "axis_divisor"})
MAY_HAVE_FOUR = frozenset({*SHARDED, *STAGES, "tp"})
SAVES = frozenset({*SHARDED, *HYBRID, *TENSOR, *COMPOSED_MESH})
HEALTHY = (*SHARDED, *HYBRID, *TENSOR, *COMPOSED_MESH, *STAGES, *FIRST_KIND, *ZERO, "by_hand", "experts", "ignoring")
MOST_WEIGHT = 5
"""A kind of fault is as likely as it has frameworks, up to this."""
MODULES = tuple(f"blocks.{n}.{layer}" for n in (0, 1) for layer in ("gate", "up", "down"))
HIDES_MODULES = frozenset({"checkpointing", "zero3", *FIRST_KIND})
"""Where the module of a NaN is said not to be known."""
FLIPPED, LATE = "silent_data_corruption", "optimizer_state_mismatch"


@dataclass(frozen=True)
class MeshKind:
    """One kind of fault."""

    fault: str
    causes: tuple[str, ...]
    """Each is right, the best first."""
    frameworks: tuple[str, ...]
    factors: tuple[float, ...] = (0.0,)
    names: str = "culprit"
    """`culprit`, `everyone`, `pair` (the culprit, its tensor-parallel group or all), `nobody` in particular."""
    is_from_start: bool = False
    place: str = ""
    """`tensor` or `module`: which one it was, the script prints."""
    ends: str = "normally"
    """`hangs`, `dies`."""


def composed(fault: str, cause: str, *factors: float, names: str = "nobody") -> MeshKind:
    """A kind that has a script of its own."""
    return MeshKind(fault, (cause,), ("composed",), factors or (0.0,), names, is_from_start=True)


KINDS = (
    MeshKind("flip", (FLIPPED,), (*SHARDED, *HYBRID, *TENSOR, *COMPOSED_MESH, *STAGES, *FIRST_KIND, "by_hand", "experts", "ignoring"), place="tensor"),
    MeshKind("flip_partition", (FLIPPED,), ZERO),
    MeshKind("flip_weight", (FLIPPED,), ZERO, place="tensor"),
    MeshKind("flip_moment", (FLIPPED, LATE), (*SHARDED, *HYBRID, "tp", "tp_fsdp2", *STAGES), place="tensor"),
    MeshKind("stray_write", (FLIPPED,), (*SHARDED, *HYBRID, *TENSOR, *COMPOSED_MESH, *STAGES, "fsdp1"), (0.5, 0.97, 1.003, 1.2, 4.0), place="tensor"),
    MeshKind("zeroed", (FLIPPED,), (*SHARDED, *HYBRID, "tp", *COMPOSED_MESH, *STAGES, "hybrid1"), place="tensor"),
    MeshKind("seed_per_replica", ("unsynced_initialisation",), HYBRID, names="nobody", is_from_start=True),
    MeshKind("never_reduced", ("gradient_sync_bypassed",), ("hsdp", "hybrid1"), names="nobody", is_from_start=True),
    MeshKind("lost_once", ("corrupted_collective",), ("hsdp", "hybrid1"), names="nobody"),
    MeshKind("nobody_reduces", ("unreduced_parameters",), ("ignoring",), names="nobody", is_from_start=True),
    MeshKind("other_rate", (LATE,), (*SHARDED, *HYBRID, *TENSOR, *COMPOSED_MESH, *FIRST_KIND, *ZERO, "experts"), (0.1, 0.7, 1.1, 1.5, 3.0), "pair", is_from_start=True),
    MeshKind("other_decay", (LATE,), (*SHARDED, *HYBRID, *TENSOR, "fsdp1", "zero1"), (0.02, 0.1, 0.5), "pair", is_from_start=True),
    MeshKind("other_betas", (LATE,), (*SHARDED, *HYBRID, "tp", "zero2"), (0.5, 0.8, 0.95), "pair", is_from_start=True),
    MeshKind("late_rate", (LATE,), (*SHARDED, *HYBRID, *TENSOR, *COMPOSED_MESH, *FIRST_KIND, *ZERO), (0.1, 0.5, 0.9, 2.0), "pair"),
    MeshKind("step_left_out", (LATE,), (*SHARDED, *HYBRID, "tp", "sequence", "fsdp1"), names="pair"),
    MeshKind("other_buffer", ("buffer_divergence",), (*SHARDED, *HYBRID, *TENSOR, *COMPOSED_MESH, *FIRST_KIND, *ZERO), (1e-4, 0.01, 1.0), "pair", is_from_start=True),
    MeshKind("late_buffer", ("buffer_divergence",), (*SHARDED, *HYBRID, "tp", "zero1", "zero3"), (1e-4, 0.01, 1.0), "pair"),
    MeshKind("frozen_sets", ("frozen_set_mismatch",), (*SHARDED, "hsdp"), names="nobody", is_from_start=True),
    MeshKind("frozen_garbage", ("frozen_component_uninitialised",), ("fsdp2_frozen", "zero1", "zero3"), (3e19, -1e30, float("inf")), is_from_start=True),
    MeshKind("frozen_changed", ("frozen_component_changed", FLIPPED), ("fsdp2_frozen", "hsdp_frozen", "zero2", "zero3"), (0.9, 1.01, 2.0)),
    MeshKind("local_clip", ("clip_on_local_shard",), (*SHARDED, *HYBRID), (0.02, 0.05, 0.2), "nobody", is_from_start=True),
    MeshKind("uneven_clip", ("uneven_clipping",), (*SHARDED, *HYBRID, "tp_fsdp2"), (0.25, 0.5, 0.8, 2.0), is_from_start=True),
    MeshKind("late_clip", ("uneven_clipping",), (*SHARDED, *HYBRID), (0.25, 0.8, 3.0)),
    MeshKind("other_inputs", ("parallel_input_mismatch",), (*TENSOR, *COMPOSED_MESH), names="pair", is_from_start=True),
    MeshKind("late_inputs", ("parallel_input_mismatch",), (*TENSOR, "tp_fsdp2"), names="pair"),
    MeshKind("nan_forward", ("nonfinite_forward",), (*SHARDED, *HYBRID, *TENSOR, *COMPOSED_MESH, *STAGES, *FIRST_KIND, *ZERO, "by_hand"), place="module"),
    MeshKind("nan_backward", ("nonfinite_backward",), (*SHARDED, *HYBRID, "tp", *STAGES, "fsdp1", *ZERO)),
    MeshKind("wrong_file", ("wrong_weights_loaded",), (*SHARDED, "pipeline"), is_from_start=True),
    MeshKind("slow", ("slow_compute",), (*SHARDED, *HYBRID, "tp", *STAGES, "zero2"), (0.08, 0.15)),
    MeshKind("stuck", ("rank_stuck_in_python",), HEALTHY, ends="hangs"),
    MeshKind("spinning", ("rank_stuck_in_python",), HEALTHY, ends="hangs"),
    MeshKind("suspended", ("rank_suspended",), HEALTHY, ends="hangs"),
    MeshKind("killed", ("rank_dead",), HEALTHY, ends="dies"),
    MeshKind("raises", ("script_error",), HEALTHY, ends="dies"),
    composed("collapse", "expert_collapse"),
    composed("overflow", "expert_overflow"),
    composed("idle_term", "auxiliary_loss_inactive", 0.01, 0.1, 1.0),
    composed("doubled_experts", "gradient_scale_mismatch"),
    composed("expert_mesh", "gradient_scale_mismatch"),
    composed("one_divisor", "gradient_scale_mismatch"),
    composed("axis_divisor", "gradient_scale_mismatch"),
    composed("summed_twice", "gradient_scale_mismatch"),
    composed("micro_batches", "gradient_scale_mismatch", names="pair"),
    composed("summed_loss", "gradient_scale_mismatch", names="culprit"),
    composed("other_world", "corrupt_labels_or_range", 300.0, 1000.0, 5000.0, names="culprit"),
    MeshKind("drifting_norm", (FLIPPED,), ("composed",)),
)  # fmt: skip


@dataclass(frozen=True)
class MeshCase:
    """One drawn job."""

    seed: str
    framework: str
    ranks: int
    kind: MeshKind | None = None
    culprit: int = 0
    at: int = 0
    options: tuple[str, ...] = ()
    """Of the script, beside the fault."""

    @property
    def title(self) -> str:
        """For people."""
        how = " ".join((self.framework, f"{self.ranks} ranks", *self.options)).replace("--", "")
        if self.kind is None:
            return f"healthy, {how}"
        when = "from the start" if self.kind.is_from_start else f"at step {self.at}"
        return f"{self.kind.fault} on rank {self.culprit}, {how}, {when}"

    @property
    def env(self) -> dict[str, str]:
        """Of its ranks."""
        return EVERY_STEP | ({"HOLTER_MESH": "pp=2"} if self.framework == "by_hand" else {})

    def command(self, *, is_healthy: bool = False) -> list[str]:
        """Script and arguments."""
        script, framework = "mesh_runs.py", self.framework
        if framework.startswith("zero"):
            script, framework = "zero_runs.py", framework[-1]
        elif framework == "composed" and self.kind is not None:
            script, framework = "composed_runs.py", self.kind.fault
        fault = () if self.kind is None or framework == self.kind.fault else ("--fault", self.kind.fault)
        where = () if self.kind is None else ("--at", str(self.at), "--culprit", str(self.culprit))
        tail = ("--healthy",) if is_healthy or self.kind is None else ()
        return [str(SCRIPTS / script), framework, "--steps", str(STEPS), *fault, *where, *self.options, *tail]

    def expected(self, where: str) -> Expected:
        """What must be said of it; where it was, the script has printed."""
        assert self.kind is not None
        everyone, own = tuple(range(self.ranks)), (self.culprit,)
        beside = tuple(sorted((self.culprit, self.culprit ^ 1)))
        groups = (own, everyone, beside) if self.framework in COMPOSED_MESH else (own, everyone)
        ranks = {"culprit": (own,), "everyone": (everyone,), "pair": groups, "nobody": None}[self.kind.names]
        is_known = self.kind.place == "tensor" and self.framework not in FIRST_KIND
        is_module = self.kind.place == "module" and self.framework not in HIDES_MODULES
        return Expected(
            causes=dict.fromkeys(self.kind.causes, "as injected"),
            begin=0 if self.kind.is_from_start else self.at,
            late_by=LATE_BY,
            within=WITHIN,
            ranks=ranks,
            tensors=(where.removeprefix("optimizer: "),) if is_known else None,
            modules=(where,) if is_module else None,
            severity="warning",
            has_step=self.kind.ends == "normally",
        )


def _model(chance: random.Random, framework: str) -> tuple[str, ...]:
    """How the job is built and run."""
    drawn = ["--optimizer", chance.choice(("adamw", "adamw", "each", "adam", "sgd"))]
    if framework not in (*STAGES, "by_hand", "experts"):
        drawn += ["--blocks", str(chance.choice((2, 2, 3, 4))), "--accumulate", str(chance.choice((1, 1, 1, 2, 3)))]
    if framework in SAVES and chance.random() < 0.4:
        drawn += ["--save", chance.choice(("sync", "async"))]
    if framework in ("fsdp2", "hsdp") and chance.random() < 0.3:
        drawn.append("--low")
    return tuple(drawn)


def draw(seed: str) -> MeshCase:
    """`7-3`: the fourth fault of seed 7; `7-h3`: its fourth healthy run."""
    chance = random.Random(f"mesh {seed}")  # noqa: S311  no secret
    weights = [min(MOST_WEIGHT, len(kind.frameworks)) for kind in KINDS]
    kind = None if "-h" in seed else chance.choices(KINDS, weights)[0]
    framework = chance.choice(kind.frameworks if kind else HEALTHY)
    fault = kind.fault if kind else ""
    ranks = 4 if {framework.removesuffix("_frozen"), fault} & FOUR_RANKS else 2
    ranks = chance.choice((2, 2, 4)) if framework in MAY_HAVE_FOUR else ranks
    if kind is None:
        loads = ("--loads",) if framework in SHARDED and chance.random() < 0.3 else ()
        return MeshCase(seed, framework, ranks, options=_model(chance, framework) + loads)
    culprit, at = chance.randrange(ranks), chance.randrange(4, 31)
    factor = chance.choice(kind.factors)
    options = ("--factor", str(factor)) if factor else ()
    if framework == "composed":
        options += ("--number", str(chance.randrange(12)), "--rate", str(chance.choice((0.02, 0.05, 0.1))))
        return MeshCase(seed, framework, ranks, kind, culprit, at, options)
    if kind.place == "tensor":
        options += ("--pick", str(chance.randrange(60)), "--bit", str(chance.randrange(10, 23)))
    if kind.place == "module" or fault in {"slow", "nan_backward"}:
        options += ("--module", chance.choice(MODULES))
    model = _model(chance, framework)
    if fault in {"flip_moment", "other_betas", "other_decay"}:
        model = ("--optimizer", chance.choice(("adamw", "adam", "each")), *model[2:])
    if fault in {"flip_moment", "wrong_file"}:
        model = tuple(word for word in model if word != "--low")
    return MeshCase(seed, framework, ranks, kind, culprit, at, options + model)


def run(case: MeshCase, nursery: Nursery, folder: Path, *, has_twin: bool = True) -> Result:
    """The case, and its twin."""
    began = time.monotonic()
    family = "healthy" if case.kind is None else case.framework
    result = Result(case.seed, case.title, family, case.kind.causes[0] if case.kind else "", "ran")
    result.is_from_start = case.kind is not None and case.kind.is_from_start
    ended = _job(case, nursery, folder / case.seed / "job")
    where = re.search(r"^effect: ?(.*)$", ended.stdout, re.MULTILINE)
    if case.kind is None or case.kind.ends == "normally":
        last = (ended.stderr.strip().splitlines() or [""])[-1][:200]
        result.status, result.why = ("ran", "") if ended.code == 0 else ("void", f"code {ended.code}: {last}")
    if case.kind and case.kind.place and where is None:
        result.status, result.why = "void", f"{result.why} no effect"
    if result.status == "ran" and case.kind is None:
        result.said = [brief(one) for one in ended.diagnoses if counts(one, "warning")]
    elif result.status == "ran":
        of_twin = []
        if has_twin:
            healthy = _job(case, nursery, folder / case.seed / "twin", is_healthy=True)
            result.has_twin, of_twin = healthy.code == 0, healthy.diagnoses
            result.twin_failure = "" if result.has_twin else healthy.stderr[-200:]
        judge(result, case.expected(where[1] if where else ""), ended.diagnoses, of_twin)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _job(case: MeshCase, nursery: Nursery, folder: Path, *, is_healthy: bool = False) -> Any:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    since: list[float] = []

    def is_enough(run_dir: Path) -> bool:
        if not since and list(run_dir.glob("incidents/*/diagnosis.json")):
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] > SETTLED_S

    how: dict[str, Any] = {}
    if case.kind is not None and case.kind.ends != "normally" and not is_healthy:
        how = {"is_enough": is_enough, "deadline_s": HANGING_S}
    env = case.env | {"CASE_DIR": str(folder / "parts")}
    return nursery.run(folder, case.command(is_healthy=is_healthy), ranks=case.ranks, env=env, **how)


def kept(case: MeshCase, folder: Path) -> Result | None:
    """Of this very command, if it was run before."""
    path = folder / f"{case.seed}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return Result(**found["result"]) if found["title"] == case.title else None


def cases(options: argparse.Namespace) -> Iterator[MeshCase]:
    """Those that are asked for."""
    if options.only:
        yield from map(draw, options.only)
        return
    yield from (draw(f"{options.seed}-{number}") for number in range(options.first, options.number))
    yield from (draw(f"{options.seed}-h{number}") for number in range(options.healthy))


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, run, score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--no-twins", action="store_true", help="the faults alone")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at the same time (1)")
    parser.add_argument("--minutes", type=float, default=0, help="begin no case after these (0: all)")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--to", type=Path, default=Path("holter-runs/mesh-campaign"))
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{case.seed}: {case.title}" for case in cases(options)))
        return 0
    options.to.mkdir(parents=True, exist_ok=True)
    wanted, began = list(cases(options)), time.monotonic()
    found = {case.seed: one for case in wanted if (one := kept(case, options.to)) is not None}

    def do(case: MeshCase) -> None:
        if options.minutes and time.monotonic() - began > 60 * options.minutes:
            return
        found[case.seed] = result = run(case, nursery, options.to.absolute(), has_twin=not options.no_twins)
        text = json.dumps({"title": case.title, "result": result.as_json()}, indent=1)
        (options.to / f"{case.seed}.json").write_text(text, encoding="utf-8")
        print(
            "\n".join(misses([result])) or f"{result.seed}: right: {result.title}", f"({result.seconds} s)", flush=True
        )

    with Nursery() as nursery, ThreadPoolExecutor(options.at_once) as threads:
        list(threads.map(do, [case for case in wanted if case.seed not in found]))
    results = [found[case.seed] for case in wanted if case.seed in found]
    print(f"{len(results)} of {len(wanted)} cases were run.", *misses(results), table(results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
