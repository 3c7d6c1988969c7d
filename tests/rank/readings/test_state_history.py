"""What a tensor was like until now, and what of a state is not like it."""

from typing import Any

import pytest
import torch

from holter.rank.models import Models
from holter.rank.readings import state_history
from holter.rank.readings.state_history import StateHistory
from holter_kernels import summarize


class Training:
    """A model whose history is read after each step."""

    def __init__(self, *, is_frozen: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.model[1].requires_grad_(requires_grad=not is_frozen)
        self.models = Models()
        self.models.add(self.model)
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.history = StateHistory()
        self.step = 0

    def train(self, steps: int, *, is_read: bool = True) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(2, 4)).square().mean().backward()
            self.optimizer.step()
            if is_read:
                self.read()
            self.step += 1

    def read(self) -> list[Any]:
        chosen = self.history.choose(self.models, [self.optimizer])
        table = summarize([tensor for _, tensor in chosen], histogram="off")
        self.history.learn(self.step, [entry for entry, _ in chosen], table)
        return [entry for entry, _ in chosen]

    def judge(self, **how: Any) -> dict[str, str]:
        return self.history.judge(self.step, **how)


@torch.no_grad()
def put(tensor: torch.Tensor, value: float) -> None:
    tensor.view(-1)[0] = value


def test_a_state_as_training_left_it_is_not_odd() -> None:
    training = Training(is_frozen=True)
    training.train(6)
    assert {} == training.judge()


def test_a_weight_beyond_its_history_and_that_of_all_weights_is_named_with_both_sizes() -> None:
    training = Training()
    training.train(4)
    training.train(3, is_read=False)
    put(training.model[0].weight, 1e4)
    ((name, text),) = training.judge().items()
    assert "0.weight" == name
    assert "holds values of up to 1e+04, where until now it was 0.4" in text


def test_a_look_at_a_damaged_weight_does_not_make_it_usual() -> None:
    training = Training()
    training.train(4)
    put(training.model[0].weight, 1e4)
    training.train(3)
    assert "0.weight" in training.judge()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_what_an_optimizer_remembers_has_a_history_too(key: str) -> None:
    training = Training()
    training.train(4)
    put(training.optimizer.state[training.model[0].bias][key], 1e6)
    assert [f"optimizer: 0.bias.{key}"] == list(training.judge())


def test_a_frozen_weight_that_changed_is_named_at_whatever_size() -> None:
    training = Training(is_frozen=True)
    training.train(5)
    put(training.model[1].weight, 0.25)
    ((name, text),) = training.judge().items()
    assert ("1.weight", True) == (name, "has changed since step 4" in text)


def test_a_frozen_weight_that_was_seen_to_change_once_is_named_and_one_that_always_does_is_not() -> None:
    training = Training(is_frozen=True)
    training.train(5)
    training.history.see_disturbed("1.weight", 4, num_still=4)
    training.history.see_disturbed("1.bias", 4, num_still=4)
    training.history.see_disturbed("1.bias", 5, num_still=0)
    assert {"1.weight": "is frozen, and was changed by step 4"} == training.judge()


def test_a_copy_that_the_script_updates_is_not_odd() -> None:
    training = Training(is_frozen=True)
    for _ in range(5):
        training.train(1)
        put(training.model[1].weight, 0.25 + training.step / 100)
    assert {} == training.judge()


def test_a_weight_that_changed_after_the_last_step_is_named_unless_the_script_does_that() -> None:
    training = Training()
    training.train(4)
    put(training.model[0].weight, 0.25)
    assert ["0.weight"] == list(training.judge())
    assert {} == training.judge(is_live=False), "a snapshot is another state"
    training.history.touched.add("0.weight")
    assert {} == training.judge()


def test_a_weight_that_was_read_steps_ago_may_have_changed_since() -> None:
    training = Training()
    training.train(4)
    training.train(2, is_read=False)
    assert {} == training.judge()


def test_a_tensor_that_grows_from_zero_is_not_odd() -> None:
    training = Training()
    with torch.no_grad():
        training.model[1].weight.zero_()
    training.read()
    training.train(3)
    put(training.model[1].weight, 2.0)
    training.train(1)
    assert {} == training.judge()


def test_what_the_script_lets_go_of_is_not_held_and_what_it_puts_in_its_place_is_read() -> None:
    training = Training()
    training.train(3)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.train(3)
    put(training.optimizer.state[training.model[0].bias]["exp_avg"], 1e6)
    assert ["optimizer: 0.bias.exp_avg"] == list(training.judge())


def test_large_states_are_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_history, "LEAST_BYTES", 0)
    training = Training()
    training.train(1, is_read=False)
    names = [[entry.name for entry in training.read()] for _ in range(4)]
    assert ["0.weight", "0.bias", "1.weight", "1.bias"] == names[0]
    assert 12 == len({name for each in names for name in each}), "weights and two moments of each"
