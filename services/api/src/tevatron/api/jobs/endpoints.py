"""POST and GET /v1/jobs, GET /v1/jobs/{ref}, POST /v1/jobs/{ref}:cancel, :resume, :save and :stop."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from tevatron.api.body import CheckedRoute
from tevatron.api.context import CurrentContext, CurrentPage, CurrentSession, ResourceRef
from tevatron.api.jobs.resources import job_resources
from tevatron.api.problems import responses
from tevatron.api.security import CurrentCaller
from tevatron.core.contracts.jobs import ExportJob, JobGroup, JobKind, JobState, Name, Submission
from tevatron.core.contracts.plan import Plan, PlanRequest
from tevatron.core.contracts.resources import JobResource, Page, SubmittedJobs
from tevatron.core.errors import ConfigError
from tevatron.core.model_shape import ModelShape
from tevatron.core.plan import make_plan
from tevatron.core.remote import check_remote, hub_repository
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.nudges import nudge
from tevatron.core.store.registered import ModelRepository

router = APIRouter(tags=["jobs"], route_class=CheckedRoute)

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="The same key with the same body gives the same jobs; with another body it is a 422.",
    ),
]
ACCEPTED = {
    "description": "Stored; a worker takes them from here.",
    "headers": {
        "Location": {"description": "The first job.", "schema": {"type": "string"}},
        "Retry-After": {
            "description": "Seconds until a look is worth it.",
            "schema": {"type": "string"},
        },
    },
}


@router.post(
    "/v1/jobs",
    status_code=202,
    operation_id="submit_jobs",
    responses={**responses(404, 409, 413, 415, 429), 202: ACCEPTED},
)
def submit_jobs(
    body: Submission,
    caller: CurrentCaller,
    session: CurrentSession,
    context: CurrentContext,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> SubmittedJobs:
    """Store one job, or several in one transaction; each starts as soon as a worker is free and its sources are done."""
    group = body.root
    specs = group.jobs if isinstance(group, JobGroup) else {group.name or "": group}
    for spec in specs.values():
        if isinstance(spec, ExportJob) and spec.to is not None:
            check_remote(spec.to, context.settings.remote_roots, field="to")
            hub_repository(spec.to, field="to")
    digest = hashlib.sha256(body.model_dump_json(by_alias=True).encode()).hexdigest()
    repository = JobRepository(session)
    jobs = repository.submit(
        specs,
        key_id=caller.scope,
        idempotency=None if idempotency_key is None else (idempotency_key, digest),
    )
    nudge(session)
    response.headers["Location"] = f"/v1/jobs/{jobs[0].id}"
    response.headers["Retry-After"] = "1"
    return SubmittedJobs(jobs=job_resources(jobs, repository))


@router.post("/v1/jobs:plan", operation_id="plan_job", responses=responses(404, 413, 415))
def plan_job(
    body: PlanRequest, caller: CurrentCaller, session: CurrentSession, context: CurrentContext
) -> Plan:
    """Say what a training needs on each GPU and which layouts fit; nothing is stored or started."""
    model = ModelRepository(session).get(body.model, key_id=caller.scope)
    if model.path is None:
        raise ConfigError(
            f"model '{model.name}' is registered by a hub id: its config.json is not here to be read"
        )
    shape = ModelShape.read(context.settings.data / model.path)
    return make_plan(
        shape,
        body.arguments,
        backend=body.backend,
        num_gpus=body.num_gpus,
        gpu_gib=body.gpu_gib,
    )


@router.get("/v1/jobs", operation_id="list_jobs", responses=responses())
def list_jobs(
    caller: CurrentCaller,
    session: CurrentSession,
    bounds: CurrentPage,
    kind: JobKind | None = None,
    state: JobState | None = None,
    name: Annotated[Name | None, Query()] = None,
) -> Page[JobResource]:
    """List jobs, newest first."""
    repository = JobRepository(session)
    page = repository.list_jobs(
        key_id=caller.scope,
        cursor=bounds.after,
        limit=bounds.limit,
        kind=kind,
        state=state,
        name=name,
    )
    return Page[JobResource](
        data=job_resources(page.items, repository),
        has_more=page.next_cursor is not None,
        next=page.next_cursor,
    )


# Before `get_job`, whose pattern would take the colon for a part of the name.
@router.post(
    "/v1/jobs/{ref}:cancel",
    status_code=202,
    operation_id="cancel_job",
    responses=responses(404, 409, 413, 415),
)
def cancel_job(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> JobResource:
    """Cancel a job: at once where nobody runs it, else its worker ends every process of it first."""
    repository = JobRepository(session)
    job = repository.request_cancel(ref, key_id=caller.scope)
    return job_resources([job], repository)[0]


@router.post(
    "/v1/jobs/{ref}:resume",
    status_code=202,
    operation_id="resume_job",
    responses=responses(404, 409, 413, 415, 429),
)
def resume_job(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> JobResource:
    """Go on with a job that was cancelled or has failed, a training from its last saved state."""
    repository = JobRepository(session)
    job = repository.resume(ref, key_id=caller.scope)
    return job_resources([job], repository)[0]


@router.post(
    "/v1/jobs/{ref}:save",
    status_code=202,
    operation_id="save_job",
    responses=responses(404, 409, 413, 415),
)
def save_job(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> JobResource:
    """Ask a training for a resumable state after the step that it is at; an export job can publish it."""
    repository = JobRepository(session)
    job = repository.request_save(ref, key_id=caller.scope)
    return job_resources([job], repository)[0]


@router.post(
    "/v1/jobs/{ref}:stop",
    status_code=202,
    operation_id="stop_job",
    responses=responses(404, 409, 413, 415),
)
def stop_job(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> JobResource:
    """Make the step that a training is at its last one: it is saved and published, and the job succeeds."""
    repository = JobRepository(session)
    job = repository.request_stop(ref, key_id=caller.scope)
    return job_resources([job], repository)[0]


@router.get("/v1/jobs/{ref}", operation_id="get_job", responses=responses(404))
def get_job(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> JobResource:
    """Return a job; a name means the newest of that name."""
    repository = JobRepository(session)
    return job_resources([repository.get(ref, key_id=caller.scope)], repository)[0]
