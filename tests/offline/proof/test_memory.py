"""What earlier runs left: recalled by cause, place and project; three fixes that failed stop the fourth; damaged files cost nobody."""

import json
import sqlite3
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.cli import main
from holter.cli.parts.earlier import ProjectMemory, memory_path, project_of
from holter.coordinator.identity import RunIdentity
from holter.diagnosis import explain, to_text
from holter.offline.proof.memory import MemoryEntry, MemoryFile, from_markdown, recall, search, to_markdown
from holter.records import Directive, Finding


def incident(run: str, day: int, lr: str = "0.1", **more) -> MemoryEntry:
    values = {
        "cause": "nonfinite_input",
        "project": "p",
        "place": "x.*",
        "step": 30,
        "settings": {"command: --lr": lr},
    } | more
    return MemoryEntry(key=f"{run}/1", at=f"2026-11-{day:02}T10:00:00Z", run=run, **values)


def fix(day: int, text: str, verdict: str = "not_fixed", **more) -> MemoryEntry:
    return MemoryEntry(
        key=f"fix-{day}",
        kind="fix",
        at=f"2026-11-{day:02}T12:00:00Z",
        project="p",
        cause="nonfinite_input",
        fix=text,
        verdict=verdict,
        **more,
    )


NOW = incident("now", 20, "0.001")


def test_a_fault_is_known_by_cause_place_and_project():
    entries = [
        incident("a", 1),
        incident("b", 2, cause="rank_dead"),
        incident("c", 3, project="q"),
        incident("d", 4, place="y"),
    ]
    assert ("2026-11-01 in a, step 30",) == recall(entries, NOW).seen
    assert () == recall([NOW], NOW).seen


def test_what_helped_and_what_did_not_is_said():
    entries = [incident("a", 1), fix(2, "lower the rate"), fix(3, "clean the shard", "fixed")]
    said = " ".join(recall(entries, NOW).sentences())
    assert "Seen before on 2026-11-01 in a, step 30." in said
    assert "Solved then by: clean the shard." in said
    assert "Tried without success: lower the rate." in said


def test_a_strike_is_a_change_and_not_a_start():
    same = [incident(name, day) for day, name in enumerate("abcd", start=1)]
    assert 1 == recall(same, incident("now", 20)).strikes
    changed = [incident("a", 1, "0.1"), incident("b", 2, "0.05"), incident("c", 3, "0.01")]
    known = recall(changed, NOW)
    assert 4 == known.strikes
    assert "All of them changed --lr" in known.lessons("nonfinite_input")


def test_every_fix_that_was_seen_to_fail_is_an_attempt_once():
    runs = [incident("a", 1, "0.1"), incident("b", 2, "0.05")]
    # Proven after `b` was looked at, and still what was tried between `a` and `b`; nobody remembered the run after the second fix.
    fixes = [fix(3, "lower the rate", run="a"), fix(4, "clip", run="b"), fix(5, "decay", run="elsewhere")]
    known = recall([*runs, *fixes], NOW)

    assert ["lower the rate", "clip", "decay"] == [one.what for one in known.attempts]
    assert "after 3 fixes" in known.lessons("nonfinite_input")
    assert "Before a third" not in known.lessons("nonfinite_input")
    told = [incident("a", 1, settings={}), fix(2, "shuffle"), incident("b", 3, settings={}), fix(4, "drop the shard")]
    known = recall(told, incident("now", 20, settings={}))
    assert ["shuffle", "drop the shard"] == [one.what for one in known.attempts]
    assert "put that in question first" in known.lessons("nonfinite_input")


def diagnosis():
    finding = Finding(
        detector="slow_rank", severity="warning", first_step=30, detected_step=31, ranks=(0,), summary="It is late.", facts={"is_in_data": True}
    )  # fmt: skip
    return explain(
        finding, incident_id="20261118T101500-1", run_id="now", opened_at="2026-11-20T10:00:00Z", detected_after_s=0.1,
        directive=Directive(directive="notify", reason="a test"),
    )  # fmt: skip


def test_the_third_fix_that_fails_stops_and_says_what_the_attempts_taught(tmp_path):
    file = MemoryFile(tmp_path / "memory.sqlite")
    made = diagnosis()
    cause = made.causes[0].cause
    identity = RunIdentity(run_id="now", command=["t.py", "--lr", "0.001"], started_at="", coordinator="")
    file.put(
        incident(name, day, lr, cause=cause, project=tmp_path.name, place="")
        for day, name, lr in ((1, "a", "0.1"), (2, "b", "0.01"))
    )
    memory = ProjectMemory(file, tmp_path.name)
    memory.load()
    found = memory.recall(made, identity)
    assert 3 == found.strikes
    text = " ".join(to_text(found).split())
    assert "Stop: " in text
    assert "Before a third fix is tried: All of them changed --lr" in text
    assert "Seen before on 2026-11-01 in a" in text
    assert cause == found.causes[0].cause, "what this run shows by itself is not outvoted by earlier ones"
    assert ["slow_compute"] == [one.cause for one in found.hypotheses]
    unsure = msgspec.structs.replace(
        made, causes=tuple(msgspec.structs.replace(one, basis="inference") for one in made.causes)
    )
    assert cause == memory.recall(unsure, identity).causes[-1].cause
    memory.remember(made, identity)
    assert {"a/1", "b/1", f"now/{made.id}"} == {one.key for one in file.entries()}
    # Another look at the same incident counts nothing twice.
    memory.load()
    assert 3 == memory.recall(made, identity).strikes


text = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp")) | st.sampled_from("\n\\=:#- "), max_size=30
)
entries = st.builds(
    MemoryEntry, key=text.filter(bool), at=st.just("2026-11-18T10:00:00Z"), project=text, cause=text, place=text, symptom=text, fix=text, note=text,
    step=st.integers(-1, 99), settings=st.dictionaries(text, text, max_size=3),
)  # fmt: skip


