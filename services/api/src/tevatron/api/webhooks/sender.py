"""Sends what is due to webhooks, signed, and writes down how it ended. A third loop of the dispatcher's process.

An attempt is counted and committed before it is sent: a sender that is killed leaves a row that falls due again, and the
receiver may get the event twice under one id. Knows no job.
"""

from __future__ import annotations

import asyncio
import http
import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from tevatron.api.webhooks.signature import signed_headers
from tevatron.api.webhooks.target import addresses_of
from tevatron.core.contracts.webhooks import DeliveryState
from tevatron.core.errors import TevatronError
from tevatron.core.store.deliveries import (
    Claimed,
    claim_deliveries,
    disable_webhook,
    settle_delivery,
)
from tevatron.core.store.session import Sessions

log = logging.getLogger(__name__)
MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt has ended."""

    error: str | None = None
    """None when the receiver has taken the event."""
    is_gone: bool = False
    """The receiver wants nothing any more."""


class WebhookSender:
    """One look after the other; `step` raises only what breaks the database."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        allow: Sequence[str],
        timeout_s: float,
        retry_s: float,
        poll_s: float,
        stopping: threading.Event,
    ) -> None:
        self._sessions = sessions
        self._allow = allow
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._poll_s = poll_s
        self._stopping = stopping

    def step(self) -> None:
        """Send all that is due now, some at a time."""
        while not self._stopping.is_set():
            with self._sessions.begin() as session:
                batch = claim_deliveries(session, hold_s=2 * self._timeout_s)
            if not batch:
                return
            outcomes = asyncio.run(send_all(batch, allow=self._allow, timeout_s=self._timeout_s))
            for claimed, outcome in zip(batch, outcomes, strict=True):
                self._settle(claimed, outcome)

    def pause(self) -> None:
        """Wait for the next look."""
        self._stopping.wait(self._poll_s)

    def _settle(self, claimed: Claimed, outcome: Outcome) -> None:
        with self._sessions.begin() as session:
            state = settle_delivery(session, claimed, error=outcome.error, retry_s=self._retry_s)
            if outcome.is_gone and outcome.error is not None:
                disable_webhook(session, claimed.webhook_id, error=outcome.error)
                state = DeliveryState.FAILED
        if outcome.error is not None:
            log.warning(
                "%s to %s: attempt %d failed (now %s): %s",
                claimed.delivery_id,
                claimed.webhook_id,
                claimed.attempt,
                state,
                outcome.error,
            )


async def send_all(
    batch: Sequence[Claimed], *, allow: Sequence[str], timeout_s: float
) -> list[Outcome]:
    """Send all at once; each has the time for itself."""
    # No connection is kept: by address, two names at one address would share it, and the certificate of one only
    # would have been checked. The environment's proxy would look the name up again.
    async with httpx.AsyncClient(
        timeout=None,
        trust_env=False,
        follow_redirects=False,
        limits=httpx.Limits(max_keepalive_connections=0),
    ) as client:
        return await asyncio.gather(
            *(_send(client, claimed, allow=allow, timeout_s=timeout_s) for claimed in batch)
        )


async def _send(
    client: httpx.AsyncClient, claimed: Claimed, *, allow: Sequence[str], timeout_s: float
) -> Outcome:
    try:
        # Over all of it: a receiver that sends a byte now and then never runs into a timeout of reads.
        async with asyncio.timeout(timeout_s):
            addresses = await addresses_of(claimed.url, allow)
            status = await post(client, claimed, addresses=addresses)
    except TimeoutError:
        return Outcome(f"no answer within {timeout_s:g} s")
    except (httpx.HTTPError, httpx.InvalidURL, TevatronError) as error:
        return Outcome(f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS])
    if 200 <= status < 300:
        return Outcome()
    is_gone = status == http.HTTPStatus.GONE
    hint = "; redirects are not followed" if 300 <= status < 400 else ""
    return Outcome(f"answered {status}, expected 2xx{hint}", is_gone=is_gone)


async def post(client: httpx.AsyncClient, claimed: Claimed, *, addresses: Sequence[str]) -> int:
    """Send one event and return the status of the answer, whose body is not read.

    Args:
        addresses: The only ones to connect to, in order; where there are none, the URL's own host.
    """
    url = httpx.URL(claimed.url)
    body = json.dumps(claimed.payload, separators=(",", ":")).encode()
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "tevatron-webhooks",
        "Host": url.netloc.decode(),
        **signed_headers(
            body,
            secret=claimed.secret,
            delivery_id=claimed.delivery_id,
            timestamp=int(time.time()),
        ),
    }
    targets = [url.copy_with(host=address) for address in addresses] or [url]
    for number, target in enumerate(targets, 1):
        # The certificate is checked against the name that was asked for.
        request = client.build_request(
            "POST", target, content=body, headers=headers, extensions={"sni_hostname": url.host}
        )
        try:
            response = await client.send(request, stream=True)
        except httpx.ConnectError:
            if number == len(targets):
                raise
        else:
            await response.aclose()
            return response.status_code
    raise AssertionError("there is always a target")
