"""Real jobs whose sidecars speak through an agent: halted, resumed, hung, and with the agent killed."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.resuming import HALT, halt_json, results, same_bits

SCRIPTS = Path(__file__).parent / "scripts"
AGENT = {"HOLTER_AGENT": "auto"}
AT, EVERY = 8, 2
RANKS = (2, 4)

pytestmark = [pytest.mark.job, pytest.mark.release]


def start(nursery: Any, folder: Path, ranks: int, *arguments: object, **env: str) -> Any:
    folder.mkdir()
    words = [str(SCRIPTS / "resumable_loop.py"), "--kind", "ddp", "--out", str(folder / "out"), *map(str, arguments)]
    return nursery.start(folder, words, ranks=ranks, env=HALT | env)


def spoke_through_one_agent(run_dir: Path, ranks: int) -> None:
    """Exactly one sidecar started it, and none gave it up."""
    logs = [(run_dir / "logs" / f"sidecar-{rank}.log").read_text() for rank in range(ranks)]
    assert 1 == sum("started the agent of this host" in log for log in logs)
    assert not any("does not serve" in log for log in logs)
    (log,) = (run_dir / "logs").glob("agent-*.log")
    assert "serving at" in log.read_text()


@pytest.mark.parametrize("ranks", RANKS)
def test_a_nan_is_halted_through_an_agent_and_resumed_bit_for_bit(nursery: Any, tmp_path: Path, ranks: int) -> None:
    reference = start(nursery, tmp_path / "reference", ranks).wait()
    assert 0 == reference.code, reference.stderr[-3000:]
    halted = start(nursery, tmp_path / "halted", ranks, "--fault", "nan", "--at", AT, **AGENT).wait()
    assert 93 == halted.code, halted.stderr[-3000:]
    halt = halt_json(halted.run_dir)
    assert ("nonfinite_input", [1], "healthy") == (halt["cause"], halt["ranks"], halt["verdict"]), halt["why"]
    spoke_through_one_agent(halted.run_dir, ranks)
    resumed = start(nursery, tmp_path / "resumed", ranks, "--resume", halted.run_dir / halt["checkpoint"], **AGENT)
    assert 0 == resumed.wait().code
    same_bits(
        results(tmp_path / "reference" / "out", ranks),
        results(tmp_path / "resumed" / "out", ranks),
        str(halt["step"] * EVERY),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_a_hang_is_named_through_an_agent(nursery: Any, tmp_path: Path, ranks: int) -> None:
    ended = start(nursery, tmp_path / "hung", ranks, "--fault", "suspend", "--at", AT, **AGENT).wait()
    assert 93 == ended.code, ended.stderr[-3000:]
    halt = halt_json(ended.run_dir)
    assert ("rank_suspended", [1]) == (halt["cause"], halt["ranks"]), halt["why"]
    spoke_through_one_agent(ended.run_dir, ranks)


def digests(ended: Any) -> list[str]:
    found = sorted(re.findall(r"digest of rank \d: [0-9a-f]{64}", ended.stdout))
    assert len(found) == 2, ended.stderr[-3000:]
    return found


def states(shown: dict[str, Any]) -> list[str]:
    return [rank["sidecar"] for rank in shown["ranks"]]


def test_killing_the_agent_changes_no_bit_and_each_rank_speaks_for_itself(
    forks: Any, status: Any, wait_for: Any
) -> None:
    words = (SCRIPTS / "bits.py", "--steps", 1200)
    alone = forks.run(*words)
    job = forks.start(*words, "--pause", 0.015, env=AGENT)
    wait_for(lambda: states(status(job)) == ["connected"] * 2, 60, "two sidecars")
    (agent,) = job.pids("agent")
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: states(status(job)) != ["connected"] * 2, 30, "the loss to be noticed")
    wait_for(lambda: states(status(job)) == ["connected"] * 2, 30, "two sidecars again")
    ended = job.wait()
    assert digests(alone) == digests(ended)
    assert [] == ended.diagnoses
    for rank in (0, 1):
        assert "does not serve" in (ended.run_dir / "logs" / f"sidecar-{rank}.log").read_text()
