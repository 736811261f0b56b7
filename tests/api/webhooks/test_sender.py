"""Webhooks from the end of a job to a real receiver: signed, sent again, given up, and never told twice under two ids."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, text
from standardwebhooks import Webhook as Verifier
from tests.support.processes import python, running, settings_environment, wait_for
from tests.support.receivers import receiving
from tests.support.store import eval_job, register, submit, train_job

from tevatron.api.webhooks.sender import WebhookSender
from tevatron.api.webhooks.signature import signed_headers
from tevatron.core.contracts.jobs import FailReason, JobKind
from tevatron.core.store.claims import claim_next_job, fail, succeed
from tevatron.core.store.deliveries import claim_deliveries, settle_delivery
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.models import Webhook, WebhookDelivery
from tevatron.core.store.webhooks import WebhookRepository

RETRY_S = 0.05


@pytest.fixture
def make_sender(sessions):
    def make(*allow, timeout_s=5.0):
        return WebhookSender(
            sessions,
            allow=allow,
            timeout_s=timeout_s,
            retry_s=RETRY_S,
            poll_s=0.1,
            stopping=threading.Event(),
        )

    return make


def add_webhook(sessions, url, **fields):
    with sessions.begin() as session:
        return WebhookRepository(session).create(url, key_id=None, **fields)


def end_one(sessions, **result):
    """Run one job to its good end, and return its id."""
    submit(sessions, a=eval_job())
    with sessions.begin() as session:
        claim = claim_next_job(session, list(JobKind), worker="w", lease_s=60)
        succeed(session, claim, result)
    return claim.job_id


def deliveries(sessions):
    with sessions() as session:
        return session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.id)).all()


def settle_all(sessions, sender):
    """Step until nothing is pending any more."""

    def step():
        sender.step()
        return all(row.state != "pending" for row in deliveries(sessions))

    wait_for(step, what="the last attempt")


def make_due(sessions):
    with sessions.begin() as session:
        session.execute(text("UPDATE webhook_deliveries SET next_at = now()"))


def test_a_receiver_that_fails_twice_gets_its_event_once_it_answers(sessions, make_sender):
    with receiving([500, 500, 200]) as receiver:
        webhook = add_webhook(sessions, f"{receiver.url}/hook")
        job_id = end_one(sessions)
        settle_all(sessions, make_sender(receiver.url))
    [row] = deliveries(sessions)
    assert (row.state, row.attempts, row.last_error) == ("delivered", 3, None)
    assert [headers["webhook-id"] for headers in receiver.headers] == [row.id] * 3
    assert len(set(receiver.bodies)) == 1
    for body, headers in zip(receiver.bodies, receiver.headers, strict=True):
        event = Verifier(webhook.secret).verify(body, headers)
    assert event["type"] == "job.succeeded"
    assert abs(datetime.now(UTC) - datetime.fromisoformat(event["timestamp"])) < timedelta(
        minutes=5
    )
    data = event["data"]
    assert (data["id"], data["kind"], data["name"], data["state"]) == (
        job_id,
        "eval",
        "a",
        "succeeded",
    )


def test_the_signature_is_the_published_examples():
    # Of docs.svix.com, "Verifying payloads manually".
    headers = signed_headers(
        b'{"event_type":"ping","data":{"success":true}}',
        secret="whsec_plJ3nmyCDGBKInavdOK15jsl",
        delivery_id="msg_loFOjxBNrRLzqYUf",
        timestamp=1731705121,
    )
    assert headers == {
        "webhook-id": "msg_loFOjxBNrRLzqYUf",
        "webhook-timestamp": "1731705121",
        "webhook-signature": "v1,rAvfW3dJ/X/qxhsaXPOyyCGmRKsaKWcsNccKXlIktD0=",
    }


def test_every_kind_of_end_is_told_once(sessions, make_sender):
    with receiving([200]) as receiver:
        add_webhook(sessions, receiver.url)
        submit(sessions, bad=train_job(), gone=train_job(), good=eval_job())
        with sessions.begin() as session:
            claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60)
            fail(session, claim, reason=FailReason.OUT_OF_MEMORY, message="too large")
            JobRepository(session).request_cancel("gone", key_id=None)
            claim = claim_next_job(session, [JobKind.EVAL], worker="w", lease_s=60)
            succeed(session, claim, {})
        with sessions.begin() as session:
            assert succeed(session, claim, {}) is False
        settle_all(sessions, make_sender(receiver.url))
        events = [json.loads(body) for body in receiver.bodies]
    assert sorted((event["data"]["name"], event["type"]) for event in events) == [
        ("bad", "job.failed"),
        ("gone", "job.cancelled"),
        ("good", "job.succeeded"),
    ]
    [failed] = [event["data"] for event in events if event["type"] == "job.failed"]
    assert (failed["reason"], failed["message"]) == ("out_of_memory", "too large")


def test_a_job_that_did_not_end_leaves_no_event(sessions):
    add_webhook(sessions, "https://hooks.example/")
    submit(sessions, a=eval_job())
    with sessions() as session:
        claim = claim_next_job(session, list(JobKind), worker="w", lease_s=60)
        succeed(session, claim, {})
        session.rollback()
    assert deliveries(sessions) == []


def test_after_ten_attempts_it_is_given_up_and_says_why(sessions, make_sender):
    with receiving([503]) as receiver:
        add_webhook(sessions, receiver.url)
        end_one(sessions)
        sender = make_sender(receiver.url)
        for _ in range(12):
            sender.step()
            make_due(sessions)
        assert len(receiver.bodies) == 10
    [row] = deliveries(sessions)
    assert (row.state, row.attempts, row.last_error) == (
        "failed",
        10,
        "answered 503, expected 2xx",
    )


def test_a_receiver_that_is_gone_is_told_nothing_more(sessions, make_sender):
    with receiving([410]) as receiver:
        add_webhook(sessions, receiver.url)
        end_one(sessions)
        sender = make_sender(receiver.url)
        sender.step()
        end_one(sessions)
        sender.step()
        assert len(receiver.bodies) == 1
    [row] = deliveries(sessions)
    assert (row.state, row.last_error) == ("failed", "answered 410, expected 2xx")
    with sessions() as session:
        assert session.scalars(select(Webhook)).one().disabled_at is not None


def test_redirects_are_not_followed(sessions, make_sender):
    with receiving([307, 200]) as receiver:
        add_webhook(sessions, receiver.url)
        end_one(sessions)
        make_sender(receiver.url).step()
        assert len(receiver.bodies) == 1
    assert deliveries(sessions)[0].last_error == (
        "answered 307, expected 2xx; redirects are not followed"
    )


def test_a_receiver_that_trickles_holds_nothing_up(sessions, make_sender):
    stop = threading.Event()

    def trickle(listener):
        connection, _ = listener.accept()
        with connection:
            for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000:
                if stop.wait(0.2):
                    return
                try:
                    connection.send(bytes([byte]))
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener, receiving([200]) as receiver:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        slow = f"http://127.0.0.1:{listener.getsockname()[1]}"
        first = add_webhook(sessions, slow)
        add_webhook(sessions, receiver.url)
        end_one(sessions)
        begun = time.monotonic()
        make_sender(slow, receiver.url, timeout_s=1.0).step()
        assert time.monotonic() - begun < 10
        stop.set()
        thread.join()
        assert len(receiver.bodies) == 1
    [row] = [row for row in deliveries(sessions) if row.webhook_id == first.id]
    assert (row.state, row.last_error) == ("pending", "no answer within 1 s")


def test_a_private_address_is_refused_when_it_is_sent_to(sessions, make_sender):
    with receiving([200]) as receiver:
        port = receiver.url.rpartition(":")[2]
        add_webhook(sessions, f"https://localhost:{port}/")
        add_webhook(sessions, receiver.url)
        end_one(sessions)
        make_sender().step()
        assert receiver.bodies == []
    errors = sorted(row.last_error for row in deliveries(sessions))
    assert "'localhost' is at" in errors[0]
    assert "which is not a public address" in errors[0]
    assert "expected https" in errors[1]


def test_a_revoked_keys_webhooks_get_nothing(sessions, make_sender):
    with sessions.begin() as session:
        keys = KeyRepository(session)
        key, _ = keys.create("left")
        register(session, key_id=key.id)
        WebhookRepository(session).create("https://hooks.example/", key_id=key.id)
        jobs = JobRepository(session)
        first, second = jobs.submit({"a": eval_job(), "b": eval_job()}, key_id=key.id)
        jobs.request_cancel(first.id, key_id=key.id)
        keys.revoke(key.id)
        session.flush()
        jobs.request_cancel(second.id, key_id=key.id)
    make_sender().step()
    [row] = deliveries(sessions)
    assert (row.job_id, row.attempts) == (first.id, 0)


def test_a_dispatcher_killed_between_attempts_delivers_under_the_same_id(
    settings, sessions, tmp_path
):
    log = tmp_path / "log"
    argv = python("-m", "tevatron.api.main", "dispatcher")
    with receiving([500, 200]) as receiver:
        environment = {
            **os.environ,
            **settings_environment(settings),
            "TEVATRON_WEBHOOK_ALLOW": receiver.url,
            "TEVATRON_WEBHOOK_RETRY_S": "3",
        }
        add_webhook(sessions, receiver.url)
        with running(argv, environment=environment, log=log) as process:
            end_one(sessions)
            wait_for(
                lambda: [row.last_error for row in deliveries(sessions)] != [None],
                timeout_s=60,
                what="the first attempt",
            )
            process.send_signal(signal.SIGKILL)
            process.wait()
        [row] = deliveries(sessions)
        assert (row.state, row.attempts, len(receiver.bodies)) == ("pending", 1, 1)
        with running(argv, environment=environment, log=log) as process:
            wait_for(lambda: deliveries(sessions)[0].state == "delivered", timeout_s=60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    assert [headers["webhook-id"] for headers in receiver.headers] == [row.id] * 2


def test_an_attempt_whose_sender_died_is_made_again(sessions, make_sender):
    with receiving([200]) as receiver:
        add_webhook(sessions, receiver.url)
        end_one(sessions)
        with sessions.begin() as session:
            [lost] = claim_deliveries(session, hold_s=1.0)
        with sessions.begin() as session:
            assert claim_deliveries(session, hold_s=1.0) == []
        settle_all(sessions, make_sender(receiver.url))
        # The first sender was only slow: what it says is too late.
        with sessions.begin() as session:
            assert settle_delivery(session, lost, error="late", retry_s=1.0) is None
    [row] = deliveries(sessions)
    assert (row.state, row.attempts, row.last_error) == ("delivered", 2, None)
    assert receiver.headers[0]["webhook-id"] == lost.delivery_id
