"""Logins: a cookie's secret stands for its key until it is closed, expires, or the key is revoked."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, text

from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.logins import LoginRepository
from tevatron.core.store.models import Login


@pytest.fixture
def key_id(sessions) -> str:
    with sessions.begin() as session:
        return KeyRepository(session).create("laptop")[0].id


def open_login(sessions, key_id: str, *, lasts_s: float = 60.0) -> str:
    with sessions.begin() as session:
        return LoginRepository(session).open(key_id, lasts_s=lasts_s)


def key_of(sessions, secret: str) -> str | None:
    with sessions.begin() as session:
        key = LoginRepository(session).key_of(secret)
        return None if key is None else key.id


def test_a_login_stands_for_its_key_and_only_its_hash_is_stored(sessions, key_id):
    secret = open_login(sessions, key_id)
    assert key_of(sessions, secret) == key_id
    assert key_of(sessions, secret + "x") is None
    with sessions() as session:
        assert secret not in session.execute(text("SELECT logins::text FROM logins")).scalar_one()


def test_a_closed_login_is_over(sessions, key_id):
    secret, other = open_login(sessions, key_id), open_login(sessions, key_id)
    for _ in range(2):
        with sessions.begin() as session:
            LoginRepository(session).close(secret)
    assert key_of(sessions, secret) is None
    assert key_of(sessions, other) == key_id


def test_an_expired_login_is_over_and_forgotten_at_the_next(sessions, key_id):
    secret = open_login(sessions, key_id, lasts_s=-1.0)
    assert key_of(sessions, secret) is None
    open_login(sessions, key_id)
    with sessions() as session:
        assert session.scalar(select(func.count()).select_from(Login)) == 1


def test_revoking_the_key_ends_its_logins(sessions, key_id):
    secret = open_login(sessions, key_id)
    with sessions.begin() as session:
        KeyRepository(session).revoke(key_id)
    assert key_of(sessions, secret) is None
