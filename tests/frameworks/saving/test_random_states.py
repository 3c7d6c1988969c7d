"""The generator drawn from backwards, against torch drawing forwards."""

import pytest
import torch

from holter.frameworks.saving import random_states


def state_after(words: int, seed: int = 5) -> torch.Tensor:
    """Of a generator that gave so many words."""
    generator = torch.Generator().manual_seed(seed)
    if words:
        torch.rand(words, generator=generator)
    return generator.get_state()


def rolled(state: torch.Tensor, *, seeds: int) -> torch.Tensor:
    """What the generator gives after so many seeds."""
    generator = torch.Generator()
    generator.set_state(state)
    for _ in range(seeds):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    return torch.rand(2000, generator=generator)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("words", [0, 1, 2, 3, 5, 6, 7, 300, 623, 624, 625, 626, 1247, 1248, 1249, 5000])
def test_seeds_lead_from_the_state_before_to_the_state(words: int, number: int) -> None:
    state = state_after(words)
    before = random_states.before_seeds(state, number)
    assert before is not None
    assert torch.equal(rolled(state, seeds=0), rolled(before, seeds=number))


def test_a_normal_sample_that_is_kept_for_later_stays() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.randn(1, generator=generator)
    state = generator.get_state()
    before = random_states.before_seeds(state, 1)
    assert before is not None
    generator.set_state(state)
    expected = torch.randn(3, generator=generator)
    generator.set_state(before)
    twister_seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
    assert torch.equal(expected, torch.randn(3, generator=generator))
    assert [int(twister_seed)] == random_states.next_seeds(before, 1)


def test_nothing_is_drawn_from_the_generator_of_the_run() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    random_states.before_seeds(state, 2)
    random_states.next_seeds(state, 2)
    assert torch.equal(state, torch.get_rng_state())


def test_more_than_a_block_back_is_not_tried() -> None:
    assert random_states.before_seeds(state_after(10), 313) is not None
    assert random_states.before_seeds(state_after(10), 318) is None


def test_a_generator_whose_words_lie_elsewhere_is_left_alone() -> None:
    state = state_after(10)
    twister_words = random_states._head(state)["words"][0]
    twister_words[9] ^= 1 << 40
    assert random_states.before_seeds(state, 1) is None, "torch does not get from there to the state that was given"
