"""What is known of a device by its type."""

import torch

from holter_kernels import devices, side_stream


def test_the_host_has_no_streams_though_torch_has_their_names() -> None:
    assert not devices.has_streams(torch.device("cpu"))
    assert side_stream(torch.device("cpu")) is None
    assert not devices.can_pin("cpu")


def test_what_torch_does_not_know_has_nothing() -> None:
    assert not devices.has_streams(torch.device("meta"))
    assert not devices.is_capturing(torch.device("meta"))
