"""The second grammar: faults of sharded jobs. A seed gives a case, always the same one; the draws of the first grammar do not depend on it.

    python -m tests.campaign.meshes --seed 7 --number 12              run and score the first twelve cases of seed 7, each with its twin
    python -m tests.campaign.meshes --seed 7 --healthy 12             healthy runs alone
    python -m tests.campaign.meshes --seed 7 --number 12 --list       what would be run

What is drawn: a kind of fault first, then a framework that can have it, its ranks, whose fault it is, when it begins and which tensor it is in. The
scripts are those of the corpus (`mesh_runs.py`, `zero_runs.py`, `composed_runs.py`), with the arguments that were drawn.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.campaign.grammar import LATE_BY, WITHIN, Expected
from tests.campaign.score import Result, brief, counts, judge, misses, table

from conftest import Nursery

SCRIPTS = Path(__file__).resolve().parents[1] / "corpus" / "scripts"
STEPS = 60
MATRICES = tuple(f"blocks.{n}.{layer}.weight" for n in (0, 1) for layer in ("gate", "up", "down"))
NORMS = ("blocks.0.norm.weight", "blocks.1.norm.bias", "norm.weight")
EVERY_STEP = {"HOLTER_OVERHEAD_BUDGET": "1", "HOLTER_OVERHEAD_FLOOR_S": "1"}
"""Weights are read before and after each."""
FSDP, HSDP, TENSOR = ("fsdp2", "checkpointing"), ("hsdp",), ("tp", "sequence", "loss_parallel")
FOUR_RANKS = frozenset({"hsdp", "tp_fsdp2", "sequence_fsdp2", "hybrid1", "expert_mesh", "axis_divisor"})
HEALTHY = (
    *FSDP, *HSDP, *TENSOR, "tp_fsdp2", "sequence_fsdp2", "pipeline", "pipeline_1f1b", "experts", "ignoring", "fsdp1", "hybrid1", "zero1", "zero2", "zero3",
)  # fmt: skip
COMPOSED = (
    "collapse", "overflow", "idle_term", "doubled_experts", "expert_mesh", "one_divisor", "axis_divisor", "summed_twice", "micro_batches",
    "summed_loss", "other_world", "drifting_norm",
)  # fmt: skip


@dataclass(frozen=True)
class MeshKind:
    """One kind of fault."""

    fault: str
    causes: tuple[str, ...]
    """Each is right, the best first."""
    frameworks: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    """It is in one of these."""
    names: str = "culprit"
    """`culprit`, `everyone`, `pair` (either the culprit or all), `nobody` in particular."""
    is_from_start: bool = False
    module: str = ""
    culprits: tuple[int, ...] = ()
    """Empty: any rank."""


KINDS = (
    MeshKind("flip", ("silent_data_corruption",), (*FSDP, *HSDP, "tp_fsdp2"), MATRICES),
    MeshKind("flip", ("silent_data_corruption",), ("tp", "hsdp"), NORMS),
    MeshKind("flip_partition", ("silent_data_corruption",), ("zero1", "zero2", "zero3")),
    MeshKind("stray_write", ("silent_data_corruption",), (*FSDP, *HSDP)),
    MeshKind("seed_per_replica", ("unsynced_initialisation",), HSDP, names="nobody", is_from_start=True),
    MeshKind("never_reduced", ("gradient_sync_bypassed",), HSDP, names="nobody", is_from_start=True),
    MeshKind("lost_once", ("corrupted_collective",), HSDP, names="nobody"),
    MeshKind("other_rate", ("optimizer_state_mismatch",), (*FSDP, *HSDP, "tp", "zero2"), names="pair", is_from_start=True),
    MeshKind("other_decay", ("optimizer_state_mismatch",), (*FSDP, "tp"), names="pair", is_from_start=True),
    MeshKind("late_rate", ("optimizer_state_mismatch",), (*FSDP, *HSDP, "zero2", "zero3"), names="pair"),
    MeshKind("other_buffer", ("buffer_divergence",), (*FSDP, *HSDP, "tp", "zero2"), names="pair", is_from_start=True),
    MeshKind("frozen_sets", ("frozen_set_mismatch",), FSDP, names="nobody", is_from_start=True),
    MeshKind("frozen_garbage", ("frozen_component_uninitialised",), ("fsdp2_frozen", "zero3"), is_from_start=True),
    MeshKind("local_clip", ("clip_on_local_shard",), (*FSDP, *HSDP), names="nobody", is_from_start=True),
    MeshKind("uneven_clip", ("uneven_clipping",), (*FSDP, *HSDP), is_from_start=True),
    MeshKind("other_inputs", ("parallel_input_mismatch",), ("tp", "sequence", "tp_fsdp2"), names="pair", is_from_start=True),
    MeshKind("nan_forward", ("nonfinite_forward",), ("fsdp2", *HSDP), module="blocks.0.up"),
    MeshKind("collapse", ("expert_collapse",), ("composed",), names="nobody", is_from_start=True),
    MeshKind("overflow", ("expert_overflow",), ("composed",), names="nobody", is_from_start=True),
    MeshKind("idle_term", ("auxiliary_loss_inactive",), ("composed",), names="nobody", is_from_start=True),
    MeshKind("doubled_experts", ("gradient_scale_mismatch",), ("composed",), names="nobody", is_from_start=True),
    MeshKind("expert_mesh", ("gradient_scale_mismatch",), ("composed",), names="nobody", is_from_start=True),
    MeshKind("one_divisor", ("gradient_scale_mismatch",), ("composed",), names="nobody", is_from_start=True),
    MeshKind("axis_divisor", ("gradient_scale_mismatch",), ("composed",), names="nobody", is_from_start=True),
    MeshKind("summed_twice", ("gradient_scale_mismatch",), ("composed",), names="nobody", is_from_start=True),
    MeshKind("micro_batches", ("gradient_scale_mismatch",), ("composed",), names="pair", is_from_start=True, culprits=(1,)),
    MeshKind("summed_loss", ("gradient_scale_mismatch",), ("composed",), is_from_start=True, culprits=(1,)),
    MeshKind("other_world", ("corrupt_labels_or_range",), ("composed",), is_from_start=True, culprits=(1,)),
)  # fmt: skip


@dataclass(frozen=True)
class MeshCase:
    """One drawn job."""

    seed: str
    framework: str
    ranks: int
    kind: MeshKind | None = None
    tensor: str = ""
    culprit: int = 0
    at: int = 0

    @property
    def title(self) -> str:
        """For people."""
        if self.kind is None:
            return f"healthy, {self.framework}, {self.ranks} ranks"
        when = "from the start" if self.kind.is_from_start else f"at step {self.at}"
        return f"{self.kind.fault} {self.tensor} on rank {self.culprit}, {self.framework}, {self.ranks} ranks, {when}"

    def command(self, *, is_healthy: bool = False) -> list[str]:
        """Script and arguments."""
        tail = ["--steps", str(STEPS)] + (["--healthy"] if is_healthy or self.kind is None else [])
        if self.framework == "composed":
            assert self.kind is not None
            return [str(SCRIPTS / "composed_runs.py"), self.kind.fault, *tail]
        fault = self.kind.fault + (f":{self.tensor}" if self.tensor else "") if self.kind else ""
        tail += ["--fault", fault, "--at", str(self.at), "--culprit", str(self.culprit)] if fault else []
        if self.framework.startswith("zero"):
            return [str(SCRIPTS / "zero_runs.py"), self.framework[-1], *tail]
        return [str(SCRIPTS / "mesh_runs.py"), self.framework, *tail]

    @property
    def expected(self) -> Expected:
        """What must be said of it."""
        assert self.kind is not None
        everyone, own = tuple(range(self.ranks)), (self.culprit,)
        ranks = {"culprit": (own,), "everyone": (everyone,), "pair": (own, everyone), "nobody": None}[self.kind.names]
        return Expected(
            causes=dict.fromkeys(self.kind.causes, "as injected"),
            begin=0 if self.kind.is_from_start else self.at,
            late_by=LATE_BY,
            within=WITHIN,
            ranks=ranks,
            tensors=(self.tensor,) if self.tensor else None,
            modules=(self.kind.module,) if self.kind.module else None,
            severity="warning",
            has_step=True,
        )


def draw(seed: str) -> MeshCase:
    """`7-3`: the fourth fault of seed 7; `7-h3`: its fourth healthy run."""
    chance = random.Random(f"mesh {seed}")  # noqa: S311  no secret
    if "-h" in seed:
        framework = chance.choice(HEALTHY)
        return MeshCase(seed, framework, 4 if framework in FOUR_RANKS else 2)
    kind = chance.choice(KINDS)
    framework = chance.choice(kind.frameworks)
    ranks = 4 if framework in FOUR_RANKS or kind.fault in FOUR_RANKS else 2
    tensor = chance.choice(kind.tensors) if kind.tensors else ""
    culprit = chance.choice(kind.culprits or range(ranks))
    return MeshCase(seed, framework, ranks, kind, tensor, culprit, chance.randrange(6, 25))


def run(case: MeshCase, nursery: Nursery, folder: Path) -> Result:
    """The case, and its twin."""
    began = time.monotonic()
    family = "healthy" if case.kind is None else case.framework
    result = Result(case.seed, case.title, family, case.kind.causes[0] if case.kind else "", "ran")
    result.is_from_start = case.kind is not None and case.kind.is_from_start
    ended = _job(case, nursery, folder / case.seed / "job")
    if case.kind is None:
        result.status, result.why = ("ran", "") if ended.code == 0 else ("void", ended.stderr[-200:])
        result.said = [brief(one) for one in ended.diagnoses if counts(one, "warning")]
    elif any(one["causes"][0]["cause"] == "script_error" for one in ended.diagnoses if one["causes"]):
        # The draw does not fit the script: a tensor of that name is not there.
        result.status, result.why = "void", (ended.stderr.strip().splitlines() or [""])[-1][:200]
    else:
        healthy = _job(case, nursery, folder / case.seed / "twin", is_healthy=True)
        result.has_twin = healthy.code == 0
        result.twin_failure = "" if result.has_twin else healthy.stderr[-200:]
        judge(result, case.expected, ended.diagnoses, healthy.diagnoses)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _job(case: MeshCase, nursery: Nursery, folder: Path, *, is_healthy: bool = False) -> Any:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return nursery.run(folder, case.command(is_healthy=is_healthy), ranks=case.ranks, env=EVERY_STEP)


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
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--to", type=Path, default=Path("holter-runs/mesh-campaign"))
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{case.seed}: {case.title}" for case in cases(options)))
        return 0
    results = []
    with Nursery() as nursery:
        for case in cases(options):
            results.append(result := run(case, nursery, options.to.absolute()))
            print(
                "\n".join(misses([result])) or f"{result.seed}: right: {result.title}",
                f"({result.seconds} s)",
                flush=True,
            )
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
