"""A manifest is believed as a whole or not at all."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holter.errors import VaultError
from holter.halting.vault import manifest as manifests
from holter.halting.vault.manifest import Circumstances, Manifest, RankPart, StoredFile, StoredTensor, not_looked_at


def manifest() -> Manifest:
    tensor = StoredTensor(name="w", file="state/a", shape=(2, 3), dtype="float32", fingerprint="00ff")
    return manifests.signed(
        Manifest(
            run_id="run",
            step=30,
            framework="dcp",
            world_size=2,
            verdict="healthy",
            why="",
            files={"state/a": StoredFile(3, "00"), "state/b": StoredFile(4, "11")},
            tensors=[tensor],
            sealed_at="2026-11-15T10:15:00Z",
        )
    )


def test_it_reads_back_as_it_was_written(tmp_path: Path):
    (tmp_path / "manifest.json").write_bytes(manifests.encode(manifest()))
    assert manifest() == manifests.read(tmp_path)


@pytest.mark.slow
def test_any_flipped_bit_is_seen(tmp_path: Path):
    """In a name, too: a field with a default that nobody recognises any more is not a field left out."""
    content = manifests.encode(manifest())
    for place in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        (tmp_path / "manifest.json").write_bytes(flipped)
        with pytest.raises(VaultError, match="damaged"):
            manifests.read(tmp_path)


@pytest.mark.parametrize("change", [lambda content: content[:-1], lambda content: content + b"\n", lambda _: b""])
def test_so_is_one_that_is_cut_off_or_longer(tmp_path: Path, change: Callable[[bytes], bytes]):
    (tmp_path / "manifest.json").write_bytes(change(manifests.encode(manifest())))
    with pytest.raises(VaultError, match="damaged"):
        manifests.read(tmp_path)


def test_one_of_a_version_with_other_fields_is_believed(tmp_path: Path):
    """Fields are added, never changed: an older one lacks some, a newer one has more."""
    for other in (without("mesh"), manifest_fields() | {"added": 1}):
        signed = other | {"digest": manifests.digest_of(json.dumps(other).encode())}
        (tmp_path / "manifest.json").write_text(json.dumps(signed, indent=1) + "\n")
        assert 30 == manifests.read(tmp_path).step


def manifest_fields() -> dict[str, Any]:
    return dict(json.loads(manifests.encode(manifest())))


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in manifest_fields().items() if key != name}


def test_a_missing_one_is_said(tmp_path: Path):
    with pytest.raises(VaultError, match=r"has no manifest\.json"):
        manifests.read(tmp_path)


def test_what_no_reading_had_come_to_is_not_looked_at():
    about = Circumstances(run_id="r", step=30, world_size=1, savers=(0,))
    part = RankPart(rank=0, framework="dcp", num_live=4, unlooked=["head.weight", "head.bias"])
    said = not_looked_at(about, {0: part})
    assert (
        "head.weight of rank 0 and 1 more had not been read before it was saved: what it was like is not known" == said
    )
    assert "" == not_looked_at(about, {0: RankPart(rank=0, framework="dcp", num_live=4)})


def test_a_replica_that_saved_alone_since_the_last_comparison_is_not_looked_at():
    parts = {rank: RankPart(rank=rank, framework="dcp", num_live=4, replica_roots={"0-1": "a"}) for rank in (0, 1)}
    about = Circumstances(
        run_id="r", step=30, world_size=2, savers=(0, 1), uncompared="replicas were last found equal after 28 steps"
    )
    assert "" == not_looked_at(about, parts), "both saved, and are compared by their roots"
    alone = {0: parts[0]}
    assert "replicas were last found equal after 28 steps, and rank 0 alone saved" == not_looked_at(about, alone)
    assert "" == not_looked_at(replace(about, uncompared=""), alone), "they were compared in this very state"
