"""A mesh as detectors see it: one subgroup along one axis, asked for and told by the names that the ranks use."""

from holter.coordinator.window.assembly import Assembly
from holter.diagnosis import rank_causes
from holter.faults.replicas.replica_divergence import ReplicaDivergence
from holter.faults.replicas.shard_history import ShardHistory
from holter.faults.shared.axes import part_text, views
from holter.records import Attached, Census, Component, MeshAxis, Observation, StepDone, Table, TensorEntry

AXES = [MeshAxis("replicate", 2, 2), MeshAxis("shard", 2, 1)]
ENTRY = TensorEntry(
    "up.weight", (64, 32), "float32", True, False, 0, False, True, axis="replicate", placements="replicate=R,shard=S(0)"
)


def census(entry=ENTRY):
    return Census(
        model=0,
        wrapper="Net",
        is_replicated=False,
        optimizers=["AdamW"],
        components=[Component("", "Net", "Net", True, 4)],
        backward_order=[],
        part=0,
        parts=1,
        entries=[entry],
        axes=AXES,
    )


def done(roots):
    return StepDone(
        seconds=0.1,
        phase_seconds={},
        micro_steps=1,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=0.1,
        batch=0,
        roots=roots,
        nonfinite=[],
        overhead_ratio=0.0,
        check_interval=1,
    )


class Mesh:
    """Four ranks, two by two, whose roots a test says."""

    def __init__(self, entry=ENTRY):
        self.assembly = Assembly(4)
        for rank in range(4):
            self.say(rank, 0, Attached(pid=rank + 1, host="h", world_size=4, local_rank=rank, command=[], versions={}))
            self.say(rank, 0, census(entry))

    def say(self, rank, step, body):
        self.assembly.add(Observation(rank=rank, step=step, at_ns=0, body=body), 0)

    def step(self, step, roots_of):
        for rank in range(4):
            self.say(rank, step, done(roots_of(rank)))

    def table(self, name, step, rank, fingerprint):
        self.say(rank, step, Table(tensor_class=name, root=fingerprint, names=["up.weight"], fingerprints=[fingerprint], norms=[1.0]))  # fmt: skip

    def window(self):
        return self.assembly.window(10**12)


def along(moment, rank, root):
    return {f"parameters_{moment}@replicate#{rank % 2}": root}


def test_subgroups_that_agree_among_themselves_are_equal_whatever_the_others_have():
    mesh = Mesh()
    for step in range(3):
        mesh.step(step, lambda rank: along("before", rank, rank % 2) | along("after", rank, 10 + rank % 2))
    window = mesh.window()
    assert 3 == window.tensors.classes["parameters_before@replicate"].num_equal
    assert [""] == [view.axis for view in views(window)]
    assert [] == list(ReplicaDivergence().judge(window))


def test_a_subgroup_that_parts_is_asked_for_by_its_own_name_and_named_with_axis_and_part():
    mesh = Mesh()
    mesh.step(0, lambda rank: along("before", rank, 5 if rank == 3 else rank % 2))
    mesh.step(1, lambda rank: along("before", rank, 5 if rank == 3 else rank % 2))
    (asking,) = ReplicaDivergence().judge(mesh.window())
    assert [("parameters_before@replicate#1", (1, 3))] == [(need.tensor_class, need.ranks) for need in asking.needs]
    for rank in (1, 3):
        mesh.table("parameters_before@replicate#1", 0, rank, 5 if rank == 3 else 1)
    (finding,) = ReplicaDivergence().judge(mesh.window())
    assert "along the axis replicate" in finding.summary
    (proof,) = [one for one in finding.evidence if one.kind == "mesh"]
    assert ("replicate", [[1, 3]]) == (proof.values["axis"], proof.values["subgroups"])
    assert {"up.weight": "32:64 of 64 in dimension 0"} == proof.values["parts"]
    assert "unsynced_initialisation" == rank_causes(finding)[0].cause


def test_settings_that_differ_on_one_rank_are_told_of_all_ranks_though_weights_part_along_an_axis_at_once():
    mesh = Mesh()
    for step in range(3):
        mesh.step(step, lambda rank: along("before", rank, rank % 2) | along("after", rank, 10 + rank % 2 + 5 * (rank == 3)) | {"hyperparameters": int(rank == 3)})  # fmt: skip
    (asking,) = ReplicaDivergence().judge(mesh.window())
    for need in asking.needs:
        for rank in need.ranks:
            mesh.say(rank, need.step, Table(tensor_class=need.tensor_class, root=int(rank == 3), names=["lr"], fingerprints=[1 + (rank == 3)], norms=[0.1 + (rank == 3)]))  # fmt: skip
    (finding,) = ReplicaDivergence().judge(mesh.window())
    assert ((3,), "optimizer_state_mismatch") == (finding.ranks, rank_causes(finding)[0].cause)


def own(moment, root):
    return {f"parameters_{moment}@own": root}


def test_a_shard_that_changed_between_two_steps_is_found_by_its_own_history():
    mesh = Mesh()
    for step in range(6):
        mesh.step(step, lambda rank, step=step: own("before", 100 * step + (rank == 2 and step == 5)) | own("after", 100 * (step + 1)))  # fmt: skip
    (asking,) = ShardHistory().judge(mesh.window())
    assert {("parameters_after@own", 4), ("parameters_before@own", 5)} <= {
        (need.tensor_class, need.step) for need in asking.needs
    }
    mesh.table("parameters_after@own", 4, 2, 7)
    mesh.table("parameters_before@own", 5, 2, 8)
    for need in asking.needs:
        if need.tensor_class.partition("@")[2] == "own.partition" or need.tensor_class.startswith("state"):
            mesh.assembly.mark_unavailable((need.tensor_class, need.step, 2))
    (finding,) = ShardHistory().judge(mesh.window())
    assert ((2,), ("up.weight",), 5) == (finding.ranks, finding.tensors, finding.first_step)
    assert "silent_data_corruption" == rank_causes(finding)[0].cause


