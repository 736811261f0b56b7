"""Jobs: the list, one job with its plots, events and log, and the buttons that cancel, resume, steer and clone it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal, NamedTuple

from fastapi import Query, Request
from pydantic import JsonValue, ValidationError
from starlette.responses import Response

from tevatron.api.context import CurrentContext, CurrentSession, PageBounds, ResourceRef
from tevatron.api.dashboard.page import page_router, redirect, render
from tevatron.api.dashboard.static_files import PLOTLY_PATH
from tevatron.api.jobs.endpoints import cancel_job, list_jobs, resume_job, save_job, stop_job
from tevatron.api.jobs.history import get_job_log, list_job_events
from tevatron.api.jobs.log import read_tail
from tevatron.api.jobs.resources import job_event, job_resources
from tevatron.api.security import PAGES, CurrentCaller
from tevatron.core.contracts.jobs import (
    CLAIMED_STATES,
    EventType,
    JobEvent,
    JobKind,
    JobState,
    TrainJob,
)
from tevatron.core.contracts.resources import JobResource
from tevatron.core.errors import NotFoundError
from tevatron.core.store.jobs import STEP_PHASES, JobRepository

router = page_router()

PAGE_LIMIT = 50
EVENTS_LIMIT = 50
STEPS_SHOWN = 20
STEPS_SEARCHED = 500
"""Events, the newest, among which the last steps are looked for."""
LOG_BYTES = 16 * 2**10
MAX_SEQ = 2**63 - 1

CANCELLABLE = frozenset({JobState.WAITING, JobState.QUEUED, JobState.STARTING, JobState.RUNNING})
RESUMABLE = frozenset({JobState.CANCELLED, JobState.FAILED})

NameFilter = Annotated[
    str, Query(max_length=100, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$", alias="name")
]
Cursor = Annotated[str, Query(max_length=4000)]


@router.get("/jobs")
def show_jobs(
    request: Request,
    caller: CurrentCaller,
    session: CurrentSession,
    kind: JobKind | Literal[""] = "",
    state: JobState | Literal[""] = "",
    name: NameFilter = "",
    after: Cursor = "",
) -> Response:
    """Show a page of jobs, newest first."""
    page = list_jobs(
        caller,
        session,
        PageBounds(limit=PAGE_LIMIT, after=after or None),
        kind=kind or None,
        state=state or None,
        name=name or None,
    )
    repository = JobRepository(session)
    values = {
        "jobs": page.data,
        "progress": repository.progress_of(_ids(page.data, CLAIMED_STATES)),
        "ahead": repository.num_ahead(_ids(page.data, frozenset({JobState.QUEUED}))),
        "duration_s": {job.id: _duration_s(job) for job in page.data},
        "next": page.next,
        "after": after,
        "kinds": list(JobKind),
        "states": list(JobState),
        "filters": {"kind": kind, "state": state, "name": name},
    }
    return render(request, "jobs.html", values)


@router.get("/jobs/{ref}")
def show_job(
    request: Request,
    ref: ResourceRef,
    caller: CurrentCaller,
    session: CurrentSession,
    context: CurrentContext,
    before: Annotated[int, Query(ge=1, le=MAX_SEQ)] = MAX_SEQ,
) -> Response:
    """Show one job; `before` is the seq of an event, whose older ones are shown."""
    repository = JobRepository(session)
    row = repository.get(ref, key_id=caller.scope)
    job = job_resources([row], repository)[0]
    first = max(0, min(row.last_seq, before - 1) - EVENTS_LIMIT)
    events = [
        job_event(event)
        for event in repository.events_page(job.id, after_seq=first, limit=EVENTS_LIMIT)
        if event.seq < before
    ]
    newest = repository.events_page(
        job.id, after_seq=max(0, row.last_seq - STEPS_SEARCHED), limit=STEPS_SEARCHED
    )
    try:
        tail = read_tail(
            context.settings.data, job_id=job.id, attempt=job.attempt, max_bytes=LOG_BYTES
        ).decode("utf-8", "replace")
    except NotFoundError:
        # It has not started, or it is of a kind that writes none.
        tail = None
    values = {
        "job": job,
        "progress": repository.progress_of([job.id]).get(job.id)
        if job.state in CLAIMED_STATES
        else None,
        "ahead": repository.num_ahead([job.id]).get(job.id),
        "duration_s": _duration_s(job),
        "last_seq": row.last_seq,
        "events": [(event, _summary(event)) for event in reversed(events)],
        "older": events[0].seq if events and events[0].seq > 1 else None,
        "steps": _steps([job_event(event) for event in newest]),
        "validation": _validation(job, repository),
        "tail": tail,
        "plotly_path": PLOTLY_PATH,
        "can_cancel": job.state in CANCELLABLE,
        "can_resume": job.state in RESUMABLE,
        "can_steer": job.kind is JobKind.TRAIN
        and job.state is JobState.RUNNING
        and job.phase in STEP_PHASES,
        "is_stopping": row.stop_requested_at is not None,
    }
    return render(request, "job.html", values)


@router.post("/jobs/{ref}/cancel")
def cancel(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> Response:
    """Cancel the job."""
    return redirect(f"{PAGES}/jobs/{cancel_job(ref, caller, session).id}")


@router.post("/jobs/{ref}/resume")
def resume(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> Response:
    """Resume the job."""
    return redirect(f"{PAGES}/jobs/{resume_job(ref, caller, session).id}")


@router.post("/jobs/{ref}/save")
def save(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> Response:
    """Ask the training for a state after the step that it is at."""
    return redirect(f"{PAGES}/jobs/{save_job(ref, caller, session).id}")


@router.post("/jobs/{ref}/stop")
def stop(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> Response:
    """Make the step that the training is at its last one."""
    return redirect(f"{PAGES}/jobs/{stop_job(ref, caller, session).id}")


# The same as below /v1, for a browser that has a login and no key.
router.add_api_route("/jobs/{ref}/events", list_job_events, response_model=None)
router.add_api_route("/jobs/{ref}/log", get_job_log, response_model=None)


class Validation(NamedTuple):
    """What a training's held-out rows gave."""

    metric: str
    """Which number decides, as the plots name it."""
    steps: list[dict[str, JsonValue]]
    """The newest and the best, newest first."""
    best_step: JsonValue


