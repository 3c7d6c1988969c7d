"""Which process is a rank, when an unmodified script is attached by HOLTER=1."""

import sys

import pytest

from holter.frameworks import autoload

RANK = {"HOLTER": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
LIGHTNING = {"HOLTER": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


@pytest.fixture
def process(monkeypatch):
    def start(environ: dict[str, str], *words: str) -> bool:
        for name in ("HOLTER", "HOLTER_RANK_PID", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "orig_argv", ["python3", *words])
        return autoload._is_rank()

    return start


@pytest.mark.parametrize(
    ("environ", "words", "is_rank"),
    [
        (RANK, ["train.py"], True),
        (RANK, ["-u", "-X", "dev", "-m", "package.train"], True),
        (RANK | {"HOLTER": "0"}, ["train.py"], False),
        (RANK | {"HOLTER_RANK_PID": "1"}, ["train.py"], False),
        ({"HOLTER": "1"}, ["train.py"], False),
        ({"HOLTER": "1", "LOCAL_RANK": "0"}, ["train.py"], True),
        # A cluster that sets RANK for a host: the launcher there is none.
        (RANK, ["/venv/bin/torchrun", "train.py"], False),
        (RANK, ["-m", "torch.distributed.run", "train.py"], False),
        (RANK, ["-u", "/venv/bin/accelerate", "launch", "train.py"], False),
    ],
)
def test_a_rank_is_told_from_what_starts_it(process, environ, words, is_rank):
    assert is_rank is process(environ, *words)


def test_a_rank_that_does_not_know_its_number_is_not_taken_for_the_first(process, capsys):
    assert not process(LIGHTNING, "train.py")
    assert "RANK is not set: not attached" in capsys.readouterr().err
