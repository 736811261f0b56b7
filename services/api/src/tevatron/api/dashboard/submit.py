"""Submitting: a form for train, export and eval, then a look at the jobs and the plan, then the jobs.

Whatever is sent goes through the same functions as `POST /v1/jobs` and `POST /v1/jobs:plan`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import NamedTuple, get_args

from fastapi import Request
from fastapi.responses import Response as FastAPIResponse
from pydantic import JsonValue, ValidationError
from sqlalchemy.orm import Session
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tevatron.api.body import parse_checked
from tevatron.api.context import Context, CurrentContext, CurrentSession, ResourceRef
from tevatron.api.dashboard.page import CurrentForm, Form, page_router, redirect, render
from tevatron.api.jobs.endpoints import plan_job, submit_jobs
from tevatron.api.security import PAGES, Caller, CurrentCaller
from tevatron.core.contracts.jobs import JobGroup, Submission, TrainJob
from tevatron.core.contracts.plan import Plan, PlanRequest
from tevatron.core.contracts.resources import DatasetKind
from tevatron.core.contracts.train import LossName, TrainArguments
from tevatron.core.errors import InputError, TevatronError
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.repository import KeyScope

router = page_router()

CHOICES_LIMIT = 500
GPU_GIB = str(PlanRequest.model_fields["gpu_gib"].default)
ARGUMENTS = [
    "loss",
    "learning_rate",
    "num_train_epochs",
    "max_steps",
    "train_group_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "rerank_max_len",
    "dtype",
    "use_lora",
    "lora_r",
    "eval_steps",
    "load_best_model_at_end",
]
"""Training arguments with a field of their own; any other goes into the box below them."""
CHOICES: dict[str, list[str]] = {
    "loss": [name.value for name in LossName],
    "dtype": list(get_args(TrainArguments.model_fields["dtype"].annotation)),
    "use_lora": ["true", "false"],
    "load_best_model_at_end": ["true", "false"],
}


class Argument(NamedTuple):
    """One training argument, as the form shows it."""

    name: str
    default: str
    hint: str
    choices: list[str]


class Planned(NamedTuple):
    """A training's plan, or why there is none."""

    name: str
    plan: Plan | None
    problem: str | None


@router.get("/new")
def show_form(request: Request, caller: CurrentCaller, session: CurrentSession) -> Response:
    """Show the form."""
    return _form_page(request, session, caller.scope, values={})


@router.post("/new")
def take_form(
    request: Request,
    form: CurrentForm,
    caller: CurrentCaller,
    session: CurrentSession,
    context: CurrentContext,
) -> Response:
    """Make the jobs' specs of the form, and show them with the plan; nothing is stored."""
    try:
        submission = _submission(_group_of(form))
    except InputError as error:
        return _form_page(request, session, caller.scope, values=form, problem=str(error))
    # What was not asked for is left to the defaults.
    spec = submission.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return _review_page(
        request, caller, session, context, spec=spec, gpu_gib=form.get("gpu_gib", "")
    )


@router.get("/jobs/{ref}/clone")
def clone(
    request: Request,
    ref: ResourceRef,
    caller: CurrentCaller,
    session: CurrentSession,
    context: CurrentContext,
) -> Response:
    """Show a job's spec, to be sent again with or without changes."""
    row = JobRepository(session).get(ref, key_id=caller.scope)
    # Another submission has no job by the name that `from` gives; what it stood for is known by its id.
    spec = row.resolved if JobRepository(session).sources_of([row.id]) else row.spec
    return _review_page(request, caller, session, context, spec=dict(spec), gpu_gib=GPU_GIB)


@router.post("/review")
def review(
    request: Request,
    form: CurrentForm,
    caller: CurrentCaller,
    session: CurrentSession,
    context: CurrentContext,
) -> Response:
    """Check the specs again, or send them."""
    text, gpu_gib = form.get("spec", ""), form.get("gpu_gib", GPU_GIB)
    try:
        spec = _parse(text)
        submission = _submission(spec, is_strict=True)
        if form.get("action") == "send":
            # What a refused submission has written already must not be kept.
            with session.begin_nested():
                sent = submit_jobs(
                    submission,
                    caller,
                    session,
                    context,
                    FastAPIResponse(),
                    form.get("once") or None,
                )
            return redirect(
                f"{PAGES}/jobs/{sent.jobs[0].id}" if len(sent.jobs) == 1 else f"{PAGES}/jobs"
            )
    except TevatronError as error:
        values = {
            "spec": text,
            "gpu_gib": gpu_gib,
            "plans": [],
            "once": secrets.token_urlsafe(16),
            "problem": str(error),
        }
        return render(request, "review.html", values, status=error.status_code)
    return _review_page(request, caller, session, context, spec=spec, gpu_gib=gpu_gib)


