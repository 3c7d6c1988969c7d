"""`holter checkpoint`: whatever is done to a sealed checkpoint is found; what is whole is called good."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from holter.cli import main
from holter.frameworks.halts import prove
from holter.halting.vault import manifest as manifests
from holter.halting.vault import store
from holter.halting.vault.manifest import Circumstances
from holter.halting.vault.store import Vault
from holter.rank.framework import Task

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Keeper:
    framework = "accelerate"
    rescues_alone = True

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def save(self, task: Task) -> None:
        raise NotImplementedError

    def live(self):
        yield from self._model.state_dict().items()


def seal(run_dir: Path, step: int = 30, **about: object) -> Path:
    """A checkpoint of two ranks, with files of every kind."""
    vault, model = Vault(run_dir), torch.nn.Linear(16, 8)
    partial = vault.begin(step)
    state = partial / "state"
    save_file(model.state_dict(), state / "model.safetensors")
    torch.save({"state": {0: {"exp_avg": torch.rand(16)}}, "param_groups": [{"lr": 0.1}]}, state / "optimizer.bin")
    for rank in (0, 1):
        torch.save({"torch": torch.get_rng_state(), "python": random.getstate()}, state / f"random_states_{rank}.pkl")
    dcp.save({"extra": torch.rand(4, 4)}, checkpoint_id=str(state / "dcp"), no_dist=True)
    (state / "config.json").write_text("{}")
    (partial / "ranks" / "0.msgpack").write_bytes(b"blob")
    for rank in (0, 1):
        task = Task(partial, step, rank, 2, (0, 1), (), is_rescue=False, writes_shared=rank == 0, rewinds={})
        prove(task, Keeper(model))
    known = {"run_id": "run-a", "step": step, "world_size": 2, "savers": (0, 1), "cause": "nonfinite_input", "why": ""}
    sealed = vault.seal(partial, Circumstances(**(known | about)))
    (run_dir / "run.json").write_text(json.dumps({"run_id": "run-a"}))
    return sealed.path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("original") / "run"
    seal(run_dir)
    return run_dir


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """One to be damaged."""
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "30"


def verify(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    code = main(["checkpoint", "verify", str(path), "--json"])
    return code, json.loads(capsys.readouterr().out)


def kinds(found: dict) -> set[str]:
    return {problem["kind"] for problem in found["problems"]}


def test_a_whole_one_is_good_by_its_directory_and_by_its_state(checkpoint, capsys):
    for path in (checkpoint, checkpoint / "state"):
        code, found = verify(path, capsys)
        assert (0, True, [], []) == (code, found["is_good"], found["problems"], found["notes"])
        assert (30, "run-a", "healthy", 2) == (found["step"], found["run_id"], found["verdict"], found["world_size"])
    assert 0 == main(["checkpoint", "verify", str(checkpoint)])
    said = capsys.readouterr().out
    assert ": good\n" in said
    assert "step 30 of run run-a, accelerate, 2 ranks, halted for Non-finite input (nonfinite_input)" in said
    assert "all as they were sealed" in said


def test_a_flipped_bit_anywhere_in_any_file_is_found(checkpoint, capsys):
    rng = random.Random(0)  # noqa: S311
    files = [path for part in ("state", "ranks") for path in (checkpoint / part).rglob("*") if path.is_file()]
    assert len(files) >= 7
    for path in files:
        content = path.read_bytes()
        place = rng.randrange(len(content) * 8)
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        code, found = verify(checkpoint, capsys)
        assert 1 == code, (path, place)
        assert str(path.relative_to(checkpoint)) in {problem["file"] for problem in found["problems"]}
        path.write_bytes(content)
    assert 0 == verify(checkpoint, capsys)[0]


@pytest.mark.parametrize(
    ("file", "tensor"),
    [
        ("state/model.safetensors", "weight"),
        ("state/optimizer.bin", "state.0.exp_avg"),
        ("state/dcp/__0_0.distcp", "extra"),
    ],
)
def test_a_bit_of_a_tensor_names_the_tensor(checkpoint, capsys, file, tensor):
    path = checkpoint / file
    content = bytearray(path.read_bytes())
    sealed = next(each for each in manifests.read(checkpoint).tensors if (each.file, each.name) == (file, tensor))
    assert "float32" == sealed.dtype
    from holter.frameworks.saving.reading import tensors_in  # noqa: PLC0415

    value = dict(tensors_in(path))[tensor]
    at = bytes(content).index(value.contiguous().numpy().tobytes())
    content[at + 5] ^= 0x10
    path.write_bytes(content)
    code, found = verify(checkpoint, capsys)
    assert 1 == code
    named = [(each["file"], each["tensor"]) for each in found["problems"] if each["kind"] == "changed_tensor"]
    assert [(file, tensor)] == named


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda at: os.truncate(at / "state" / "model.safetensors", 100), "truncated_file"),
        (lambda at: os.truncate(at / "state" / "optimizer.bin", 0), "truncated_file"),
        (lambda at: (at / "state" / "dcp" / "__0_0.distcp").unlink(), "missing_file"),
        (lambda at: (at / "state" / "random_states_1.pkl").unlink(), "missing_file"),
        (lambda at: (at / "state" / "more.bin").write_bytes(b""), "extra_file"),
        (lambda at: (at / "manifest.json").unlink(), "no_manifest"),
        (lambda at: (at / "manifest.json").write_text("{}"), "damaged_manifest"),
        (lambda at: (at / "manifest.json").write_bytes(b""), "damaged_manifest"),
        (lambda at: _rewrite(at, step=40), "other_step"),
        (lambda at: _rewrite(at, run_id="run-z"), "other_run"),
        (lambda at: _edit(at, b'"run-a"', b'"run-z"'), "damaged_manifest"),
        (lambda at: _edit(at, b'"healthy"', b'"unknown"'), "damaged_manifest"),
    ],
)
def test_damage_is_found_and_said(checkpoint: Path, capsys, damage: Callable[[Path], None], kind: str):
    damage(checkpoint)
    for path in (checkpoint, checkpoint / "state"):
        code, found = verify(path, capsys)
        assert (1, False) == (code, found["is_good"])
        assert kind in kinds(found)
        assert 1 == main(["checkpoint", "verify", str(path)])
        assert "not good" in capsys.readouterr().out


def test_one_in_another_runs_directory_is_found_out(checkpoint, tmp_path, capsys):
    other = tmp_path / "other"
    seal(other, 20, run_id="run-b")
    (other / "run.json").write_text(json.dumps({"run_id": "run-b"}))
    shutil.copytree(checkpoint, other / "checkpoints" / "30")
    code, found = verify(other / "checkpoints" / "30", capsys)
    assert (1, {"other_run"}) == (code, kinds(found))


def test_one_of_an_earlier_life_of_the_same_directory_is_good(checkpoint, capsys):
    (checkpoint.parent.parent / "run.json").write_text(json.dumps({"run_id": "run-after-resume"}))
    assert 0 == verify(checkpoint, capsys)[0]


def test_one_that_was_not_healthy_is_not_good_although_it_is_whole(tmp_path, capsys):
    code, found = verify(seal(tmp_path / "run", verdict="poisoned", why="NaN at step 12"), capsys)
    assert (1, "poisoned", []) == (code, found["verdict"], found["problems"])


def test_one_that_was_never_sealed_is_not_good(tmp_path, capsys):
    partial = Vault(tmp_path / "run").begin(30)
    (partial / "state" / "model.bin").write_bytes(b"half")
    code, found = verify(partial, capsys)
    assert (1, {"unsealed"}) == (code, kinds(found))


def test_a_checkpoint_of_ones_own_is_read_for_what_it_is(tmp_path, capsys):
    own = tmp_path / "mine"
    own.mkdir()
    torch.save({"w": torch.ones(4)}, own / "model.pt")
    code, found = verify(own, capsys)
    assert (0, False, "unknown", []) == (code, found["has_manifest"], found["verdict"], found["problems"])
    assert any("no manifest" in note for note in found["notes"])
    torch.save({"w": torch.tensor([1.0, float("nan"), float("inf"), 2.0]), "fine": torch.ones(2)}, own / "model.pt")
    code, found = verify(own / "model.pt", capsys)
    assert (1, "poisoned", ["w"]) == (code, found["verdict"], [each["tensor"] for each in found["problems"]])
    assert "2 of 4 values" in found["problems"][0]["text"]
    os.truncate(own / "model.pt", 300)
    code, found = verify(own, capsys)
    assert (1, {"unreadable_file"}) == (code, kinds(found))


def test_wrong_use_is_one_sentence(tmp_path, capsys):
    assert 2 == main(["checkpoint", "verify", str(tmp_path / "nowhere")])
    assert 2 == main(["checkpoint", "verify", str(tmp_path)])
    assert 2 == main(["checkpoint"])
    said = capsys.readouterr().err.splitlines()
    assert 3 == len(said)
    assert all(line.startswith("holter: ") for line in said)


def test_a_run_without_a_healthy_checkpoint_has_no_newest_one(tmp_path, capsys):
    seal(tmp_path / "run", why="NaN", verdict="poisoned")
    assert 1 == main(["checkpoint", "newest", str(tmp_path / "run")])
    assert "" == capsys.readouterr().out


def test_list_shows_what_halts_kept_and_what_the_script_saved(checkpoint, tmp_path, capsys):
    run_dir = checkpoint.parent.parent
    own = store.ScriptSave(
        step=20,
        path=str(tmp_path / "gone"),
        framework="torch",
        saved_at="2026-11-15T10:15:00Z",
        seconds=0.1,
        verdict="poisoned",
        why="NaN at step 12",
    )
    store.script_saves_path(run_dir).write_bytes(msgspec.json.encode(store.ScriptSaves([own])))
    assert 0 == main(["checkpoint", "list", str(run_dir), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(20, "poisoned", "script", False), (30, "healthy", "holter", True)] == [
        (each["step"], each["verdict"], each["by"], each["is_there"]) for each in found
    ]
    assert 0 == main(["checkpoint", "newest", str(run_dir)])
    assert f"{checkpoint / 'state'}\n" == capsys.readouterr().out
    assert 0 == main(["checkpoint", "list", str(run_dir)])
    said = capsys.readouterr().out
    assert str(checkpoint / "state") in said
    assert "it is no longer there" in said


def _rewrite(directory: Path, **changes: object) -> None:
    """A manifest that is sound in itself."""
    changed = manifests.signed(msgspec.structs.replace(manifests.read(directory), **changes))
    (directory / "manifest.json").write_bytes(manifests.encode(changed))


def _edit(directory: Path, old: bytes, new: bytes) -> None:
    path = directory / "manifest.json"
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@pytest.fixture
def in_parts(tmp_path: Path) -> Path:
    """A checkpoint of two ranks that were blocked: each wrote one half of a weight."""
    vault, weight = Vault(tmp_path / "run"), torch.arange(6.0)
    partial = vault.begin(30)
    for rank in (0, 1):
        stretch = {"start": 3 * rank, "value": weight[3 * rank : 3 * rank + 3].clone()}
        part = {"model": {"weight": {"shape": [2, 3], **stretch}}, "optim": {}, "whole": {}, "groups": [], "others": {}}
        torch.save(part | {"step": 30}, partial / "state" / f"part_rank_{rank}.pt")
        keeper = Keeper(torch.nn.ParameterDict({"weight": torch.nn.Parameter(stretch["value"])}))
        keeper.framework = "fsdp_parts"
        task = Task(partial, 30, rank, 2, (0, 1), (), is_rescue=True, writes_shared=rank == 0, rewinds={})
        prove(task, keeper)
    about = Circumstances(run_id="run-a", step=30, world_size=2, savers=(0, 1))
    return vault.seal(partial, about).path


def test_parts_are_assembled_beside_what_was_sealed(in_parts, capsys):
    assert 0 == main(["checkpoint", "assemble", str(in_parts), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (str(in_parts / "assembled"), 30, "healthy", 1) == tuple(told.values())
    state = {"model": {"weight": torch.zeros(2, 3)}}
    dcp.load(state, checkpoint_id=in_parts / "assembled", no_dist=True)
    assert [[0, 1, 2], [3, 4, 5]] == state["model"]["weight"].tolist()
    assert 0 == verify(in_parts, capsys)[0], "what was sealed is as it was"
    assert 2 == main(["checkpoint", "assemble", str(in_parts)])
    assert "is there already" in capsys.readouterr().err


def test_a_part_that_was_changed_is_not_assembled(in_parts, capsys):
    with (in_parts / "state" / "part_rank_1.pt").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert 1 == main(["checkpoint", "assemble", str(in_parts)])
    assert "part_rank_1.pt" in capsys.readouterr().out
    assert not (in_parts / "assembled").exists()


def test_what_needs_no_assembling_is_said_to_need_none(checkpoint, capsys):
    assert 2 == main(["checkpoint", "assemble", str(checkpoint)])
    assert "needs no assembling" in capsys.readouterr().err
    assert 2 == main(["checkpoint", "assemble", str(checkpoint / "nowhere")])
