"""Names on the server and places in the stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.config import load
from holter.errors import ConfigError
from holter.transport.nats.line import NatsPlace
from holter.transport.nats.listener import reachable, speaker_of
from holter.transport.nats.subjects import Subjects, name_of, token_of
from holter.transport.nats.tail import Place, place_of


@given(st.text(min_size=1, max_size=40))
def test_any_name_of_a_run_is_one_word_and_no_two_are_the_same(name):
    word = token_of(name)
    assert word
    assert not set(word) & set(".*> \t/\\")
    assert name == name_of(word)


def test_a_run_has_its_own_subjects():
    names = Subjects("my run.1")
    assert "holter.my=20=run=2e=1.said.3" == names.said("3")
    assert "holter-run-my=20=run=2e=1" == names.stream


def test_the_place_of_a_message_is_read_from_its_reply_address():
    assert Place(sequence=42, delivered=7, at_ns=1700000000, pending=3) == place_of(
        "$JS.ACK.stream.consumer.1.42.7.1700000000.3"
    )
    assert Place(sequence=42, delivered=7, at_ns=1700000000, pending=3) == place_of(
        "$JS.ACK.hub.acc.stream.consumer.1.42.7.1700000000.3.rest"
    )
    assert place_of("$JS.FC.stream.x.y") is None
    assert place_of("") is None
    assert place_of("$JS.ACK.stream.consumer.1.x.7.1700000000.3") is None


def test_a_rank_speaks_as_a_rank_and_an_agent_as_its_host():
    assert "12" == speaker_of("holter.r.said.12")
    assert "host-node=2e=1" == speaker_of("holter.r.said.host-node=2e=1")
    for word in ("all", "", "-1", "012", "\u0661", "99999999"):
        assert speaker_of(f"holter.r.said.{word}") is None


def test_metrics_are_scraped_from_the_host_that_a_sidecar_names():
    assert "node-a:99" == reachable("10.0.0.3:99", "node-a")
    assert "127.0.0.1:99" == reachable("127.0.0.1:99", "node-a")
    assert "" == reachable("elsewhere:port", "node-a")


def test_credentials_are_a_seed_or_a_user_with_a_password_each_for_who_it_is(tmp_path):
    (tmp_path / "rank-3.txt").write_text("rank-3:a secret\n")
    (tmp_path / "coordinator.txt").write_text("SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY\n")
    place = NatsPlace("nats://h:4222", str(tmp_path / "{who}.txt"))
    found = place.options("rank-3")
    assert ("rank-3", "a secret", "_INBOX_rank-3") == (found["user"], found["password"], found["inbox_prefix"])
    assert place.options("coordinator")["nkeys_seed_str"].startswith("SUAC")
    with pytest.raises(OSError, match="rank-4"):
        place.options("rank-4")


def test_settings_refuse_what_cannot_work():
    assert load({"HOLTER_NATS": "nats://a:1,nats://b:2"}).is_nats
    with pytest.raises(ConfigError, match="HOLTER_NATS must be addresses that begin with nats://"):
        load({"HOLTER_NATS": "a:4222"})
    with pytest.raises(ConfigError, match="HOLTER_NATS_CREDENTIALS"):
        load({"HOLTER_NATS": "nats://user:password@a:4222"})
    with pytest.raises(ConfigError, match="HOLTER_COORDINATOR must be given together with HOLTER_RUN_ID"):
        load({"HOLTER_COORDINATOR": "nats://a:4222"})
    assert load({"HOLTER_COORDINATOR": "nats://a:4222", "HOLTER_RUN_ID": "r"}).is_nats
    assert not load({"HOLTER_COORDINATOR": "a:4222", "HOLTER_NATS": "nats://b:1"}).is_nats
    assert any(
        "HOLTER_NATS" in said for said in load({"HOLTER_COORDINATOR": "a:1", "HOLTER_NATS": "nats://b:1"}).warnings()
    )
