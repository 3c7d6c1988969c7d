"""Twenty fixes, each really run before and after: `holter verify` says which of them worked.

Three are in `make test`, the others for a release. `python -m tests.offline.proof.test_pairs` runs all of them and prints the score.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.offline.proof.pairs import PAIRS, Pair

from holter.cli.verify import rendered, verified

JOB = Path(__file__).with_name("job.py")
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
IN_MAKE_TEST = {"a rate that is low enough", "weight decay mends no logarithm", "a lower rate mends no batch"}
DEADLINE_S = 180


def ran(folder: Path, arguments: str, under: str) -> Path:
    """Run the job, unless it was; what it left."""
    place = folder / f"{under} {arguments}".replace(" ", "_").replace("/", "_")
    if place.exists():
        return place
    place.mkdir(parents=True)
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [str(JOB), *shlex.split(arguments)]
    if under == "ranks":
        run_dir = place / "run"
        command = [*TORCHRUN, "-m", "holter", "--run-dir", str(run_dir), *words]
        subprocess.run(
            command, env=environ | {"HOLTER_LINGER_S": "0"}, check=False, timeout=DEADLINE_S, capture_output=True
        )
        return place
    (place / "logs").mkdir()
    with (place / "logs" / "run.log").open("wb") as log:
        environ |= {"CONFIG_TO": str(place / "logs" / "config.json")}
        subprocess.run([sys.executable, *words], env=environ, check=False, timeout=DEADLINE_S, stdout=log, stderr=log)
    return place


def judged(folder: Path, pair: Pair):
    before = ran(folder, pair.before, "ranks" if pair.under in {"ranks", "mixed"} else "log")
    after = ran(folder, pair.after, "ranks" if pair.under == "ranks" else "log")
    names = [str(next(iter(place.glob("*/")))) for place in (before, after)]
    return verified(names)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("pairs")


@pytest.mark.job
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=pair.name, marks=() if pair.name in IN_MAKE_TEST else pytest.mark.release)
        for pair in PAIRS
    ],
)
def test_a_fix_is_judged_by_what_it_did(pair, runs):
    verdict = judged(runs, pair)
    assert (pair.verdict, pair.num_changes) == (verdict.verdict, len(verdict.changes) if pair.num_changes else None), (
        rendered(verdict)
    )


def main() -> None:
    """Run all, and print the score."""
    num = 0
    with tempfile.TemporaryDirectory() as folder:
        for pair in PAIRS:
            verdict = judged(Path(sys.argv[1] if len(sys.argv) > 1 else folder), pair)
            is_right = verdict.verdict == pair.verdict and pair.num_changes in {None, len(verdict.changes)}
            num += is_right
            print(f"{'ok  ' if is_right else 'MISS'} {pair.name}: expected {pair.verdict}, {pair.num_changes} changes")
            print(
                json.dumps({"verdict": verdict.verdict, "changes": len(verdict.changes)}), rendered(verdict), sep="\n"
            )
    print(f"{num} of {len(PAIRS)}")


if __name__ == "__main__":
    main()
