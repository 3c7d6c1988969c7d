"""Files that somebody else made: what they unfold to is bounded, what they name is said, and nothing of it is run."""

import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holter.errors import VaultError
from holter.frameworks.saving.inert_pickle import InertUnpickler
from holter.frameworks.saving.reading import survey, tensors_in

STRINGS = pickle.SHORT_BINUNICODE


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(content: str) -> bytes:
    return STRINGS + bytes([len(content)]) + content.encode()


SHARED = b"]q\x00(" + b"K\x01" * 100_000 + b"e"
"""A list of a hundred thousand, kept at place 0."""
BOMBS = {
    "a number of empty bytes": named("builtins", "bytearray") + b"\x8a\x05\x00\x00\x00\x00\x10\x85R.",
    "a list copied a thousand times": SHARED + (named("torch", "Size") + b"h\x00\x85R0") * 1000 + b"N.",
    "a set of it, likewise": SHARED + (named("builtins", "frozenset") + b"h\x00\x85R0") * 1000 + b"N.",
    "hex of hex": text("ab") + (b"q\x00" + named("_codecs", "encode") + b"h\x00" + text("hex") + b"\x86R") * 40 + b".",
    "a place that five bytes name": b"Nr\xff\xff\xff\x7f.",
    "such a place in words": b"Np2147483647\n.",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_pickle_that_unfolds_to_far_more_than_it_holds_is_refused(bomb: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(VaultError):
        InertUnpickler(b"\x80\x04" + bomb).load()
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()


def test_what_checkpoints_hold_is_read() -> None:
    content = {"size": torch.Size([2, 3]), "of": frozenset({1}), "raw": bytearray(b"ab"), "z": 1j}
    found = InertUnpickler(pickle.dumps(content, 2)).load()
    assert ((2, 3), {1}, b"ab", 1j) == (found["size"], found["of"], found["raw"], found["z"])


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def compress(path: Path) -> None:
    """The same archive, squeezed: torch.save never does."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"text": "0" * 10_000_000})
    compress(path)
    assert path.stat().st_size < 100_000
    with pytest.raises(VaultError, match="does not lie in the file as it should"):
        list(tensors_in(path))


def test_a_tensor_that_repeats_one_value_without_end_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"mask": torch.zeros(1).expand(10**12), "fine": torch.zeros(1).expand(1000)})
    with pytest.raises(VaultError, match="a tensor of 1000000000000 elements has 1 in the file"):
        list(tensors_in(path))
    assert [1000] == [one.numel() for _, one in tensors_in(save(path, {"fine": torch.zeros(1).expand(1000)}))]


class Acts:
    """Runs something when it is loaded."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


@pytest.mark.parametrize("acts", [Acts(os.system, "touch ran"), Acts(eval, "open('ran', 'w')"), Acts(exec, "1")])
def test_a_file_that_names_code_is_not_good_and_runs_nothing(
    acts: Acts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a.pt", {"weight": torch.ones(3), "more": acts})
    found = survey(tmp_path, lambda *_: None)
    assert 1 == found.num_tensors
    assert ["names_code"] == [problem.kind for problem in found.problems]
    assert "nothing was run here" in found.problems[0].text
    assert not Path("ran").exists()


def test_an_ordinary_checkpoint_names_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    save(
        tmp_path / "a.pt",
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()},
    )
    save(tmp_path / "whole.pt", model)
    assert [] == survey(tmp_path, lambda *_: None).problems
