"""Phones and chats: really sent by apprise to servers of our own, and never in anybody's way."""

import email
import json
import logging
import threading
import time
from pathlib import Path

import pytest
from tests.coordinator.outside import http_server, mail_server
from tests.exporters.test_phone_text import diagnosis

from holter import clock
from holter.config import load
from holter.coordinator import courier
from holter.coordinator.courier import MAX_WAITING, Courier
from holter.coordinator.notifier import BURST, EVERY_S, Notifier, Rationing, services
from holter.exporters.phone_text import PhoneMessage
from holter.exporters.webhook import Deliveries

pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")  # apprise's own import, on Python 3.11
SECRET = "s3cr3t-" + "x" * 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(courier, "FIRST_PAUSE_S", 0.05)


def tell(addresses, incidents, deadline_s=30.0):
    """Each look as [standing incidents]; returns what became of the messages."""
    deliveries = Deliveries("notify")
    notifier = Notifier(addresses, "https://head.example", deliveries)
    notifier.start([])
    for standing in incidents:
        notifier.look(standing, standing, clock.monotonic_s())
    notifier.close(deadline_s)
    return deliveries


def test_an_incident_arrives_at_a_server_and_again_when_it_is_over():
    closed = diagnosis(closed_at="2026-11-15T10:20:00Z")
    with http_server() as server:
        deliveries = Deliveries("notify")
        notifier = Notifier(f"json://user:{SECRET}@127.0.0.1:{server.port}/in", "https://head.example", deliveries)
        notifier.start([])
        for standing, known in (([diagnosis()], [diagnosis()]), ([diagnosis()], [diagnosis()]), ([], [closed])):
            notifier.look(standing, known, clock.monotonic_s())
        notifier.close(30)
    told = [json.loads(body) for _, _, body in server.posts]
    assert ["failure", "success"] == [one["type"] for one in told]
    assert "holter: critical: Non-finite input, rank 1, step 30" == told[0]["title"]
    assert "https://head.example/#incident=20261115T101500-1" in told[0]["message"]
    assert {"delivered": 2} == deliveries.counts


def test_several_addresses_are_told_and_one_that_fails_does_not_repeat_the_others():
    with http_server() as good, http_server() as bad:
        bad.status = 500
        addresses = f"json://127.0.0.1:{good.port}/a, ntfy://127.0.0.1:{bad.port}/topic"
        deliveries = tell(addresses, [[diagnosis()]])
    assert 1 == len(good.posts)
    assert len(bad.posts) == courier.MAX_ATTEMPTS
    assert {"delivered": 1, "failed": courier.MAX_ATTEMPTS, "dropped": 1} == deliveries.counts
    assert "ntfy did not take the message" in deliveries.warnings()[0]


def test_a_service_of_its_own_form_and_a_mail():
    with http_server() as chat, mail_server() as mail:
        addresses = f"ntfy://127.0.0.1:{chat.port}/training mailto://127.0.0.1:{mail.port}?from=a@x.example&to=b@x.example&mode=insecure"
        deliveries = tell(addresses, [[diagnosis()]])
    assert {"delivered": 2} == deliveries.counts, deliveries.failure
    assert "holter: critical: Non-finite input" in json.dumps([str(body) for *_, body in chat.posts]) + str(chat.posts)
    (read,) = map(email.message_from_string, mail.mails)
    assert "holter: critical: Non-finite input, rank 1, step 30" == str(
        email.header.make_header(email.header.decode_header(read["Subject"]))
    )
    assert "b@x.example" in read["To"]


def test_information_is_no_page():
    with http_server() as server:
        assert {} == tell(f"json://127.0.0.1:{server.port}/", [[diagnosis(severity="info")]]).counts
    assert not server.posts


def test_a_pagerduty_page_is_updated_and_resolved_by_the_incidents_own_name():
    ((_, send),) = services("pagerduty://aaaaaaaaaaaaaaaaaaaa@bbbbbbbbbbbbbbbbbbbb")
    plugin, sent = send.args[0], []
    plugin.notify = lambda **told: sent.append((plugin.dedup, plugin.action, told["notify_type"])) or True
    for kind in ("critical", "over"):
        assert "" == send(PhoneMessage("t", "b", kind, "20261115T101500-1"))
    assert [("20261115T101500-1", "map", "failure"), ("20261115T101500-1", "map", "success")] == sent


