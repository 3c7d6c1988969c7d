"""The whole job in a few numbers."""

import math

import msgspec
from tests.coordinator.conftest import attached, done, seen

from holter.coordinator.http.pages import job_figures, module_figures, occupancy
from holter.coordinator.roster import Roster
from holter.coordinator.window.assembly import Assembly
from holter.records import ModuleVitals, Phase, Vitals
from holter.transport import wire


def module(name: str, norm: float, ratio: float = math.nan, exponents: tuple[int, ...] = ()) -> ModuleVitals:
    return ModuleVitals(name, "float32", 4, 2.0, norm, 0.5, 0.0, 1.0, ratio, 1.0, 1e-3, list(exponents))


def vitals(*modules: ModuleVitals) -> Vitals:
    return Vitals(view="replicated", modules=list(modules), num_trainable=len(modules))


def hello(rank: int) -> wire.Hello:
    return wire.Hello(
        run_id="r", rank=rank, world_size=2, host="a", rank_pid=1000 + rank, sidecar_pid=1, metrics_address=""
    )


def test_a_job_is_seen_across_its_ranks() -> None:
    roster, assembly = Roster(), Assembly(2)
    for rank in range(2):
        roster.connect(hello(rank))
        roster.beat(rank, wire.Heartbeat(3, Phase.BACKWARD, 0, 0), (5 + rank) * 10**9)
        assembly.add(attached(rank), 0)
        for step in range(3):
            assembly.add(done(rank, step), 0)
    assembly.add(seen(1, 1, vitals(module("old", 9.0))), 0)
    assembly.add(seen(0, 2, vitals(module("head", 1.0))), 0)
    found = job_figures(roster, assembly)
    assert (2, 3, 6.0, {Phase.BACKWARD: 2}) == (found.world_size, found.step, found.last_progress_s, found.phases)
    assert {"connected": 2, "gone": 0, "silent": 0, "ended": 0, "absent": 0} == found.sidecars
    assert (1.5, 2) == (found.spreads["loss"].mean, found.spreads["loss"].num)
    assert found.overhead_ratio is None, "nobody told it"
    roster.members[0].numbers.overhead_ratio, roster.members[1].numbers.overhead_ratio = 0.002, 0.004
    assert 0.004 == job_figures(roster, assembly).overhead_ratio
    assert ["head"] == [one.module for one in found.modules], "only the last look counts"


def test_a_rank_that_has_not_come_is_counted_and_what_a_former_process_lost_stays_lost() -> None:
    roster = Roster()
    roster.connect(hello(0))
    assert 1 == job_figures(roster, Assembly(2)).sidecars["absent"]
    roster.members[0].dropped = 5
    roster.connect(msgspec.structs.replace(hello(0), rank_pid=7))
    roster.members[0].dropped = 2
    assert 7 == job_figures(roster, Assembly(2)).dropped


def test_a_rank_that_ended_neither_moves_nor_is_in_a_phase() -> None:
    roster = Roster()
    roster.connect(hello(0))
    roster.beat(0, wire.Heartbeat(3, Phase.BACKWARD, 0, 0), 5)
    roster.goodbye(0)
    found = job_figures(roster, Assembly(1))
    assert (None, {}, 1) == (found.last_progress_s, found.phases, found.sidecars["ended"])


def test_of_a_module_the_largest_over_ranks_and_groups_counts() -> None:
    found = module_figures([vitals(module("a", 1.0, 0.1), module("a", 3.0)), vitals(module("a", 2.0, 0.2))])
    assert [("a", 3.0, 0.2, 2.0, 0.5)] == [
        (one.module, one.gradient_norm, one.update_ratio, one.weight_norm, one.gradient_zeros) for one in found
    ]


def test_occupancy_is_a_share_over_all_that_was_read() -> None:
    told = [vitals(module("a", 1.0, exponents=(0, 1)), module("b", 1.0)), vitals(module("a", 1.0, exponents=(2, 1)))]
    assert (0.5, 0.5) == occupancy(told)
    assert () == occupancy([vitals(module("a", 1.0))])
