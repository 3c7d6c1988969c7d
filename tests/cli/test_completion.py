"""`holter completion`: every command and option is in it, and the tools that read it take it."""

import shutil
import subprocess

import pytest

from holter import cli
from holter.exporters import pages


@pytest.fixture
def printed(capsys):
    def of(shell: str) -> str:
        assert 0 == cli.main(["completion", shell])
        return capsys.readouterr().out

    return of


def complete(script: str, *words: str) -> list[str]:
    """What bash offers after these words."""
    ask = f'COMP_WORDS=({" ".join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _shtab_holter; printf "%s\\n" "${{COMPREPLY[@]}}"'
    told = subprocess.run(["bash", "-c", script + "\n" + ask], capture_output=True, text=True, check=True)
    return told.stdout.split()


def test_bash_completes_commands_and_their_options(printed):
    pytest.importorskip("shtab")
    script = printed("bash")
    assert set(cli.COMMANDS) <= set(complete(script, "holter", ""))
    assert ["doctor"] == complete(script, "holter", "doc")
    assert {"--wait-s", "--reason"} <= set(complete(script, "holter", "halt", "--"))
    assert {"verify", "list", "newest", "assemble"} <= set(complete(script, "holter", "checkpoint", ""))


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_theirs(printed, shell):
    pytest.importorskip("shtab")
    assert "holter" in printed(shell)


@pytest.mark.skipif(shutil.which("man") is None, reason="no man here")
def test_man_renders_the_page_without_a_warning(printed, tmp_path):
    (tmp_path / "holter.1").write_text(printed("man"))
    page = subprocess.run(
        ["man", "--warnings", "-l", str(tmp_path / "holter.1")],
        env={"MANWIDTH": "300", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "" == page.stderr
    assert not [name for name in cli.COMMANDS if f"holter {name}" not in page.stdout]
    assert "--wait-s" in page.stdout


def test_explain_without_a_name_has_a_line_for_each_under_its_family(capsys):
    assert 0 == cli.main(["explain"])
    lines = capsys.readouterr().out.splitlines()
    families = [line for line in lines if line and not line.startswith(" ")]
    assert {"numerics", "hangs", "replicas", "holter itself"} <= set(families)
    told = dict(line.split(maxsplit=1) for line in lines if line.startswith(" "))
    assert set(pages.names()) == set(told)
