"""A batch by the paths that a person would write."""

from collections import OrderedDict

import torch

from holter.probes import batches

ONE = torch.ones(2)


def paths(thing: object) -> list[str]:
    return [path for path, _ in batches.leaves(thing, "batch")]


def test_paths_are_what_a_person_would_write():
    assert ["batch"] == paths(ONE)
    assert ["batch['x'][0]", "batch['x'][1]", "batch['y']"] == paths({"x": [ONE, ONE], "y": ONE})
    assert ["batch[1]['x']"] == paths(("text", OrderedDict(x=ONE), 3, None))
    assert [] == paths("text")


def test_depth_is_bounded():
    deep: object = ONE
    for _ in range(batches.MAX_DEPTH):
        deep = [deep]
    assert ["batch" + "[0]" * batches.MAX_DEPTH] == paths(deep)
    assert [] == paths([deep])


def test_a_call_is_kept_without_its_graph():
    weight = torch.ones(2, requires_grad=True)
    product = weight * 2
    kept = batches.capture(lambda: None, (product,), {"mask": [product]})
    assert ["input", "mask[0]"] == [path for path, _, _ in kept.leaves]
    assert all(tensor.grad_fn is None for _, tensor, _ in kept.leaves)
    assert kept.args[0].data_ptr() == product.data_ptr()


def test_several_arguments_are_numbered_and_their_number_is_bounded():
    kept = batches.capture(lambda: None, (ONE, ONE), {})
    assert ["input[0]", "input[1]"] == [path for path, _, _ in kept.leaves]
    many = batches.capture(lambda: None, ([ONE] * 200,), {})
    assert batches.MAX_LEAVES == len(many.leaves)


def test_a_change_in_place_shows_in_the_version():
    value = torch.ones(2)
    kept = batches.capture(lambda: None, (value,), {})
    ((_, tensor, version),) = kept.leaves
    assert version == tensor._version
    value.add_(1)
    assert version != tensor._version


def test_the_fingerprint_depends_on_values_and_their_places():
    def of(*tensors: torch.Tensor) -> int:
        return batches.read([("x", tensor) for tensor in tensors])[0]

    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert of(one, two) == of(one.clone(), two.clone())
    assert of(one, two) != of(two, one)
    assert of(one) != of(one.flip(0))
    assert 0 == batches.read([])[0]


def test_kinds_that_no_kernel_reads_are_passed_over():
    tensors = [
        ("mask", torch.ones(2, dtype=torch.bool)),
        ("sparse", torch.eye(2).to_sparse()),
        ("none", torch.empty(0)),
    ]
    assert [] == batches.read(tensors)[1]


def test_what_is_not_finite_is_named():
    _, bad = batches.read([("x", torch.tensor([1.0, float("nan"), float("inf"), float("-inf")])), ("y", ONE)])
    assert [("x", 1, 2, 4)] == [(entry.name, entry.nans, entry.infs, entry.numel) for entry in bad]
