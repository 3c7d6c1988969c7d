"""What a loader says of itself."""

import random
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)

from holter.rank.hooks.data import LoaderDescription, describe_loader

DATA = TensorDataset(torch.arange(20))


def of(**how: Any) -> LoaderDescription:
    return describe_loader(DataLoader(DATA, **how), None)


def test_a_plain_loader():
    said = of(batch_size=3)
    assert ("TensorDataset", 20, 7, 3) == (said.dataset, said.dataset_size, said.num_batches, said.batch_size)
    assert ("BatchSampler>SequentialSampler", False, -1, 1) == (
        said.sampler,
        said.is_shuffling,
        said.sampler_epoch,
        said.num_shards,
    )


def test_the_last_batch_counts_unless_it_is_dropped():
    assert 6 == of(batch_size=3, drop_last=True).num_batches
    assert 20 == of(batch_size=None).num_batches


@pytest.mark.parametrize("is_shuffling", [True, False])
def test_a_distributed_sampler_says_its_parts_and_its_epoch(is_shuffling):
    sampler = DistributedSampler(DATA, 2, 0, shuffle=is_shuffling)
    sampler.set_epoch(4)
    said = of(batch_size=5, sampler=sampler)
    assert (2, 4, is_shuffling, 2) == (said.num_batches, said.sampler_epoch, said.is_shuffling, said.num_shards)


def test_data_that_is_cut_twice_is_counted_twice():
    once = BatchSampler(DistributedSampler(DATA, 2, 0), batch_size=5, drop_last=False)
    said = of(batch_sampler=BatchSamplerShard(once, num_processes=2, process_index=0))
    assert ("BatchSamplerShard>BatchSampler>DistributedSampler", 4) == (said.sampler, said.num_shards)
    assert 1 == said.num_batches


def test_accelerates_own_sampler_shuffles():
    said = of(batch_size=4, sampler=SeedableRandomSampler(DATA, data_seed=1))
    assert ("BatchSampler>SeedableRandomSampler", True) == (said.sampler, said.is_shuffling)


def test_a_stream_has_no_sizes_and_is_not_asked_for_them():
    class Stream(IterableDataset):
        def __len__(self) -> int:
            raise AssertionError("asked")

        def __iter__(self) -> Any:
            return iter(range(10))

    said = describe_loader(DataLoader(Stream(), batch_size=2), None)
    assert ("Stream", -1, -1, 2, 1) == (
        said.dataset,
        said.dataset_size,
        said.num_batches,
        said.batch_size,
        said.num_shards,
    )
    said = describe_loader(DataLoader(IterableDatasetShard(Stream(), num_processes=2), batch_size=2), None)
    assert ("Stream", "IterableDatasetShard", 2) == (said.dataset, said.sampler, said.num_shards)


class Simple(Sampler):
    def __init__(self) -> None:
        self.order = [3, 1, 2]

    def __iter__(self) -> Any:
        return iter(self.order)

    def __len__(self) -> int:
        return max(len(self.order), 0)


class Running(Simple):
    """Must draw an epoch to know its length."""

    def draw(self) -> list[int]:
        return random.sample(self.order, 2)

    def __len__(self) -> int:
        return len(self.draw())


class Iterating(Simple):
    def __len__(self) -> int:
        return len(list(self))


def test_a_length_that_must_be_worked_for_is_not_asked():
    assert 3 == of(batch_size=1, sampler=Simple()).num_batches
    assert -1 == of(batch_size=1, sampler=Running()).num_batches
    assert -1 == of(batch_size=1, sampler=Iterating()).num_batches
    assert 2 == of(batch_sampler=[[0, 1], [2]]).num_batches


def test_a_length_that_raises_is_unknown():
    class Broken(TensorDataset):
        def __len__(self) -> int:
            raise LookupError

    said = describe_loader(DataLoader(Broken(torch.ones(4)), batch_sampler=[[0]]), None)
    assert (-1, 1) == (said.dataset_size, said.num_batches)


def test_parts_that_ranks_cut_by_hand_are_told_apart():
    whole = TensorDataset(torch.arange(40.0))
    cut = [TensorDataset(whole.tensors[0][rank::2]) for rank in (0, 1)]
    subsets = [Subset(whole, range(rank, 40, 2)) for rank in (0, 1)]
    for one, other in (cut, subsets):
        sampled = [DataLoader(data, sampler=DistributedSampler(data, 2, 0)) for data in (one, other, one)]
        said = [describe_loader(loader, None) for loader in sampled]
        assert 0 != said[0].content != said[1].content
        assert said[0].content == said[2].content
    assert 40 == said[0].whole_size
    assert 0 == describe_loader(DataLoader(whole), None).content, "nothing cuts it"
