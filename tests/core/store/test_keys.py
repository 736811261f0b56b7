"""API keys: the secret is shown once, found by its hash, and useless once revoked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from tevatron.core.errors import NotFoundError
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.models import ApiKey


def test_a_secret_is_found_and_not_stored(sessions):
    with sessions.begin() as session:
        key, secret = KeyRepository(session).create("laptop", role="admin")
    assert secret.startswith("tvt_")
    assert len(secret) == 47
    assert secret.startswith(key.prefix)
    assert len(key.prefix) == 10
    with sessions.begin() as session:
        found = KeyRepository(session).lookup(secret)
        assert (found.id, found.name, found.role) == (key.id, "laptop", "admin")
        stored = session.execute(text("SELECT api_keys::text FROM api_keys")).scalar_one()
    assert secret not in stored


def test_another_secret_is_not_found(sessions):
    with sessions.begin() as session:
        repository = KeyRepository(session)
        _, secret = repository.create("laptop")
        assert repository.lookup(secret[:-1]) is None
        assert repository.lookup("") is None
        assert repository.lookup("\0") is None


def test_a_revoked_key_is_not_found_but_listed(sessions):
    with sessions.begin() as session:
        repository = KeyRepository(session)
        assert repository.any_active() is False
        key, secret = repository.create("laptop")
        assert repository.any_active() is True
        first = repository.revoke(key.id).revoked_at
        assert repository.revoke(key.id).revoked_at == first
        assert repository.lookup(secret) is None
        assert repository.any_active() is False
        assert [row.name for row in repository.list_all()] == ["laptop"]


def test_an_unknown_key_cannot_be_revoked(sessions):
    with sessions.begin() as session, pytest.raises(NotFoundError, match="no API key 'key_0'"):
        KeyRepository(session).revoke("key_0")


def test_last_used_is_written_once_a_minute(sessions):
    with sessions.begin() as session:
        key, secret = KeyRepository(session).create("laptop")
    seen = []
    for age in (None, timedelta(seconds=30), timedelta(seconds=90)):
        with sessions.begin() as session:
            if age is not None:
                session.get_one(ApiKey, key.id).last_used_at = datetime.now(UTC) - age
        with sessions.begin() as session:
            found = KeyRepository(session).lookup(secret)
            seen.append((datetime.now(UTC) - found.last_used_at).total_seconds())
    assert seen == [pytest.approx(0, abs=5), pytest.approx(30, abs=5), pytest.approx(0, abs=5)]
