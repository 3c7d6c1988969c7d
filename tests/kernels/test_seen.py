"""What native code sees of a list in one call is what Python says of each, and what cannot be seen is left to Python."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holter_kernels import Pass, seen

pytestmark = pytest.mark.skipif(not seen.is_sound(), reason="no native code, or a torch whose functions are others")


@pytest.fixture
def owners() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.full((3, 2 + k), float(k))) for k in range(4)]
    for each in made:
        each.grad = each.detach() + 1
    return made


def words(part: bytes) -> list[int]:
    found: list[int] = np.frombuffer(part, np.uint64).tolist()
    return found


def test_gradients_are_seen_as_python_says(owners: list[torch.nn.Parameter]) -> None:
    gradients = [owner.grad for owner in owners]
    gradients[2].mul_(2)
    found = seen.see(list(owners), gradients=True)
    assert found is not None
    assert [g.data_ptr() for g in gradients] == words(found.addresses)
    assert [g._version for g in gradients] == words(found.versions)
    assert all(a is b for a, b in zip(gradients, found, strict=True))


def test_a_write_is_seen_and_a_new_gradient_too(owners: list[torch.nn.Parameter]) -> None:
    before = seen.see(list(owners), gradients=True)
    owners[1].grad.add_(1)
    written = seen.see(list(owners), gradients=True)
    held, owners[1].grad = owners[1].grad, owners[1].grad.clone()
    made_anew = seen.see(list(owners), gradients=True)
    assert before is not None
    assert written is not None
    assert made_anew is not None
    assert before.versions != written.versions
    assert before.addresses == written.addresses != made_anew.addresses
    assert held is not owners[1].grad


def test_a_tensor_that_took_anothers_place_is_seen(owners: list[torch.nn.Parameter]) -> None:
    other = torch.nn.Parameter(torch.ones(3, 3))
    other.grad = torch.ones(3, 3)
    address = other.grad.data_ptr()
    torch.utils.swap_tensors(owners[1], other)
    found = seen.see(list(owners), gradients=True)
    assert found is not None
    assert words(found.addresses)[1] == address


class Wrapper(torch.Tensor):
    """A script's own kind of tensor."""


@pytest.mark.parametrize(
    "odd",
    [
        lambda: None,
        lambda: torch.ones(4, 6).t()[1:],
        lambda: torch.ones(4).to_sparse(),
        lambda: torch.ones(4).long(),
        lambda: torch.ones(0),
        lambda: torch.ones(4, device="meta"),
        lambda: torch.ones(4).as_subclass(Wrapper),
        lambda: torch._neg_view(torch.ones(4)),
        lambda: "no tensor",
    ],
)
def test_a_list_with_anything_else_in_it_is_left_to_python(odd: Any, owners: list[torch.nn.Parameter]) -> None:
    assert seen.see([*owners, odd()]) is None


def test_a_gradient_that_is_missing_or_sparse_is_left_to_python(owners: list[torch.nn.Parameter]) -> None:
    owners[2].grad = None
    assert seen.see(list(owners), gradients=True) is None
    owners[2].grad = torch.ones(3, 4).to_sparse()
    assert seen.see(list(owners), gradients=True) is None


def test_a_tensor_of_inference_has_no_version_and_is_left_to_python() -> None:
    with torch.inference_mode():
        untracked = torch.ones(3)
    assert seen.see([untracked]) is None


def test_memory_that_was_freed_is_not_read(owners: list[torch.nn.Parameter]) -> None:
    owners[0].grad.untyped_storage().resize_(0)
    assert seen.see(list(owners), gradients=True) is None


def rows(kept: Pass, tensors: Any) -> Any:
    table = kept.start(tensors).poll()  # type: ignore[union-attr]
    return table.rows.copy()


def test_a_pass_reads_the_same_of_what_was_seen_and_of_a_list(owners: list[torch.nn.Parameter]) -> None:
    kept, gradients = Pass([]), [owner.grad for owner in owners]
    for turn in range(4):
        for owner in owners:
            owner.grad = owner.grad * 2 + turn
        gradients = [owner.grad for owner in owners]
        as_seen = rows(kept, seen.see(list(owners), gradients=True))
        assert (rows(Pass([]), gradients) == as_seen).all()
        assert (rows(kept, gradients) == as_seen).all()
    larger = seen.see([*owners, torch.nn.Parameter(torch.ones(7))])
    assert larger is not None
    assert rows(kept, larger)["numel"].tolist() == [6, 9, 12, 15, 7]


@pytest.fixture
def unbound() -> Iterator[None]:
    yield
    seen.is_sound.cache_clear()
    assert seen.is_sound()


@pytest.mark.usefixtures("unbound")
@pytest.mark.parametrize("name", ["_ZN2at6native12is_inferenceERKNS_6TensorE", "no_such_name"])
def test_nothing_is_seen_with_a_torch_that_answers_otherwise(name: str) -> None:
    # In the place of the version another function that takes the same and says something else; or one that no torch has.
    symbols = (seen.SYMBOLS[0], ("libtorch_cpu.so", name), *seen.SYMBOLS[2:])
    assert not seen.is_sound(symbols)
    # Not by the native code either, whoever asks it.
    assert seen.see_unchecked([torch.ones(3)]) is None
