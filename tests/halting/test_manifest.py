"""A manifest is believed as a whole or not at all."""

import random
from pathlib import Path

import pytest

from holter.errors import VaultError
from holter.halting import manifest as manifests
from holter.halting.manifest import Manifest, StoredFile, StoredTensor


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


def test_any_flipped_bit_is_seen(tmp_path: Path):
    content = manifests.encode(manifest())
    rng = random.Random(0)  # noqa: S311
    for _ in range(300):
        place = rng.randrange(len(content) * 8)
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        (tmp_path / "manifest.json").write_bytes(flipped)
        try:
            # White space between two fields says nothing.
            assert manifest() == manifests.read(tmp_path), place
        except VaultError as error:
            assert "damaged" in str(error)  # noqa: PT017


def test_a_missing_one_is_said(tmp_path: Path):
    with pytest.raises(VaultError, match=r"has no manifest\.json"):
        manifests.read(tmp_path)
