"""Weights swapped within one autocast region."""

import copy

import pytest
import torch
from torch import nn

from holter.records import Swapped


class Loop:
    """A policy and its reference, which share one module."""

    def __init__(self, worn) -> None:
        torch.manual_seed(0)
        self.worn, self.model = worn, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        worn.monitor.add_model(self.model)
        self.reference = copy.deepcopy(self.model.state_dict())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def swap(self, others: dict) -> dict:
        mine = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            p.data.copy_(others[name])
        return mine

    def referred(self, x: torch.Tensor) -> torch.Tensor:
        mine = self.swap(self.reference)
        with torch.no_grad():
            out = self.model(x)
        self.swap(mine)
        return out

    def run(self, num_steps: int, step) -> list[Swapped]:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            x = torch.randn(4, 8)
            policy, reference = step(self, x)
            ((policy - reference).pow(2).mean() + policy.pow(2).mean()).float().backward()
            self.optimizer.step()
        return [observation.body for observation in self.worn.said(Swapped)]


def region(**how) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **how)


def in_one_region(loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with region():
        return loop.model(x), loop.referred(x)


def test_a_swap_in_one_region_is_said(worn):
    said = Loop(worn).run(20, in_one_region)
    assert [1, 2, 4, 8, 16] == [swapped.num_times for swapped in said]
    assert all(swapped.is_input_equal and swapped.is_output_equal for swapped in said)
    assert said[-1].distance > said[0].distance > 0


def test_regions_of_their_own_are_healthy(worn):
    def apart(loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with region():
            policy = loop.model(x)
        with region():
            return policy, loop.referred(x)

    assert [] == Loop(worn).run(20, apart)


def test_a_cache_that_is_cleared_is_healthy(worn):
    def cleared(loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with region():
            policy = loop.model(x)
            torch.clear_autocast_cache()
            return policy, loop.referred(x)

    assert [] == Loop(worn).run(20, cleared)


def test_a_region_without_a_cache_is_healthy(worn):
    def uncached(loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with region(cache_enabled=False):
            return loop.model(x), loop.referred(x)

    assert [] == Loop(worn).run(20, uncached)


def test_two_calls_with_the_same_weights_are_healthy(worn):
    def twice(loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with region():
            policy = loop.model(x)
            with torch.no_grad():
                return policy, loop.model(x)

    assert [] == Loop(worn).run(20, twice)


def test_without_a_region_a_swap_is_healthy(worn):
    assert [] == Loop(worn).run(20, lambda loop, x: (loop.model(x), loop.referred(x)))


def test_a_nested_region_is_part_of_the_outer_one(worn):
    def nested(loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with region():
            with region():
                policy = loop.model(x)
            return policy, loop.referred(x)

    assert [1, 2] == [swapped.num_times for swapped in Loop(worn).run(4, nested)]


def test_other_inputs_are_told_as_such(worn):
    def other(loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with region():
            return loop.model(x), loop.referred(x + 1)

    assert {(False, False)} == {(s.is_input_equal, s.is_output_equal) for s in Loop(worn).run(5, other)}


@pytest.mark.usefixtures("gloo")
def test_the_wrapper_and_its_module_are_one_model(worn):
    loop = Loop(worn)
    inner, ddp = loop.model, nn.parallel.DistributedDataParallel(loop.model)

    def through_both(loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with region():
            loop.model = inner
            return ddp(x), loop.referred(x)

    assert [1, 2] == [swapped.num_times for swapped in loop.run(4, through_both)]