@pytest.mark.parametrize("scheme", ["slack", "discord", "msteams", "nonsense"])
def test_an_address_that_cannot_be_used_is_told_without_its_secret(scheme, caplog):
    assert [] == services(f"{scheme}://{SECRET}")
    assert "HOLTER_NOTIFY: address 1" in caplog.text
    assert SECRET not in caplog.text


def test_no_log_holds_the_secret_of_an_address_that_fails(caplog):
    caplog.set_level(logging.DEBUG)
    deliveries = tell(f"json://user:{SECRET}@127.0.0.1:1/{SECRET}", [[diagnosis()]], 10.0)
    assert deliveries.counts["failed"] >= 1
    assert SECRET not in caplog.text + deliveries.failure + str(deliveries.warnings())


def test_the_services_that_people_have_are_known_to_it():
    addresses = (
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ "
        "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js workflows://prod-1.westus.logic.azure.com:443/workflow-id/signature"
        " mailto://user:pass@gmail.com pagerduty://aaaaaaaaaaaaaaaaaaaa@bbbbbbbbbbbbbbbbbbbb"
    )
    assert 5 == len(services(addresses))


def test_whoever_does_not_answer_is_waited_for_by_nobody():
    release = threading.Event()
    with http_server() as server:
        server.before = lambda: release.wait(60)
        deliveries = Deliveries("notify")
        notifier = Notifier(f"json://127.0.0.1:{server.port}/", "http://a", deliveries)
        notifier.start([])
        began_s = time.monotonic()
        notifier.look([diagnosis()], [diagnosis()], clock.monotonic_s())
        assert time.monotonic() - began_s < 5, "it returns at once"
        notifier.close(1.0)
        assert time.monotonic() - began_s < 15
        assert {"dropped": 1} == deliveries.counts
        release.set()


def test_what_waits_is_bounded_and_the_oldest_goes_first():
    release, delivered = threading.Event(), []
    deliveries = Deliveries("notify")
    one = Courier("test", lambda text: (release.wait(60), delivered.append(text), "")[2], deliveries)
    for number in range(MAX_WAITING + 10):
        one.send(number)
    one.start()
    release.set()
    one.close(30)
    assert list(range(10, MAX_WAITING + 10)) == delivered
    assert {"dropped": 10, "delivered": MAX_WAITING} == deliveries.counts


def test_a_library_that_raises_is_counted_and_its_words_are_not_told():
    def fail(_):
        raise RuntimeError(SECRET)

    deliveries = Deliveries("notify")
    one = Courier("test", fail, deliveries)
    one.start()
    one.send("x")
    one.close(30)
    assert "RuntimeError" == deliveries.failure
    assert 1 == deliveries.counts["dropped"]


def messages(number):
    return [PhoneMessage(f"holter: {each}", "", "warning", str(each)) for each in range(number)]


def test_a_few_are_sent_at_once_and_many_are_put_together():
    rations = Rationing("http://a")
    assert 3 == len(rations.take(messages(3), 0.0))
    sent = rations.take(messages(20), 1.0)
    assert len(sent) == 3
    assert "holter: 18 more messages about incidents" == sent[-1].title
    assert [] == rations.take(messages(5), 2.0), "until the next may follow"
    (later,) = rations.take([], 2.0 + EVERY_S)
    assert "holter: 5 more messages about incidents" == later.title


def test_a_storm_of_an_hour_is_a_message_a_minute_and_at_the_end_all_is_said():
    rations, sent = Rationing("http://a"), 0
    for second in range(3600):
        sent += len(rations.take(messages(1), float(second)))
    assert sent <= BURST + 3600 / EVERY_S
    assert len(rations.take(messages(1), 3600.0, is_final=True)) == 1


def test_without_apprise_it_says_so(monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "apprise", None)
    assert [] == services("json://127.0.0.1:1")
    assert "pip install holter[notify]" in caplog.text
    Notifier("json://127.0.0.1:1", "http://a", Deliveries()).close(1.0)


def test_addresses_may_lie_in_a_file(tmp_path: Path):
    file = tmp_path / "notify"
    file.write_text(f"json://user:{SECRET}@h/\n")
    assert f"json://user:{SECRET}@h/" == load({"HOLTER_NOTIFY_FILE": str(file)}).notify
