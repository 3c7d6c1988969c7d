"""The vault: nothing half-written has a name, and nothing that has one is lost to a failure."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holter.errors import VaultError
from holter.halting.vault import manifest as manifests
from holter.halting.vault.manifest import Circumstances, RankPart, StoredTensor
from holter.halting.vault.store import Sealed, Vault

ABOUT = Circumstances(run_id="run-a", step=30, world_size=2, savers=(0, 1), cause="nonfinite_input", why="held in time")


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path / "run")


def save(vault: Vault, step: int = 30, content: bytes = b"weights", **part: object) -> Path:
    """What two replicas leave: rank 0 everything, rank 1 its random state."""
    partial = vault.begin(step)
    write(partial, 0, {"model.bin": content, "random_states_0.pkl": b"r0"}, **part)
    write(partial, 1, {"random_states_1.pkl": b"r1"})
    return partial


def write(partial: Path, rank: int, files: dict[str, bytes], **part: object) -> None:
    for name, content in files.items():
        (partial / "state" / name).write_bytes(content)
    sizes = {f"state/{name}": len(content) for name, content in files.items()}
    record = RankPart(**{"rank": rank, "framework": "accelerate", "files": sizes, **part})
    (partial / "parts" / f"{rank}.json").write_bytes(msgspec.json.encode(record))


def seal(vault: Vault, step: int = 30, content: bytes = b"weights", **about: object) -> Sealed:
    return vault.seal(save(vault, step, content), replace(ABOUT, step=step, **about))


def names(vault: Vault) -> list[str]:
    return sorted(path.name for path in vault.folder.iterdir() if path.is_dir())


def test_a_sealed_checkpoint_has_its_steps_as_name_and_lists_every_file(vault):
    tensor = StoredTensor(name="w", file="state/model.bin", shape=(2,), dtype="float32", fingerprint="ab")
    partial = save(vault, tensors=[tensor], num_live=1)
    (partial / "ranks" / "0.msgpack").write_bytes(b"blob")
    sealed = vault.seal(partial, ABOUT)

    assert ["30"] == names(vault)
    assert vault.folder / "30" == sealed.path
    found = manifests.read(sealed.path)
    assert sealed.manifest == found
    assert ("run-a", 30, "accelerate", 2, "healthy") == (
        found.run_id,
        found.step,
        found.framework,
        found.world_size,
        found.verdict,
    )
    on_disk = {str(path.relative_to(sealed.path)) for path in sealed.path.rglob("*") if path.is_file()}
    assert on_disk - {"manifest.json"} == set(found.files)
    assert [tensor] == found.tensors
    assert [0, 1] == found.random_states
    assert sealed == vault.last_good()


def test_what_a_dead_halt_left_is_neither_good_nor_in_the_way(vault):
    (save(vault) / "state" / "half").write_bytes(b"x")
    assert vault.last_good() is None
    assert [] == vault.all()
    partial = vault.begin(30)
    assert [] == list((partial / "state").iterdir())


def test_the_same_bits_again_keep_the_first_and_other_bits_get_a_name_of_their_own(vault):
    first = seal(vault)
    stamp = (first.path / "manifest.json").stat().st_mtime_ns
    assert first.path == seal(vault).path
    assert stamp == (first.path / "manifest.json").stat().st_mtime_ns
    assert ["30"] == names(vault)
    assert "30-2" == seal(vault, content=b"other weights").path.name
    assert b"weights" == (first.path / "state" / "model.bin").read_bytes()


def test_one_that_was_damaged_since_is_not_taken_for_the_same(vault):
    first = seal(vault)
    (first.path / "state" / "model.bin").write_bytes(b"w3ights")
    assert "30-2" == seal(vault).path.name


def test_two_good_ones_are_kept_and_go_only_when_a_newer_one_has_its_name(vault):
    for step in (10, 20, 30):
        seal(vault, step, content=str(step).encode())
    assert ["20", "30"] == names(vault)
    assert 30 == vault.last_good().manifest.step


@pytest.mark.parametrize("verdict", ["incomplete", "unknown", "poisoned"])
def test_what_is_not_good_pushes_no_good_one_out_and_is_bounded_by_itself(vault, verdict):
    for step in (10, 20):
        seal(vault, step, content=str(step).encode())
    for step in (30, 40, 50):
        if verdict == "incomplete":
            partial = vault.begin(step)
            write(partial, 1, {"random_states_1.pkl": str(step).encode()})
            assert "incomplete" == vault.seal(partial, replace(ABOUT, step=step)).verdict
        else:
            seal(vault, step, content=str(step).encode(), verdict=verdict)
    assert {"10", "20"} < set(names(vault))
    assert 4 == len(names(vault))
    assert 20 == vault.last_good().manifest.step


def test_one_whose_file_is_gone_is_not_the_last_good_and_stands_in_no_others_place(vault):
    for step in (10, 20):
        seal(vault, step, content=str(step).encode())
    (vault.folder / "20" / "state" / "model.bin").unlink()
    assert 10 == vault.last_good().manifest.step
    seal(vault, 30, content=b"30")
    assert ["10", "20", "30"] == names(vault)


def test_a_tensor_of_absurd_size_makes_it_suspect_and_is_named(vault):
    sealed = vault.seal(save(vault, oversized={"layer.weight": 1e37}), ABOUT)
    assert ("suspect", True) == (sealed.verdict, "layer.weight of rank 0 holds values of up to 1e+37" in sealed.why)
    assert vault.last_good() is None


def test_a_tensor_that_is_not_as_its_history_has_it_makes_it_suspect_beside_what_an_incident_says(vault):
    odd = {"layer.weight": "holds values of up to 1e+04, where until now it was 0.3 at most"}
    sealed = vault.seal(save(vault, implausible=odd), ABOUT)
    assert ("suspect", True) == (sealed.verdict, f"layer.weight of rank 0 {odd['layer.weight']}" in sealed.why)
    partial = save(vault, 31, implausible={"optimizer: head.weight.exp_avg": "holds"} | odd)
    sealed = vault.seal(partial, replace(ABOUT, step=31, verdict="suspect", why="the loss had left its course"))
    assert sealed.why.startswith("the loss had left its course; layer.weight of rank 0")
    assert "and 1 more tensors are like it" in sealed.why


def test_replicas_that_are_not_equal_make_it_suspect_and_the_tensor_and_rank_are_named(vault):
    def seal_with(step: int, *prints: str) -> Sealed:
        partial = vault.begin(step)
        for rank, print_ in enumerate(prints):
            tables = {"all": {"a.weight": "same", "b.weight": print_}}
            manifests.replicas_path(partial, rank).write_bytes(msgspec.json.encode(tables))
            write(partial, rank, {f"{rank}.bin": b"x"}, replica_roots={"all": print_})
        return vault.seal(partial, replace(ABOUT, step=step, world_size=len(prints), savers=tuple(range(len(prints)))))

    assert "healthy" == seal_with(30, "x", "x", "x").verdict
    sealed = seal_with(31, "x", "y", "x")
    assert "suspect" == sealed.verdict
    assert "rank 1 holds other values than rank 0, 2, of which it is a replica: b.weight" in sealed.why


def test_tensors_that_nobody_held_against_memory_make_it_unknown(vault):
    tensor = StoredTensor(name="w", file="state/model.bin", shape=(2,), dtype="float32", fingerprint="ab")
    sealed = vault.seal(save(vault, tensors=[tensor], num_live=0), ABOUT)
    assert ("unknown", True) == (sealed.verdict, "rank 0 saved was not looked at" in sealed.why)
    states = StoredTensor(name="w", file="state/random_states_0.pkl", shape=(2,), dtype="uint8", fingerprint="ab")
    assert "healthy" == vault.seal(save(vault, 31, tensors=[states], num_live=0), replace(ABOUT, step=31)).verdict


def test_a_missing_part_makes_it_incomplete_and_says_whose(vault):
    partial = vault.begin(30)
    write(partial, 0, {"__0_0.distcp": b"0"}, is_sharded=True, framework="dcp")
    sealed = vault.seal(partial, replace(ABOUT, savers=(0, 1), lost=(2,), failures={1: "No space left on device"}))
    assert ("incomplete", "30-incomplete") == (sealed.verdict, sealed.path.name)
    assert "rank 1 saved nothing that it could prove (No space left on device)" in sealed.why
    assert "the shard of rank 2 is missing" in sealed.why
    assert vault.last_good() is None


def test_a_lost_shard_of_which_the_index_misses_nothing_is_no_loss(vault):
    partial = vault.begin(30)
    write(partial, 0, {"__0_0.distcp": b"0", ".metadata": b"m"}, is_sharded=True, has_index=True)
    assert "healthy" == vault.seal(partial, replace(ABOUT, savers=(0,), lost=(1,))).verdict


def test_what_a_rank_says_it_could_not_save_makes_it_incomplete(vault):
    sealed = vault.seal(save(vault), replace(ABOUT, failures={0: "the random state of rank 1 is not known"}))
    assert ("incomplete", "rank 0: the random state of rank 1 is not known") == (sealed.verdict, sealed.why)


def test_a_replica_that_is_lost_costs_nothing_but_its_random_state(vault):
    partial = vault.begin(30)
    write(partial, 0, {"model.bin": b"w", "random_states_0.pkl": b"r"})
    sealed = vault.seal(partial, replace(ABOUT, savers=(0,), lost=(1,)))
    assert "healthy" == sealed.verdict
    assert "held in time; without the random state of rank 1" == sealed.why


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda partial: (partial / "state" / "model.bin").unlink(),
            "state/model.bin, which rank 0 wrote, is not there",
        ),
        (
            lambda partial: os.truncate(partial / "state" / "model.bin", 3),
            "state/model.bin has 3 bytes, rank 0 wrote 7",
        ),
        (lambda partial: (partial / "parts" / "0.json").write_bytes(b"{"), "parts/0.json is damaged"),
        (lambda partial: (partial / "parts" / "0.json").unlink(), "rank 0 saved nothing that it could prove"),
    ],
)
def test_what_does_not_add_up_is_incomplete(vault, damage, sentence):
    partial = save(vault)
    damage(partial)
    sealed = vault.seal(partial, ABOUT)
    assert "incomplete" == sealed.verdict
    assert sentence in sealed.why


def test_tensors_that_were_not_found_again_make_it_incomplete(vault):
    lost = StoredTensor(name="model 0: w", file="", shape=(2,), dtype="float32", fingerprint="ab")
    sealed = vault.seal(save(vault, missing=[lost], num_live=4), ABOUT)
    assert ("incomplete", "of rank 0's 4 tensors 1 are in no file (model 0: w)") == (sealed.verdict, sealed.why)


def test_a_tensor_that_another_replica_wrote_is_not_missing(vault):
    tensor = StoredTensor(name="w", file="", shape=(2,), dtype="float32", fingerprint="ab")
    partial = vault.begin(30)
    write(partial, 0, {"__0_0.distcp": b"0"}, is_sharded=True, missing=[tensor], num_live=1)
    elsewhere = msgspec.structs.replace(tensor, name="model.w", file="state/__1_0.distcp")
    write(partial, 1, {"__1_0.distcp": b"1"}, is_sharded=True, tensors=[elsewhere], num_live=1)
    assert "healthy" == vault.seal(partial, ABOUT).verdict


def test_what_a_rank_notes_is_said_and_takes_nothing_from_its_being_whole(vault):
    sealed = vault.seal(save(vault, notes=["buffers are as rank 1 has them"]), ABOUT)
    assert ("healthy", "held in time; buffers are as rank 1 has them") == (sealed.verdict, sealed.why)


def test_nothing_written_is_no_checkpoint(vault):
    sealed = vault.seal(vault.begin(30), ABOUT)
    assert "incomplete" == sealed.verdict
    assert "nothing was written" in sealed.why


def test_a_directory_that_cannot_be_made_is_said_in_a_sentence(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(VaultError, match=r"nothing can be saved below .*checkpoints"):
        Vault(tmp_path).begin(30)


@pytest.mark.parametrize("failing", ["fsync", "rename", "replace"])
def test_a_full_disk_at_any_moment_of_sealing_leaves_what_was_named(vault, monkeypatch, failing):
    good = seal(vault, 20, content=b"20")
    partial = save(vault)
    calls = {"fsync": (os, "fsync"), "rename": (Path, "rename"), "replace": (Path, "replace")}
    owner, name = calls[failing]
    original, count = getattr(owner, name), 0

    for fail_at in range(1, 20):
        count = 0

        def full(*args: object, at: int = fail_at) -> object:
            nonlocal count
            count += 1
            if count == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, full)
            try:
                sealed = vault.seal(partial, ABOUT)
            except VaultError as error:
                assert "No space left on device" in str(error)  # noqa: PT017 - some of the tries succeed
                assert ["20"] == [path.name for path in vault.folder.iterdir() if path.name.isdigit()]
                assert good == vault.last_good()
                continue
        break
    assert fail_at > 1, "nothing was ever made to fail"
    assert sealed == vault.last_good()


def test_runs_that_sealed_here_are_remembered(vault):
    seal(vault)
    seal(vault, 40, content=b"40", run_id="run-b")
    assert ["run-a", "run-b"] == vault.runs()


def test_progress_is_told_to_the_end(vault):
    told: list[tuple[int, int]] = []
    vault.seal(save(vault), ABOUT, lambda done, of: told.append((done, of)))
    assert (11, 11) == told[-1]
