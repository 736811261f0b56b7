"""Running a study: each job submitted once under its key, followed to its end. What was there already is picked up."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

import typer

from tevatron.core.cli.client import ApiError, Client
from tevatron.core.cli.follow import follow_jobs
from tevatron.core.cli.study import Study
from tevatron.core.contracts.jobs import FINAL_STATES, AnyJob, From, JobState
from tevatron.core.contracts.resources import JobResource
from tevatron.core.contracts.sources import job_sources, with_sources
from tevatron.core.errors import ConfigError

_RESUMABLE = frozenset({JobState.FAILED, JobState.CANCELLED})


def submit_study(client: Client, study: Study, *, resume: bool) -> dict[str, JobResource]:
    """Submit what is not there yet and return all jobs by name, as they are now.

    Killed anywhere and started again, it submits nothing twice: each request has the job's own Idempotency-Key, and the ids
    in it are those of the jobs before.

    Args:
        client: Whose key the jobs belong to.
        study: What to submit.
        resume: Go on with jobs that have failed or were cancelled. A source comes first, and takes along what failed
            because of it.
    """
    keys = study.keys()
    found: dict[str, JobResource] = {}
    for name, spec in study.jobs.items():
        ids = {source: From(source=found[source].id) for source in job_sources(spec)}
        try:
            job = _submit(client, with_sources(spec, ids), name=name, key=keys[name])
        except ApiError as error:
            hint = ""
            if error.code == "idempotency_key_reused":
                hint = "\n  an older version of this command has submitted it; under another name the study begins anew"
            raise ConfigError(f"study '{study.name}', job '{name}': {error}{hint}") from error
        found[name] = client.resume(job.id) if resume and job.state in _RESUMABLE else job
    return found


def _submit(client: Client, spec: AnyJob, *, name: str, key: str) -> JobResource:
    """Submit one job. Where the API takes no more for now, those that it has make room: they are waited for."""
    is_told = False
    while True:
        try:
            [job] = client.submit(spec, idempotency_key=key)
        except ApiError as error:
            # The client has asked several times by now, with the pauses that the answers name.
            if error.status_code != HTTPStatus.TOO_MANY_REQUESTS:
                raise
            if not is_told:
                typer.echo(f"{name} waits until the API takes it: {error}", err=True)
            is_told = True
        else:
            return job


def follow_study(
    client: Client, jobs: dict[str, JobResource], *, file: Path, quiet: bool
) -> dict[str, JobResource]:
    """Follow the jobs that are not over yet to their end, and return all."""
    names = {job.id: name for name, job in jobs.items()}
    under_way = [job for job in jobs.values() if job.state not in FINAL_STATES]
    try:
        ended = follow_jobs(client, under_way, quiet=quiet)
    except KeyboardInterrupt:
        typer.echo(f"the same command goes on with the study: tevatron run {file}", err=True)
        raise
    return jobs | {names[job.id]: job for job in ended}