def _form_page(
    request: Request,
    session: Session,
    scope: KeyScope,
    *,
    values: Mapping[str, str],
    problem: str | None = None,
) -> Response:
    models = ModelRepository(session).list_page(key_id=scope, limit=CHOICES_LIMIT).items
    datasets = DatasetRepository(session).list_page(key_id=scope, limit=CHOICES_LIMIT).items
    page = {
        "models": [row.name for row in models],
        "training": [row.name for row in datasets if row.kind is DatasetKind.TRAINING],
        "beir": [row.name for row in datasets if row.kind is DatasetKind.BEIR],
        "arguments": _arguments(),
        "form": values,
        "gpu_gib": GPU_GIB,
        "problem": problem,
    }
    return render(request, "new.html", page, status=200 if problem is None else 422)


def _arguments() -> list[Argument]:
    fields = TrainArguments.model_fields
    return [
        Argument(
            name, str(fields[name].default), str(fields[name].description), CHOICES.get(name, [])
        )
        for name in ARGUMENTS
    ]


def _review_page(
    request: Request,
    caller: Caller,
    session: Session,
    context: Context,
    *,
    spec: JsonValue,
    gpu_gib: str,
) -> Response:
    try:
        plans, problem = _plans(spec, gpu_gib, caller, session, context), None
    except InputError as error:
        plans, problem = [], str(error)
    values = {
        "spec": json.dumps(spec, indent=2, ensure_ascii=False),
        "gpu_gib": gpu_gib,
        "plans": plans,
        "once": secrets.token_urlsafe(16),
        "problem": problem,
    }
    return render(request, "review.html", values, status=200 if problem is None else 422)


def _plans(
    spec: JsonValue, gpu_gib: str, caller: Caller, session: Session, context: Context
) -> list[Planned]:
    """Plan every training of the submission."""
    root = _submission(spec, is_strict=True).root
    specs = root.jobs if isinstance(root, JobGroup) else {root.name or root.kind: root}
    found = []
    for name, one in specs.items():
        if not isinstance(one, TrainJob):
            continue
        try:
            request = PlanRequest.model_validate(
                {
                    "model": one.model,
                    "backend": one.backend,
                    "num_gpus": one.num_processes,
                    "gpu_gib": gpu_gib,
                    "arguments": one.arguments,
                },
                strict=False,
            )
            found.append(Planned(name, plan_job(request, caller, session, context), None))
        except ValidationError as error:
            raise InputError(_faults(error)) from error
        except TevatronError as error:
            found.append(Planned(name, None, str(error)))
    return found


def _group_of(form: Form) -> dict[str, JsonValue]:
    """Return the group of jobs that the form describes; text is read as numbers where a field is one."""
    name = form.get("name", "")
    arguments: dict[str, JsonValue] = {
        argument: form[argument] for argument in ARGUMENTS if form.get(argument)
    }
    more = _parse(form.get("more", "")) if form.get("more") else {}
    if not isinstance(more, dict):
        raise InputError('more arguments: expected a JSON object, such as {"warmup_ratio": 0.1}')
    train: dict[str, JsonValue] = {
        "kind": "train",
        "model": form.get("model", ""),
        "dataset": form.get("dataset", ""),
        "backend": form.get("backend", ""),
        "num_processes": form.get("num_processes", ""),
        "arguments": arguments | more,
    }
    if form.get("validation"):
        train["validation"] = form["validation"]
    jobs: dict[str, JsonValue] = {"train": train}
    source = "train"
    if form.get("export"):
        source = "export"
        export: dict[str, JsonValue] = {"kind": "export", "train": {"from": "train"}}
        if form.get("export_dtype"):
            export["dtype"] = form.get("export_dtype", "")
        jobs["export"] = export
    if form.get("eval_dataset"):
        rerank: dict[str, JsonValue] = {
            "checkpoint": {"from": source},
            "depth": form.get("depth", ""),
        }
        jobs["eval"] = {
            "kind": "eval",
            "dataset": form.get("eval_dataset", ""),
            "split": form.get("split", ""),
            "rerank": rerank,
        }
    if not name:
        return {"jobs": jobs}
    return {
        "jobs": {
            name if job == "train" else f"{name}-{job}": _renamed(spec, name)
            for job, spec in jobs.items()
        }
    }


def _renamed(spec: JsonValue, name: str) -> JsonValue:
    """Return a spec whose references name the jobs of the group as they are called there."""
    if not isinstance(spec, dict):
        return spec
    if isinstance(source := spec.get("from"), str):
        return {"from": name if source == "train" else f"{name}-{source}"}
    return {key: _renamed(value, name) for key, value in spec.items()}


def _parse(text: str) -> JsonValue:
    try:
        return parse_checked(text.encode())
    except HTTPException as error:
        raise InputError(str(error.detail)) from error


def _submission(spec: JsonValue, *, is_strict: bool = False) -> Submission:
    """Check the form of a submission; text counts as a number only where it comes from the form's fields."""
    try:
        return Submission.model_validate(spec, strict=None if is_strict else False)
    except ValidationError as error:
        raise InputError(_faults(error)) from error


def _faults(error: ValidationError) -> str:
    """Say what is wrong, and where."""
    lines = []
    for fault in error.errors(include_url=False)[:10]:
        # The members of unions that pydantic went through are no part of what the user wrote.
        place = ".".join(str(part) for part in fault["loc"] if part not in ("spec", "group"))
        lines.append(f"{place}: {fault['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)
