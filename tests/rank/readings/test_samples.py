"""A few elements of many tensors."""

import torch
from torch import nn

from holter.rank.readings.samples import Samples, spread, strided


def test_a_sample_is_spread_over_the_whole():
    values = strided(torch.arange(100.0).view(10, 10), 8)
    assert [0.0, 13.0, 26.0, 39.0, 52.0, 65.0, 78.0, 91.0] == values.tolist()
    assert [0, 33, 66] == spread(100, 3)
    assert [0, 1] == spread(2, 3)


def test_a_sample_of_an_image_kernel_lies_in_its_memory():
    kernel = torch.arange(16.0).view(2, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    assert sorted(strided(kernel, 100).tolist()) == list(range(16))


def test_differences_are_those_of_the_step():
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    weight.grad = torch.tensor([1.0, 0.0, 1.0])
    samples = Samples([[weight]])
    with torch.no_grad():
        weight += torch.tensor([0.5, 0.5, 0.0])
    before, added, masked = samples.differences()
    assert [1.0, 2.0, 3.0] == before.tolist()
    assert [0.5, 0.5, 0.0] == added.tolist()
    assert [0.5, 0.0] == masked[[0, 2]].tolist()
    assert masked[1].isnan()


def test_a_parameter_that_is_gone_has_no_differences():
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    samples = Samples([[weight]])
    del weight
    assert [0, 0, 0] == [tensor.numel() for tensor in samples.differences()]
