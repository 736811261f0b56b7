"""POST and GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tevatron.api.body import CheckedRoute
from tevatron.api.context import Context, CurrentContext, CurrentPage, CurrentSession, ResourceRef
from tevatron.api.models.checks import check_model_folder
from tevatron.api.pages import page_resource
from tevatron.api.problems import responses
from tevatron.api.roots import check_hub_allowed, resolve_under
from tevatron.api.security import CurrentCaller
from tevatron.core.contracts.resources import ModelRequest, ModelResource, Page
from tevatron.core.errors import InputError
from tevatron.core.formats.files import sha256_tree
from tevatron.core.store.models import Model
from tevatron.core.store.registered import ModelRepository

router = APIRouter(tags=["models"], route_class=CheckedRoute)


@router.post(
    "/v1/models", status_code=201, operation_id="register_model", responses=responses(409, 413, 415)
)
def register_model(
    body: ModelRequest,
    caller: CurrentCaller,
    context: CurrentContext,
    session: CurrentSession,
    response: Response,
) -> ModelResource:
    """Register a base model: a folder under a configured root, hashed here, or a hub id with its revision."""
    path, sha256 = _checked_folder(body.path, context) if body.path is not None else (None, None)
    if body.hub_id is not None:
        check_hub_allowed(context.settings)
    row = ModelRepository(session).create(
        body.name,
        key_id=caller.key_id,
        path=path,
        hub_id=body.hub_id,
        hub_revision=body.revision,
        sha256=sha256,
    )
    session.refresh(row)
    response.headers["Location"] = f"/v1/models/{row.id}"
    return _resource(row)


@router.get("/v1/models", operation_id="list_models", responses=responses())
def list_models(
    caller: CurrentCaller, session: CurrentSession, bounds: CurrentPage
) -> Page[ModelResource]:
    """List registered base models, newest first."""
    page = ModelRepository(session).list_page(
        key_id=caller.scope, cursor=bounds.after, limit=bounds.limit
    )
    return page_resource(page, _resource)


@router.get("/v1/models/{ref}", operation_id="get_model", responses=responses(404))
def get_model(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> ModelResource:
    """Return a registered base model."""
    return _resource(ModelRepository(session).get(ref, key_id=caller.scope))


def _checked_folder(path: str, context: Context) -> tuple[str, str]:
    roots = context.settings.model_roots
    folder = resolve_under(path, roots, variable="TEVATRON_MODEL_ROOTS")
    try:
        check_model_folder(folder, roots)
        return str(folder), sha256_tree(folder)
    except PermissionError as error:
        raise InputError(f"path: the API may not read {error.filename}") from error


def _resource(row: Model) -> ModelResource:
    return ModelResource(
        id=row.id,
        name=row.name,
        path=row.path,
        hub_id=row.hub_id,
        revision=row.hub_revision,
        sha256=row.sha256,
        created_at=row.created_at,
    )
