"""How often the vitals are taken."""

from holter.rank.readings.vitals import VitalsSchedule


def steps(rhythm: VitalsSchedule, num_steps: int, *, interval: int = 1, cost_s: float = 0.0) -> list[int]:
    vital = []
    for step in range(0, num_steps, interval):
        if rhythm.is_vital(step, interval):
            vital.append(step)
            rhythm.spend(cost_s)
    return vital


def rhythm(*, rank: int = 0, world_size: int = 1, floor_s: float = 0.01) -> VitalsSchedule:
    return VitalsSchedule(rank=rank, world_size=world_size, budget=0.01, floor_s=floor_s)


def test_often_at_first_then_every_fourth_comparison():
    assert [*range(8), 8, 12, 16, 20] == steps(rhythm(), 24)


def test_what_is_dear_is_rare():
    # 40 ms against a tenth of four floors of 10 ms a step.
    assert [*range(8), 16, 32, 48] == steps(rhythm(), 64, cost_s=0.04)


def test_what_is_very_dear_is_rare_from_the_start():
    # What the first one cost is no measure.
    assert [0, 1, 128] == steps(rhythm(), 200, cost_s=0.4)


def test_rare_comparisons_are_all_vital():
    taken = steps(rhythm(), 64 * 20, interval=64)
    assert [64 * number for number in range(20)] == taken


def test_ranks_take_turns():
    speakers = [steps(rhythm(rank=rank, world_size=16_000), 4096)[:40] for rank in (0, 1, 249, 250)]
    assert all(speakers)
    assert speakers[0] == speakers[3]
    assert not set(speakers[0]) & set(speakers[1])