@given(st.lists(entries, max_size=4))
def test_markdown_brings_back_what_was_written(written):
    assert written == from_markdown(to_markdown(written))


def test_a_damaged_file_is_put_aside_and_a_damaged_row_left_out(tmp_path):
    path = tmp_path / "memory.sqlite"
    file = MemoryFile(path)
    file.put([incident("a", 1), incident("b", 2)])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE memories SET content = ? WHERE key = 'a/1'", (b"\xff{",))
    assert ["b/1"] == [one.key for one in file.entries()]
    assert "1 entries" in file.remarks[0]
    path.write_bytes(b"no database" * 100)
    assert [] == MemoryFile(path).entries()
    assert [path.name + ".damaged-1"] == [one.name for one in tmp_path.glob("*damaged*")]
    path.write_bytes(b"no database" * 100)
    MemoryFile(path).put([incident("c", 3)])
    assert ["c/1"] == [one.key for one in MemoryFile(path).entries()]


def test_search_takes_words_in_any_order():
    known = [
        incident("a", 1, symptom="NaN in the batch of rank 1"),
        incident("b", 2, cause="rank_dead", symptom="killed"),
    ]
    assert ["a/1"] == [one.key for one in search(known, "batch NaN")]
    assert [] == search(known, "entropy")


def test_where_it_is(tmp_path):
    assert tmp_path / "memory.sqlite" == memory_path(tmp_path, "")
    assert None is memory_path(tmp_path, "off")
    tmp_path.chmod(0o777)
    assert None is memory_path(tmp_path, "")
    assert "shop" == project_of(tmp_path / "shop" / "holter-runs")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLTER_MEMORY", raising=False)
    return tmp_path


def test_the_command_adds_lists_finds_exports_and_imports(here, capsys, monkeypatch):
    assert 0 == main(
        ["memory", "add", "--cause", "rank_dead", "--fix", "another host", "--verdict", "fixed", "--note", "node 7"]
    )
    assert 0 == main(["memory", "search", "host", "--json"])
    out = capsys.readouterr().out
    found = json.loads(out[out.index("[") :])
    assert [("fix", "rank_dead", "fixed")] == [(one["kind"], one["cause"], one["verdict"]) for one in found]
    assert 0 == main(["memory", "export", "m.md"])
    monkeypatch.setenv("HOLTER_MEMORY", str(here / "other.sqlite"))
    assert 0 == main(["memory", "import", "m.md"])
    assert MemoryFile(here / "holter-runs" / "memory.sqlite").entries() == MemoryFile(here / "other.sqlite").entries()
    assert 0 == main(["memory"])
    assert "another host" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["add"], ["add", "--cause", "nonsense", "--fix", "x"], ["add", "--cause", "rank_dead"], ["import", "nowhere.md"], ["import"],
        ["add", "--run", "nowhere"], ["add", "--cause", "rank_dead", "--verdict", "fixed"], ["what"],
    ],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_wrong_use_is_one_sentence(words, capsys):
    assert 2 == main(["memory", *words])
    said = capsys.readouterr().err
    assert 1 == said.count("\n")
    assert "Traceback" not in said


def test_a_verdict_is_remembered_with_what_was_done(here, capsys):
    for name, last in (("before.log", "nan"), ("after.log", "1.0")):
        (here / name).write_text(
            "\n".join(f"step {i} loss {1.0 if i < 30 else last}" for i in range(200)), encoding="utf-8"
        )
    assert 0 == main(["verify", "before.log", "after.log", "--fix", "an epsilon"])
    (entry,) = MemoryFile(here / "holter-runs" / "memory.sqlite").entries()
    assert ("an epsilon", "fixed", "fix") == (entry.fix, entry.verdict, entry.kind)
    capsys.readouterr()


def test_entries_are_records():
    assert msgspec.json.decode(msgspec.json.encode(NOW), type=MemoryEntry) == NOW


def _diverging(folder: Path, rate: float) -> Path:
    """A run whose loss rises from its sixtieth step on, with its settings beside it."""
    folder.mkdir()
    losses = [3 - 0.04 * step for step in range(60)] + [0.6 + 0.1 * step for step in range(60)]
    (folder / "train.log").write_text("".join(f"step {step}: loss {loss:.3f}\n" for step, loss in enumerate(losses)))
    (folder / "config.yaml").write_text(f"lr: {rate}\nseed: 1\nbatch_size: 8\n")
    return folder


def test_what_a_log_shows_is_looked_up_and_remembered(here, capsys):
    def diagnosed(path, *options):
        main(["diagnose", str(path), "--json", *options])
        return json.loads(capsys.readouterr().out)[0]

    first = _diverging(here / "a", 0.1)
    assert diagnosed(first)["seen_before"] == []
    assert diagnosed(first, "--remember")["strikes"] == 1
    again = diagnosed(first, "--remember")
    assert (again["seen_before"], again["strikes"]) == ([], 1)

    second = diagnosed(_diverging(here / "b", 0.05), "--remember")
    assert second["strikes"] == 2
    assert "Seen before on" in second["seen_before"][0]

    third = diagnosed(_diverging(here / "c", 0.01))
    assert third["strikes"] == 3
    assert "lr" in json.dumps(third)
    assert "Stop" in json.dumps(third)


def test_without_a_memory_remember_is_wrong_use(here, capsys, monkeypatch):
    monkeypatch.setenv("HOLTER_MEMORY", "off")

    assert main(["diagnose", str(_diverging(here / "a", 0.1)), "--remember"]) == 2
    assert "--remember" in capsys.readouterr().err
