"""Jobs as a user sees them: submit, look, cancel, save, stop, read events. The worker's side is claims.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import ClassVar

from pydantic import JsonValue
from sqlalchemy import func, select, tuple_
from sqlalchemy.orm import aliased

from tevatron.core.contracts.jobs import (
    AnyJob,
    EventType,
    FailReason,
    JobKind,
    JobState,
    Phase,
)
from tevatron.core.contracts.sources import check_group, job_sources
from tevatron.core.errors import ConflictError
from tevatron.core.ids import new_id
from tevatron.core.store.idempotency import once
from tevatron.core.store.lifecycle import NewEvent, add_events, begin_again, move
from tevatron.core.store.limits import check_max_queued, held_back
from tevatron.core.store.models import Job, JobDependency, JobEventRow
from tevatron.core.store.paging import Page, page_of
from tevatron.core.store.references import References
from tevatron.core.store.repository import KeyScope, Repository, owner_of

STEP_PHASES = frozenset({Phase.TRAINING, Phase.SAVING, Phase.EVALUATING})
"""Phases of a train job in which a step follows, or may."""


class JobRepository(Repository[Job]):
    """Jobs within the caller's transaction."""

    table = Job
    noun: ClassVar[str] = "job"

    def submit(
        self,
        specs: Mapping[str, AnyJob],
        *,
        key_id: KeyScope,
        idempotency: tuple[str, str] | None = None,
    ) -> list[Job]:
        """Check and store jobs, all or none, and return them in the order of `specs`.

        Args:
            specs: By name; the name is the job's own unless its spec has another. The empty name is for a single spec.
            key_id: Whose things the specs may name; the jobs belong to its key.
            idempotency: The request's Idempotency-Key and the sha256 of its body.
        """
        if idempotency is None:
            return self._by_ids(self._store(specs, key_id=key_id))
        key, body_sha256 = idempotency
        ids = once(
            self._session,
            key,
            body_sha256=body_sha256,
            key_id=owner_of(key_id),
            make=lambda: self._store(specs, key_id=key_id),
        )
        return self._by_ids(ids)

    def list_jobs(
        self,
        *,
        key_id: KeyScope,
        cursor: str | None = None,
        limit: int = 50,
        kind: JobKind | None = None,
        state: JobState | None = None,
        name: str | None = None,
        group_id: str | None = None,
    ) -> Page[Job]:
        """Return the key's jobs that match, newest first."""
        statement = self._visible(key_id)
        wanted = ((Job.kind, kind), (Job.state, state), (Job.name, name), (Job.group_id, group_id))
        for column, value in wanted:
            if value is not None:
                statement = statement.where(column == value)
        return page_of(self._session, statement, Job, cursor=cursor, limit=limit)

    def request_cancel(self, ref: str, *, key_id: KeyScope) -> Job:
        """Cancel at once what nobody runs; ask the worker of a running job to stop. Repeating it does no harm."""
        job_id = self.get(ref, key_id=key_id).id
        job = self._session.get_one(Job, job_id, with_for_update=True, populate_existing=True)
        if job.state in (JobState.WAITING, JobState.QUEUED):
            move(self._session, job, JobState.CANCELLED)
        elif job.state in (JobState.STARTING, JobState.RUNNING):
            move(self._session, job, JobState.CANCELLING)
        elif job.state not in (JobState.CANCELLING, JobState.CANCELLED):
            raise ConflictError(f"job {job.id} is {job.state}; it cannot be cancelled any more")
        self._session.flush()
        return job

    def resume(self, ref: str, *, key_id: KeyScope) -> Job:
        """Go on with a job that was cancelled or has failed, from what its attempts have left.

        A training has its last saved state, an evaluation the scores that it has. Jobs that failed only because this one
        did wait for it again.
        """
        job_id = self.get(ref, key_id=key_id).id
        job = self._session.get_one(Job, job_id, with_for_update=True, populate_existing=True)
        if job.state not in (JobState.CANCELLED, JobState.FAILED):
            raise ConflictError(
                f"job {job.id} is {job.state}; only one that was cancelled or has failed can be resumed"
            )
        self._begin_again(job)
        self._session.flush()
        check_max_queued(self._session, job.key_id)
        return job

    def _begin_again(self, job: Job) -> None:
        begin_again(self._session, job, has_sources=bool(self.sources_of([job.id])))
        dependents = self._session.scalars(
            select(Job)
            .join(JobDependency, JobDependency.job_id == Job.id)
            .where(
                JobDependency.source_id == job.id,
                Job.state == JobState.FAILED,
                Job.reason == FailReason.DEPENDENCY_FAILED,
            )
            .order_by(Job.id)
            .with_for_update(of=Job)
            .execution_options(populate_existing=True)
        ).all()
        for dependent in dependents:
            self._begin_again(dependent)

    def request_save(self, ref: str, *, key_id: KeyScope) -> Job:
        """Ask a training for a resumable state after the step that it is at."""
        job = self._training(ref, key_id=key_id)
        job.save_requested_at = datetime.now(UTC)
        self._note(job, "asked to save its state after this step")
        return job

    def request_stop(self, ref: str, *, key_id: KeyScope) -> Job:
        """Ask a training to end after the step that it is at, and to publish. Repeating it does no harm."""
        job = self._training(ref, key_id=key_id)
        if job.stop_requested_at is None:
            job.stop_requested_at = datetime.now(UTC)
            self._note(job, "asked to end after this step and to publish")
        return job

    def _training(self, ref: str, *, key_id: KeyScope) -> Job:
        """Return the job locked; `ConflictError` unless its steps are under way."""
        job_id = self.get(ref, key_id=key_id).id
        job = self._session.get_one(Job, job_id, with_for_update=True, populate_existing=True)
        is_training = job.kind is JobKind.TRAIN and job.state is JobState.RUNNING
        if not is_training or job.phase not in STEP_PHASES:
            phase = f" ({job.phase})" if job.phase else ""
            raise ConflictError(
                f"{job.kind} job {job.id} is {job.state}{phase}; only a job that is training can save its state or stop"
            )
        return job

    def _note(self, job: Job, message: str) -> None:
        data: dict[str, JsonValue] = {"level": "info", "message": message}
        add_events(self._session, job, [NewEvent(EventType.LOG, data)])
        self._session.flush()

    def events_page(
        self, job_id: str, *, after_seq: int = 0, limit: int = 100
    ) -> Sequence[JobEventRow]:
        """Return events with a higher `seq`, in order; call `get` first to check whose job it is."""
        return self._session.scalars(
            select(JobEventRow)
            .where(JobEventRow.job_id == job_id, JobEventRow.seq > after_seq)
            .order_by(JobEventRow.seq)
            .limit(limit)
        ).all()

    def validations(self, job_id: str) -> Sequence[JobEventRow]:
        """Return the events with the numbers of a training's held-out rows, in order; call `get` first."""
        return self._session.scalars(
            select(JobEventRow)
            .where(
                JobEventRow.job_id == job_id,
                JobEventRow.type == EventType.METRICS,
                JobEventRow.data.has_key("eval_loss"),
            )
            .order_by(JobEventRow.seq)
        ).all()

    def sources_of(self, job_ids: Sequence[str]) -> dict[str, list[str]]:
        """Return the ids of the jobs whose output each of these uses; jobs without any are left out."""
        rows = self._session.execute(
            select(JobDependency.job_id, JobDependency.source_id)
            .where(JobDependency.job_id.in_(job_ids))
            .order_by(JobDependency.job_id, JobDependency.source_id)
        )
        found: dict[str, list[str]] = {}
        for job_id, source_id in rows:
            found.setdefault(job_id, []).append(source_id)
        return found

    def progress_of(self, job_ids: Sequence[str]) -> dict[str, dict[str, JsonValue]]:
        """Return the newest progress that each of these has told in its newest phase; jobs without any are left out."""
        # One look along the primary key for each: over all events of a long training, DISTINCT ON would sort them.
        newest = (
            select(JobEventRow.type, JobEventRow.data)
            .where(
                JobEventRow.job_id == Job.id,
                JobEventRow.attempt == Job.attempt,
                JobEventRow.type.in_((EventType.PROGRESS, EventType.PHASE)),
            )
            .order_by(JobEventRow.seq.desc())
            .limit(1)
            .lateral()
        )
        rows = self._session.execute(
            select(Job.id, newest.c.data)
            .join(newest, newest.c.type == EventType.PROGRESS)
            .where(Job.id.in_(job_ids))
        )
        return dict(rows.all())

    def num_ahead(self, job_ids: Sequence[str]) -> dict[str, int]:
        """Return for each queued job of these how many queued jobs of its kind, of all keys, are claimed before it."""
        older = aliased(Job)
        ahead = (
            select(func.count())
            .where(
                older.kind == Job.kind,
                older.state == JobState.QUEUED,
                tuple_(-older.priority, older.created_at, older.id)
                < tuple_(-Job.priority, Job.created_at, Job.id),
            )
            .scalar_subquery()
        )
        rows = self._session.execute(
            select(Job.id, ahead).where(Job.id.in_(job_ids), Job.state == JobState.QUEUED)
        )
        return dict(rows.all())

    def held_back(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Say for each queued job of these that its key's limit holds back why; others are left out."""
        return held_back(self._session, job_ids)

    def oldest_queued_s(self) -> dict[JobKind, float]:
        """Return for each kind how long its oldest queued job has been there, for metrics."""
        age = func.extract("epoch", func.clock_timestamp() - func.min(Job.created_at))
        rows = self._session.execute(
            select(Job.kind, age).where(Job.state == JobState.QUEUED).group_by(Job.kind)
        )
        return {kind: float(seconds) for kind, seconds in rows}

    def count_by_state(self) -> dict[tuple[JobKind, JobState], int]:
        """Count all jobs of all keys, for metrics."""
        rows = self._session.execute(
            select(Job.kind, Job.state, func.count()).group_by(Job.kind, Job.state)
        )
        return {(kind, state): count for kind, state, count in rows}

    def _store(self, specs: Mapping[str, AnyJob], *, key_id: KeyScope) -> list[str]:
        references = References(self._session, key_id=key_id)
        sources = {source for spec in specs.values() for source in job_sources(spec)}
        earlier = references.earlier(sources - set(specs))
        check_group(specs, earlier=earlier)
        # Sorted, so that jobs of one submission are claimed in its order.
        ids = dict(zip(specs, sorted(new_id("job") for _ in specs), strict=True))
        group_id = new_id("group") if len(specs) > 1 else None
        jobs: list[Job] = []
        for name, spec in specs.items():
            job = Job(
                id=ids[name],
                key_id=owner_of(key_id),
                kind=spec.kind,
                name=spec.name or name or None,
                priority=spec.priority,
                group_id=group_id,
                state=JobState.WAITING if job_sources(spec) else JobState.QUEUED,
                spec=spec.model_dump(mode="json", by_alias=True),
                resolved=references.resolve(spec).model_dump(mode="json", by_alias=True),
                attempt=0,
                last_seq=0,
            )
            jobs.append(job)
        self._session.add_all(jobs)
        self._session.flush()
        source_ids = {job_id: job_id for job_id in earlier} | ids
        check_max_queued(self._session, owner_of(key_id))
        for (name, spec), job in zip(specs.items(), jobs, strict=True):
            add_events(self._session, job, [NewEvent(EventType.STATE, {"state": job.state.value})])
            for source in sorted(job_sources(spec)):
                self._session.add(
                    JobDependency(
                        job_id=ids[name], source_id=source_ids[source], source_name=source
                    )
                )
        self._session.flush()
        return list(ids.values())

    def _by_ids(self, ids: Sequence[str]) -> list[Job]:
        found = {job.id: job for job in self._session.scalars(select(Job).where(Job.id.in_(ids)))}
        return [found[job_id] for job_id in ids]
