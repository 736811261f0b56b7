"""POST, GET and DELETE /v1/scorers."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from tevatron.api.allowed import check_allowed
from tevatron.api.body import CheckedRoute
from tevatron.api.context import Context, CurrentContext, CurrentPage, CurrentSession, ResourceRef
from tevatron.api.pages import page_resource
from tevatron.api.problems import responses
from tevatron.api.scorers.resources import scorer_resource
from tevatron.api.security import Caller, CurrentCaller
from tevatron.core.contracts.resources import Page, ScorerRequest, ScorerResource
from tevatron.core.errors import ForbiddenError
from tevatron.core.prompts import get_template
from tevatron.core.store.checkpoints import CheckpointRepository
from tevatron.core.store.registered import ModelRepository
from tevatron.core.store.scorers import (
    ScorerRepository,
    ScorerTarget,
    release_scorer,
    request_scorer,
)

router = APIRouter(tags=["scorers"], route_class=CheckedRoute)


@router.post(
    "/v1/scorers",
    status_code=202,
    operation_id="request_scorer",
    responses=responses(404, 409, 413, 415),
)
def post_scorer(
    body: ScorerRequest,
    caller: CurrentCaller,
    context: CurrentContext,
    session: CurrentSession,
    response: Response,
) -> ScorerResource:
    """Ask for a scorer: hosts take its replicas as places are free. An administrator registers an outside one by url."""
    repository = ScorerRepository(session)
    if body.url is not None:
        scorer_id = _register(body, body.url, caller, context, repository)
    else:
        scorer_id = _request(body, caller, context, session)
    response.headers["Location"] = f"/v1/scorers/{scorer_id}"
    return _resource(repository, scorer_id)


@router.get("/v1/scorers", operation_id="list_scorers", responses=responses())
def list_scorers(
    caller: CurrentCaller, session: CurrentSession, bounds: CurrentPage
) -> Page[ScorerResource]:
    """List scorers, newest first; outside ones are everybody's."""
    repository = ScorerRepository(session)
    page = repository.list_page(key_id=caller.scope, cursor=bounds.after, limit=bounds.limit)
    found = repository.replicas([row.id for row in page.items])
    scorers = {scorer.first.id: scorer for scorer in found}
    return page_resource(page, lambda row: scorer_resource(scorers[row.id]))


@router.get("/v1/scorers/{ref}", operation_id="get_scorer", responses=responses(404))
def get_scorer(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> ScorerResource:
    """Return a scorer."""
    repository = ScorerRepository(session)
    return _resource(repository, repository.get(ref, key_id=caller.scope).id)


@router.delete(
    "/v1/scorers/{ref}",
    status_code=202,
    operation_id="release_scorer",
    responses=responses(404, 413, 415),
)
def delete_scorer(
    ref: ResourceRef, caller: CurrentCaller, session: CurrentSession
) -> ScorerResource:
    """Let a scorer go: hosts stop all its replicas. Repeating it does no harm."""
    repository = ScorerRepository(session)
    row = repository.get(ref, key_id=caller.scope)
    if row.external and not caller.is_admin:
        raise ForbiddenError(f"scorer '{ref}' is an outside one; only an administrator lets it go")
    release_scorer(session, row.id)
    return _resource(repository, row.id)


def _resource(repository: ScorerRepository, scorer_id: str) -> ScorerResource:
    [scorer] = repository.replicas([scorer_id])
    return scorer_resource(scorer)


def _register(
    body: ScorerRequest, url: str, caller: Caller, context: Context, repository: ScorerRepository
) -> str:
    if not caller.is_admin:
        raise ForbiddenError("url: only an administrator registers an outside scorer")
    check_allowed(url, context.settings.scorer_allow)
    return repository.register_external(
        url, key_id=caller.key_id, name=body.name, token=body.token, engine=body.engine
    ).id


def _request(body: ScorerRequest, caller: Caller, context: Context, session: Session) -> str:
    if body.prompt_template is not None:
        get_template(body.prompt_template)
    target = ScorerTarget(
        checkpoint_id=(
            CheckpointRepository(session)
            .get_servable(body.checkpoint, key_id=caller.scope, dtype=body.dtype)
            .id
            if body.checkpoint is not None
            else None
        ),
        model_id=(
            ModelRepository(session).get(body.model, key_id=caller.scope).id
            if body.model is not None
            else None
        ),
        engine=body.engine,
        dtype=body.dtype,
        prompt_template=body.prompt_template,
        max_length=body.max_length,
    )
    ttl_s = body.ttl_s if body.ttl_s is not None else context.settings.scorer_idle_ttl_s
    return request_scorer(
        session,
        target,
        key_id=caller.key_id,
        name=body.name,
        ttl_s=ttl_s,
        replicas=body.replicas,
    )
