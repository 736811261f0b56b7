"""POST, GET and DELETE /v1/webhooks, and what was delivered."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tevatron.api.body import CheckedRoute
from tevatron.api.context import CurrentContext, CurrentPage, CurrentSession, ResourceRef
from tevatron.api.pages import page_resource
from tevatron.api.problems import responses
from tevatron.api.security import CurrentCaller
from tevatron.api.webhooks.target import check_target
from tevatron.core.contracts.resources import Page
from tevatron.core.contracts.webhooks import (
    DeliveryResource,
    NewWebhook,
    WebhookRequest,
    WebhookResource,
)
from tevatron.core.store.webhooks import WebhookRepository

router = APIRouter(tags=["webhooks"], route_class=CheckedRoute)


@router.post(
    "/v1/webhooks",
    status_code=201,
    operation_id="create_webhook",
    responses=responses(409, 413, 415),
)
def post_webhook(
    body: WebhookRequest,
    caller: CurrentCaller,
    context: CurrentContext,
    session: CurrentSession,
    response: Response,
) -> NewWebhook:
    """Tell this URL from now on how each of the key's jobs ends. The answer shows the secret, this once."""
    check_target(body.url, context.settings.webhook_allow)
    row = WebhookRepository(session).create(body.url, key_id=caller.key_id, name=body.name)
    session.refresh(row)
    response.headers["Location"] = f"/v1/webhooks/{row.id}"
    return NewWebhook.model_validate(row)


@router.get("/v1/webhooks", operation_id="list_webhooks", responses=responses())
def list_webhooks(
    caller: CurrentCaller, session: CurrentSession, bounds: CurrentPage
) -> Page[WebhookResource]:
    """List webhooks, newest first."""
    page = WebhookRepository(session).list_page(
        key_id=caller.scope, cursor=bounds.after, limit=bounds.limit
    )
    return page_resource(page, WebhookResource.model_validate)


@router.get("/v1/webhooks/{ref}", operation_id="get_webhook", responses=responses(404))
def get_webhook(
    ref: ResourceRef, caller: CurrentCaller, session: CurrentSession
) -> WebhookResource:
    """Return a webhook; a name means the newest of that name."""
    return WebhookResource.model_validate(WebhookRepository(session).get(ref, key_id=caller.scope))


@router.delete(
    "/v1/webhooks/{ref}",
    status_code=204,
    operation_id="delete_webhook",
    responses=responses(404, 413, 415),
)
def delete_webhook(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> None:
    """Delete a webhook and its deliveries; what is being sent may still arrive."""
    WebhookRepository(session).delete(ref, key_id=caller.scope)


@router.get(
    "/v1/webhooks/{ref}/deliveries", operation_id="list_deliveries", responses=responses(404)
)
def list_deliveries(
    ref: ResourceRef, caller: CurrentCaller, session: CurrentSession, bounds: CurrentPage
) -> Page[DeliveryResource]:
    """List what was or is to be sent to a webhook, newest first."""
    repository = WebhookRepository(session)
    row = repository.get(ref, key_id=caller.scope)
    page = repository.deliveries_page(row.id, cursor=bounds.after, limit=bounds.limit)
    return page_resource(page, DeliveryResource.model_validate)
