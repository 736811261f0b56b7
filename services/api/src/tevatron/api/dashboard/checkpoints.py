"""Checkpoints: what was published, how it must be scored, what proves it, where it came from, and where it is served."""

from __future__ import annotations

from typing import NamedTuple

from fastapi import Request
from pydantic import JsonValue, ValidationError
from sqlalchemy.orm import Session
from starlette.responses import Response

from tevatron.api.checkpoints.endpoints import get_checkpoint, list_checkpoints
from tevatron.api.context import CurrentSession, PageBounds, ResourceRef
from tevatron.api.dashboard.jobs import PAGE_LIMIT, Cursor
from tevatron.api.dashboard.page import page_router, render
from tevatron.api.security import PAGES, CurrentCaller
from tevatron.core.contracts.checkpoint import CheckpointContract
from tevatron.core.errors import NotFoundError
from tevatron.core.store.evaluations import EvaluationRepository
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.repository import KeyScope
from tevatron.core.store.scorers import ScorerRepository

router = page_router()


class Origin(NamedTuple):
    """One thing that a checkpoint was made of."""

    role: str
    name: str
    detail: str = ""
    href: str | None = None


@router.get("/checkpoints")
def show_checkpoints(
    request: Request, caller: CurrentCaller, session: CurrentSession, after: Cursor = ""
) -> Response:
    """Show a page of checkpoints, newest first."""
    page = list_checkpoints(caller, session, PageBounds(limit=PAGE_LIMIT, after=after or None))
    values = {
        "checkpoints": [(row, _contract(row.contract)) for row in page.data],
        "next": page.next,
        "after": after,
    }
    return render(request, "checkpoints.html", values)


@router.get("/checkpoints/{ref}")
def show_checkpoint(
    request: Request, ref: ResourceRef, caller: CurrentCaller, session: CurrentSession
) -> Response:
    """Show one checkpoint."""
    checkpoint = get_checkpoint(ref, caller, session)
    scope = caller.scope
    values = {
        "checkpoint": checkpoint,
        "contract": _contract(checkpoint.contract),
        "origins": _origins(session, str(checkpoint.job_id), scope),
        "scorers": ScorerRepository(session).of_checkpoint(checkpoint.id, key_id=scope),
        "evaluations": EvaluationRepository(session)
        .list_evaluations(key_id=scope, checkpoint_id=checkpoint.id)
        .items,
    }
    return render(request, "checkpoint.html", values)


def _contract(stored: dict[str, JsonValue]) -> CheckpointContract | None:
    """Return the contract, None where another build wrote it in another form: then it is shown as it is."""
    try:
        return CheckpointContract.model_validate(stored)
    except ValidationError:
        return None


def _origins(session: Session, job_id: str, scope: KeyScope) -> list[Origin]:
    """Return the jobs and inputs that led to what the job published, the newest first."""
    job = JobRepository(session).get(job_id, key_id=scope)
    found = [Origin(f"{job.kind} job", job.name or job.id, job.id, f"{PAGES}/jobs/{job.id}")]
    if "train" in job.resolved:
        return found + _origins(session, str(job.resolved["train"]), scope)
    try:
        model = ModelRepository(session).get(str(job.resolved["model"]), key_id=scope)
        found.append(Origin("base model", model.name, model.hub_id or f"sha256 {model.sha256}"))
        dataset = DatasetRepository(session).get(str(job.resolved["dataset"]), key_id=scope)
        found.append(Origin("training data", dataset.name, f"sha256 {dataset.sha256}"))
    except NotFoundError as error:
        found.append(Origin("input", str(error)))
    return found
