"""Settings: strongest source wins, wrong values are named as the user wrote them."""

import os
from pathlib import Path

import pytest

from holter.config import Settings, is_enabled, load, usable
from holter.errors import ConfigError


def test_defaults(tmp_path):
    assert load({}, directory=tmp_path) == Settings()


def test_the_environment_beats_the_file_and_options_beat_both(tmp_path):
    (tmp_path / "holter.toml").write_text('action = "observe"\nport = 1\noverhead_budget = 0.5\n')
    settings = load({"HOLTER_PORT": "2", "HOLTER_OVERHEAD_BUDGET": "0.2"}, {"overhead_budget": "0.1"}, tmp_path)
    assert (settings.action, settings.port, settings.overhead_budget) == ("observe", 2, 0.1)


def test_the_file_may_use_the_environment_names(tmp_path):
    (tmp_path / "holter.toml").write_text('HOLTER_ACTION = "notify"\n')
    assert load({}, directory=tmp_path).action == "notify"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"HOLTER_OVERHEAD_BUDGET": "fast"}, "HOLTER_OVERHEAD_BUDGET must be a number, got 'fast'"),
        ({"HOLTER_OVERHEAD_BUDGET": "2"}, "HOLTER_OVERHEAD_BUDGET must be a number between 0 and 1, got 2.0"),
        ({"HOLTER_PORT": "99999"}, "HOLTER_PORT must be a port between 0 and 65535, got 99999"),
        ({"HOLTER_ACTION": "explode"}, "HOLTER_ACTION must be observe, notify or halt, got 'explode'"),
        (
            {"HOLTER_WEBHOOK": "pager.corp"},
            "HOLTER_WEBHOOK must be an address that begins with http:// or https://, got 'pager.corp'",
        ),
        (
            {"HOLTER_RUNBOOKS": "wiki/holter"},
            "HOLTER_RUNBOOKS must be an address that begins with http:// or https://, got 'wiki/holter'",
        ),
        ({"HOLTER_RUN_ID": "a/b"}, "HOLTER_RUN_ID must be a name without slashes or spaces, got 'a/b'"),
    ],
)
def test_a_wrong_value_is_named_as_it_was_written(tmp_path, environ, sentence):
    with pytest.raises(ConfigError) as raised:
        load(environ, directory=tmp_path)
    assert str(raised.value) == sentence


def test_a_wrong_value_in_the_file_names_the_file(tmp_path):
    path = tmp_path / "holter.toml"
    path.write_text("port = true\n")
    with pytest.raises(ConfigError, match=r"holter\.toml: port must be a whole number, got True"):
        load({}, directory=tmp_path)


def test_an_unknown_setting_in_the_file_is_refused(tmp_path):
    (tmp_path / "holter.toml").write_text("prot = 1\n")
    with pytest.raises(ConfigError, match=r"holter\.toml: prot: there is no such setting"):
        load({}, directory=tmp_path)


def test_a_named_file_that_is_missing_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"HOLTER_CONFIG: cannot read"):
        load({"HOLTER_CONFIG": str(tmp_path / "no.toml")}, directory=tmp_path)


def test_a_token_comes_from_its_file(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    assert load({"HOLTER_TOKEN_FILE": str(tmp_path / "token")}, directory=tmp_path).token == "secret"


def test_a_setting_without_effect_warns():
    assert any("HOLTER_NATS" in warning for warning in Settings(nats_credentials="f").warnings())
    assert any("HOLTER_PORT" in warning for warning in Settings(coordinator="x:1", port=5).warnings())


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_switch(value, expected):
    assert is_enabled({"HOLTER": value}) is expected


def test_names_are_given_by_commas_or_as_a_list(tmp_path):
    (tmp_path / "holter.toml").write_text('local_buffers = ["*.running_mean", "queue"]\n')
    settings = load({"HOLTER_FROZEN": "encoder.*, vae.*,"}, directory=tmp_path)
    assert ("*.running_mean", "queue") == settings.local_buffers
    assert ("encoder.*", "vae.*") == settings.frozen


@pytest.mark.parametrize("written", ["3", "[1, 2]", "true"])
def test_names_that_are_none_are_refused(tmp_path, written):
    (tmp_path / "holter.toml").write_text(f"frozen = {written}\n")
    with pytest.raises(ConfigError, match="frozen must be names separated by commas"):
        load({}, directory=tmp_path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"HOLTER_OVERHEAD_BUDGET": "1%"}, "HOLTER_OVERHEAD_BUDGET must be a number, got '1%'"),
        ({"HOLTER_PORT": "99999"}, "HOLTER_PORT must be a port between 0 and 65535, got 99999"),
        ({"HOLTER_TOKEN_FILE": "/nowhere/token"}, "HOLTER_TOKEN_FILE: cannot read /nowhere/token"),
        ({"HOLTER_CONFIG": "/nowhere/holter.toml"}, "HOLTER_CONFIG: cannot read /nowhere/holter.toml"),
    ],
)
def test_what_cannot_be_used_takes_nothing_else_along(tmp_path, wrong, said):
    right = {"HOLTER_ACTION": "observe", "HOLTER_RUN_DIR": "/runs/7", "HOLTER_RESUME": "1"}
    settings, sentences = usable(right | wrong, directory=tmp_path)
    assert ("observe", "/runs/7", 1) == (settings.action, settings.run_dir, settings.resume)
    assert len(sentences) == 1
    assert sentences[0].startswith(said)


def test_an_unknown_setting_takes_nothing_of_its_file_along(tmp_path):
    (tmp_path / "holter.toml").write_text('prot = 1\naction = "observe"\n')
    settings, sentences = usable({}, directory=tmp_path)
    assert ("observe", 1) == (settings.action, len(sentences))


@pytest.mark.parametrize("written", ['action = "Notify"', "action = true", "action = halt"])
def test_an_action_that_cannot_be_read_is_not_to_halt(tmp_path, written):
    (tmp_path / "holter.toml").write_text(f"{written}\n")
    settings, sentences = usable({}, directory=tmp_path)
    assert ("notify", 1) == (settings.action, len(sentences))


def test_every_value_that_cannot_be_used_is_said():
    settings, sentences = usable({"HOLTER_ACTION": "Halt", "HOLTER_PORT": "-1", "HOLTER_RESUME": "true"})
    assert ("notify", 0, 0, 3) == (settings.action, settings.port, settings.resume, len(sentences))


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
@pytest.mark.parametrize("name", ["HOLTER_SAVE_DEADLINE_S", "HOLTER_OVERHEAD_BUDGET", "HOLTER_LINGER_S"])
def test_a_number_that_is_not_finite_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a number, got '{value}'"):
        load({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NATS", "nats://joe:hunter2secret@h:4222"),
        ("WEBHOOK", "ftp://joe:hunter2secret@h/?token=hunter2secret"),
        ("PORT", "token=hunter2secret"),
    ],
)
def test_a_complaint_shows_no_password(name: str, value: str) -> None:
    _, (sentence,) = usable(environ={f"HOLTER_{name}": value})
    assert f"HOLTER_{name}" in sentence
    assert "hunter2secret" not in sentence


@pytest.mark.parametrize("text", ["a = " + "[" * 10_000, f"port = {'9' * 10_000}", "a", "\udcff"])
def test_a_file_that_is_no_toml_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "holter.toml").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"holter\.toml is not TOML"):
        load({}, directory=tmp_path)


@pytest.mark.timeout(20)
def test_a_file_that_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"HOLTER_CONFIG: cannot read .*pipe: is no plain file"):
        load({"HOLTER_CONFIG": str(tmp_path / "pipe")}, directory=tmp_path)
