"""Parameters by module."""

import torch
from torch import nn

from holter.rank.readings.checkup import grouped_by_module


def modules(names: list[str]) -> list[str]:
    return [group.module for group in grouped_by_module([(name, torch.empty(1)) for name in names])]


def test_few_modules_are_told_apart_to_the_last():
    assert ["a.b.c", "a.b.d", ""] == modules(["a.b.c.weight", "a.b.d.weight", "scale"])


def test_many_are_told_by_what_they_have_in_common():
    names = [f"blocks.{block}.{part}.weight" for block in range(12) for part in ("q", "k", "v", "o")]
    assert [f"blocks.{block}" for block in range(12)] + ["head"] == modules([*names, "head.weight"])


def test_too_many_share_the_last_group():
    found = modules([f"{layer}.weight" for layer in range(100)])
    assert (32, "(others)") == (len(found), found[-1])


def test_dtypes_are_told_apart():
    model = nn.ModuleDict({"norm": nn.LayerNorm(2), "linear": nn.Linear(2, 2).bfloat16()})
    model["linear"].bias = nn.Parameter(torch.zeros(2))
    groups = grouped_by_module(list(model.named_parameters()))
    assert [("norm", "float32"), ("linear", "bfloat16"), ("linear", "float32")] == [(g.module, g.dtype) for g in groups]
    assert [0, 1, 2, 3] == sorted(place for group in groups for place in group.places)
