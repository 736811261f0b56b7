"""POST and GET /v1/datasets, PUT /v1/datasets/{ref}/content."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from tevatron.api.body import CheckedRoute
from tevatron.api.context import Context, CurrentContext, CurrentPage, CurrentSession, ResourceRef
from tevatron.api.datasets.checks import Inspection, inspect_dataset
from tevatron.api.datasets.resources import dataset_resource
from tevatron.api.datasets.upload import Upload
from tevatron.api.guard import CONTENT_TYPES
from tevatron.api.pages import page_resource
from tevatron.api.problems import responses
from tevatron.api.roots import check_hub_allowed, refuse_leaving_links, resolve_under
from tevatron.api.security import Caller, CurrentCaller
from tevatron.core.contracts.resources import (
    DatasetKind,
    DatasetRequest,
    DatasetResource,
    DatasetState,
    Page,
)
from tevatron.core.errors import ConflictError
from tevatron.core.remote import check_remote
from tevatron.core.store.models import Dataset
from tevatron.core.store.registered import DatasetRepository, HubSource

router = APIRouter(tags=["datasets"], route_class=CheckedRoute)

CONTENT_BODY = {
    "requestBody": {
        "required": True,
        "description": (
            "training, ranklist: one file, plain, gzip or zstd. "
            "beir: a .zip of corpus.jsonl, queries.jsonl and qrels/<split>.tsv."
        ),
        "content": {
            media_type: {"schema": {"type": "string", "format": "binary"}}
            for media_type in sorted(CONTENT_TYPES)
        },
    }
}


@router.post(
    "/v1/datasets",
    status_code=201,
    operation_id="register_dataset",
    responses=responses(409, 413, 415),
)
def register_dataset(
    body: DatasetRequest,
    caller: CurrentCaller,
    context: CurrentContext,
    session: CurrentSession,
    response: Response,
) -> DatasetResource:
    """Register a dataset: by a path, from the hub or a URL, read from end to end here, or without, to be uploaded next."""
    repository = DatasetRepository(session)
    if body.hub_id is not None or body.url is not None:
        row = repository.by_id(_fetch(body, caller, context))
    elif body.path is None:
        row = repository.create(body.name, key_id=caller.key_id, kind=body.kind)
    else:
        path, found = _inspect(body.path, body.kind, context)
        row = repository.create(
            body.name,
            key_id=caller.key_id,
            kind=body.kind,
            path=path,
            sha256=found.sha256,
            stats=found.stats,
        )
    session.refresh(row)
    response.headers["Location"] = f"/v1/datasets/{row.id}"
    return dataset_resource(row)


@router.get("/v1/datasets", operation_id="list_datasets", responses=responses())
def list_datasets(
    caller: CurrentCaller, session: CurrentSession, bounds: CurrentPage
) -> Page[DatasetResource]:
    """List datasets, newest first."""
    page = DatasetRepository(session).list_page(
        key_id=caller.scope, cursor=bounds.after, limit=bounds.limit
    )
    return page_resource(page, dataset_resource)


@router.get("/v1/datasets/{ref}", operation_id="get_dataset", responses=responses(404))
def get_dataset(
    ref: ResourceRef, caller: CurrentCaller, session: CurrentSession
) -> DatasetResource:
    """Return a dataset."""
    return dataset_resource(DatasetRepository(session).get(ref, key_id=caller.scope))


@router.put(
    "/v1/datasets/{ref}/content",
    operation_id="upload_dataset_content",
    responses=responses(404, 409, 413, 415),
    openapi_extra=CONTENT_BODY,
)
async def upload_dataset_content(
    ref: ResourceRef, request: Request, caller: CurrentCaller, context: CurrentContext
) -> DatasetResource:
    """Take the content of a dataset that awaits it; it is read from end to end before it is kept."""
    # Async only because a body can be streamed no other way; whatever blocks runs in a thread.
    dataset = await run_in_threadpool(_awaiting, ref, caller, context)
    upload = _upload(dataset.kind, context)
    try:
        await upload.receive(request.stream())
        return await run_in_threadpool(_store, upload, dataset.id, context)
    finally:
        await run_in_threadpool(upload.discard)


def _inspect(path: str, kind: DatasetKind, context: Context) -> tuple[str, Inspection]:
    roots = context.settings.dataset_roots
    real = resolve_under(path, roots, variable="TEVATRON_DATASET_ROOTS")
    if real.is_dir():
        refuse_leaving_links(real, roots)
    return str(real), inspect_dataset(kind, real)


def _upload(kind: DatasetKind, context: Context) -> Upload:
    settings = context.settings
    return Upload(settings.data, kind=kind, max_bytes=settings.max_upload_bytes)


def _fetch(body: DatasetRequest, caller: Caller, context: Context) -> str:
    """Fetch and store a dataset of the hub or at a URL, and return its id."""
    hub: HubSource | None = None
    if body.url is not None:
        check_remote(body.url, context.settings.remote_roots, field="url")
    else:
        check_hub_allowed(context.settings)
        assert body.hub_id is not None
        assert body.revision is not None, "the request's own validator"
        hub = HubSource(hub_id=body.hub_id, revision=body.revision, file=body.file)
    with context.sessions.begin() as session:
        DatasetRepository(session).check_free(body.name, key_id=caller.key_id)
    upload = _upload(body.kind, context)
    try:
        # No session is open while it is fetched and read, which may take minutes.
        if hub is not None:
            upload.fetch(hub)
        elif body.url is not None:
            upload.fetch_url(body.url)
        found = upload.inspect()
        with context.sessions.begin() as session:
            row = DatasetRepository(session).create(
                body.name,
                key_id=caller.key_id,
                kind=body.kind,
                sha256=found.sha256,
                stats=found.stats,
                hub=hub,
                url=body.url,
            )
            upload.publish(context.settings.data / row.path)
            return row.id
    finally:
        upload.discard()


def _awaiting(ref: str, caller: Caller, context: Context) -> Dataset:
    with context.sessions.begin() as session:
        dataset = DatasetRepository(session).get(ref, key_id=caller.scope)
    if dataset.state is not DatasetState.AWAITING_CONTENT:
        raise ConflictError(f"dataset '{ref}' has its content already; register another")
    return dataset


def _store(upload: Upload, dataset_id: str, context: Context) -> DatasetResource:
    # No session is open while the content is read, which may take minutes.
    upload.unpack()
    found = upload.inspect()
    with context.sessions.begin() as session:
        dataset = DatasetRepository(session).lock_awaiting(dataset_id)
        upload.publish(context.settings.data / dataset.path)
        dataset.state = DatasetState.READY
        dataset.sha256 = found.sha256
        dataset.stats = found.stats
        return dataset_resource(dataset)
