"""API keys: made, looked up by the hash of their secret, revoked. The secret is shown once and never stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from tevatron.core.errors import NotFoundError
from tevatron.core.ids import new_id
from tevatron.core.store.models import ApiKey, KeyRole

SECRET_PREFIX = "tvt_"
SECRET_BYTES = 32
SHOWN_CHARACTERS = len(SECRET_PREFIX) + 6
LAST_USED_STEP = timedelta(minutes=1)
"""`last_used_at` is this coarse, so that a request is seldom a write."""


class KeyRepository:
    """The keys, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def create(
        self,
        name: str,
        *,
        role: KeyRole = KeyRole.USER,
        max_queued: int | None = None,
        max_running: int | None = None,
    ) -> tuple[ApiKey, str]:
        """Return the new key and its secret."""
        secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        key = ApiKey(
            id=new_id("key"),
            name=name,
            prefix=secret[:SHOWN_CHARACTERS],
            secret_sha256=_sha256(secret),
            role=role,
            max_queued=max_queued,
            max_running=max_running,
        )
        self._session.add(key)
        self._session.flush()
        return key, secret

    def lookup(self, secret: str) -> ApiKey | None:
        """Return the key of this secret unless it is revoked, and note that it was used."""
        # A search for the hash tells an attacker nothing about the secret by its timing.
        key = self._session.scalars(
            select(ApiKey).where(
                ApiKey.secret_sha256 == _sha256(secret), ApiKey.revoked_at.is_(None)
            )
        ).first()
        now = datetime.now(UTC)
        if key is not None and (
            key.last_used_at is None or now - key.last_used_at > LAST_USED_STEP
        ):
            key.last_used_at = now
        return key

    def list_all(self) -> Sequence[ApiKey]:
        """Return all keys, the oldest first."""
        return self._session.scalars(select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)).all()

    def limit(self, key_id: str, *, max_queued: int | None, max_running: int | None) -> ApiKey:
        """Set how many jobs of the key may be queued and run; what is there already stays."""
        key = self._locked(key_id)
        key.max_queued, key.max_running = max_queued, max_running
        return key

    def revoke(self, key_id: str) -> ApiKey:
        """Make the key's secret useless for ever; its rows stay."""
        key = self._locked(key_id)
        key.revoked_at = key.revoked_at or datetime.now(UTC)
        return key

    def _locked(self, key_id: str) -> ApiKey:
        key = self._session.get(ApiKey, key_id, with_for_update=True)
        if key is None:
            raise NotFoundError(f"no API key '{key_id}'")
        return key

    def any_active(self) -> bool:
        """Return whether there is a key that works."""
        return (
            self._session.scalar(select(ApiKey.id).where(ApiKey.revoked_at.is_(None)).limit(1))
            is not None
        )


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
