"""The deliveries of webhooks: stored with the end of a job, claimed by the sender, and settled. The row is the outbox.

A claim is committed before anything is sent and carries when the next attempt is due, so that a sender which dies loses
nothing; the event is then sent again under the same id. Knows no HTTP.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import JsonValue
from sqlalchemy import ColumnElement, and_, exists, func, or_, select, update
from sqlalchemy.orm import Session

from tevatron.core.contracts.webhooks import DeliveryState
from tevatron.core.ids import new_id
from tevatron.core.store.models import ApiKey, Job, Webhook, WebhookDelivery

MAX_ATTEMPTS = 10
"""With pauses of 5 s, 20 s, 80 s, ... and 8 h at the end: about a day."""
PAUSE_FACTOR = 4.0
LONGEST_PAUSE_S = 8 * 3600.0
JITTER = 0.2
"""Pauses are this share longer or shorter, so that receivers which come back are not hit by all at once."""
BATCH = 32
BATCH_OF_ONE = 4
"""Of one webhook in a batch: a receiver that hangs must not keep the others waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """One attempt at a delivery."""

    delivery_id: str
    webhook_id: str
    attempt: int
    url: str
    secret: str
    payload: dict[str, JsonValue]


def add_deliveries(session: Session, job: Job, now: datetime) -> None:
    """Store the event of a job's end for each webhook of its key."""
    # Locked as the foreign key would: one that is deleted meanwhile is left out, and does not break the job's end.
    webhooks = session.scalars(
        select(Webhook.id)
        .where(Webhook.key_id.is_not_distinct_from(job.key_id), _is_live())
        .with_for_update(read=True, key_share=True)
    ).all()
    payload: dict[str, JsonValue] = {
        "type": f"job.{job.state.value}",
        "timestamp": now.isoformat(),
        "data": {
            "id": job.id,
            "kind": job.kind.value,
            "name": job.name,
            "group_id": job.group_id,
            "state": job.state.value,
            "reason": job.reason.value if job.reason else None,
            "phase": job.phase.value if job.phase else None,
            "message": job.message,
            "attempt": job.attempt,
        },
    }
    session.add_all(
        WebhookDelivery(
            id=new_id("msg"),
            key_id=job.key_id,
            webhook_id=webhook_id,
            job_id=job.id,
            payload=payload,
        )
        for webhook_id in webhooks
    )


def claim_deliveries(session: Session, *, hold_s: float) -> list[Claimed]:
    """Begin an attempt at some deliveries that are due, at few of each webhook.

    Args:
        hold_s: When they are due again if nothing is heard of this attempt.
    """
    is_due = and_(
        WebhookDelivery.state == DeliveryState.PENDING,
        WebhookDelivery.next_at <= func.clock_timestamp(),
    )
    place = func.row_number().over(
        partition_by=WebhookDelivery.webhook_id, order_by=WebhookDelivery.next_at
    )
    ranked = select(WebhookDelivery.id, place.label("place")).where(is_due).subquery()
    rows = session.execute(
        select(WebhookDelivery, Webhook)
        .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
        .where(
            WebhookDelivery.id.in_(select(ranked.c.id).where(ranked.c.place <= BATCH_OF_ONE)),
            is_due,
            _is_live(),
        )
        .order_by(WebhookDelivery.next_at, WebhookDelivery.id)
        .limit(BATCH)
        .with_for_update(of=WebhookDelivery, skip_locked=True)
        .execution_options(populate_existing=True)
    ).all()
    now: datetime = session.scalars(select(func.clock_timestamp())).one()
    claimed = []
    for delivery, webhook in rows:
        delivery.attempts += 1
        delivery.next_at = now + timedelta(seconds=hold_s)
        claimed.append(
            Claimed(
                delivery_id=delivery.id,
                webhook_id=webhook.id,
                attempt=delivery.attempts,
                url=webhook.url,
                secret=webhook.secret,
                payload=delivery.payload,
            )
        )
    return claimed


def settle_delivery(
    session: Session, claimed: Claimed, *, error: str | None, retry_s: float
) -> DeliveryState | None:
    """Write how an attempt has ended and return the delivery's state; None when a later attempt has begun.

    Args:
        error: Why it failed; None when the receiver has taken the event.
        retry_s: Pause after the first attempt.
    """
    delivery = session.scalars(
        select(WebhookDelivery)
        .where(
            WebhookDelivery.id == claimed.delivery_id,
            WebhookDelivery.attempts == claimed.attempt,
            WebhookDelivery.state == DeliveryState.PENDING,
        )
        .with_for_update()
        .execution_options(populate_existing=True)
    ).first()
    if delivery is None:
        return None
    delivery.last_error = error
    if error is None:
        delivery.state = DeliveryState.DELIVERED
    elif claimed.attempt >= MAX_ATTEMPTS:
        delivery.state = DeliveryState.FAILED
    else:
        pause = timedelta(seconds=pause_s(claimed.attempt, retry_s=retry_s))
        now: datetime = session.scalars(select(func.clock_timestamp())).one()
        delivery.next_at = now + pause
    return delivery.state


def disable_webhook(session: Session, webhook_id: str, *, error: str) -> None:
    """Send nothing more to a receiver that is gone; what was on its way has failed."""
    session.execute(
        update(Webhook)
        .where(Webhook.id == webhook_id, Webhook.disabled_at.is_(None))
        .values(disabled_at=func.now())
    )
    session.execute(
        update(WebhookDelivery)
        .where(
            WebhookDelivery.webhook_id == webhook_id,
            WebhookDelivery.state == DeliveryState.PENDING,
        )
        .values(state=DeliveryState.FAILED, last_error=error)
        .execution_options(synchronize_session=False)
    )


def pause_s(attempt: int, *, retry_s: float) -> float:
    """Return the pause after this many attempts have failed."""
    pause = min(retry_s * PAUSE_FACTOR ** (attempt - 1), LONGEST_PAUSE_S)
    return pause * random.uniform(1 - JITTER, 1 + JITTER)


def _is_live() -> ColumnElement[bool]:
    """Match webhooks that are sent to: a revoked key's are not."""
    is_active = exists().where(ApiKey.id == Webhook.key_id, ApiKey.revoked_at.is_(None))
    return and_(Webhook.disabled_at.is_(None), or_(Webhook.key_id.is_(None), is_active))
