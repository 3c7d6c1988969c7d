"""Who holds the same bytes: told by placements, wrappers and the user, for every rank of a mesh that is only pretended."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from holter.rank import mesh
from holter.rank.models import Model, SaidMesh


@contextmanager
def pretended(rank: int, world_size: int) -> Iterator[None]:
    """A group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("rank", "placements", "scope"),
    [
        (0, (Replicate(), Shard(0)), "@replicate#0"),
        (3, (Replicate(), Shard(0)), "@replicate#1"),
        (3, (Shard(0), Replicate()), "@shard#2"),
        (1, (Replicate(), Replicate()), ""),
        (2, (Shard(0), Shard(1)), "@own"),
    ],
)
def test_a_dtensor_is_held_by_those_that_differ_on_replicated_axes_only(rank, placements, scope):
    with pretended(rank, 4):
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert scope == mesh.of_dtensor(distribute_tensor(torch.zeros(8, 4), axes, placements)).scope


def test_placements_are_said_in_words_and_a_plain_tensor_has_none():
    with pretended(0, 4):
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placed = distribute_tensor(torch.zeros(8, 4), axes, (Replicate(), Shard(1)))
        assert "dp=R,tp=S(1)" == mesh.of_dtensor(placed).placements
        partial = torch.distributed.tensor.DTensor.from_local(torch.zeros(2), axes, (Replicate(), Partial()))
        assert "dp=R,tp=P" == mesh.of_dtensor(partial).placements
        assert mesh.of_dtensor(torch.zeros(2)) is None


def test_axes_are_strides_of_rank_numbers_the_same_on_every_rank():
    told = []
    for rank in (0, 3):
        with pretended(rank, 4):
            axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            told.append([(axis.name, axis.size, axis.stride) for axis in mesh.axes_of(axes)])
    assert [[("dp", 2, 2), ("tp", 2, 1)]] * 2 == told


def test_plain_layers_of_a_tensor_parallel_model_are_replicas_along_its_axis_and_nobody_reduces_the_other():
    with pretended(1, 4):
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.data, axes["tp"], (Shard(0),)))
        watched = Model(model, "")
        assert "@tp#0" == watched.scope_of(model[0].weight)
        assert ["tensor"] == [axis.kind for axis in watched.axes]
        assert "@ignored:dp#1" == watched.scope_of(model[1].weight)


def test_what_ddp_ignores_is_no_replica_and_an_expert_is_a_rank_s_own():
    with pretended(0, 2):
        model = nn.ModuleDict({"shared": nn.Linear(2, 2), "head": nn.Linear(2, 2), "expert": nn.Linear(2, 2)})
        names = [name for name, _ in model.named_parameters() if not name.startswith("shared")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapper = DistributedDataParallel(model, init_sync=False)
        watched = Model(wrapper, "")
        assert {id(p) for p in model["shared"].parameters()} == watched.replicas
        assert "@ignored#0" == watched.scope_of(model["head"].weight)
        assert not watched.is_compared(model["expert"].weight, with_own=True)


def test_fully_sharded_parameters_are_a_rank_s_own_and_say_what_they_are_cast_to():
    with pretended(1, 2):
        axes = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, mesh=axes, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        watched = Model(model, "")
        assert ["@own"] * 4 == [watched.scope_of(p) for p in model.parameters()]
        assert {"bfloat16,None"} == set(watched.policies.values())
        assert [("dp", "data")] == [(axis.name, axis.kind) for axis in watched.axes]
        assert (0, 1) == watched.span


@pytest.mark.parametrize(
    ("said", "rank", "scope"),
    [
        ("pp=2,dp=2", 3, "@dp#2"),
        ("dp=2,pp=2", 3, "@dp#1"),
        ({"x:replicate": 2, "dp:split": 2}, 1, "@x#1"),
        ("dp=4", 1, ""),
        ("pp=4", 1, "@own"),
    ],
)
def test_the_user_s_word_counts_for_plain_parameters(said, rank, scope):
    with pretended(rank, 4):
        assert scope == mesh.declare(said).holders(rank).scope


def test_a_layout_of_another_number_of_ranks_is_no_layout():
    with pretended(0, 4):
        assert mesh.declare("dp=8") is None
        assert mesh.declare("") is None


@pytest.mark.parametrize(("said", "scopes"), [("dp=2,tp=2", ("", "@dp#1")), ("dp=2,pp=2", ("@dp#1", "@dp#1"))])
def test_what_is_not_marked_as_cut_is_whole_along_a_tensor_parallel_axis_that_the_user_names(said, scopes):
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 2, bias=False)})
    model["up"].weight.tensor_model_parallel = True
    with pretended(1, 4):
        watched = Model(model, "", said=SaidMesh(said))
        assert scopes == (watched.scope_of(model["norm"].weight), watched.scope_of(model["up"].weight))
        ddp = DistributedDataParallel(model, process_group=dist.new_group([1, 3]))
        wrapped = Model(ddp, "", said=SaidMesh(said))
        assert scopes == (wrapped.scope_of(model["norm"].weight), wrapped.scope_of(model["up"].weight))


def test_without_marks_nothing_is_known_along_a_tensor_parallel_axis():
    model = nn.LayerNorm(4)
    with pretended(1, 2):
        assert "@own" == Model(model, "", said=SaidMesh("tp=2")).scope_of(model.weight)
