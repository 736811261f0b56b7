"""Webhooks as a user sees them: made, listed, deleted, and what was delivered. The sender's side is deliveries.py."""

from __future__ import annotations

import base64
import secrets
from typing import ClassVar

from sqlalchemy import func, select

from tevatron.core.errors import ConflictError
from tevatron.core.ids import new_id
from tevatron.core.store.models import Webhook, WebhookDelivery
from tevatron.core.store.paging import Page, page_of
from tevatron.core.store.repository import KeyScope, Repository, owned_by

SECRET_PREFIX = "whsec_"
SECRET_BYTES = 32
MAX_WEBHOOKS = 20
"""Of one key: each end of a job is a request to every one."""


class WebhookRepository(Repository[Webhook]):
    """Webhooks within the caller's transaction."""

    table = Webhook
    noun: ClassVar[str] = "webhook"

    def create(self, url: str, *, key_id: str | None, name: str | None = None) -> Webhook:
        """Store a webhook with a secret of its own."""
        count = select(func.count()).select_from(Webhook).where(owned_by(Webhook.key_id, key_id))
        if self._session.scalars(count).one() >= MAX_WEBHOOKS:
            raise ConflictError(
                f"the key has {MAX_WEBHOOKS} webhooks, the most there can be; delete one first"
            )
        secret = SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
        row = Webhook(id=new_id("hook"), key_id=key_id, name=name, url=url, secret=secret)
        self._session.add(row)
        self._session.flush()
        return row

    def delete(self, ref: str, *, key_id: KeyScope) -> None:
        """Delete a webhook and its deliveries; what is being sent may still arrive."""
        self._session.delete(self.get(ref, key_id=key_id))
        self._session.flush()

    def deliveries_page(
        self, webhook_id: str, *, cursor: str | None = None, limit: int = 50
    ) -> Page[WebhookDelivery]:
        """Return what was or is to be sent, newest first; call `get` first to check whose webhook it is."""
        statement = select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id)
        return page_of(self._session, statement, WebhookDelivery, cursor=cursor, limit=limit)
