"""Browsers that are logged in: a cookie's secret stands for a key until it expires, is closed, or the key is revoked."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from tevatron.core.store.models import ApiKey, Login

SECRET_BYTES = 32


class LoginRepository:
    """The logins, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def open(self, key_id: str, *, lasts_s: float) -> str:
        """Return the secret of a new login; those that have expired are forgotten."""
        now = datetime.now(UTC)
        self._session.execute(delete(Login).where(Login.expires_at < now))
        secret = secrets.token_urlsafe(SECRET_BYTES)
        self._session.add(
            Login(
                secret_sha256=_sha256(secret),
                key_id=key_id,
                expires_at=now + timedelta(seconds=lasts_s),
            )
        )
        return secret

    def key_of(self, secret: str) -> ApiKey | None:
        """Return the key that this login stands for, if it still works."""
        return self._session.scalars(
            select(ApiKey)
            .join(Login, Login.key_id == ApiKey.id)
            .where(
                Login.secret_sha256 == _sha256(secret),
                Login.expires_at > datetime.now(UTC),
                ApiKey.revoked_at.is_(None),
            )
        ).first()

    def close(self, secret: str) -> None:
        """End the login; repeating it does no harm."""
        self._session.execute(delete(Login).where(Login.secret_sha256 == _sha256(secret)))


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