def _ids(jobs: list[JobResource], states: frozenset[JobState]) -> list[str]:
    return [job.id for job in jobs if job.state in states]


def _duration_s(job: JobResource) -> float | None:
    if job.started_at is None:
        return None
    return ((job.finished_at or datetime.now(UTC)) - job.started_at).total_seconds()


def _steps(events: list[JobEvent]) -> list[dict[str, JsonValue]]:
    """Return the last training steps, newest first."""
    steps = [
        dict(event.data)
        for event in events
        if event.type is EventType.METRICS and "loss" in event.data
    ]
    return steps[: -STEPS_SHOWN - 1 : -1]


def _validation(job: JobResource, repository: JobRepository) -> Validation | None:
    """Return the numbers of the held-out rows, None where the job scores none; of a step that was repeated the last."""
    if job.kind is not JobKind.TRAIN:
        return None
    try:
        spec = TrainJob.model_validate(job.spec)
    except ValidationError:
        # Stored by another version: the page shows what it is, and the numbers among the events.
        return None
    if spec.validation is None:
        return None
    metric = f"eval_{spec.arguments.metric_for_best_model}"
    by_step = {
        str(event.data["step"]): dict(event.data) for event in repository.validations(job.id)
    }
    steps = sorted(by_step.values(), key=lambda data: int(str(data["step"])))
    values = {index: data[metric] for index, data in enumerate(steps)}
    numbers = {index: value for index, value in values.items() if isinstance(value, int | float)}
    # The earliest of equals, as the training keeps it.
    choose = min if metric == "eval_loss" else max
    best = steps[choose(numbers, key=numbers.__getitem__)]["step"] if numbers else None
    shown = [step for step in steps[:-STEPS_SHOWN] if step["step"] == best] + steps[-STEPS_SHOWN:]
    return Validation(metric, shown[::-1], best)


def _summary(event: JobEvent) -> str:
    """Say in one line what an event says."""
    data = event.data
    match event.type:
        case EventType.STATE:
            why = [str(data[name]) for name in ("reason", "message") if data.get(name)]
            return ": ".join([str(data.get("state")), *why])
        case EventType.PHASE:
            return str(data.get("phase"))
        case EventType.PROGRESS:
            return f"{data.get('done')} of {data.get('total')} {data.get('unit', '')}"
        case EventType.LOG:
            return f"{data.get('level')}: {data.get('message')}"
        case EventType.METRICS:
            return ", ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in data.items()
            )
