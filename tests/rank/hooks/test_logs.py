"""What the script logs becomes numbers by known names."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from holter.rank.hooks.logs import MAX_CALLS, MAX_NAMES, SAMPLED, meaning_of, sample
from holter.records import Logged


def logged(worn, **values) -> dict[str, float]:
    worn.monitor.logs.log(values)
    said = worn.said(Logged)
    return said[-1].body.values if said else {}


def test_a_number_stays_a_number_and_a_tensor_becomes_its_mean(worn):
    told = logged(worn, entropy=1.5, Temperature=torch.tensor([1.0, 3.0]), steps=np.float32(2.0), flag=True)
    assert {"log.entropy": 1.5, "log.temperature": 2.0, "log.steps": 2.0, "log.flag": 1.0} == told


def test_what_is_no_number_is_ignored(worn):
    assert {} == logged(worn, name="run", items=[1, 2], nothing=None, empty=torch.empty(0), z=torch.ones(2) * 1j)


def test_terms_of_the_loss_are_told_one_by_one(worn):
    told = logged(worn, loss_terms={"KL": torch.tensor(0.5), "policy": 2})
    assert {"log.loss_terms.kl": 0.5, "log.loss_terms.policy": 2.0, "carries_gradient.loss_terms.kl": 0.0} == told


def test_it_is_said_at_once_with_the_step_that_is_open(worn):
    model = nn.Linear(4, 1)
    worn.monitor.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        worn.monitor.logs.log({"kl": 0.0})
        optimizer.step()
    assert [0, 1, 2] == [observation.step for observation in worn.said(Logged)]


def test_groups_whose_rewards_are_all_equal_are_counted(worn):
    rewards = torch.tensor([[0.1] * 4, [0.0] * 4, [0.0, 1.0, 0.0, 1.0]])
    told = logged(worn, advantages=torch.ones(3, 4), rewards=rewards)
    assert (3.0, 2.0) == (told["rewards.num_groups"], told["rewards.num_flat_groups"])
    assert math.isclose(float(rewards.double().mean()), told["log.rewards"])
    assert told["log.rewards_std"] > 0.0
    assert 0.0 == told["log.advantages_std"]


def test_a_flat_list_of_rewards_is_one_group(worn):
    assert 0.0 == logged(worn, rewards=torch.tensor([0.0, 1.0]))["rewards.num_flat_groups"]
    assert "rewards.num_groups" not in logged(worn, rewards=torch.tensor([[0.5], [1.0]]))
    assert "rewards.num_groups" not in logged(worn, rewards=torch.tensor(0.5))


def test_use_of_a_codebook(worn):
    counts = torch.zeros(512)
    counts[7] = 100
    told = logged(worn, codebook_usage=counts)
    assert (1 / 512, 1.0, 512.0) == (
        told["log.codebook_usage"],
        round(told["log.codebook_perplexity"], 9),
        told["log.codebook_size"],
    )
    assert math.isclose(512.0, logged(worn, codebook_usage=torch.ones(512))["log.codebook_perplexity"])
    assert {"log.codebook_usage": 0.25} == logged(worn, codebook_usage=0.25)


def test_of_several_codebooks_the_worst_is_told(worn):
    counts = torch.ones(2, 8)
    counts[1, 1:] = 0
    assert 0.125 == logged(worn, codebook_usage=counts)["log.codebook_usage"]


@pytest.mark.parametrize("has_gradient", [True, False])
def test_kl_says_whether_it_carries_a_gradient(worn, has_gradient):
    kl = torch.tensor([0.0, 2.0], requires_grad=has_gradient)
    assert {"log.kl": 1.0, "carries_gradient.kl": float(has_gradient)} == logged(worn, kl=kl)


def test_ratios_are_held_against_one_on_the_first_micro_step_only(worn):
    ratio = torch.tensor([1.0, 1.25])
    off = {"ratio.first_deviation": 0.25, "ratio.first_mean_deviation": 0.125}
    assert {"log.ratio": 1.125} | off == logged(worn, ratio=ratio)
    assert {"log.ratio": 1.125} == logged(worn, ratio=ratio)


def test_a_ratio_that_is_logged_as_numbers_is_an_importance_ratio_where_a_policy_is_trained(worn):
    numbers = {"train/ratio_mean": 1.0, "train/ratio_std": 0.5}
    assert not [name for name in logged(worn, **numbers) if name.startswith("ratio.")]
    told = logged(worn, **numbers, **{"train/advantages_std": 0.9})
    assert (0.5, 0.0) == (told["ratio.first_deviation"], told["ratio.first_mean_deviation"])


def test_terms_that_are_logged_as_paths_are_terms(worn):
    assert {"log.loss_terms.kl": 0.5} == logged(worn, **{"train/loss_terms/kl": 0.5})


def test_an_averaged_copy_is_held_against_the_live_weights(worn):
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 1))
    worn.monitor.add_model(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    assert {"ema.distance": 0.0} == logged(worn, ema=average)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    told = logged(worn, ema=average)
    assert 0.0 == told["ema.moved"]
    assert math.isclose(0.5, told["ema.distance"])
    average.update_parameters(model)
    average.update_parameters(model)
    assert 1.0 == logged(worn, ema=average)["ema.moved"]


def test_the_way_of_an_average_is_told(worn):
    model = nn.Linear(40, 40)
    worn.monitor.add_model(model)
    average = copy.deepcopy(model)
    logged(worn, ema=average)
    with torch.no_grad():
        model.weight.mul_(1.1)
        average.weight.lerp_(model.weight, -0.1)
    told = logged(worn, ema=average)
    assert (0.0, True) == (told["ema.is_narrow"], told["ema.toward"] < -0.9)
    with torch.no_grad():
        for kept, live in zip(average.parameters(), model.parameters(), strict=True):
            kept.copy_(kept.bfloat16().lerp(live.bfloat16(), 0.001))
    logged(worn, ema=average)
    with torch.no_grad():
        average.weight.copy_(average.weight.bfloat16().lerp(model.weight.bfloat16(), 0.02))
    told = logged(worn, ema=average)
    assert (1.0, True) == (told["ema.is_narrow"], 0 < told["ema.changed"] < 0.5)


def test_an_average_may_be_a_copy_or_a_state_dict(worn):
    model = nn.Linear(4, 4)
    worn.monitor.add_model(model)
    shadow = copy.deepcopy(model)
    with torch.no_grad():
        shadow.weight.add_(1.0)
    first = logged(worn, ema=shadow)["ema.distance"]
    assert first > 0.0
    assert first == logged(worn, ema=shadow.state_dict())["ema.distance"]


def test_a_foreign_module_says_nothing(worn):
    worn.monitor.logs.log({"ema": nn.Conv1d(2, 2, 3)})
    assert not worn.said(Logged)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("train/reward_std", "rewards_std"),
        ("reward", "rewards"),
        ("objective/kl", "kl"),
        ("train/codebook_perplexity", "codebook_perplexity"),
        ("train/loss", "loss"),
        ("loss", "loss"),
        ("val/loss", "eval_loss"),
        ("val_loss", "eval_loss"),
        ("loss/validation", "eval_loss"),
        ("eval/reward", "eval/reward"),
        ("perplexity", "perplexity"),
        ("actor/entropy_mean", "entropy"),
        ("train_kl", "kl"),
        ("critic/advantages/mean", "advantages"),
        ("policy_loss", "policy_loss"),
        ("loss_terms.kl", "loss_terms.kl"),
        ("actor/kl_loss", "actor/kl_loss"),
        ("policy/approx_kl", "policy/approx_kl"),
        ("train/accuracy", "train/accuracy"),
    ],
)
def test_names_that_mean_the_same(name, meaning):
    assert meaning == meaning_of(name)


def test_a_name_keeps_its_own_spelling_beside_its_meaning(worn):
    worn.monitor.logs.log({"train/Reward_Std": 0.0})
    assert {"log.train/reward_std": 0.0, "log.rewards_std": 0.0} == worn.said(Logged)[-1].body.values


def test_names_and_calls_are_bounded(worn):
    worn.monitor.logs.log({f"histogram/{number}": 1.0 for number in range(2 * MAX_NAMES)})
    assert MAX_NAMES == len(worn.said(Logged)[0].body.values)
    for _ in range(2 * MAX_CALLS):
        worn.monitor.logs.log({"histogram/0": 1.0})
    assert MAX_CALLS == len(worn.said(Logged))


@pytest.mark.parametrize("tensor", [torch.rand(1 << 20), torch.rand(2000, 2000).t(), torch.rand(3, 70_001)])
def test_a_large_tensor_is_sampled(tensor):
    assert 0 < sample(tensor).numel() <= SAMPLED


def test_nothing_is_changed_and_nothing_raises(worn):
    kl = torch.tensor([1.0], requires_grad=True)
    state = torch.random.get_rng_state()
    worn.monitor.logs.log({"kl": kl * 2, 3: 4.0})
    assert torch.equal(state, torch.random.get_rng_state())
    assert kl.grad is None
    assert 4.0 == worn.said(Logged)[-1].body.values["log.3"]
