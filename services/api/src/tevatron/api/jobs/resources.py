"""Rows of jobs and events as the API's resources."""

from __future__ import annotations

from collections.abc import Sequence

from tevatron.core.contracts.jobs import JobEvent
from tevatron.core.contracts.resources import JobResource
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import Job, JobEventRow


def job_resources(jobs: Sequence[Job], repository: JobRepository) -> list[JobResource]:
    """Convert jobs of one page, with one look for all their sources and one for what holds them back."""
    ids = [job.id for job in jobs]
    sources, held = repository.sources_of(ids), repository.held_back(ids)
    return [
        JobResource(
            id=job.id,
            kind=job.kind,
            name=job.name,
            state=job.state,
            phase=job.phase,
            reason=job.reason,
            message=job.message,
            held_back=held.get(job.id),
            priority=job.priority,
            attempt=job.attempt,
            spec=job.spec,
            depends_on=sources.get(job.id, []),
            result=job.result,
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
        )
        for job in jobs
    ]


def job_event(row: JobEventRow) -> JobEvent:
    """Convert one event."""
    return JobEvent(seq=row.seq, time=row.time, attempt=row.attempt, type=row.type, data=row.data)
