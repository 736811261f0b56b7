"""GET /v1/checkpoints and /v1/checkpoints/{ref}."""

from __future__ import annotations

from fastapi import APIRouter

from tevatron.api.body import CheckedRoute
from tevatron.api.context import CurrentPage, CurrentSession, ResourceRef
from tevatron.api.pages import page_resource
from tevatron.api.problems import responses
from tevatron.api.security import CurrentCaller
from tevatron.core.contracts.resources import CheckpointResource, Page
from tevatron.core.store.checkpoints import CheckpointRepository

router = APIRouter(tags=["checkpoints"], route_class=CheckedRoute)


@router.get("/v1/checkpoints", operation_id="list_checkpoints", responses=responses())
def list_checkpoints(
    caller: CurrentCaller, session: CurrentSession, bounds: CurrentPage
) -> Page[CheckpointResource]:
    """List published checkpoints, newest first."""
    page = CheckpointRepository(session).list_page(
        key_id=caller.scope, cursor=bounds.after, limit=bounds.limit
    )
    return page_resource(page, CheckpointResource.model_validate)


@router.get("/v1/checkpoints/{ref}", operation_id="get_checkpoint", responses=responses(404))
def get_checkpoint(
    ref: ResourceRef, caller: CurrentCaller, session: CurrentSession
) -> CheckpointResource:
    """Return a checkpoint with its contract; a name means the newest of that name."""
    row = CheckpointRepository(session).get(ref, key_id=caller.scope)
    return CheckpointResource.model_validate(row)
