"""A NaN in one rank's shard: the rank that has it and those that do not stand before the same step, in real jobs too."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.e2e.resuming import HALT

from holter.frameworks.deepspeed.framework import ZeroProbe
from holter.rank.models import is_split
from holter.records import SightLost

SCRIPT = Path(__file__).parent / "scripts" / "shards.py"


class Agent:
    """Writes down, and lets go."""

    def __init__(self) -> None:
        self.holds: list[tuple[int, str]] = []
        self.poisoned: list[int | None] = []

    def is_due(self, _step: int) -> bool:
        return False

    def is_wanted(self) -> bool:
        return not self.holds

    def hold(self, step: int, why: str, num_skipped: int = 0) -> None:  # noqa: ARG002
        self.holds.append((step, why))
        self.poisoned.append(self.context.hold.poisoned_step)


class Peers:
    """Ranks that answer what the test says, after a second that nobody sees pass."""

    is_over, has_left, loss, waited_s = False, False, "", 0.0

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | None]] = []
        self.answers: dict[int, int] = {}

    def agree(self, step: int, bad_step: int | None) -> int | None:
        self.asked.append((step, bad_step))
        self.waited_s += 1000.0
        return bad_step if bad_step is not None else self.answers.get(step)

    def leave(self) -> None:
        self.has_left = True


@pytest.fixture
def rank(worn):
    """A rank whose optimizer applies a part of what another framework partitioned."""
    context, parameter = worn.monitor.context, torch.nn.Parameter(torch.ones(3))
    context.hold.agent, context.hold.peers = Agent(), Peers()
    context.hold.agent.context = context
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    context.frameworks.partitioned.add(optimizer)

    def step(*arguments, worth: float = 1.0, by=optimizer.step) -> None:
        parameter.grad = torch.full((3,), worth)
        by(*arguments)

    return SimpleNamespace(worn=worn, context=context, optimizer=optimizer, step=step, parameter=parameter)


def test_a_step_is_held_for_a_peer_and_then_nobody_is_asked_any_more(rank):
    rank.context.hold.peers.answers = {2: 2}
    for _ in range(4):
        rank.step()
    assert [(0, None), (1, None), (2, None)] == rank.context.hold.peers.asked
    assert [(2, "peer")] == rank.context.hold.agent.holds
    # Before it was applied nothing was poisoned.
    assert ([None], 2) == (rank.context.hold.agent.poisoned, rank.context.hold.poisoned_step)
    assert rank.context.hold.peers.has_left


def test_a_peer_that_knows_of_an_earlier_step_says_that_the_weights_have_it(rank):
    rank.context.hold.peers.answers = {2: 1}
    for _ in range(3):
        rank.step()
    assert ([(2, "peer")], [1]) == (rank.context.hold.agent.holds, rank.context.hold.agent.poisoned)


def test_our_own_is_told_to_the_peers_and_held_for_itself(rank):
    rank.step()
    rank.step(worth=float("inf"))
    assert [(0, None), (1, 1)] == rank.context.hold.peers.asked
    assert [(1, "nonfinite")] == rank.context.hold.agent.holds


def test_the_wait_for_peers_is_not_ours(rank):
    rank.step()
    assert -1000.0 <= rank.context.guard.own_s < 0.0


def test_peers_are_asked_once_a_step_after_the_closure_has_computed(rank):
    rank.context.hold.peers.answers = {1: 1}
    rank.step(lambda: None)
    rank.step(lambda: None)
    assert [(0, None), (1, None)] == rank.context.hold.peers.asked
    assert [(1, "peer")] == rank.context.hold.agent.holds


def test_a_step_that_a_loss_scaler_answers_for_is_not_asked(rank):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    rank.step(rank.optimizer, by=scaler.step)
    assert [] == rank.context.hold.peers.asked


def test_a_stage_of_a_pipeline_asks_the_others_and_goes_on_asking(rank):
    rank.context.frameworks.partitioned.clear()
    rank.context.world_size = 2
    rank.step()
    assert [] == rank.context.hold.peers.asked, "it is no stage, as far as is known"
    rank.context.inputs.stage = (1, False)
    rank.step()
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=0.1).step()
    rank.context.inputs.stage = None
    rank.step()
    assert [(1, None), (2, None)] == rank.context.hold.peers.asked, "once a step: other stages may have one optimizer"


def test_when_nobody_wants_halts_nobody_is_asked(rank):
    rank.context.hold.agent.holds = [(0, "nonfinite")]
    rank.step(worth=float("nan"))
    assert [] == rank.context.hold.peers.asked


def test_why_it_is_over_is_said_once(rank, capsys):
    rank.context.hold.peers.loss, rank.context.hold.peers.is_over = "no word of rank 3", True
    for _ in range(2):
        rank.step()
    lost = [observation.body.what for observation in rank.worn.said(SightLost)]
    assert ["shards are not agreed on any more: no word of rank 3"] == lost
    assert 1 == capsys.readouterr().err.count("rank 0: shards are not agreed on any more: no word of rank 3")


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, [(0, None)]), (torch.float16, [])])
def test_partitions_of_zero_are_agreed_on_unless_it_skips_overflows_itself(rank, dtype, expected):
    rank.context.frameworks.partitioned.clear()
    probe = ZeroProbe(rank.context, rank.worn.monitor.steps)
    # This rank's part of the only group is empty: that is not for all ranks so.
    zero = SimpleNamespace(optimizer=rank.optimizer, dtype=dtype, fp32_partitioned_groups_flat=[], overflow=False)
    probe._around(lambda _: rank.step())(zero)
    assert expected == rank.context.hold.peers.asked


def test_a_tensor_is_split_where_its_mesh_has_several_ranks_on_an_axis_that_shards_it():
    shard, copy = SimpleNamespace(is_replicate=lambda: False), SimpleNamespace(is_replicate=lambda: True)
    mesh = SimpleNamespace(size=lambda axis: (4, 1)[axis])
    for placements, expected in (((shard, copy), True), ((copy, shard), False), ((copy, copy), False)):
        assert expected == is_split(SimpleNamespace(placements=placements, device_mesh=mesh))
    assert not is_split(torch.ones(3))


@pytest.fixture
def train(forks):
    """What each rank wrote."""

    def run(kind: str, *arguments: object, ranks: int) -> list[dict]:
        ended = forks.run(SCRIPT, "--kind", kind, "--out", "out", *arguments, ranks=ranks, env=HALT)
        assert 0 == ended.code, ended.stderr
        assert [] == [line for line in ended.holter_lines if "shards" in line]
        told = [json.loads((ended.directory / f"out-{rank}.json").read_text()) for rank in range(ranks)]
        assert [{}] * ranks == [rank["failures"] for rank in told]
        return told

    return run


@pytest.mark.job
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("fsdp", 4), *(pytest.param(*kind, marks=pytest.mark.release) for kind in (("hsdp", 4), ("flat", 2)))],
)
def test_all_ranks_stand_before_the_step_of_which_one_shard_is_not_finite_and_before_no_other(train, kind, ranks):
    told = train(kind, "--rank", 1, ranks=ranks)
    step = told[0]["fault_step"]
    expected = [[step, "nonfinite" if rank == 1 else "peer"] for rank in range(ranks)]
    # Twenty steps were agreed on before it, and none of them was held.
    assert [[one] for one in expected] == [rank["holds"] for rank in told]
    # Let go, the script has applied it; nobody asks any more.
    assert [step] * ranks == [rank["poisoned"] for rank in told]
    assert [True] * ranks == [rank["is_over"] for rank in told]


@pytest.mark.job
def test_of_two_optimizers_of_one_step_the_second_one_is_agreed_on_too(train):
    told = train("fsdp", "--rank", 0, "--optimizers", 2, ranks=2)
    step = told[0]["fault_step"]
    assert [[[step, "nonfinite"]], [[step, "peer"]]] == [rank["holds"] for rank in told]


@pytest.mark.job
def test_replicas_are_not_asked(train):
    told = train("ddp", ranks=2)
    assert [[[20, "nonfinite"]]] * 2 == [rank["holds"] for rank in told]
    assert [False, False] == [rank["was_asked"] for rank in told]
    assert [0.0, 0.0] == [rank["waited_s"] for rank in told]
