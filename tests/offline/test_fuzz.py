"""Files that nobody should have: no traceback, no hang, bounded memory, and exit 2 with a sentence where nothing can be read."""

import gzip
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.offline.cases.expected import FILE

from holter.cli import main

ODD = {
    "empty": b"",
    "binary": bytes(range(256)) * 50,
    "deep array": b"[" * 200_000,
    "deep object": b'{"a":' * 100_000,
    "long line": b"x" * 3_000_000,
    "one wide row": b",".join(b"c%d" % i for i in range(200_000)) + b"\n" + b"1," * 200_000,
    "words without numbers": b"step loss " * 300_000,
    "open brackets": b"Namespace(" * 200_000,
    "nested code": b"import x\n" + b"(" * 20_000,
    "long expression": b"import x\nx = " + b"1+" * 20_000 + b"1\n",
    "not a pickle": b"\x80\x04" + b"X\xff\xff\xff\x7fabc",
    "a pickle of marks": b"\x80\x04(" + b"(l" * 50_000,
    "half a record of events": struct.pack("<QI", 2**62, 0) + b"junk" * 100,
    "broken gzip": gzip.compress(b"step 1 loss 2.0\n" * 1000)[:60],
    "utf-16": ("nothing that anybody measured\n" * 50).encode("utf-16"),
    "indentation": b"".join(b" " * i + b"a%d:\n" % i for i in range(500)),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_read_is_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(ODD[name])
    assert 2 == main(["diagnose", str(tmp_path)])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "nothing in" in said


def test_a_pickle_that_would_act_is_not_obeyed(tmp_path: Path) -> None:
    class Acts:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    (tmp_path / "rank_0").write_bytes(pickle.dumps(Acts()))
    assert 2 == main(["diagnose", str(tmp_path / "rank_0")])
    assert not (tmp_path / "made").exists()


def test_links_in_a_circle_and_pipes_are_passed_by(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "self").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert 2 == main(["diagnose", str(tmp_path)])
    assert 2 == main(["diagnose", str(tmp_path / "pipe")])


def test_mutated_and_cut_files_of_every_format_raise_nothing(tmp_path: Path) -> None:
    rng = random.Random(5)  # noqa: S311 - which bytes
    with tarfile.open(FILE.with_name("cases.tar.xz")) as archive:
        members = [member for member in archive.getmembers() if member.isfile() and member.size < 40_000]
        for number, member in enumerate(rng.sample(members, 40)):
            stream = archive.extractfile(member)
            assert stream is not None
            content = bytearray(stream.read())
            for _ in range(20):
                content[rng.randrange(len(content))] = rng.randrange(256)
            (tmp_path / str(number)).write_bytes(content[: rng.randrange(len(content))])
            assert main(["diagnose", str(tmp_path / str(number)), "--json"]) in {0, 1, 2}


def test_what_inflates_stays_small_in_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "bomb.gz", "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b"a" * 1_000_000)
    rows = b",".join(b'{"step": %d, "loss": 1.5}' % i for i in range(700_000))
    (tmp_path / "large.json").write_bytes(b"[" + rows + b"]")
    script = "import sys\nfrom holter.cli import main\nmain(['diagnose', sys.argv[1]])\nassert 'torch' not in sys.modules\nprint(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(ended.stdout.split()[-1]) < 500_000
