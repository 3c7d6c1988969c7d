"""A batch by the paths that a person would write."""

from collections import OrderedDict

import pytest
import torch

from holter.rank.readings import batches

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


def test_long_lists_of_words_and_numbers_are_not_searched():
    assert [] == paths([list(range(100_000))] * 3)
    assert ["batch[1]"] == paths((["a"] * 50, ONE))
    assert batches.MAX_LEAVES == len(paths([ONE] * 200))


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


def test_the_signature_depends_on_values_places_shape_and_dtype():
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert batches.sign([one, two]) == batches.sign([one.clone(), two.clone()])
    assert batches.sign([one, two]) != batches.sign([two, one])
    assert batches.sign([one]) != batches.sign([one.flip(0)])
    assert batches.sign([one]) != batches.sign([one.reshape(2, 1)])
    assert batches.sign([one]) != batches.sign([one.view(torch.int32)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(2,), (4, 1024), (3, 70_001), (2, 3, 64, 64)])
def test_copies_have_one_signature_whatever_their_size(dtype, shape):
    tensor = torch.rand(shape).mul(100).to(dtype)
    assert batches.sign([tensor]) == batches.sign([tensor.clone()]) != 0


def test_only_what_is_in_memory_and_plural_is_signed():
    assert 0 == batches.sign([])
    assert 0 == batches.sign(
        [torch.tensor(3.0), torch.empty(0), torch.eye(2).to_sparse(), torch.ones(4, device="meta")]
    )
    assert 0 == batches.sign([torch.ones(4, dtype=torch.complex64)])


def test_padding_at_the_head_does_not_make_batches_equal():
    """Left-padded sequences and white margins: the first elements are the same in every batch."""
    first, second = torch.zeros(2, 8, 4096, dtype=torch.int64)
    first[:, -300:], second[:, -300:] = torch.randint(1, 99, (2, 8, 300))
    assert batches.sign([first]) != batches.sign([second])


def test_a_tensor_that_is_not_contiguous_is_signed_without_a_copy_of_it():
    image = torch.rand(4, 3, 64, 64).to(memory_format=torch.channels_last)
    assert batches.sign([image]) == batches.sign([image.clone()])
    assert batches.sign([image]) != batches.sign([image + 1])
    assert batches.corner(image).numel() <= batches.SIGNED_BYTES // 4


def test_a_tensor_whose_memory_was_taken_away_is_not_touched():
    tensor = torch.ones(4096)
    tensor.untyped_storage().resize_(0)
    other = torch.ones(4096)
    assert batches.sign([tensor, other]) == batches.sign([tensor, other.clone()])
    assert batches.sign([tensor, other]) != batches.sign([tensor, other + 1])
    assert 0 == tensor.untyped_storage().size()


def test_nothing_leaves_a_signature_as_it_is():
    assert 7 == batches.fold(7, 0)
    assert batches.fold(batches.fold(0, 1), 2) != batches.fold(batches.fold(0, 2), 1)


def test_kinds_that_no_kernel_reads_are_passed_over():
    tensors = [
        ("mask", torch.ones(2, dtype=torch.bool)),
        ("sparse", torch.eye(2).to_sparse()),
        ("none", torch.empty(0)),
    ]
    assert [] == batches.read(tensors)


def test_what_is_not_finite_is_named():
    bad = batches.read([("x", torch.tensor([1.0, float("nan"), float("inf"), float("-inf")])), ("y", ONE)])
    assert [("x", 1, 2, 4)] == [(entry.name, entry.nans, entry.infs, entry.numel) for entry in bad]
