"""Webhooks on the wire: what a user sends and sees, and the event that a receiver gets.

Form and signature are those of the Standard Webhooks specification (standardwebhooks.com).
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field, JsonValue

from tevatron.core.contracts.jobs import Name, Spec
from tevatron.core.contracts.resources import Resource


class DeliveryState(StrEnum):
    """What has become of one event for one webhook."""

    PENDING = "pending"
    """Not sent yet, or to be sent again."""
    DELIVERED = "delivered"
    FAILED = "failed"
    """Given up: the last attempt failed too, or the receiver is gone."""


class WebhookRequest(Spec):
    """Ask for an event at this URL whenever one of the key's jobs ends."""

    url: str = Field(min_length=1, max_length=2000)
    """https on the public network; anything else only under a prefix that the operator allows."""
    name: Name | None = None


class WebhookResource(Resource):
    """A webhook; its secret is never shown again."""

    id: str
    name: str | None
    url: str
    disabled_at: datetime | None
    """When its receiver answered 410 Gone; it gets nothing since."""
    created_at: datetime


class NewWebhook(WebhookResource):
    """A webhook just made, with the secret that signs its deliveries."""

    secret: str
    """`whsec_` and the key in base64; shown this once."""


class DeliveryResource(Resource):
    """One event on its way to one webhook."""

    id: str
    """The header `webhook-id`, the same in every attempt."""
    job_id: str
    state: DeliveryState
    attempts: int
    next_at: datetime
    """When a pending one is sent, or sent again."""
    last_error: str | None
    """Why the last attempt failed."""
    payload: dict[str, JsonValue]
    """The body: `type` (job.succeeded, job.failed, job.cancelled), `timestamp` and `data`."""
    created_at: datetime