def test_what_an_optimizer_remembers_of_a_shard_has_a_history_of_its_own():
    mesh = Mesh()
    for step in range(6):
        kept = {"state_before@own": 7 * step, "state_after@own": 7 * (step + 1)}
        state = kept | ({"state_before@own": 1} if step == 5 else {})
        mesh.step(step, lambda rank, step=step, state=state, kept=kept: own("before", step) | own("after", step + 1) | (state if rank == 2 else kept))  # fmt: skip
    (asking,) = ShardHistory().judge(mesh.window())
    assert {("state_after@own", 4), ("state_before@own", 5)} <= {
        (need.tensor_class, need.step) for need in asking.needs
    }
    for name, step in ((need.tensor_class, need.step) for need in asking.needs):
        if name.startswith("state"):
            mesh.say(2, step, Table(tensor_class=name, root=step, names=["optimizer: up.weight.exp_avg"], fingerprints=[step], norms=[1.0]))  # fmt: skip
        else:
            mesh.assembly.mark_unavailable((name, step, 2))
    (finding,) = ShardHistory().judge(mesh.window())
    assert ((2,), ("optimizer: up.weight.exp_avg",), ()) == (finding.ranks, finding.tensors, finding.modules)
    assert finding.summary.startswith("What the optimizer remembers of shards of rank 2 changed")
    assert "silent_data_corruption" == rank_causes(finding)[0].cause


def test_weights_that_every_rank_changes_between_steps_or_one_changes_again_and_again_are_silent():
    for changed in (lambda _rank, step: step == 5, lambda rank, step: rank == 0 and step % 2):
        mesh = Mesh()
        for step in range(8):
            mesh.step(step, lambda rank, step=step, changed=changed: own("before", 100 * step + bool(changed(rank, step))) | own("after", 100 * (step + 1)))  # fmt: skip
        assert [] == list(ShardHistory().judge(mesh.window()))


def test_what_is_ignored_and_differs_from_the_start_is_each_rank_s_own():
    mesh = Mesh()
    for step in range(3):
        mesh.step(step, lambda rank: {"parameters_before@ignored#0": rank, "gradients@ignored#0": rank})
    assert [] == list(ReplicaDivergence().judge(mesh.window()))


def test_the_part_of_a_tensor_follows_from_its_placements():
    assert "0:32 of 64 in dimension 0" == part_text(ENTRY, AXES, 2)
    assert "" == part_text(TensorEntry("b", (4,), "float32", True, False, 0), AXES, 2)


def test_of_thousands_of_subgroups_only_the_one_that_parted_is_asked():
    assembly = Assembly(4096)
    for rank in range(4096):
        body = Attached(pid=rank + 1, host="h", world_size=4096, local_rank=0, command=[], versions={})
        assembly.add(Observation(rank=rank, step=0, at_ns=0, body=body), 0)
        root = rank % 1024 + (10**6 if rank == 3000 else 0)
        body = done({f"gradients@replicate#{rank % 1024}": root, "gradients@own": rank})
        assembly.add(Observation(rank=rank, step=0, at_ns=0, body=body), 0)
    (asking,) = ReplicaDivergence().judge(assembly.window(10**12))
    assert {952, 1976, 3000, 4024} >= set(asking.needs[0].ranks) >= {3000}
    assert "gradients@replicate#952" == asking.needs[0].tensor_class


def test_gradients_that_part_after_the_settings_did_are_not_the_beginning():
    mesh = Mesh()
    for step in range(3):
        mesh.step(step, lambda rank, step=step: {"hyperparameters": rank == 3, f"gradients@replicate#{rank % 2}": rank == 3 and step > 0})  # fmt: skip
    (asking,) = ReplicaDivergence().judge(mesh.window())
    assert ["hyperparameters"] == [need.tensor_class for need in asking.needs]
    for rank in asking.needs[0].ranks:
        table = Table(tensor_class="hyperparameters", root=int(rank == 3), names=["lr"], fingerprints=[1 + (rank == 3)], norms=[0.1])  # fmt: skip
        mesh.say(rank, 0, table)
    (finding,) = ReplicaDivergence().judge(mesh.window())
    top = rank_causes(finding)[0]
    assert ((3,), "optimizer_state_mismatch", 0.93) == (top.ranks, top.cause, top.confidence)


def test_what_a_script_leaves_out_of_its_own_reduction_is_not_judged_by_what_it_reduces():
    mesh = Mesh()
    for step in range(4):
        mesh.step(step, lambda rank, step=step: {"gradients_reduced": step, "gradients": step, "gradients@ignored#0": 10 * step + rank, "parameters_before@ignored#0": 100 * step + bool(step) * rank, "parameters_after@ignored#0": 100 * (step + 1) + rank})  # fmt: skip
    (asking,) = ReplicaDivergence().judge(mesh.window())
    for need in asking.needs:
        for rank in need.ranks:
            mesh.assembly.mark_unavailable((need.tensor_class, need.step, rank))
    (finding,) = ReplicaDivergence().judge(mesh.window())
    assert ("warning", "unreduced_parameters") == (finding.severity, rank_causes(finding)[0].cause)
