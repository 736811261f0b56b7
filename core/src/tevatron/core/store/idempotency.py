"""Idempotency-Key: the same request sent twice makes its jobs once."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from tevatron.core.errors import InputError
from tevatron.core.store.models import IdempotencyKey
from tevatron.core.store.repository import owned_by


class IdempotencyKeyReusedError(InputError):
    """The key was used before with another body."""

    code = "idempotency_key_reused"


def once(
    session: Session,
    key: str,
    *,
    body_sha256: str,
    key_id: str | None,
    make: Callable[[], list[str]],
) -> list[str]:
    """Return the ids that `make` gives, or those that it gave for this key before.

    The second of two concurrent requests waits in the INSERT until the first one's transaction has ended: it finds the
    row, or makes the jobs itself when the first was rolled back.
    """
    row_id = session.scalar(
        insert(IdempotencyKey)
        .values(key_id=key_id, key=key, body_sha256=body_sha256, job_ids=[])
        .on_conflict_do_nothing()
        .returning(IdempotencyKey.id)
    )
    if row_id is not None:
        job_ids = make()
        session.execute(
            update(IdempotencyKey).where(IdempotencyKey.id == row_id).values(job_ids=job_ids)
        )
        return job_ids
    found = session.scalars(
        select(IdempotencyKey).where(
            owned_by(IdempotencyKey.key_id, key_id), IdempotencyKey.key == key
        )
    ).one()
    if found.body_sha256 != body_sha256:
        raise IdempotencyKeyReusedError(
            f"Idempotency-Key '{key}' was used before with another body; a new request needs a new key"
        )
    return found.job_ids
